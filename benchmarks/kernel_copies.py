# SPDX-License-Identifier: Apache-2.0
"""Measure copying and digesting many tensors: on a GPU against one big copy, on a CPU against a memory copy.

    python benchmarks/kernel_copies.py              on a GPU if there is one, else says so and ends with status 0
    python benchmarks/kernel_copies.py --cpu        digest and copies on the CPU
    python benchmarks/kernel_copies.py --only scales --json

GB/s are bytes of payload (10**9) a second: a copy moves each byte twice through the memory. Every figure is a median;
in brackets, the share of the same run's big copy. Results are checked before they are timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weightlife.kernels import backends, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALIGNMENT = 512  # of the caching allocator's blocks


def qwen3_8b() -> list[int]:
    """Bytes of Qwen3-8B's 399 bfloat16 tensors, 16.4 GB."""
    layer = [4096 * 4096] * 2 + [1024 * 4096] * 2 + [12288 * 4096] * 3 + [4096] * 2 + [128] * 2
    return [2 * n for n in layer * 36 + [151_936 * 4096] * 2 + [4096]]


def experts_fused() -> list[int]:
    """Half of Qwen3-30B-A3B's layers with fused experts: 24 layers, 29 GB."""
    layer = [128 * 1536 * 2048, 128 * 2048 * 768, 5120 * 2048, 2048 * 4096, 128 * 2048, 2048, 2048, 128, 128]
    return [2 * n for n in layer * 24 + [151_936 * 2048] * 2 + [2048]]


MIXES: dict[str, Callable[[], list[int]]] = {
    "qwen3-8b": qwen3_8b,
    "experts-fused": experts_fused,
    "experts-unfused": lambda: [2 << 20] * 18_000,
    "scales": lambda: [4096] * 2000,
}


