# SPDX-License-Identifier: Apache-2.0
"""The kernels on a CUDA device: `python -m pytest -m gpu tests/gpu`. No other target collects this folder."""

from __future__ import annotations

import pytest
import torch

from weightlife.kernels import backends, digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def memory(nbytes: int, offset: int) -> torch.Tensor:
    """Random bytes at a distance from a 512-byte boundary."""
    return torch.randint(0, 256, (nbytes + offset,), dtype=torch.uint8, device=CUDA)[offset:]


def test_the_kernels_work_here() -> None:
    assert backends.triton_works(CUDA)
    assert backends.chosen("auto", CUDA) == "triton"


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_copy_and_digest_at_every_size_and_address(offset: int) -> None:
    from weightlife.kernels import fused

    sizes = [0, 1, 3, 15, 16, 17, 4095, 4096, 4097, 65_535, 65_537, 1_000_003, 64 << 20]
    src = [memory(size, offset) for size in sizes]
    for at in (offset, 0):
        dst = [memory(size, at) for size in sizes]
        totals, _ = fused.copy_pass(list(zip(dst, src, strict=True)), digest=True).run()
        assert all(torch.equal(a, b) for a, b in zip(dst, src, strict=True))
        found = [digest.finish(total, size) for total, size in zip(totals.tolist(), sizes, strict=True)]
        assert found == [digest.digest_bytes(item.cpu().numpy()) for item in src]


def test_a_tensor_beyond_32_bits() -> None:
    size = (1 << 32) + 4099
    src = torch.zeros(size, dtype=torch.uint8, device=CUDA)
    src[-1], src[1 << 31] = 7, 9
    want = digest.finish(int(digest.torch_total(src)), size)
    assert digest.digests([src]) == [want]
    dst = torch.ones_like(src)
    backends.copy_pairs([(dst, src)], "triton")
    assert torch.equal(dst, src)


def test_nonfinite_is_found_in_the_same_pass() -> None:
    from weightlife.kernels import fused

    src = [
        torch.ones(100_001, dtype=dtype, device=CUDA)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    dst = [torch.zeros_like(item) for item in src]
    src[1][77_777] = float("inf")
    _, flags = fused.copy_pass(list(zip(dst, src, strict=True)), digest=True, finite=True).run()
    assert flags.tolist() == [0, 1, 0]


def test_a_graph_replays_a_pass_whose_owner_is_gone() -> None:
    """The tables are read at each replay: they outlive the pass that made them."""
    import gc

    from weightlife.kernels import fused

    src = [memory(size, 0) for size in (100_000, 4096, 77)]
    dst = [torch.zeros_like(item) for item in src]
    run = fused.copy_pass(list(zip(dst, src, strict=True)))
    run.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.run()
    with pytest.raises(RuntimeError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fused.copy_pass(list(zip(dst, src, strict=True)))
    del run
    gc.collect()
    filler = [memory(4096, 0) for _ in range(200)]  # would take freed tables' memory
    for item in src:
        item.random_(0, 256)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(dst, src, strict=True))
    assert filler


def test_tables_of_a_device_and_of_a_cpu_agree() -> None:
    from weightlife import digests

    tensors = {f"t{i}": torch.randn(i * 37 + 1) for i in range(50)}
    on_device = {name: tensor.cuda() for name, tensor in tensors.items()}
    want = digests.digest_table(tensors)
    assert digests.digest_table(on_device) == want
    assert digests.digest_table(iter(on_device.items())) == want
