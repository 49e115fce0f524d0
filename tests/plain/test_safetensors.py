# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of safetensors files into plain modules: `read_safetensors`, `load`, and `verify` of the same files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import weightlife
from tests.plainnet import A, B, C, Net, Pairs, copy_all, nets, outcome, served, serves
from tests.toyhost import unchanged
from weightlife import errors, source_checks
from weightlife._engine.trust import Trust

__all__ = ["nets"]

pytestmark = pytest.mark.plain

Tensors = dict[str, torch.Tensor]


def write(folder: Path, tensors: Pairs | Tensors, index: bool = True) -> Path:
    """Two files, the first half in the second one, and an index."""
    items = list(dict(tensors).items())
    half = len(items) // 2
    folder.mkdir(exist_ok=True)
    files = {"model-2.safetensors": dict(items[:half]), "model-1.safetensors": dict(items[half:])}
    for name, held in files.items():
        save_file(held, folder / name)
    if index:
        where = {name: file for file, held in files.items() for name in held}
        (folder / source_checks.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.fixture(name="a")
def _a(tmp_path: Path) -> Path:
    return write(tmp_path / "a", A)


@pytest.fixture(name="b")
def _b(tmp_path: Path) -> Path:
    return write(tmp_path / "b", B)


class Zoo(nn.Module):
    """What checkpoints hold besides floats of four bytes: ties, small and packed types, nothing at all."""

    def __init__(self) -> None:
        super().__init__()

        def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.two_bytes = parameter(3, dtype=torch.bfloat16)
        self.one_byte = parameter(4, 2, dtype=torch.float8_e4m3fn)
        self.packed = parameter(2, 1, dtype=torch.int32)  # eight numbers of four bits in each
        self.pairs = parameter(2, 4, dtype=torch.uint8)  # two in each
        self.nothing = parameter(0, 7)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.full((2,), 7.0), persistent=False)


def zoo(seed: int, head: bool = False) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in Zoo().state_dict().items():
        raw = torch.randint(0, 64, (tensor.numel() * tensor.element_size(),), generator=generator)
        out[name] = raw.to(torch.uint8).view(tensor.dtype).reshape(tensor.shape)
    out["head.weight"] = out["embed.weight"].clone()
    if not head:
        del out["head.weight"]
    return out


