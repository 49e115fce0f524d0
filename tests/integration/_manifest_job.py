# SPDX-License-Identifier: Apache-2.0
"""Child process of test_manifest.py: one engine, asked for its manifest and given broken sources and announcements."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from weightlife.testing.checkpoints import tensors as checkpoint_tensors


class Nothing(TorchDispatchMode):
    """A client's mode over a load, as sparse updates use one: which elements it leaves out nobody can tell."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Rig:
    """An engine that serves A or B exactly, and what it said to each case."""

    def __init__(self, llm: Any, folders: Any, want: dict[str, Any]) -> None:
        self.llm, self.folders, self.want = llm, folders, want
        self.served = "a"
        self.found: dict[str, Any] = {}

    @property
    def other(self) -> str:
        return "b" if self.served == "a" else "a"

    def folder(self, side: str) -> Path:
        return Path(getattr(self.folders, side))

    def exact(self, side: str) -> list[str]:
        from weightlife.testing import oracle

        return oracle.differences(oracle.fingerprint(self.llm), self.want[side])[:4]

    def refused(self, case: str, change: Callable[[], Any]) -> None:
        """`change` must be refused before anything is touched, the old weights serve, and the next update is exact."""
        import weightlife
        from weightlife import errors

        verdict: dict[str, Any] = {"code": "", "heard": ""}
        try:
            change()
        except Exception as error:  # noqa: BLE001 - the test judges what the client hears
            known = errors.from_message(str(error))
            verdict = {"code": known.code if known else "", "heard": str(error)[:600]}
        report = weightlife.last_report(self.llm)
        assert report is not None
        verdict |= {"outcome": report.outcome, "received": report.tensors_received}
        verdict["old"] = self.exact(self.served)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder(self.other))})
        self.served = self.other
        verdict["next"] = self.exact(self.served)
        self.found[case] = verdict

    def by_path(self, folder: Path) -> Callable[[], Any]:
        return lambda: self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a file's header in place; its tensors' bytes stay."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def broken(folder: Path, scratch: Path, known: Any) -> Iterator[tuple[str, Path]]:
    """Copies of a checkpoint, each broken in one way."""
    taken = [
        n for n, e in known.tensors.items() if e.writes and len(e.shape) == 2 and e.shape[0] != e.shape[1]
    ]
    name = taken[0]

    def copy(case: str) -> Path:
        target = scratch / case
        shutil.copytree(folder, target)
        return target

    def holder(target: Path) -> Path:
        from safetensors import safe_open

        for path in shards(target):
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118
                    return path
        raise KeyError(name)

    target = copy("truncated")
    path = holder(target)
    path.write_bytes(path.read_bytes()[:-100])
    yield "truncated", target

    target = copy("index")
    from safetensors import safe_open

    listed = {}
    for path in shards(target):
        with safe_open(path, framework="pt") as file:
            listed.update(dict.fromkeys(file.keys(), path.name))
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {**listed, "gone.weight": next(iter(listed.values()))}})
    )
    yield "index", target

    target = copy("twice")
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    shutil.copy(holder(target), target / "zz_stale.safetensors")
    yield "twice", target

    # The index names one of two files for a tensor, and the other one holds an old copy of it.
    target = copy("stale")
    from safetensors.torch import load_file, save_file

    old = {n: t for n, t in load_file(holder(target)).items() if n == name}
    listed = {n: holder(target).name for n in load_file(holder(target))}
    for path in shards(target):
        listed.update(dict.fromkeys(load_file(path), path.name))
    save_file({**old, "weightlife.extra": old[name].clone()}, target / "zz_reused.safetensors")
    listed["weightlife.extra"] = "zz_reused.safetensors"
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    yield "stale", target

    target = copy("missing")
    rewrite_without(holder(target), name)
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    yield "missing", target

    target = copy("shape")
    rewrite(holder(target), lambda header: header[name]["shape"].reverse())
    yield "shape", target

    target = copy("dtype")
    wide = {"BF16": "I16", "F16": "I16", "F32": "I32"}

    def other_kind(header: dict[str, Any]) -> None:
        header[name]["dtype"] = wide.get(header[name]["dtype"], "BOOL")

    rewrite(holder(target), other_kind)
    yield "dtype", target


