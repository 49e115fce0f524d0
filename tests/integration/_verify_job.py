# SPDX-License-Identifier: Apache-2.0
"""Child of test_verify.py: one engine, verified on A and on B, with faults in live memory and failures on the way.

python -m tests.integration._verify_job FAMILY [FAMILY ...]      # what each family's verification says
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def _engine(folder: Path, **more: Any) -> Any:
    from vllm import LLM

    from weightlife.testing import _cold, oracle

    llm = LLM(**oracle.engine_arguments(folder, **more))
    _cold.KEEP.append(llm)
    return llm


def _reload(llm: Any, folder: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


@contextlib.contextmanager
def _one_by_one() -> Iterator[None]:
    """Each group in a batch of its own, as in a large model; all of a tiny one would be rebuilt together."""
    from weightlife._engine import proof

    least, batch = proof._LEAST, proof._BATCH
    proof._LEAST = proof._BATCH = 0
    try:
        yield
    finally:
        proof._LEAST, proof._BATCH = least, batch


def clean(family: str, root: str) -> dict[str, Any]:
    """Load A, verify; go to B, verify against both: what each says, and that nothing moved."""
    import weightlife
    from weightlife.testing import checkpoints, oracle

    os.environ[oracle.POISON_VARIABLE] = "1"
    oracle.poison()
    weightlife.install()
    pair = checkpoints.pair(family, Path(root))
    llm = _engine(pair.a)
    found: dict[str, Any] = {}
    before = oracle.fingerprint(llm)
    with _one_by_one():
        found["first"] = weightlife.verify(llm).ranks[0].to_dict()
    found["moved"] = oracle.differences(oracle.fingerprint(llm), before)
    _reload(llm, pair.b)
    before = oracle.fingerprint(llm)
    found["b"] = weightlife.verify(llm, pair.b).ranks[0].to_dict()
    found["own"] = weightlife.verify(llm).ranks[0].to_dict()["ok"]
    found["a"] = weightlife.verify(llm, pair.a).ranks[0].to_dict()
    found["sampled"] = weightlife.verify(llm, pair.b, layers=0.3, seed=7).ranks[0].to_dict()
    found["stream"] = weightlife.verify(llm, checkpoints.tensors(pair.b).items()).ranks[0].to_dict()
    found["moved"] += oracle.differences(oracle.fingerprint(llm), before)
    _reload(llm, pair.a)
    found["back"] = weightlife.verify(llm, pair.a).ranks[0].to_dict()["ok"]
    return found


def observed(family: str, root: str) -> dict[str, Any]:
    """Stock reloads by itself, weightlife only looks on: what does verification say of the result?"""
    import weightlife
    from weightlife.testing import checkpoints, oracle

    weightlife.install(mode="observe")
    pair = checkpoints.pair(family, Path(root))
    llm = _engine(pair.a)
    first = weightlife.verify(llm)
    _reload(llm, pair.b)
    before = oracle.fingerprint(llm)
    report = weightlife.verify(llm, pair.b)
    return {
        "first": first.ok, "after": [d.path for d in report.differences],
        "moved": oracle.differences(oracle.fingerprint(llm), before), "reports": len(weightlife.last_reports(llm)),
    }  # fmt: skip


# -- faults ------------------------------------------------------------------------------------------------------------


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    start = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    return whole[start : start + tensor.numel() * tensor.element_size()]


@contextlib.contextmanager
def _bit(tensor: torch.Tensor) -> Iterator[bool]:
    memory = _memory(tensor)
    memory[-1] ^= 1 << 2
    yield True
    memory[-1] ^= 1 << 2


@contextlib.contextmanager
def _swapped(tensor: torch.Tensor) -> Iterator[bool]:
    """Two blocks of 16 bytes change places."""
    memory = _memory(tensor)
    half = memory.numel() // 32 * 16
    if not half or not tensor.is_contiguous():
        yield False
        return
    one, two = memory[:16].clone(), memory[half : half + 16].clone()
    memory[:16], memory[half : half + 16] = two, one
    yield not torch.equal(one, two)
    memory[:16], memory[half : half + 16] = one, two


@contextlib.contextmanager
def _put(owner: Any, name: str, value: Any) -> Iterator[bool]:
    """Another value in a slot of a module or of an object."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield True
    setattr(owner, name, before)