def same(model: nn.Module, want: Tensors) -> bool:
    state = model.state_dict()
    return all(
        torch.equal(state[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        for name, tensor in want.items()
    )


class TestReading:
    def test_is_what_was_written_in_one_order(self, a: Path) -> None:
        weights = weightlife.read_safetensors(a)
        first, second = list(weights), list(weights)
        want = [sorted(name for name, _ in A[at:to]) for at, to in ((3, 6), (0, 3))]
        assert [name for name, _ in first] == [name for file in want for name in file]
        assert [name for name, _ in second] == [name for name, _ in first] == weights.names()
        assert all(torch.equal(tensor, dict(A)[name]) for name, tensor in first)
        assert (len(weights), weights.nbytes) == (6, sum(tensor.nbytes for _, tensor in A))
        assert {name: (h.dtype, h.shape) for name, h in weights.headers.items()} == {
            name: ("float32", tuple(tensor.shape)) for name, tensor in A
        }

    def test_a_folder_a_file_and_an_index_are_sources(self, a: Path, tmp_path: Path) -> None:
        whole = tmp_path / "whole.safetensors"
        save_file(dict(A), whole)
        (a / source_checks.INDEX).rename(a / "other.json")
        save_file(dict(C), a / "stray.safetensors")  # the index does not name it
        for path in (whole, str(whole), a / "other.json"):
            net = Net()
            weightlife.load(net, path)
            assert serves(net) == "A"
            assert weightlife.verify(net, path).ok
        with pytest.raises(errors.RepeatedSourceError):
            weightlife.read_safetensors(a)

    def test_what_is_kept_and_renamed(self, tmp_path: Path) -> None:
        write(tmp_path / "x", {f"net.{name}": tensor for name, tensor in A} | {"step": torch.zeros(1)})
        weights = weightlife.read_safetensors(
            tmp_path / "x", keep=lambda name: name != "step", rename=lambda name: name.removeprefix("net.")
        )
        net = Net()
        weightlife.load(net, weights)
        assert serves(net) == "A"
        assert weightlife.verify(net, weights).ok and weightlife.verify(net, weights).ok
        with pytest.raises(errors.ConfigError, match="one name"):
            weightlife.read_safetensors(tmp_path / "x", rename=lambda name: "same")
        with pytest.raises(errors.ConfigError, match="NoneType"):
            weightlife.read_safetensors(tmp_path / "x", rename=lambda name: None)  # type: ignore[arg-type,return-value]
        assert len(weightlife.read_safetensors(tmp_path / "x", keep=lambda name: False)) == 0

    @pytest.mark.parametrize("device", ["meta", "bogus", 1.5])
    def test_a_device_that_is_none(self, a: Path, device: Any) -> None:
        with pytest.raises(errors.ConfigError):
            weightlife.read_safetensors(a, device=device)

    def test_writing_to_a_tensor_changes_no_file_and_nobody_else(self, a: Path) -> None:
        weights = weightlife.read_safetensors(a)
        before = {path: path.read_bytes() for path in a.iterdir()}
        for _, tensor in weights:
            tensor.fill_(-1)
        assert all(torch.equal(tensor, dict(A)[name]) for name, tensor in weights)
        assert before == {path: path.read_bytes() for path in a.iterdir()}

    def test_holds_one_file_open_and_none_afterwards(self, a: Path) -> None:
        def held() -> set[str]:
            links = list(Path("/proc/self/fd").iterdir())  # of which one is that of this look
            found = (link.readlink() for link in links if link.is_symlink())
            return {path.name for path in found if path.is_relative_to(a)}

        stream = iter(weightlife.read_safetensors(a))
        assert held() == set()
        seen = [(next(stream)[0], held()) for _ in range(6)]
        assert [len(files) for _, files in seen] == [1] * 6
        assert list(stream) == [] and held() == set()

    def test_needs_memory_for_no_tensor(self, tmp_path: Path) -> None:
        """64 MiB in 8 tensors pass by. What the process has for itself (not pages of files) stays as it was."""
        save_file({f"t{n}": torch.full((1 << 21,), float(n)) for n in range(8)}, tmp_path / "m.safetensors")

        def own() -> int:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

        weights, most = weightlife.read_safetensors(tmp_path), 0
        target = torch.empty(1 << 21).zero_()
        before = own()
        for _, tensor in weights:
            target.copy_(tensor)
            most = max(most, own() - before)
        assert most < 4 << 20  # half a tensor

    def test_a_reader_is_imported_when_it_is_asked_for(self) -> None:
        code = (
            "import sys, weightlife\nweightlife.read_safetensors\n"
            "assert not {'torch', 'safetensors', 'vllm'} & sys.modules.keys()"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class TestLoading:
    def test_first_and_again_and_named_in_the_report(self, a: Path, b: Path) -> None:
        net = Net()
        for path, want in ((a, "A"), (b, "B"), (a, "A")):
            weightlife.load(net, path)
            report = weightlife.last_report(net)
            assert report is not None
            assert (serves(net), report.outcome, report.source) == (want, "committed", str(path))
            assert (report.tensors_received, report.bytes_received) == (6, sum(t.nbytes for _, t in A))
            assert weightlife.verify(net, path).ok
        found = weightlife.verify(net, b)
        assert not found.ok and found.ranks[0].random_access

    @pytest.mark.parametrize("way", ["by name", "own", "given", "wrapped before"])
    def test_the_loader_is_known_again(
        self, way: str, a: Path, b: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known: list[bool] = []
        serves_ = Trust.serves

        def noted(self: Trust, load: Any) -> bool:
            known.append(serves_(self, load))
            return known[-1]

        class Own(Net):
            def load_weights(self, weights: Any) -> None:
                copy_all(self, weights)

        monkeypatch.setattr(Trust, "serves", noted)
        net = Own() if way == "own" else served() if way == "wrapped before" else Net()
        more: Any = {"loader": copy_all} if way == "given" else {}
        if way != "wrapped before":
            weightlife.load(net, a, **more)
        weightlife.load(net, b, **more)
        assert (serves(net), known) == ("B", [True])

    def test_a_state_dict_and_an_iterable(self, a: Path) -> None:
        for source in (dict(A), A, iter(A)):
            net = Net()
            weightlife.load(net, source)
            weightlife.load(net, B)
            assert serves(net) == "B"
            weightlife.load(net, a)
            assert serves(net) == "A"

    def test_in_a_session_and_by_a_wrapped_loader(self, a: Path, b: Path) -> None:
        net = served()
        weights = weightlife.read_safetensors(b)
        with weightlife.session(net, source=weights) as opened:
            weightlife.load(net, weights)
            assert serves(net) == "A"
            assert opened.report is not None and opened.report.source == str(b)
        assert serves(net) == "B"
        weightlife.wrap_loader(copy_all)(net, weightlife.read_safetensors(a))
        report = weightlife.last_report(net)
        assert report is not None
        assert (serves(net), report.source, report.opened_by) == ("A", str(a), "copy_all")
        with weightlife.session(net, expected=weights):
            weightlife.load(net, weights)
        assert serves(net) == "B"

    def test_a_part_that_can_not_be_is_refused_before_it_is_written(self, b: Path, tmp_path: Path) -> None:
        net = served()
        other = weightlife.read_safetensors(write(tmp_path / "o", [(n, t.to(torch.int8)) for n, t in C]))
        with weightlife.session(net):
            with pytest.raises(errors.DtypeMismatchError):
                weightlife.load(net, other)
            weightlife.load(net, b)
        assert (serves(net), outcome(net)) == ("B", "committed")

    def test_everything_that_files_hold(self, tmp_path: Path) -> None:
        one, two = zoo(1), zoo(2, head=True)
        model = Zoo()
        weightlife.load(model, write(tmp_path / "1", one))
        assert same(model, one)
        weightlife.load(model, write(tmp_path / "2", two))
        assert same(model, two) and model.head.weight is model.embed.weight
        apart = {**zoo(4), "head.weight": zoo(5)["embed.weight"]}
        for other in (model, Zoo()):
            with pytest.raises(errors.SurplusTensorError, match="ties these"):
                weightlife.load(other, write(tmp_path / "apart", apart))
        taught = weightlife.read_safetensors(tmp_path / "2", keep=lambda name: name != "head.weight")
        assert weightlife.verify(model, taught).ok  # by the names of the first load
        assert model.get_buffer("cache").tolist() == [7.0, 7.0]
        for cut in ("nothing", "steps", "packed"):
            less = {name: tensor for name, tensor in zoo(3).items() if name != cut}
            if cut == "nothing":  # of no elements: nothing of it can be missing
                weightlife.load(model, write(tmp_path / cut, less))
                continue
            with unchanged(model), pytest.raises(errors.MissingTensorError) as told:
                weightlife.load(model, write(tmp_path / cut, less))
            assert told.value.tensors == (cut,)

    def test_what_loads_a_model_must_be_known(self, a: Path) -> None:
        @weightlife.wrap_loader
        def by_path(model: nn.Module, path: str) -> None:
            model.load_state_dict(dict(weightlife.read_safetensors(path)))

        net = Net()
        by_path(net, str(a))
        with pytest.raises(errors.ConfigError, match="what loads this model"):
            weightlife.load(net, a)
        assert serves(net) == "A"
        with pytest.raises(errors.HostError):
            weightlife.load("a path", a)  # type: ignore[arg-type]
        with torch.device("meta"):
            hollow = Net()
        with pytest.raises(errors.ConfigError, match="meta"):
            weightlife.load(hollow, a)


def truncated(folder: Path) -> None:
    file = folder / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def gone(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()


def twice(folder: Path) -> None:
    (folder / source_checks.INDEX).unlink()
    (folder / "model-3.safetensors").symlink_to(folder / "model-1.safetensors")


def moved(folder: Path) -> None:
    one, two = (folder / f"model-{n}.safetensors" for n in (1, 2))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def hostile(folder: Path) -> None:
    save_file({"\x1b[31m<script>": torch.zeros(1), **dict(B)}, folder / "model-1.safetensors")
    gone(folder)
    (folder / source_checks.INDEX).unlink()


def short(folder: Path) -> None:
    (folder / source_checks.INDEX).unlink()
    gone(folder)


def wide(folder: Path) -> None:
    (folder / source_checks.INDEX).unlink()
    save_file({name: torch.ones(1, *t.shape[1:]) for name, t in B[3:]}, folder / "model-1.safetensors")


def other_kind(folder: Path) -> None:
    (folder / source_checks.INDEX).unlink()
    save_file({name: tensor.to(torch.int8) for name, tensor in B[3:]}, folder / "model-1.safetensors")


BAD: dict[Callable[[Path], None], type[errors.WeightlifeError]] = {
    truncated: errors.TruncatedSourceError, gone: errors.SourceIndexError, twice: errors.RepeatedSourceError,
    moved: errors.SourceIndexError, hostile: errors.UnexpectedTensorError, short: errors.MissingTensorError,
    wide: errors.ShapeMismatchError, other_kind: errors.DtypeMismatchError,
}  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize("what", BAD, ids=lambda what: what.__name__)
    @pytest.mark.parametrize("first", [True, False])
    def test_before_anything_is_touched(self, what: Callable[[Path], None], first: bool, b: Path) -> None:
        net = Net()
        if not first:
            weightlife.load(net, A)
        kind, before = BAD[what], {name: tensor.clone() for name, tensor in net.state_dict().items()}
        what(b)
        with unchanged(net), pytest.raises(kind) as told:
            weightlife.load(net, b)
        assert all(torch.equal(t, before[n]) or t.isnan().any() for n, t in net.state_dict().items())
        assert "\x1b" not in str(told.value) and told.value.hint
        if first:
            weightlife.load(net, A)
        assert serves(net) == "A"

    @pytest.mark.parametrize("where", ["nowhere", "empty", "pickle"])
    def test_what_holds_no_files(self, where: str, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "pickle").mkdir()
        torch.save({}, tmp_path / "pickle" / "pytorch_model.bin")
        for call in (weightlife.read_safetensors, lambda path: weightlife.verify(served(), path)):
            with pytest.raises(errors.SourceError) as told:
                call(tmp_path / where)
            assert where in str(told.value)
        (tmp_path / "pickle" / "bin.index.json").write_text('{"weight_map": {"x": "pytorch_model.bin"}}')
        with pytest.raises(errors.SourceIndexError):
            weightlife.read_safetensors(tmp_path / "pickle" / "bin.index.json")


class TestWhileItIsRead:
    """A file that is exchanged, written to or cut after its header was read."""

    @pytest.mark.parametrize("how", ["exchanged", "written to", "cut", "deleted"])
    @pytest.mark.parametrize("when", [0, 1, 4])
    def test_is_noticed_and_the_old_weights_serve(self, how: str, when: int, a: Path, b: Path) -> None:
        net = Net()
        weightlife.load(net, a)
        second = b / "model-2.safetensors"
        count = 0

        def change() -> None:
            if how == "exchanged":
                os.utime(a / second.name, ns=(1, 1))
                (a / second.name).replace(second)
            elif how == "deleted":
                second.unlink()
            else:
                with second.open("r+b") as file:
                    if how == "cut":
                        file.truncate(second.stat().st_size - 8)
                    else:
                        file.seek(-4, os.SEEK_END)
                        file.write(b"\0\0\0\0")
                os.utime(second, ns=(1, 1))

        weights = weightlife.read_safetensors(b)

        def late(model: nn.Module, stream: Any) -> None:
            nonlocal count
            for name, tensor in stream:
                if count == when:
                    change()
                count += 1
                model.get_parameter(name).data.copy_(tensor)

        held = when == 4 and how in ("exchanged", "deleted")  # it is open already: what was checked is read
        if held:
            weightlife.load(net, weights, loader=late)
            assert serves(net) == "B"
            return
        with unchanged(net), pytest.raises(errors.SourceError, match=r"model-2\.safetensors"):
            weightlife.load(net, weights, loader=late)
        assert (serves(net), outcome(net)) == ("A", "aborted")

    def test_a_first_load_can_be_repeated(self, a: Path, b: Path) -> None:
        weights = weightlife.read_safetensors(a)
        second = a / "model-2.safetensors"
        second.write_bytes((b / second.name).read_bytes())
        os.utime(second, ns=(1, 1))
        net = Net()
        with pytest.raises(errors.SourceError, match="exchanged or written to"):
            weightlife.load(net, weights)
        with pytest.raises(errors.SessionStateError, match="first load failed"):
            serves(net)
        weightlife.load(net, b)
        assert serves(net) == "B"
        with pytest.raises(errors.SourceError, match="exchanged or written to"):
            weightlife.verify(net, weights)
