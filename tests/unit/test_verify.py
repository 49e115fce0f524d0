# SPDX-License-Identifier: Apache-2.0
"""`weightlife.verify` on toy layers and plain nets: what it finds, what it leaves alone, what it says."""

from __future__ import annotations

import io
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import weightlife
from tests import plainnet
from tests.plainnet import nets
from tests.toyhost import KINDS, WIDTH, Boom, Layer, Served, ToyHost, ToyModel, faults, parameter, unchanged
from weightlife import errors
from weightlife._engine import groups, lifecycle, proof, rehearsal, runtime
from weightlife._engine.equal import unequal
from weightlife._engine.events import bus
from weightlife._engine.ground import Ground
from weightlife._verification import MAX_DIFFERENCES, Difference, RankVerification, VerifyReport

__all__ = ["nets"]

ALL = (*sorted(KINDS), ("packed", "tied"))


class Hookless(ToyModel):
    """Without a hook of the model's own: every group for itself."""

    process = None  # type: ignore[assignment]


def hookless(spec: Any) -> Served:
    return Served(lambda: Hookless(spec))


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(proof, "_LEAST", 0)  # several batches also of the smallest models
    monkeypatch.setattr(rehearsal, "_LENT_BYTES", 0)
    yield
    faults.clear()
    Served.close_all()
    assert lifecycle.OpenSessions.count == 0


def paths(report: VerifyReport) -> set[str]:
    return {difference.path for difference in report.differences}


class TestClean:
    @pytest.mark.parametrize("kind", [*sorted(KINDS), ("packed", "tied"), ALL], ids=str)
    @pytest.mark.parametrize("make", [Served, hookless])
    def test_what_serves_is_equal_and_another_checkpoint_is_not(self, kind: Any, make: Any) -> None:
        served = make(kind)
        other = served.checkpoint(5)
        with unchanged(served.model):
            report = weightlife.verify(served.model, served.weights.items())
            wrong = weightlife.verify(served.model, other.items())
        assert (report.ok, report.differences) == (True, [])
        assert kind == "native" or not wrong.ok
        served.update(other)
        assert paths(weightlife.verify(served.model, other.items())) == set()

    def test_every_group_is_rebuilt_by_itself(self) -> None:
        found = weightlife.verify(hookless(ALL).model, hookless(ALL).weights.items()).ranks[0]
        assert found.groups == len(KINDS) + 1
        whole = weightlife.verify(Served(ALL).model, Served(ALL).weights.items()).ranks[0]
        assert whole.groups == 1  # the model's hook may look at everything

    def test_nobody_is_told(self) -> None:
        served = hookless(ALL)
        heard: list[Any] = []
        reports = len(served.life.reports)
        stop = bus.subscribe(heard.append)
        weightlife.verify(served.model, served.weights.items())
        stop()
        assert heard == []
        assert len(served.life.reports) == reports
        assert served.life.session is None

    def test_nan_is_equal_to_itself(self) -> None:
        served = hookless("dense")
        weights = {name: torch.full_like(value, float("nan")) for name, value in served.weights.items()}
        served.update(weights)
        assert weightlife.verify(served.model, weights.items()).ok