def _in_tensors(llm: Any, model: Any, found: dict[str, Any], says: Any) -> None:
    """Bits and blocks of every kind of tensor that was compared."""
    from weightlife._engine import lifecycle, runtime

    host = lifecycle.of(model).host  # type: ignore[union-attr]
    told = {path for entry in found["told"].values() for path in entry["paths"]}
    tensors = {
        p: t for p, t in runtime.tensors(model, host.skip, host.transient) if t.numel() and p not in told
    }
    kinds: dict[Any, str] = {}
    for path, tensor in tensors.items():
        kinds.setdefault((path.rpartition(".")[2], tensor.dtype, tensor.ndim), path)
    for path in kinds.values():
        same = {
            p
            for p, t in tensors.items()
            if t.untyped_storage()._cdata == tensors[path].untyped_storage()._cdata
        }
        for kind, fault in (("bit", _bit), ("swap", _swapped)):
            with fault(tensors[path]) as changed:
                if changed:
                    said = says()
                    found["faults"].append([kind, path, bool(same & set(said)), sorted(said)[:4]])


def _in_objects(model: Any, found: dict[str, Any], says: Any) -> None:
    """Kernels that changed places, parameters that were made again, plain numbers that went stale."""
    kernels: dict[Any, list[tuple[str, Any]]] = {}
    for path, module in model.named_modules():
        function = vars(module).get("cpu_linear")
        if isinstance(function, types.FunctionType) and function.__closure__:
            cells = [cell.cell_contents for cell in function.__closure__]
            handler = next((c for c in cells if hasattr(type(c), "__del__")), None)
            if handler is not None:
                kernels.setdefault((handler.k, handler.n), []).append((path, module))
    pair = next(
        (group[:2] for group in kernels.values() if len(group) > 1 and "embed" not in group[0][0]), None
    )
    if pair is not None:
        (one, a), (other, b) = pair
        mine, theirs = a.cpu_linear, b.cpu_linear
        with _put(a, "cpu_linear", theirs), _put(b, "cpu_linear", mine):
            said = says()
            there = all(any(path.startswith(f"{name}.cpu_linear") for path in said) for name in (one, other))
            found["faults"].append(["kernels changed places", one, there, sorted(said)[:4]])
    path, norm = next(
        (p, m) for p, m in model.named_modules() if "norm" in p.rpartition(".")[2] and hasattr(m, "weight")
    )
    for kind, shape in (("made again", norm.weight.shape), ("of another size", (norm.weight.numel() + 8,))):
        again = torch.nn.Parameter(torch.zeros(shape, dtype=norm.weight.dtype), requires_grad=False)
        with _put(norm, "weight", again):
            said = says()
            found["faults"].append([kind, f"{path}.weight", f"{path}.weight" in said, sorted(said)[:4]])
    for path, module in model.named_modules():
        value = vars(module).get("_k_scale_float")
        if isinstance(value, float):
            with _put(module, "_k_scale_float", value * 0.5):
                said = says()
                where = f"{path}._k_scale_float"
                found["faults"].append(["stale number", where, where in said, sorted(said)[:4]])
            break


def faults(family: str, root: str) -> dict[str, Any]:
    """Faults in live memory, one at a time, and verifications that fail on the way."""
    import weightlife
    from weightlife._models import find_model
    from weightlife.testing import checkpoints, oracle

    weightlife.install()
    pair = checkpoints.pair(family, Path(root))
    llm = _engine(pair.a)
    _reload(llm, pair.b)
    model = find_model(llm)
    before = oracle.fingerprint(llm)
    clean = weightlife.verify(llm, pair.b).ranks[0]
    found: dict[str, Any] = {"clean": clean.ok, "told": clean.untold, "faults": []}

    def says() -> set[str]:
        return {difference.path for difference in weightlife.verify(llm, pair.b).differences}

    _in_tensors(llm, model, found, says)
    _in_objects(model, found, says)
    found["heard"] = _failures(llm, model, pair)
    found["after"] = weightlife.verify(llm, pair.b).ok
    found["moved"] = oracle.differences(oracle.fingerprint(llm), before)
    return found


