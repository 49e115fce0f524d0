# SPDX-License-Identifier: Apache-2.0
"""The kernel, interpreted, against the numpy references: every dtype, size and address, and many tensors at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightlife.kernels import backends, digest, fused, plan

CPU = torch.device("cpu")
SIZES = (
    0,
    1,
    2,
    3,
    4,
    5,
    15,
    16,
    17,
    31,
    4095,
    4096,
    4097,
    8191,
    8192,
    8196,
    12_288,
    65_535,
    65_536,
    65_537,
    150_001,
)
# How far source and destination lie from a 16-byte boundary.
OFFSETS = ((0, 0), (4, 4), (1, 1), (15, 15), (2, 2), (4, 0), (0, 8), (1, 3), (2, 4), (8, 8))
MODES = [(False, False), (True, False), (False, True), (True, True)]
mode = pytest.mark.parametrize(
    ("digests", "finite"), MODES, ids=["copy", "digest", "finite", "digest-finite"]
)
DTYPES = [
    getattr(torch, name)
    for name in (
        "uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64", "complex64",
        "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
        "uint16", "uint32", "uint64", "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
]  # fmt: skip
FLOATS = [dtype for dtype in DTYPES if plan.kind_of(dtype)]


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert fused.INTERPRETED


def memory(nbytes: int, offset: int, seed: int = 0) -> torch.Tensor:
    """Random bytes at a chosen distance from a 16-byte boundary, with at least 64 others on both sides."""
    rng = np.random.default_rng(seed + 1_000_000)
    whole = torch.from_numpy(rng.integers(0, 256, nbytes + 160, dtype=np.uint8))
    start = 64 + (-(whole.data_ptr() + 64) % 16) + offset
    part = whole[start : start + nbytes]
    part.copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)))
    assert nbytes == 0 or part.data_ptr() % 16 == offset % 16
    return part


def surroundings(part: torch.Tensor) -> list[int]:
    """The bytes of a `memory` that are not part of it."""
    whole = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
    start = part.storage_offset()
    return [*whole[:start].tolist(), *whole[start + part.numel() :].tolist()]


def wanted(tensors: list[torch.Tensor]) -> list[int]:
    return [digest.digest_bytes(digest.bytes_of(item).numpy()) for item in tensors]


def finished(totals: torch.Tensor, tensors: list[torch.Tensor]) -> list[int]:
    sizes = [item.numel() * item.element_size() for item in tensors]
    return [digest.finish(int(t), n) for t, n in zip(totals, sizes, strict=True)]


@mode
@pytest.mark.parametrize("size", SIZES)
def test_every_size_at_every_address(size: int, digests: bool, finite: bool) -> None:
    src = [memory(size, a, seed) for seed, (a, _) in enumerate(OFFSETS)]
    dst = [memory(size, b, 1000 + seed) for seed, (_, b) in enumerate(OFFSETS)]
    around = [surroundings(item) for item in dst]
    totals, _ = fused.copy_pass(list(zip(dst, src, strict=True)), digest=digests, finite=finite).run()
    assert all(torch.equal(a, b) for a, b in zip(dst, src, strict=True))
    assert [surroundings(item) for item in dst] == around, "nothing is written beside it"
    if digests:
        assert finished(totals, src) == wanted(src)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    raw = [memory(n * dtype.itemsize, 0, n) & 1 for n in (0, 1, 7, 1024, 4097, 20_003)]
    src = [item.view(dtype) for item in raw]
    dst = [torch.zeros_like(item).view(dtype) for item in raw]
    totals, flags = fused.copy_pass(list(zip(dst, src, strict=True)), digest=True, finite=True).run()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(dst, src, strict=True))
    assert finished(totals, src) == wanted(src)
    assert flags.tolist() == [0] * len(src)


def test_digest_alone_writes_nothing() -> None:
    src = [memory(size, offset, size) for size in SIZES for offset in (0, 1, 4)]
    before = [item.clone() for item in src]
    assert finished(fused.totals(src), src) == wanted(src)
    assert all(torch.equal(a, b) for a, b in zip(src, before, strict=True))


def test_many_tensors_of_many_sizes_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    real = fused.one_pass
    grid = type("Counted", (), {"__getitem__": lambda self, g: launches.append(g) or real[g]})
    monkeypatch.setattr(fused, "one_pass", grid())
    rng = np.random.default_rng(5)
    src = [
        memory(int(n), int(o), int(n))
        for n, o in zip(rng.integers(0, 9000, 300), rng.integers(0, 16, 300), strict=True)
    ]
    dst = [torch.zeros_like(item) for item in src]
    run = fused.copy_pass(list(zip(dst, src, strict=True)), digest=True)
    totals, _ = run.run()
    assert len(launches) == 1
    assert all(torch.equal(a, b) for a, b in zip(dst, src, strict=True))
    assert finished(totals, src) == wanted(src)
    src[7].zero_()  # a pass may run again, and sees what is there then
    totals, _ = run.run()
    assert torch.equal(dst[7], src[7])
    assert finished(totals, src) == wanted(src)


@pytest.mark.parametrize("chunk", [4096, 16 * 4096, 64 * 4096])
def test_the_digest_does_not_depend_on_the_tiling(chunk: int) -> None:
    src = memory(300_007, 0)
    tables = plan.tables([src.data_ptr()], None, [src.numel()], chunk=chunk)
    run = fused.Pass(tables, CPU, copy=False, digest=True, finite=False)
    assert finished(run.run()[0], [src]) == wanted([src])


@pytest.mark.parametrize("first", [2**31, 2**32, 5 * 2**33 + 2**20])
def test_offsets_beyond_32_bits(first: int) -> None:
    """A chunk far into a tensor of 40 GiB: only its own bytes are there, the addresses before it are never used."""
    src, dst = memory(8192 + 9, 0), memory(8192 + 9, 0, 1)
    whole = first + src.numel()
    tables = plan.tables([src.data_ptr() - first], [dst.data_ptr() - first], [whole], chunk=64 * 4096)
    here = tables.chunks[tables.chunks[:, 1] == first]
    assert len(here) == 1
    only = plan.Tables(tables.segments, here, tables.chunk, 1)
    totals, _ = fused.Pass(only, CPU, copy=True, digest=True, finite=False).run()
    assert torch.equal(dst, src)
    assert int(totals[0]) & digest.MASK == digest.total_of(src.numpy(), first // 4096)
    assert int(totals[0]) & digest.MASK != digest.total_of(src.numpy(), (first // 4096) % 2**19)


class TestFinite:
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_each_code_of_a_dtype(self, dtype: torch.dtype) -> None:
        """8- and 16-bit types: every code, one tensor each batch. Wider ones: codes at the edges of the exponent."""
        codes = self.codes(dtype)
        judged = self.judge(codes)
        assert judged.any() and not judged.all()
        width = codes.element_size()
        # A clean tensor around each code, so that its neighbours in the word are clean as well.
        clean = torch.ones(24, dtype=torch.float32).to(dtype) if width > 1 else torch.zeros(24, dtype=torch.uint8).add_(
            0x20).view(dtype)  # fmt: skip
        place = np.random.default_rng(0).integers(0, 24, len(codes))
        tensors = []
        for index in range(len(codes)):
            item = clean.clone()
            item.view(torch.uint8).view(24, -1)[place[index]] = codes[index : index + 1].view(torch.uint8)
            tensors.append(item)
        _, flags = fused.read_pass(tensors, digest=False, finite=True).run()
        assert flags.bool().tolist() == judged.tolist()
        for item, bad in zip(tensors, judged.tolist(), strict=True):
            assert plan.nonfinite_words(item.view(torch.uint8).numpy().view("<u4"), dtype).any() == bad

    @staticmethod
    def codes(dtype: torch.dtype) -> torch.Tensor:
        width = dtype.itemsize
        if width == 1:
            return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
        if width == 2 and dtype.is_floating_point:
            every = torch.arange(0, 1 << 16, dtype=torch.int32)[::211]
            edge = torch.tensor([0x7F80, 0xFF80, 0x7F7F, 0x7F81, 0x7C00, 0xFC00, 0x7BFF, 0x7C01, 0xFFFF, 0])
            return torch.cat([every, edge]).to(torch.int16).view(dtype)
        real = {8: torch.float32, 16: torch.float64}.get(width, dtype) if dtype.is_complex else dtype
        top = torch.finfo(real).max
        values = torch.tensor(
            [0.0, -0.0, 1.0, top, -top, float("inf"), float("-inf"), float("nan"), torch.finfo(real).tiny],
            dtype=real,
        )
        if not dtype.is_complex:
            return values
        return torch.cat(
            [torch.complex(values, torch.ones_like(values)), torch.complex(torch.ones_like(values), values)]
        )

    @staticmethod
    def judge(codes: torch.Tensor) -> torch.Tensor:
        wide = codes if codes.dtype.is_complex or codes.element_size() > 1 else codes.to(torch.float32)
        return ~torch.isfinite(wide)

    @pytest.mark.parametrize("offset", [0, 4, 2])
    @pytest.mark.parametrize("place", [0, 2047, 2048, 4095, 70_000, 99_998])
    def test_one_bad_value_anywhere(self, place: int, offset: int) -> None:
        src = memory(2 * 99_999, offset).view(torch.bfloat16)
        src.fill_(1.5)
        dst = torch.zeros_like(src)
        src[place] = float("nan")
        other = torch.ones(50, dtype=torch.bfloat16)
        _, flags = fused.copy_pass(
            [(dst, src), (torch.zeros(50, dtype=torch.bfloat16), other)], finite=True
        ).run()
        assert flags.tolist() == [1, 0]
        src[place] = 1.0
        _, flags = fused.copy_pass([(dst, src)], finite=True).run()
        assert flags.tolist() == [0]


class TestBackend:
    def test_what_is_no_flat_range_takes_another_way(self) -> None:
        base = torch.arange(64.0).view(8, 8)
        pairs = [
            (torch.zeros(8, 8), base),  # flat
            (torch.zeros(8, 8).t(), base.t()),  # dense, equal strides: flat as well
            (torch.zeros(8, 8).t(), base),  # other strides
            (torch.zeros(16, 8)[::2], base),  # holes
            (torch.zeros(4), base[0, :4]),
        ]
        done = backends.copy_pairs(pairs, "triton")
        assert all(torch.equal(a, b) for a, b in pairs)
        assert (done.triton, done.copy) == (3, 2)

    def test_overlap_and_ties(self) -> None:
        memory_ = torch.arange(3000, dtype=torch.int32)
        want = memory_.clone()
        want[7:2007] = memory_[:2000].clone()
        done = backends.copy_pairs([(memory_[7:2007], memory_[:2000])], "triton")
        assert torch.equal(memory_, want)
        assert (done.triton, done.copy) == (0, 1)
        to, of = torch.zeros(100), torch.arange(100.0)
        done = backends.copy_pairs([(to, of), (to.view(10, 10), of.view(10, 10))], "triton")
        assert torch.equal(to, of)
        assert (done.triton, done.same) == (1, 1)

    def test_a_pass_holds_what_its_tables_point_to(self) -> None:
        import gc

        of, to = torch.ones(5000), torch.zeros(5000)
        run = fused.copy_pass([(to, of)])
        address = of.data_ptr()
        del of
        gc.collect()
        others = [torch.full((5000,), 2.0) for _ in range(8)]
        assert address not in {item.data_ptr() for item in others}
        run.run()
        assert to.tolist() == [1.0] * 5000

    def test_a_trial_that_fails_says_so_and_is_not_used(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        backends._trial.cache_clear()
        monkeypatch.setattr(fused, "copy_pass", lambda *_, **__: 1 / 0)
        try:
            assert not backends.triton_works(CPU)
            assert "ZeroDivisionError" in caplog.text
            to = torch.zeros(3)
            assert backends.copy_pairs([(to, torch.ones(3))], "triton").foreach == 1
        finally:
            backends._trial.cache_clear()

    def test_the_engine_commits_through_it(self) -> None:
        from tests.toyhost import KINDS, Served, cold
        from weightlife.testing._walk import digests as walked

        served = Served((*sorted(KINDS), "tied"), storage="pinned", copy_backend="triton")
        served.update(served.checkpoint(1))
        assert walked(served.model) == walked(cold(served.spec, served.weights))


def test_numpy_and_kernel_agree_on_kinds() -> None:
    assert plan.kind_of(torch.int32) == 0
    assert plan.kinds().shape[1] == 6
    assert set(FLOATS) == {
        d for d in DTYPES if (d.is_floating_point or d.is_complex) and "float4" not in str(d)
    }