class TestFaults:
    @pytest.mark.parametrize("kind", sorted(set(KINDS) - {"native"}))
    def test_one_bit_anywhere_is_found(self, kind: str) -> None:
        served = hookless(("dense", kind))
        told = weightlife.verify(served.model, served.weights.items()).ranks[0].untold
        skipped = {path for entry in told.values() for path in entry["paths"]}
        tensors = dict(runtime.tensors(served.model, served.host.skip, served.host.transient))
        for path, tensor in tensors.items():
            if path in skipped:
                continue
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
            place = tensor.storage_offset() * 4 + 1
            memory[place] ^= 4
            same = {
                p for p, t in tensors.items() if t.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            }
            report = weightlife.verify(served.model, served.weights.items())
            assert paths(report) & same, path
            assert all(d.elements == 1 for d in report.differences if d.path == path)
            memory[place] ^= 4
        assert paths(weightlife.verify(served.model, served.weights.items())) == set()

    def test_a_closure_that_was_moved_and_went_stale(self) -> None:
        served = hookless(("dense", "renamed"))
        layer = served.model.body.inner[1]
        cell = next(c for c in layer.apply_fn.__closure__ if c.cell_contents.ndim == 2)
        cell.cell_contents = cell.cell_contents.clone()  # moved, and still right
        assert weightlife.verify(served.model, served.weights.items()).ok
        cell.cell_contents.add_(1.0)
        found = paths(weightlife.verify(served.model, served.weights.items()))
        assert len(found) == 1 and "apply_fn.<closure" in found.pop()

    def test_a_stale_number(self) -> None:
        served = hookless(("dense", "packed"))
        served.model.body.inner[1].quant_method.kernel.scale += 1.0
        (difference,) = weightlife.verify(served.model, served.weights.items()).differences
        assert (difference.path, difference.what) == ("body.inner.1.quant_method.kernel.scale", "attribute")

    def test_tensors_that_were_made_again(self) -> None:
        served = hookless(("dense", "packed", "norm"))
        dense, _, norm = served.model.body.inner
        norm.weight = parameter(WIDTH + 3, loader=norm.copy, fill=0.0)
        dense.bias = parameter(WIDTH, loader=dense.copy, fill=0.0)
        said = {d.path: d.what for d in weightlife.verify(served.model, served.weights.items()).differences}
        assert said == {"body.inner.0.bias": "value", "body.inner.2.weight": "size"}

    def test_geometry_and_what_is_missing(self) -> None:
        served = hookless(("renamed", "swapped"))
        renamed, swapped = served.model.body.inner
        del renamed.scales
        swapped.weight.data = swapped.weight.data.to(torch.float64)
        said = {d.path: d.what for d in weightlife.verify(served.model, served.weights.items()).differences}
        assert said == {"body.inner.0.scales": "missing", "body.inner.1.weight": "geometry"}

    @pytest.mark.parametrize("kept", [0, 1 << 20])
    def test_native_memory_is_named_or_probed(self, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(proof, "_KEPT_BYTES", kept)  # answers as digests, or themselves
        served = hookless(("dense", "native"))
        found = weightlife.verify(served.model, served.weights.items()).ranks[0]
        assert found.untold["native memory"]["paths"] == ["body.inner.1.handle"]
        served.host.probe = lambda layer: layer(torch.eye(WIDTH)) if hasattr(layer, "handle") else None  # type: ignore[method-assign]
        assert weightlife.verify(served.model, served.weights.items()).ranks[0].probed == 1
        other = served.checkpoint(3)
        said = {d.path: d for d in weightlife.verify(served.model, other.items()).differences}
        assert said["body.inner.1.handle"].what == "native"
        assert 0 < said["body.inner.1.handle"].elements <= said["body.inner.1.handle"].numel
        with unchanged(served.model):
            assert weightlife.verify(served.model, served.weights.items()).ok


class Peeking(Layer):
    """Its hook looks at another layer's weight, and notes something on it."""

    def __init__(self, other: Layer, note: bool) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH, loader=self.copy)
        object.__setattr__(self, "other", other)
        self.note = note

    def process(self) -> None:
        faults.tick("hook")
        other: Any = self.other
        if self.note:
            other.seen = float(self.weight.sum())
        else:
            self.weight = nn.Parameter(self.weight.data + other.weight.data.sum(), requires_grad=False)


class TestLinks:
    @pytest.mark.parametrize("note", [False, True])
    @pytest.mark.parametrize("again", [False, True])
    def test_a_hook_that_needs_another_layer_is_rebuilt_with_it(self, note: bool, again: bool) -> None:
        def build() -> nn.Module:
            model = Hookless(("dense", "packed", "dense"))
            last = model.body.inner[2]  # type: ignore[index]
            model.body.inner[1] = Peeking(last, note)  # type: ignore[index,operator]
            return model

        served = Served(build)
        source: Any = served.weights.items()
        if again:
            source = _Files(served.weights)
        other = _Files(served.checkpoint(9)) if again else served.checkpoint(9).items()
        with unchanged(served.model):
            assert not weightlife.verify(served.model, other).ok
            assert served.life.links
            found = weightlife.verify(served.model, source).ranks[0]
        assert found.ok and found.layers_compared == found.layers
        assert found.untold == {} or note
        assert not weightlife.verify(served.model, other).ok

    def test_what_went_by_is_named(self) -> None:
        def build() -> nn.Module:
            model = Hookless(("dense", "dense", "packed"))
            model.body.inner[2] = Peeking(model.body.inner[0], False)  # type: ignore[index,operator]
            return model

        served = Served(build)
        first = weightlife.verify(served.model, served.weights.items()).ranks[0]
        assert first.layers_compared == first.layers - 1
        assert any("went by" in reason for reason in first.untold)
        second = weightlife.verify(served.model, served.weights.items()).ranks[0]
        assert second.ok and second.layers_compared == second.layers