def carve(sizes: Sequence[int], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One buffer, and bfloat16 tensors in it at the distances that an allocator gives."""
    starts = np.concatenate([[0], np.cumsum([-(-n // ALIGNMENT) * ALIGNMENT for n in sizes])])
    flat = torch.empty(int(starts[-1]), dtype=torch.uint8, device=device)
    views = [flat[s : s + n].view(torch.bfloat16) for s, n in zip(starts[:-1].tolist(), sizes, strict=True)]
    return flat, views


def on_gpu(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds on the device, and of the host until the call returns."""
    device, host = [], []
    for _ in range(rounds + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        started = time.perf_counter()
        call()
        host.append(time.perf_counter() - started)
        end.record()
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(device[2:]), statistics.median(host[2:])


def on_cpu(call: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def gpu_mix(name: str, rounds: int) -> list[dict[str, Any]]:
    from weightlife.kernels import fused

    device = torch.device("cuda")
    sizes = MIXES[name]()
    total = sum(sizes)
    source, src = carve(sizes, device)
    target, dst = carve(sizes, device)
    source.random_(0, 128)  # no NaN: what a bfloat16 of these bytes can be is finite
    target.zero_()
    pairs = list(zip(dst, src, strict=True))
    plain, together, checked = (
        fused.copy_pass(pairs, digest=d, finite=f) for d, f in ((False, False), (True, False), (True, True))
    )
    reading = fused.read_pass(src)

    def loop() -> None:
        for to, of in pairs:
            to.copy_(of)

    def then_hash() -> None:
        loop()
        for to in dst:
            torch.hash_tensor(to)

    calls: dict[str, Callable[[], object]] = {
        "one big copy": lambda: target.copy_(source),
        "_foreach_copy_": lambda: torch._foreach_copy_(dst, src),
        "copy_ loop": loop,
        "triton copy": plain.run,
        "triton copy + digest": together.run,
        "triton copy + digest + finite": checked.run,
        "triton digest alone": reading.run,
    }
    if hasattr(torch, "hash_tensor"):
        calls["copy_ loop, then hash_tensor"] = then_hash
    want = digest.finish(int(digest.torch_total(digest.bytes_of(src[0]))), sizes[0])
    found = together.run()
    assert digest.finish(int(found[0][0]), sizes[0]) == want, "the digest is wrong"
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs), "the copy is wrong"
    assert not bool(checked.run()[1].any()), "finite data were called not finite"
    started = time.perf_counter()
    fused.copy_pass(pairs)
    torch.cuda.synchronize()
    planned = time.perf_counter() - started
    rows = []
    for label, call in calls.items():
        seconds, host = on_gpu(call, rounds)
        rows.append(
            {
                "mix": name,
                "way": label,
                "tensors": len(sizes),
                "bytes": total,
                "seconds": seconds,
                "host": host,
            }
        )
    rows.append({"mix": name, "way": "making the tables", "tensors": len(sizes), "bytes": total, "seconds": planned,
                 "host": planned})  # fmt: skip
    return rows


def cpu_rows(rounds: int) -> list[dict[str, Any]]:
    """A memory copy of 256 MB and each digest, in turn, so that a noisy machine is noisy for all."""
    size = 256_000_000 // 4096 * 4096
    source = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    target = torch.empty_like(source)
    words = source.numpy().view("<u4")
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "memory copy (numpy, one thread)": (size, lambda: np.copyto(target.numpy(), source.numpy())),
        f"memory copy (torch, {torch.get_num_threads()} threads)": (size, lambda: target.copy_(source)),
        f"digest ({digest.words_total().__module__.rpartition('.')[2]})": (
            size, lambda: digest.total_of(source.numpy()),
        ),
        "digest at an odd address": (size, lambda: digest.total_of(source.numpy()[1:])),
        "digest (numpy)": (size, lambda: digest.numpy_total(words, 0)),
        "digest (torch)": (size // 8, lambda: digest.torch_total(source[: size // 8])),
    }  # fmt: skip
    samples: dict[str, list[float]] = {label: [] for label in calls}
    for index in range(rounds + 1):
        for label, (_, call) in calls.items():
            taken = on_cpu(call, 1)
            if index:
                samples[label].append(taken)
    rows = [
        {
            "mix": "256 MB",
            "way": label,
            "tensors": 1,
            "bytes": calls[label][0],
            "seconds": statistics.median(taken),
        }
        for label, taken in samples.items()
    ]
    for name, sizes in (
        ("400 x 256 B", [256] * 400),
        ("2,000 x 4 KB", [4096] * 2000),
        ("400 x 256 KB", [1 << 18] * 400),
    ):
        _, src = carve(sizes, torch.device("cpu"))
        _, dst = carve(sizes, torch.device("cpu"))
        pairs = list(zip(dst, src, strict=True))
        for way in ("copy", "foreach"):
            seconds = on_cpu(lambda way=way, pairs=pairs: backends.copy_pairs(pairs, way), rounds)
            rows.append({"mix": name, "way": f"copy_pairs, {way}", "tensors": len(sizes), "bytes": sum(sizes),
                         "seconds": seconds})  # fmt: skip
        seconds = on_cpu(lambda dst=dst, src=src: torch._foreach_copy_(dst, src), rounds)
        rows.append({"mix": name, "way": "_foreach_copy_ itself", "tensors": len(sizes), "bytes": sum(sizes),
                     "seconds": seconds})  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| mix | way | tensors | GB | ms | GB/s | of the first | host ms |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    first: dict[str, float] = {}
    for row in rows:
        speed = row["bytes"] / row["seconds"] / 1e9
        share = speed / first.setdefault(row["mix"], speed)
        host = f"{row['host'] * 1e3:.2f}" if "host" in row else ""
        lines.append(
            f"| {row['mix']} | {row['way']} | {row['tensors']} | {row['bytes'] / 1e9:.3f} | {row['seconds'] * 1e3:.3f} "
            f"| {speed:.1f} | {share:.0%} | {host} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU")
    parser.add_argument("--only", choices=sorted(MIXES), action="append", help="a mix; may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print plain data")
    given = parser.parse_args()
    if not given.cpu and not torch.cuda.is_available():
        print("No CUDA device: nothing was measured. `--cpu` measures the digest against a memory copy.")
        return 0
    about: dict[str, Any] = {"schema_version": 1, "torch": str(torch.__version__), "unit": "seconds, bytes"}
    if given.cpu:
        about["device"] = f"CPU, {torch.get_num_threads()} threads"
        rows = cpu_rows(given.rounds)
    else:
        import triton

        about |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
        rows = []
        for name in given.only or MIXES:
            rows += gpu_mix(name, given.rounds)
            torch.cuda.empty_cache()
    if given.json:
        print(json.dumps({**about, "rows": rows}, indent=2))
    else:
        print(
            f"{about['device']}, torch {about['torch']}, triton {about.get('triton', 'not used')}\n\n{table(rows)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