def rewrite_without(path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


def announced(rig: Rig, names: list[str], change: Callable[[dict[str, Any]], None]) -> Callable[[], Any]:
    """A transfer whose first chunk announces something wrong."""
    from weightlife import source_checks

    folder = rig.folder(rig.other)
    headers = source_checks.read(folder).headers
    info: dict[str, Any] = {
        "folder": str(folder), "names": list(names), "dtype_names": [headers[n].dtype for n in names],
        "shapes": [list(headers[n].shape or ()) for n in names],
    }  # fmt: skip
    change(info)

    def update() -> None:
        rig.llm.collective_rpc("start_weight_update")
        rig.llm.collective_rpc("update_weights", kwargs={"update_info": info})
        rig.llm.collective_rpc("finish_weight_update")

    return update


def streams(rig: Rig, known: Any) -> dict[str, Callable[[], Any]]:
    """Updates that only their tensors give away: each must be refused while it arrives, or at its end."""
    import torch

    import weightlife

    def weights() -> list[tuple[str, Any]]:
        return [(n, t.clone()) for n, t in checkpoint_tensors(rig.folder(rig.other)).items()]

    def changed(name: str, change: Callable[[Any], Any]) -> list[tuple[str, Any]]:
        return [(n, change(t) if n == name else t) for n, t in weights()]

    def by_iterator(make: Callable[[], list[tuple[str, Any]]], mode: Any = None) -> Callable[[], Any]:
        def run() -> None:
            pairs = make()
            with mode() if mode is not None else contextlib.nullcontext():
                rig.llm.collective_rpc(
                    lambda worker: worker.model_runner.reload_weights(weights_iterator=iter(pairs))
                )

        return run

    def in_session(make: Callable[[], list[tuple[str, Any]]], **settings: Any) -> Callable[[], Any]:
        def run() -> None:
            model = rig.llm.collective_rpc(lambda worker: worker.model_runner)[0].get_model()
            with weightlife.session(rig.llm, partial="forbid", **settings):
                model.load_weights(make())

        return run

    def half() -> None:
        rig.llm.collective_rpc("weightlife_test_layerwise_start")
        rig.llm.collective_rpc("weightlife_test_load", args=(str(rig.folder(rig.other)), group[1:]))
        rig.llm.collective_rpc("weightlife_test_layerwise_finish")

    floats = [
        n for n, t in checkpoint_tensors(rig.folder("a")).items()
        if known.tensors[n].writes and t.ndim == 2 and t.dtype in (torch.bfloat16, torch.float16)
    ]  # fmt: skip
    wide = floats[0]
    group = next(sorted(g) for g in known.atomic_groups() if len(g) > 1)
    return {
        "missing": by_iterator(lambda: [(n, t) for n, t in weights() if n != wide]),
        "surplus": by_iterator(lambda: [*weights(), *[(n, t) for n, t in weights() if n == wide]]),
        "unexpected": in_session(
            lambda: [*weights(), ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(2))],
            unexpected="refuse",
        ),
        "shape": by_iterator(lambda: changed(wide, lambda t: t[:-1].contiguous())),
        "cast": by_iterator(lambda: changed(wide, lambda t: t.to(torch.int8))),
        "half": half,
        "bypass": by_iterator(weights, Nothing),
        "empty": by_iterator(list),
        "nonfinite": in_session(
            lambda: changed(wide, lambda t: t.index_fill(0, torch.tensor([0]), float("nan"))), nonfinite="strict"
        ),
    }  # fmt: skip