def _failures(llm: Any, model: Any, pair: Any) -> dict[str, str]:
    """Verifications that end with an exception, and which."""
    import weightlife
    from weightlife._engine import lifecycle
    from weightlife.testing import checkpoints

    life = lifecycle.of(model)
    assert life is not None
    host: Any = life.host
    weights = list(checkpoints.tensors(pair.b).items())
    calls = 0

    def interrupted(layer: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        type(host).process_layer(host, layer)

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[: len(weights) // 2]
        raise OSError("the disk is gone")

    def hear(source: Any) -> str:
        try:
            weightlife.verify(llm, source)
        except BaseException as error:  # noqa: BLE001 - the test judges it
            return f"{type(error).__name__}: {error}"
        return ""

    host.process_layer = interrupted
    heard = {"interrupt": hear(pair.b)}
    del host.process_layer
    heard["breaks_off"] = hear(breaks_off())
    heard["lacks"] = hear(weights[1:])
    heard["unknown"] = hear([*weights, ("model.stranger", torch.zeros(2))])
    heard["shape"] = hear([(n, t[: len(t) // 2] if t.ndim == 2 else t) for n, t in weights])
    heard["nowhere"] = hear(Path("no") / "such" / "folder")
    return heard


def ranks(family: str, root: str) -> dict[str, Any]:
    """Two ranks: each verifies its shard, and each finds a fault of its own."""
    from vllm import SamplingParams

    import weightlife
    from weightlife._verification import VerifyReport
    from weightlife.testing import checkpoints, oracle

    weightlife.install()
    pair = checkpoints.pair(family, Path(root))
    llm = _engine(
        pair.a, tensor_parallel_size=2, worker_extension_cls="tests.integration._digest_job.DigestExtension",
        weight_transfer_config=None,
    )  # fmt: skip
    _reload(llm, pair.b)
    prompts: Any = [{"prompt_token_ids": list(p)} for p in oracle.PROMPTS]

    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def tokens() -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False)]

    before = tokens()
    b = weightlife.verify(llm, pair.b)
    a = weightlife.verify(llm, pair.a)
    own = weightlife.verify(llm, layers=0.5, seed=1)
    found: dict[str, Any] = {
        "b": b.to_dict(), "a": [len(rank.differences) for rank in a.ranks], "own": own.ok,
        "round": VerifyReport.from_dict(b.to_dict()).to_dict() == b.to_dict(),
    }  # fmt: skip
    # One of a tensor that both ranks hold whole, one of a shard.
    for rank, path in ((1, "model.norm.weight"), (0, "model.embed_tokens.weight")):
        fault = (path, "bit", rank)
        done = llm.collective_rpc("digest_fault", args=fault)
        report = weightlife.verify(llm, pair.b)
        llm.collective_rpc("digest_fault", args=fault)
        told = [[r.rank, r.ok, [d.path for d in r.differences]] for r in report.ranks]
        found.setdefault("alone", []).append([rank, path, sum(done), told, str(report)])
    try:
        weightlife.verify(llm, iter(()))
    except weightlife.errors.ConfigError as error:
        found["refused"] = str(error)
    try:
        weightlife.verify(llm, pair.a.parent / "nowhere")
    except weightlife.errors.WeightlifeError as error:
        found["nowhere"] = type(error).__name__
    found["tokens"] = tokens() == before
    return found


def main(families: list[str]) -> None:
    """Show what verification says of some families."""
    from weightlife.testing import _cold

    root = str(Path(__file__).resolve().parents[2] / ".artifacts" / "checkpoints")
    for family in families:
        started = time.monotonic()
        try:
            found = _cold.run(job("clean", family=family, root=root), fresh=False)
        except _cold.JobError as error:
            print(family, "FAILED", str(error)[-3000:])
            continue
        print(
            family, "ok" if found["first"]["ok"] and found["b"]["ok"] and found["back"] else "WRONG",
            {k: len(found[k]["differences"]) for k in ("first", "b", "a", "stream")}, found["moved"][:3],
            f"{time.monotonic() - started:.1f} s", {k: round(v, 3) for k, v in found["b"]["phases"].items()},
            f"{found['b']['seconds']:.3f}", found["b"]["groups"],
        )  # fmt: skip
        for item in (found["first"]["differences"] + found["b"]["differences"])[:6]:
            print("   ", item)
        for reason, entry in found["b"]["untold"].items():
            print("    untold:", reason, entry["places"], entry["elements"], entry["paths"][:3])


def job(call: str, **arguments: Any) -> dict[str, Any]:
    """The order for `_cold.run`."""
    root = str(Path(__file__).resolve().parents[2])
    return {
        "call": f"tests.integration._verify_job:{call}", "path": [root], "arguments": arguments,
        "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": root},
    }  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
