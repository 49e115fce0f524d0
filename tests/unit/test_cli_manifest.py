# SPDX-License-Identifier: Apache-2.0
"""`weightlife manifest show | diff | check`: from files alone, with exit codes, and hostile names made harmless."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import weightlife
from tests.toyhost import Served
from tests.unit.test_cli import ESCAPE, ROOT, Call, _call
from weightlife import errors
from weightlife._manifest import LayerEntry, Manifest, StorageEntry, TensorEntry, Write
from weightlife.runs import MANIFESTS

__all__ = ["_call"]

SPEC = ("packed", "fused_packed", "dense", "norm")


@pytest.fixture(name="served")
def _served() -> Served:
    return Served(SPEC)


@pytest.fixture(name="known")
def _known(served: Served, tmp_path: Path) -> Path:
    path = tmp_path / "known.json"
    weightlife.manifest(served.model).save(path)
    return path


def folder(path: Path, weights: dict[str, torch.Tensor], shards: int = 2) -> Path:
    path.mkdir()
    names = list(weights)
    for number in range(shards):
        save_file({n: weights[n] for n in names[number::shards]}, path / f"model-{number}.safetensors")
    return path


def codes(out: str) -> list[str]:
    return [problem["code"] for problem in json.loads(out)["problems"]]


class TestCheck:
    def test_a_checkpoint_that_would_load(
        self, call: Call, served: Served, known: Path, tmp_path: Path
    ) -> None:
        good = folder(tmp_path / "good", served.checkpoint(1))
        code, out, err = call("manifest", "check", good, "--manifest", known)
        assert (code, err) == (0, "")
        assert f"{len(served.weights)} tensors in 2 files" in out
        assert "Nothing speaks against it" in out
        code, out, _ = call("manifest", "check", good, "--manifest", known, "--json")
        assert (code, codes(out), json.loads(out)["exit_code"]) == (0, [], 0)

    def test_one_file_is_a_checkpoint_too(
        self, call: Call, served: Served, known: Path, tmp_path: Path
    ) -> None:
        save_file(served.checkpoint(1), tmp_path / "a.safetensors")
        assert call("manifest", "check", tmp_path / "a.safetensors", "--manifest", known)[0] == 0
        (tmp_path / "a.safetensors").write_bytes(b"x")
        code, out, _ = call("manifest", "check", tmp_path / "a.safetensors", "--manifest", known, "--json")
        assert (code, codes(out)[0]) == (1, "WL221")

    @pytest.mark.parametrize(
        ("case", "want"),
        [
            ("missing", ["WL201"]), ("unexpected", ["WL203"]), ("shape", ["WL204"]), ("dtype", ["WL205"]),
            ("twice", ["WL223"]), ("truncated", ["WL221", "WL201"]), ("index", ["WL222"]),
        ],
    )  # fmt: skip
    def test_what_would_be_refused_is_named(
        self, call: Call, served: Served, known: Path, tmp_path: Path, case: str, want: list[str]
    ) -> None:
        weights = served.checkpoint(1)
        first = next(name for name, value in weights.items() if value.ndim == 2)
        if case == "missing":
            del weights[first]
        elif case == "unexpected":
            weights["nobody"] = torch.ones(1)
        elif case == "shape":
            weights[first] = torch.ones(9, 9)
        elif case == "dtype":
            weights[first] = weights[first].to(torch.int8)
        bad = folder(tmp_path / "bad", weights)
        if case == "twice":
            save_file({first: weights[first]}, bad / "zz.safetensors")
        elif case == "truncated":
            path = bad / "model-0.safetensors"
            path.write_bytes(path.read_bytes()[:-4])
        elif case == "index":
            listed = dict.fromkeys(weights, "model-0.safetensors")
            (bad / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
        code, out, _ = call("manifest", "check", bad, "--manifest", known, "--json")
        found = codes(out)
        assert code == 1
        assert found[: len(want)] == want or set(want) <= set(found), found
        code, out, _ = call("manifest", "check", bad, "--manifest", known)
        assert code == 1
        assert all(item in out for item in want)
        assert "next: " in out
        if case not in ("truncated", "index"):
            assert ("nobody" if case == "unexpected" else first) in out
        # and the engine itself, given the same headers, says the same
        if case in ("missing", "shape", "dtype"):
            kind = {"missing": errors.MissingTensorError, "shape": errors.ShapeMismatchError,
                    "dtype": errors.DtypeMismatchError}[case]  # fmt: skip
            with pytest.raises(kind):
                weightlife.session(served.model, partial="forbid", expected=weights).prepare()

    def test_policies(self, call: Call, served: Served, known: Path, tmp_path: Path) -> None:
        weights = served.checkpoint(1)
        group = next(g for g in Manifest.load(known).atomic_groups() if len(g) > 1)
        part = folder(tmp_path / "part", {n: v for n, v in weights.items() if n in group}, 1)
        half = folder(tmp_path / "half", {n: weights[n] for n in sorted(group)[1:]}, 1)
        args = ("manifest", "check")
        assert call(*args, part, "--manifest", known)[0] == 1
        assert call(*args, part, "--manifest", known, "--partial", "by_layer")[0] == 0
        code, out, _ = call(*args, half, "--manifest", known, "--partial", "by_layer", "--json")
        assert (code, codes(out)) == (1, ["WL206"])
        assert call(*args, half, "--manifest", known, "--partial", "allow")[0] == 0
        more = folder(tmp_path / "more", {**weights, "nobody": torch.ones(1)})
        code, out, _ = call(*args, more, "--manifest", known, "--unexpected", "ignore")
        assert code == 0
        assert "1 names are not known" in out
        assert call(*args, more, "--manifest", known, "--partial", "some")[0] == 2

    def test_what_can_not_be_read_is_2(self, call: Call, served: Served, known: Path, tmp_path: Path) -> None:
        good = folder(tmp_path / "good", served.checkpoint(1))
        (tmp_path / "empty").mkdir()
        (tmp_path / "bad.json").write_text("{}")
        os.mkfifo(tmp_path / "pipe")
        nameless = tmp_path / "nameless.json"
        Manifest("M", {}, provisional=True).save(nameless)
        for checkpoint, manifest in (
            (tmp_path / "nowhere", known), (tmp_path / "empty", known), (tmp_path / "pipe", known),
            (good, tmp_path / "nowhere"), (good, tmp_path / "bad.json"), (good, tmp_path / "empty"),
            (good, tmp_path / "pipe"), (good, nameless),
        ):  # fmt: skip
            code, out, err = call("manifest", "check", checkpoint, "--manifest", manifest)
            assert (code, out) == (2, ""), (checkpoint, manifest)
            assert "next: " in err

    def test_without_torch(self, served: Served, known: Path, tmp_path: Path) -> None:
        good = folder(tmp_path / "good", served.checkpoint(1))
        code = "import sys; sys.modules['torch'] = None; from weightlife.cli import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, "manifest", "check", str(good), "--manifest", str(known)],
            capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")

    def test_hostile_names(self, call: Call, served: Served, known: Path, tmp_path: Path) -> None:
        name = f"{ESCAPE}[31m[bold]<script>\u202e"
        bad = folder(tmp_path / "bad", {**served.checkpoint(1), name: torch.ones(1)})
        for more in ((), ("--json",)):
            code, out, err = call("manifest", "check", bad, "--manifest", known, *more)
            assert code == 1
            assert "[bold]<script>" in out
            assert ESCAPE not in out + err
            assert "\u202e" not in out + err


class TestShow:
    def test_what_is_in_it(self, call: Call, known: Path) -> None:
        code, out, err = call("manifest", "show", known)
        assert (code, err) == (0, "")
        for word in (
            "ToyModel, rank 0 of 1",
            "a complete load",
            "float32",
            "rebuild",
            "smallest updates",
            "not loaded",
        ):
            assert word in out
        assert "body.inner.0.weight" not in out
        code, out, _ = call("manifest", "show", known, "--names", "*inner.0.*")
        assert "body.inner.0.weight" in out
        assert "body.inner.1" not in out.partition("tensor ")[2]

    def test_json_is_the_manifest(self, call: Call, known: Path) -> None:
        code, out, _ = call("manifest", "show", known, "--json")
        assert code == 0
        assert Manifest.from_dict(json.loads(out)["manifests"][0]) == Manifest.load(known)

    def test_a_provisional_one_is_1(self, call: Call, tmp_path: Path) -> None:
        Manifest("M", {}, provisional=True).save(tmp_path / "p.json")
        code, out, _ = call("manifest", "show", tmp_path / "p.json")
        assert (code, "no real load was seen" in out) == (1, True)

    def test_numbers_and_names_of_anybody(self, call: Call, tmp_path: Path) -> None:
        evil = f"{ESCAPE}]0;owned\x07[red]"
        made = Manifest(
            evil, {evil: TensorEntry(evil, "float999", (1 << 61,) * 32, ()), "a": TensorEntry("a", evil, (), ())},
            (StorageEntry("float32", 4, (), ()),), (LayerEntry(evil, "refuse", evil),), versions={evil: evil},
        )  # fmt: skip
        made.save(tmp_path / "evil.json")
        code, out, _ = call("manifest", "show", tmp_path / "evil.json", "--names", "*")
        assert code == 0
        assert ESCAPE not in out
        assert "[red]" in out

    def test_a_storage_that_nothing_is_on(self, call: Call, tmp_path: Path) -> None:
        entry = TensorEntry("a", "float32", (4,), (Write(0, 0, (4,), (1,)),))
        Manifest("M", {"a": entry}, (StorageEntry("float32", 4, (), ()),)).save(tmp_path / "m.json")
        assert call("manifest", "show", tmp_path / "m.json", "--names", "*")[0] == 0


class TestDiff:
    def test_no_difference_and_every_kind(
        self, call: Call, served: Served, known: Path, tmp_path: Path
    ) -> None:
        assert call("manifest", "diff", known, known)[0] == 0
        content = json.loads(known.read_text())
        content["tensors"][0][0] = "other.name"
        content["tensors"][1][2] = [*content["tensors"][1][2], 1]
        content["tensors"][2][1] = "float64"
        content["layers"][0][1] = "refuse"
        (tmp_path / "other.json").write_text(json.dumps(content))
        code, out, _ = call("manifest", "diff", known, tmp_path / "other.json")
        assert code == 1
        for title in ("only before: 1", "only after: 1", "shape: 1", "dtype: 1", "strategy: 1"):
            assert title in out
        code, out, _ = call("manifest", "diff", known, tmp_path / "other.json", "--json")
        found = json.loads(out)
        assert (code, found["exit_code"], found["added"]) == (1, 1, ["other.name"])

    def test_unreadable(self, call: Call, known: Path, tmp_path: Path) -> None:
        code, out, err = call("manifest", "diff", known, tmp_path / "nowhere")
        assert (code, out, "nowhere" in err) == (2, "", True)


class TestRun:
    """`runs_dir` keeps a manifest a model and rank."""

    def test_kept_by_the_writer_and_found_by_the_command(self, call: Call, tmp_path: Path) -> None:
        from weightlife.runs.writer import RunWriter

        writer = RunWriter(tmp_path / "run")
        end = writer.subscribe()
        try:
            served = Served(SPEC)
            dummy = Served(("packed",), provisional=True)
            assert writer.flush()
            files = list((tmp_path / "run").glob(f"*.{MANIFESTS}"))
            assert len(files) == 1, "a dummy has none"
            assert Manifest.load(files[0]) == weightlife.manifest(served.model)
            dummy.update(dummy.checkpoint(1))
            assert writer.flush()
            (file,) = (tmp_path / "run").glob(f"*.{MANIFESTS}")
            assert Manifest.load(file) == weightlife.manifest(dummy.model), "the later one of the same class"
            assert writer.dropped == 0
        finally:
            end()
        code, out, _ = call("manifest", "show", tmp_path / "run")
        assert (code, "ToyModel, rank 0 of 1" in out) == (0, True)
        assert list((tmp_path / "run").glob(".*")) == []

    def test_of_several_ranks_one_is_chosen(self, call: Call, known: Path, tmp_path: Path) -> None:
        run = tmp_path / "run"
        run.mkdir()
        content: dict[str, Any] = json.loads(known.read_text())
        for rank in (0, 1):
            (run / f"x.rank{rank}.M.{MANIFESTS}").write_text(
                json.dumps({**content, "rank": rank, "world_size": 2})
            )
        assert call("manifest", "diff", run, known)[0] == 0
        assert call("manifest", "diff", run, known, "--rank", "1")[0] == 0
        code, _, err = call("manifest", "diff", run, known, "--rank", "2")
        assert (code, "2 manifests" in err) == (2, True)
        code, out, _ = call("manifest", "show", run)
        assert (code, "rank 1 of 2" in out) == (0, True)


class TestFile:
    def test_save_is_whole_or_nothing(self, served: Served, tmp_path: Path) -> None:
        made = weightlife.manifest(served.model)
        path = tmp_path / "m.json"
        path.write_text("former")
        made.save(path)
        assert weightlife.Manifest.load(path) == made
        assert list(tmp_path.iterdir()) == [path]
        with pytest.raises(OSError, match="No such file"):
            made.save(tmp_path / "nowhere" / "m.json")

    def test_load_takes_files_only(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(errors.ConfigError, match="is no file"):
            weightlife.Manifest.load(tmp_path / "pipe")
        with pytest.raises(FileNotFoundError):
            weightlife.Manifest.load(tmp_path / "nowhere")