def groups(rig: Rig, known: Any) -> dict[str, Any]:
    """Each smallest partial update is legal, and none that lacks a member; all of them together are the other side."""
    from weightlife import errors

    folder = str(rig.folder(rig.other))
    sets = [sorted(group) for group in known.atomic_groups()]
    accepted: list[str] = []
    for group in sets:
        if len(group) > 1:
            rig.llm.collective_rpc("weightlife_test_layerwise_start")
            rig.llm.collective_rpc("weightlife_test_load", args=(folder, group[1:]))
            try:
                rig.llm.collective_rpc("weightlife_test_layerwise_finish")
            except errors.HalfTouchedLayerError:
                continue
            accepted.append(group[0])
    half = rig.exact(rig.served)
    for group in sets:
        rig.llm.collective_rpc("weightlife_test_layerwise_start")
        rig.llm.collective_rpc("weightlife_test_load", args=(folder, group))
        rig.llm.collective_rpc("weightlife_test_layerwise_finish")
    rig.served = rig.other
    sizes = [len(group) for group in sets]
    return {
        "accepted": accepted,
        "half": half,
        "all": rig.exact(rig.served),
        "sizes": [min(sizes), max(sizes)],
    }


def execute(family: str, root: str) -> dict[str, Any]:
    """Run every case on one engine of a family."""
    import os

    import weightlife
    from weightlife import source_checks
    from weightlife.testing import _cold, checkpoints, oracle

    folders = checkpoints.pair(family, Path(root))
    want = {side: oracle.cold(getattr(folders, side)) for side in ("a", "b")}
    os.environ[oracle.POISON_VARIABLE] = "1"
    oracle.poison()
    weightlife.install()
    from vllm import LLM

    llm = LLM(**oracle.engine_arguments(folders.a))
    _cold.KEEP.append(llm)
    rig = Rig(llm, folders, want)
    known = weightlife.manifest(llm)
    source = source_checks.read(folders.b)
    rig.found["manifest"] = {
        "again": weightlife.Manifest.from_json(known.to_json()) == known,
        "remote": [m == known for m in over_rpc(llm)],
        "names": set(known.tensors) == set(source.headers),
        "problems": [str(p) for p in (*source.problems, *known.check(source.headers))],
        "left_out": len(known.left_out),
    }
    rig.found["groups"] = groups(rig, known)
    with tempfile.TemporaryDirectory() as scratch:
        for case, folder in broken(rig.folder("b"), Path(scratch), known):
            rig.refused(case, rig.by_path(folder))
    names = [n for n, e in known.tensors.items() if e.writes]
    wide = next(n for n in names if len(known.tensors[n].shape) == 2)
    position = names.index(wide)
    rig.refused("announced_shape", announced(rig, names, lambda i: i["shapes"][position].append(7)))
    rig.refused(
        "announced_dtype", announced(rig, names, lambda i: i["dtype_names"].__setitem__(position, "bool"))
    )
    rig.refused(
        "announced_twice",
        announced(
            rig, names, lambda i: [i[key].append(i[key][0]) for key in ("names", "dtype_names", "shapes")]
        ),
    )
    for case, change in streams(rig, known).items():
        rig.refused(f"stream_{case}", change)
    headers = source_checks.read(rig.folder(rig.other)).headers
    rig.refused(
        "expected_half",
        lambda: weightlife.session(
            llm, partial="forbid", expected={n: h for n, h in headers.items() if n != wide}
        ).prepare(),
    )
    rig.found["expected"] = expected(rig, headers)
    return rig.found


def expected(rig: Rig, headers: Any) -> dict[str, Any]:
    """A session that says what will come, and gets it."""
    import weightlife

    names = list(headers)
    with weightlife.session(rig.llm, partial="forbid", expected=headers):
        rig.llm.collective_rpc("weightlife_test_load", args=(str(rig.folder(rig.other)), names))
    rig.served = rig.other
    return {"exact": rig.exact(rig.served)}


def over_rpc(llm: Any) -> list[Any]:
    """Manifests by way of the workers, as an engine in another process answers."""
    import weightlife
    from weightlife.hosts.vllm import remote

    return [weightlife.Manifest.from_dict(json.loads(json.dumps(a))) for a in remote.ask(llm, "manifest")]
