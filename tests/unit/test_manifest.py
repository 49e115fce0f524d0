# SPDX-License-Identifier: Apache-2.0
"""The exported manifest: true to what a load does, and safe to read from anybody."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weightlife
from tests.strategies import specs
from tests.toyhost import INPUT, KINDS, Served, cold, unchanged
from weightlife import errors
from weightlife._manifest import (
    SCHEMA_VERSION,
    LayerEntry,
    LeftOut,
    Manifest,
    StorageEntry,
    TensorEntry,
    Write,
)

EVERYTHING = (*sorted(KINDS), ("packed", "tied"))


def of(served: Served) -> Manifest:
    return weightlife.manifest(served.model)


class TestExport:
    def test_every_source_name_with_shape_dtype_and_place(self) -> None:
        served = Served(EVERYTHING)
        manifest = of(served)
        assert {n: (e.dtype, e.shape) for n, e in manifest.tensors.items()} == {
            n: ("float32", tuple(t.shape)) for n, t in served.weights.items()
        }
        assert not manifest.provisional
        for entry in manifest.tensors.values():
            written = sum(torch.Size(w.shape).numel() for w in entry.writes)
            assert written >= torch.Size(entry.shape).numel()

    def test_layers_and_strategies_are_those_of_the_report(self) -> None:
        served = Served(EVERYTHING)
        report = served.life.reports[-1]
        assert {(e.path, e.strategy) for e in of(served).layers} == {
            (r.name, r.strategy) for r in report.layers
        }

    def test_what_is_not_loaded_and_why(self) -> None:
        served = Served(("norm", "padded"))
        found = {item.name: item for item in of(served).left_out}
        buffer = next(item for name, item in found.items() if name.endswith("positions"))
        assert (buffer.what, buffer.elements, buffer.of) == ("tensor", 4, 4)
        assert "constructor" in buffer.why
        padded = next(item for item in found.values() if item.of == 24)
        assert (padded.elements, padded.why.split(",")[0]) == (8, "padding")

    def test_ties(self) -> None:
        served = Served(("packed", "tied"))
        assert len(of(served).ties) == len(served.life.aliases)

    def test_a_dummy_start_is_provisional_until_a_complete_load(self) -> None:
        served = Served(("packed", "dense"), provisional=True)
        assert of(served).provisional
        assert of(served).tensors == {}
        assert of(served).check({}) == []
        served.update(served.checkpoint(1))
        assert set(of(served).tensors) == set(served.weights)
        assert not of(served).provisional

    def test_only_of_models_that_were_loaded(self) -> None:
        with pytest.raises(errors.NotInstalledError):
            weightlife.manifest(torch.nn.Linear(2, 2))
        model = torch.nn.Linear(2, 2)
        weightlife.watch(model)
        with pytest.raises(errors.NotInstalledError):
            weightlife.manifest(model)
        with pytest.raises(errors.ConfigError):
            weightlife.manifest(Served(("dense",)).model, rank=3)

    def test_a_large_manifest_costs_seconds_at_most(self) -> None:
        # DeepSeek-V3's count of tensors, one rebuilt layer a mixture.
        layers = tuple(LayerEntry(f"layers.{i}.mlp", "rebuild", "packed") for i in range(61))
        storages = tuple(
            StorageEntry("bfloat16", 1541 * 100, (f"layers.{i}.mlp.w",), (i,)) for i in range(61)
        )
        tensors = {
            (name := f"layers.{i}.mlp.{e}.weight"): TensorEntry(
                name, "bfloat16", (10, 10), (Write(i, e * 100, (100,), (1,)),)
            )
            for i in range(61)
            for e in range(1541)
        }
        manifest = Manifest("M", tensors, storages, layers)
        began = time.process_time()
        again = Manifest.from_json(manifest.to_json())
        assert again == manifest
        assert len(again.atomic_groups()) == 61
        assert not manifest.diff(again)
        assert manifest.check(again) == []
        assert time.process_time() - began < 20  # 2.5 s where it was written


class TestAtomicGroups:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(specs())
    def test_are_exactly_the_smallest_legal_updates(self, spec: Any) -> None:
        served = Served(spec)
        groups = of(served).atomic_groups()
        names = [name for group in groups for name in group]
        assert len(names) == len(set(names))
        assert set(names) == {name for name, entry in of(served).tensors.items() if entry.writes}
        new = served.checkpoint(5)
        for group in groups:
            part = {name: new[name] for name in served.weights if name in group}
            for lacking in sorted(group) if len(group) > 1 else ():
                less = {name: value for name, value in part.items() if name != lacking}
                with unchanged(served.model), pytest.raises(errors.CompletenessError):
                    served.update(less, "by_layer")
                served.life.abort()
            served.update(part, "by_layer")
            assert torch.equal(served.model(INPUT), served.expected())
        assert torch.equal(served.model(INPUT), cold(spec, new)(INPUT))
        Served.close_all()


class TestJson:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(specs())
    def test_round_trip(self, spec: Any) -> None:
        manifest = of(Served(spec))
        assert Manifest.from_json(manifest.to_json()) == manifest
        assert Manifest.from_json(manifest.to_json(indent=1).encode()) == manifest
        assert json.loads(manifest.to_json())["schema_version"] == SCHEMA_VERSION
        assert manifest.model in str(manifest)
        Served.close_all()

    def test_keys_that_are_not_known_are_ignored(self) -> None:
        manifest = of(Served(("dense",)))
        content = manifest.to_dict()
        content["later"] = {"a": [1]}
        assert Manifest.from_dict(content) == manifest

    @pytest.mark.parametrize(
        "text",
        ["", "[]", "null", "3", "{}", "[" * 200_000, '{"a":' * 100_000, '{"kind": "weightlife.manifest"}',
         '{"kind": "weightlife.manifest", "schema_version": 99}', b"\xff\xfe\x00", "9" * 100_000],
        ids=range(11),
    )  # fmt: skip
    def test_what_is_no_manifest(self, text: Any) -> None:
        with pytest.raises(errors.ConfigError):
            Manifest.from_json(text)

    def test_too_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("weightlife._manifest.MAX_BYTES", 100)
        with pytest.raises(errors.ConfigError, match="at most 100"):
            Manifest.from_json(of(Served(("dense",))).to_json())

    @pytest.mark.parametrize(
        "change",
        [
            lambda c: c.update(tensors={}),
            lambda c: c.update(tensors=[[1, 2, 3]]),
            lambda c: c["tensors"][0].__setitem__(0, 7),
            lambda c: c["tensors"][0].__setitem__(0, "x" * 5000),
            lambda c: c["tensors"].append(c["tensors"][0]),
            lambda c: c["tensors"][0].__setitem__(2, [-1]),
            lambda c: c["tensors"][0].__setitem__(2, [True]),
            lambda c: c["tensors"][0].__setitem__(2, [1 << 80]),
            lambda c: c["tensors"][0].__setitem__(2, [1] * 100),
            lambda c: c["tensors"][0].__setitem__(3, [[999, 0, [1], [1]]]),
            lambda c: c["tensors"][0].__setitem__(3, [[0, 1 << 40, [1], [1]]]),
            lambda c: c["tensors"][0].__setitem__(3, [[0, 0, [1 << 40], [1 << 40]]]),
            lambda c: c["tensors"][0].__setitem__(3, [[0, 0, [1, 2], [1]]]),
            lambda c: c["tensors"][0].__setitem__(3, [[0, 0, [], []]] * 100_000),
            lambda c: c["layers"][0].__setitem__(1, "magic"),
            lambda c: c["storages"][0].__setitem__(3, [99]),
            lambda c: c["storages"][0].__setitem__(1, -1),
            lambda c: c.update(ties=[1]),
            lambda c: c.update(ties={"a": 1}),
            lambda c: c.update(model=None),
            lambda c: c.update(rank="0"),
            lambda c: c.update(left_out=None),
            lambda c: c.update(schema_version="1"),
        ],
    )
    def test_hostile_content_is_refused(self, change: Any) -> None:
        content = json.loads(of(Served(("dense", "packed"))).to_json())
        change(content)
        with pytest.raises(errors.ConfigError):
            Manifest.from_json(json.dumps(content))

    @settings(max_examples=200, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def test_any_damage_is_read_or_refused(self, data: st.DataObject) -> None:
        junk = st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=8,
        )
        content: Any = SMALL.to_dict()
        here: Any = content
        while True:
            keys = sorted(here) if isinstance(here, dict) else list(range(len(here)))
            if not keys:
                return
            key = data.draw(st.sampled_from(keys))
            if isinstance(here[key], (dict, list)) and here[key] and data.draw(st.booleans()):
                here = here[key]
                continue
            here[key] = data.draw(junk)
            break
        try:
            again = Manifest.from_dict(content)
        except errors.ConfigError:
            return
        assert isinstance(str(again), str)
        again.atomic_groups()
        again.diff(SMALL)
        again.check(SMALL)

    def test_names_of_strangers_are_shown_escaped(self) -> None:
        entry = TensorEntry("\x1b[2J", "float32", (1,))
        manifest = Manifest("\x1b[1m", {entry.name: entry}, left_out=(LeftOut("name", entry.name, "\x07"),))
        assert not set(str(manifest)) & {"\x1b", "\x07"}
        assert "\x1b" not in str(manifest.diff(SMALL))


SMALL = Manifest(
    "M",
    {
        "a": TensorEntry("a", "float32", (2, 3), (Write(0, 0, (6,), (1,)),)),
        "b": TensorEntry("b", "bfloat16", (3,), (Write(1, 0, (3,), (1,)),)),
        "c": TensorEntry("c", "int64", (4,)),
        "t": TensorEntry("t", "float32", (2, 3), (Write(0, 0, (6,), (1,)),)),
    },
    (StorageEntry("float32", 6, ("l.w",), (0,)), StorageEntry("bfloat16", 3, ("l.s",), (0,), ("float16",))),
    (LayerEntry("l", "rebuild", "packed"),),
    (LeftOut("name", "c", "no parameter of the model takes it"),),
)


class TestCheck:
    def kinds(self, headers: Any, **more: Any) -> list[type[Exception]]:
        return [type(error) for error in SMALL.check(headers, **more)]

    def test_the_same_is_fine(self) -> None:
        assert SMALL.check(SMALL) == []
        assert SMALL.check({n: (e.dtype, e.shape) for n, e in SMALL.tensors.items()}) == []
        assert SMALL.check({n: (f"torch.{e.dtype}", list(e.shape)) for n, e in SMALL.tensors.items()}) == []
        assert SMALL.check(list(SMALL.tensors)) == []

    def test_tensors_speak_for_themselves(self) -> None:
        assert SMALL.check({"a": torch.zeros(2, 3), "b": torch.zeros(3), "c": torch.zeros(1)}) == []

    def test_what_is_left_out_by_design_may_be_anything(self) -> None:
        assert self.kinds({"a": ("float32", (2, 3)), "b": None, "c": ("bool", (9, 9))}) == []

    def test_a_tied_tensor_may_come_under_either_name(self) -> None:
        assert self.kinds(["b", "t"]) == self.kinds(["a", "b"]) == []
        assert self.kinds(["b"]) == [errors.MissingTensorError]

    def test_missing(self) -> None:
        (found,) = SMALL.check(["a"])
        assert (type(found), found.tensors) == (errors.MissingTensorError, ("b",))
        assert SMALL.check(["a"], partial="allow") == []

    def test_half_a_layer(self) -> None:
        (found,) = SMALL.check(["a"], partial="by_layer")
        assert (type(found), found.tensors) == (errors.HalfTouchedLayerError, ("b",))
        assert SMALL.check([], partial="by_layer") == []

    def test_shape(self) -> None:
        assert self.kinds({"a": ("float32", (3, 2)), "b": None}) == [errors.ShapeMismatchError]
        assert self.kinds({"a": ("float32", (1, 2, 3)), "b": ("bfloat16", (3, 1))}) == []

    def test_dtype(self) -> None:
        assert (
            self.kinds({"a": ("int8", (2, 3)), "b": ("float8_e4m3fn", (3,))})
            == [errors.DtypeMismatchError] * 2
        )
        assert self.kinds({"a": ("float64", (2, 3)), "b": ("float16", (3,))}) == []

    def test_unexpected(self) -> None:
        assert self.kinds(["a", "b", "model.a"]) == []
        assert self.kinds(["a", "b", "zz"], unexpected="refuse") == [errors.UnexpectedTensorError]

    def test_names_that_are_not_known_may_hold_what_is_missing(self) -> None:
        assert self.kinds(["a_and_b_fused"]) == []

    def test_the_wrong_prefix_is_said(self) -> None:
        known = {
            f"model.l.{i}": TensorEntry(f"model.l.{i}", "float32", (1,), (Write(0, i, (), ()),))
            for i in range(4)
        }
        manifest = Manifest("M", known, (StorageEntry("float32", 4, ("w",), ()),))
        (found,) = manifest.check([f"l.{i}" for i in range(4)], unexpected="refuse")
        assert "with the prefix 'model.', 4 of 4 names would be known" in found.message
        assert "nearest known name is 'model.l.0'" in found.message

    @pytest.mark.parametrize(
        "given", [7, "abc", b"abc", {"a": 3}, {"a": ("float32", "x")}, {"a": ("float32", 3)}]
    )
    def test_what_declares_nothing(self, given: Any) -> None:
        with pytest.raises(errors.ConfigError):
            SMALL.check(given)

    def test_policies_are_checked(self) -> None:
        with pytest.raises(errors.ConfigError):
            SMALL.check([], partial="maybe")


class TestDiff:
    def test_nothing(self) -> None:
        assert not SMALL.diff(SMALL)
        assert str(SMALL.diff(SMALL)) == "no difference"

    def test_everything(self) -> None:
        other = Manifest(
            "M",
            {
                "a": TensorEntry("a", "float16", (6,), (Write(0, 0, (6,), (1,)),)),
                "b": TensorEntry("b", "bfloat16", (3,), (Write(1, 0, (2,), (1,)),)),
                "new": TensorEntry("new", "int64", (4,)),
                "t": SMALL.tensors["t"],
            },
            SMALL.storages,
            (LayerEntry("l", "direct", "nothing"),),
        )
        found = SMALL.diff(other)
        assert found
        assert (found.added, found.removed) == (("new",), ("c",))
        assert found.shapes == (("a", "[2, 3]", "[6]"),)
        assert found.dtypes == (("a", "float32", "float16"),)
        assert found.moved == ("b",)
        assert found.layers == (("l", "rebuild", "direct"),)
        assert len(str(found).splitlines()) == 6

    def test_two_checkpoints_of_one_model_do_not_differ(self) -> None:
        served = Served(EVERYTHING)
        before = of(served)
        served.update(served.checkpoint(3))
        assert not before.diff(of(served))
        assert of(served).generation == before.generation + 1