class _Files:
    """A source with random access."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def names(self) -> list[str]:
        return list(self.weights)

    def place(self, name: str) -> None:
        return None

    def read(self, names: set[str], _: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value.clone()) for name, value in self.weights.items() if name in names)


class Scaling(Layer):
    """Its loader writes something else than what comes, in one of several ways."""

    how = "twice"

    def take(self, source: str, tensor: torch.Tensor) -> None:
        if self.how == "twice":
            self.weight.data.copy_(tensor * 2)
        elif self.how == "after":
            self.weight.data.copy_(tensor)
            self.weight.data.mul_(2)
        elif self.how == "before":
            self.weight.data.zero_()
            self.weight.data.add_(tensor)
        else:
            self.weight.data.copy_(tensor.t())


class TestLent:
    """A tensor of a file that fills a parameter is not copied, unless the loader does anything but copy it."""

    @pytest.mark.parametrize("how", ["twice", "after", "before", "turned"])
    def test_a_loader_that_does_not_copy(self, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Scaling, "how", how)

        def build() -> nn.Module:
            model = Hookless(("dense", "packed", "dense"))
            model.body.inner[2].__class__ = Scaling  # type: ignore[index]
            return model

        served = Served(build)
        for _ in range(2):
            with unchanged(served.model):
                report = weightlife.verify(served.model, _Files(served.weights))
            assert report.ok, str(report)
        assert not weightlife.verify(served.model, _Files(served.checkpoint(9))).ok

    @pytest.mark.parametrize("kind", ["dense", "packed"])
    def test_its_memory_is_that_of_the_source(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        served, lent = hookless(kind), []
        lend = Ground.lend

        def seen(self: Ground, number: int, storage: torch.UntypedStorage) -> Any:
            gone = lend(self, number, storage)
            lent.append(self.by_number[number].current.data_ptr() == storage.data_ptr())
            return gone

        monkeypatch.setattr(Ground, "lend", seen)
        assert weightlife.verify(served.model, _Files(served.weights)).ok
        assert lent and all(lent)
        lent.clear()
        assert weightlife.verify(served.model, served.weights.items()).ok
        assert not lent, "a stream may be asked for its tensors again"

    def test_no_file_is_written(self, tmp_path: Path) -> None:
        """Hooks that change a loaded weight in place change their mapping alone, and see the file the next time."""
        served = hookless(ALL)
        save_file(served.weights, tmp_path / "model.safetensors")
        before = (tmp_path / "model.safetensors").read_bytes()
        for _ in range(2):
            assert weightlife.verify(served.model, tmp_path).ok
        assert (tmp_path / "model.safetensors").read_bytes() == before


class TestUnchanged:
    @pytest.mark.parametrize("kind", ["write", "hook"])
    @pytest.mark.parametrize("after", [0, 3, 7])
    @pytest.mark.parametrize("make", [Served, hookless])
    def test_whatever_is_raised(self, kind: str, after: int, make: Any) -> None:
        served = make(ALL)
        faults.seen.clear()
        with unchanged(served.model):
            faults.arm(kind, after)
            with pytest.raises(Boom):
                weightlife.verify(served.model, served.checkpoint(4).items())
        faults.clear()
        assert served.life.session is None
        assert torch.equal(served.run(), served.expected())
        assert weightlife.verify(served.model, served.weights.items()).ok

    def test_ctrl_c(self) -> None:
        served = hookless(ALL)

        def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
            for index, item in enumerate(served.weights.items()):
                if index == 9:
                    raise KeyboardInterrupt
                yield item

        with unchanged(served.model), pytest.raises(KeyboardInterrupt):
            weightlife.verify(served.model, interrupted)
        served.host.process_layer = _interrupt  # type: ignore[method-assign]
        with unchanged(served.model), pytest.raises(KeyboardInterrupt):
            weightlife.verify(served.model, served.weights.items())

    def test_requests_run_meanwhile(self) -> None:
        net = plainnet.served()
        want, wrong, stop = net(plainnet.INPUT).clone(), [], threading.Event()

        def serve() -> None:
            while not stop.is_set():
                if not torch.equal(net(plainnet.INPUT), want):
                    wrong.append("another answer")

        threads = [threading.Thread(target=serve) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                assert weightlife.verify(net, plainnet.A).ok
                assert not weightlife.verify(net, plainnet.B).ok
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert wrong == []

    def test_an_update_in_the_middle_ends_it(self) -> None:
        net = plainnet.served()

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            for index, item in enumerate(plainnet.A):
                if index == 3:
                    plainnet.load(net, plainnet.B)
                yield item

        with pytest.raises(errors.SessionStateError, match="an update was committed"):
            weightlife.verify(net, source)
        assert plainnet.serves(net) == "B"


class TestSources:
    def test_a_folder(self, tmp_path: Path) -> None:
        net = plainnet.served()
        save_file(dict(plainnet.A[:3]), tmp_path / "a.safetensors")
        save_file(dict(plainnet.A[3:]), tmp_path / "b.safetensors")
        found = weightlife.verify(net, tmp_path).ranks[0]
        assert found.ok and found.random_access and found.source == str(tmp_path)
        whole = (tmp_path / "b.safetensors").read_bytes()
        (tmp_path / "b.safetensors").write_bytes(whole[:-4])
        with pytest.raises(errors.TruncatedSourceError):
            weightlife.verify(net, tmp_path)
        (tmp_path / "b.safetensors").unlink()
        with pytest.raises(errors.MissingTensorError) as told:
            weightlife.verify(net, tmp_path)
        assert set(told.value.tensors) == {name for name, _ in plainnet.A[3:]}
        with pytest.raises(errors.SourceError):
            weightlife.verify(net, tmp_path / "nowhere")
        with pytest.raises(errors.ConfigError, match="no checkpoint of its own"):
            weightlife.verify(net)

    @pytest.mark.parametrize(
        "how", ["exchanged", "overwritten", "late", "touched", "other", "short", "gone", "gone late"]
    )
    def test_a_folder_that_is_written_while_it_is_read(self, how: str, tmp_path: Path) -> None:
        """What was found is of no checkpoint. Nothing of it may look like a verdict."""
        net = plainnet.served()
        parts = {"a.safetensors": plainnet.A[:3], "b.safetensors": plainnet.A[3:]}
        for file, part in parts.items():
            save_file(dict(part), tmp_path / file)
        last = tmp_path / "b.safetensors"
        told: list[int] = []

        def meanwhile(done: int, total: int) -> None:
            told.append(done)
            if (done == total if "late" in how else len(told) == 1) and last.exists():
                new = tmp_path / "new"
                save_file({"x": torch.zeros(1)} if how == "other" else dict(plainnet.B[3:]), new)
                if how in ("exchanged", "other"):
                    new.replace(last)
                elif how in ("overwritten", "late"):
                    last.write_bytes(new.read_bytes())
                elif how == "touched":
                    os.utime(last, ns=(0, last.stat().st_mtime_ns + 1))
                elif how == "short":
                    os.truncate(last, 20)
                else:
                    last.unlink()

        if how == "gone late":  # whoever had it open has read it
            assert weightlife.verify(net, tmp_path, progress=meanwhile).ok
            assert not last.exists()
            return
        with unchanged(net), pytest.raises(errors.SourceError, match=r"b\.safetensors") as error:
            weightlife.verify(net, tmp_path, progress=meanwhile)
        if how != "gone":
            assert isinstance(error.value, errors.ChangedSourceError)

    def test_any_order_and_what_waits(self) -> None:
        served = hookless(ALL)
        items = list(served.weights.items())
        in_order = weightlife.verify(served.model, items).ranks[0]
        random.Random(3).shuffle(items)
        shuffled = weightlife.verify(served.model, lambda: iter(items)).ranks[0]
        assert in_order.ok and shuffled.ok and not shuffled.random_access
        assert in_order.waiting_bytes < shuffled.waiting_bytes <= sum(t.nbytes for _, t in items)

    def test_a_reused_buffer(self) -> None:
        served = hookless(ALL)
        buffer = torch.empty(4096)

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in served.weights.items():
                view = buffer[: value.numel()].view(value.shape)
                view.copy_(value)
                yield name, view
                buffer.fill_(-1)

        assert weightlife.verify(served.model, source).ok

    def test_wrong_names(self) -> None:
        net = plainnet.served()
        renamed = [(f"model.{name}", value) for name, value in plainnet.A]
        with pytest.raises(errors.UnexpectedTensorError):
            weightlife.verify(net, renamed)
        with pytest.raises(errors.UnexpectedTensorError, match=r"'model\.'"):
            weightlife.verify(net, _Files(dict(renamed)))
        with pytest.raises(errors.MissingTensorError):
            weightlife.verify(net, plainnet.A[:-1])
        with pytest.raises(errors.SurplusTensorError):
            weightlife.verify(net, [*plainnet.A, plainnet.A[0]])

    def test_wrong_shapes(self) -> None:
        net = plainnet.served()
        half = [(name, value[:2] if value.ndim == 2 else value) for name, value in plainnet.A]
        with unchanged(net), pytest.raises((errors.ShapeMismatchError, RuntimeError)):
            weightlife.verify(net, half)


class TestStates:
    def test_what_can_not_be_verified(self) -> None:
        with pytest.raises(errors.NotInstalledError):
            weightlife.verify(nn.Linear(2, 2), [])
        dummy = Served("dense", provisional=True)
        with pytest.raises(errors.SessionStateError, match="no complete load"):
            weightlife.verify(dummy.model, [])
        served = Served("dense")
        served.open()
        with pytest.raises(errors.SessionStateError, match="an update is open"):
            weightlife.verify(served.model, served.weights.items())
        served.life.abort()
        served.host.refuse = "asleep"
        with pytest.raises(errors.SessionStateError, match="asleep"):
            weightlife.verify(served.model, served.weights.items())

    @pytest.mark.parametrize("share", [0, -1, 1.5, True])
    def test_a_share_that_is_none(self, share: Any) -> None:
        with pytest.raises(errors.ConfigError, match="share"):
            weightlife.verify(plainnet.served(), plainnet.A, layers=share)

    def test_nothing_known_loads_it(self) -> None:
        net = plainnet.Net()
        weightlife.watch(net)
        life = plainnet.life_of(net)
        life.load_weights(lambda stream: plainnet.copy_all(net, stream), plainnet.A)
        assert life.first is not None
        life.first.process(
            lambda: [net.a.process_weights_after_loading(), net.b.process_weights_after_loading()]
        )
        with pytest.raises(errors.ConfigError, match="loads this model"):
            weightlife.verify(net, plainnet.A)
        assert weightlife.verify(net, plainnet.A, loader=plainnet.copy_all).ok


class TestSampling:
    def test_a_seed_chooses_and_every_layer_is_chosen_by_some(self) -> None:
        served = hookless(("dense",) * 10)
        layer = served.model.body.inner[4]
        layer.weight.data[0, 0] += 1
        found = []
        for seed in range(40):
            one = weightlife.verify(served.model, served.weights.items(), layers=0.2, seed=seed).ranks[0]
            two = weightlife.verify(served.model, _Files(served.weights), layers=0.2, seed=seed).ranks[0]
            assert one.layers_compared == two.layers_compared == 2
            assert one.ok == two.ok
            found.append(not one.ok)
        assert 2 <= sum(found) <= 18  # 8 are expected

    def test_one_group_at_least(self) -> None:
        served = hookless(("dense",) * 3)
        assert weightlife.verify(served.model, served.weights.items(), layers=1e-9).ranks[0].groups == 1


class TestMemory:
    def test_batches_stay_below_the_largest_group(self) -> None:
        served = hookless(ALL)
        every = groups.of(served.life)
        largest = max(group.nbytes for group in every)
        made = groups.batches(every, largest)
        assert [g.path for batch in made for g in batch] == [g.path for g in every]
        assert all(sum(group.nbytes for group in batch) <= largest for batch in made)
        assert 1 < len(made) < len(every)

    def test_progress_reaches_the_end(self) -> None:
        served, seen = hookless(ALL), []
        weightlife.verify(
            served.model, _Files(served.weights), progress=lambda done, total: seen.append((done, total))
        )
        assert seen[-1][0] == seen[-1][1] > 0
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    @pytest.mark.parametrize(
        ("rank", "terminal", "shown"), [(0, True, True), (1, True, False), (0, False, False)]
    )
    def test_one_bar_on_a_terminal_by_the_first_rank(
        self, monkeypatch: pytest.MonkeyPatch, rank: int, terminal: bool, shown: bool
    ) -> None:
        written = io.StringIO()
        written.isatty = lambda: terminal  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stderr", written)
        monkeypatch.setattr(ToyHost, "rank", lambda _: (rank, 2))
        monkeypatch.setattr(ToyHost, "exchange", lambda _, words: [words, words])
        served = hookless(ALL)
        weightlife.verify(served.model, _Files(served.weights))
        said = written.getvalue()
        assert ("\rverify 100 %" in said) is shown
        assert said == "" if not shown else said.endswith("\r" + " " * 14 + "\r")


class TestReport:
    def test_it_survives_json(self) -> None:
        served = hookless(ALL)
        report = weightlife.verify(served.model, served.checkpoint(8).items())
        data = json.loads(json.dumps(report.to_dict()))
        assert data["schema_version"] == 1 and data["ok"] is False
        again = VerifyReport.from_dict({**data, "later": 1})
        assert again.to_dict() == report.to_dict()
        assert str(again) == str(report)
        for bad in (
            {},
            {**data, "schema_version": 2},
            {**data, "ranks": 3},
            {**data, "ranks": [{"model": 1, "rank": {}}, 4]},
        ):
            with pytest.raises(errors.ConfigError):
                VerifyReport.from_dict(bad)

    def test_hostile_names_and_many_differences(self) -> None:
        rank = RankVerification("M\x1b[2J", layers_compared=1)
        rank.differ(
            [Difference(f"layer\x1b[31m.{i}", "value", elements=1, numel=2, first=[0]) for i in range(1500)]
        )
        assert (len(rank.differences), rank.more) == (MAX_DIFFERENCES, 500)
        text = str(VerifyReport([rank]))
        assert "\x1b" not in text and "and 1480 more" in text

    def test_nothing_compared_is_not_ok(self) -> None:
        assert not RankVerification("M").ok
        assert not VerifyReport([]).ok


class TestEqual:
    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float32,
            torch.bfloat16,
            torch.int8,
            torch.bool,
            torch.complex64,
            torch.complex128,
            torch.float8_e4m3fn,
        ],
    )
    @pytest.mark.parametrize("size", [1, 3, 8, 1000])
    def test_counts_and_first_index(self, dtype: torch.dtype, size: int) -> None:
        width = torch.empty(0, dtype=dtype).element_size()
        a = torch.randint(0, 2, (size * width,), dtype=torch.uint8).view(dtype)
        b = a.clone()
        assert unequal(a, b) is None
        b.view(torch.uint8)[-1] ^= 1
        assert unequal(a, b) == type(unequal(a, b))(1, (size - 1,))  # type: ignore[misc]

    def test_bits_not_numbers(self) -> None:
        nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
        assert unequal(nan, nan.clone()) is None
        found = unequal(zero, -zero)
        assert found is not None and found.count == 1

    def test_views(self) -> None:
        a = torch.arange(24.0).view(4, 6)
        b = a.clone()
        b[2, 3] += 1
        found = unequal(a.t(), b.t())
        assert found is not None and (found.count, found.first) == (1, (3, 2))
        assert unequal(a[:2], b[:2]) is None
        assert unequal(a[:, :0], b[:, :0]) is None
        assert unequal(torch.ones(1).expand(5), torch.ones(1).expand(5)) is None


def _interrupt(layer: Any) -> None:
    raise KeyboardInterrupt
