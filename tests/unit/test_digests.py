# SPDX-License-Identifier: Apache-2.0
"""Tables of digests: what was sent is what arrived, what was committed is what is there, or it is said by name."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

import weightlife
from tests.toyhost import KINDS, Served, ToyModel, cold, unchanged, weights_of
from weightlife import digests, errors
from weightlife._engine import guard
from weightlife.testing._walk import walk

EVERYTHING = (*sorted(KINDS), "tied")


def flip(tensor: torch.Tensor, place: int = 0, bit: int = 0) -> None:
    """One bit of a live tensor."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    memory[tensor.storage_offset() * tensor.element_size() + place] ^= 1 << bit


class TestTable:
    def test_is_plain_data_that_survives_json(self) -> None:
        table = digests.digest_table(
            {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(0)}, source="step 3"
        )
        assert json.loads(json.dumps(table)) == table
        assert table["schema_version"] == 1
        assert table["source"] == "step 3"
        assert table["tensors"]["w"] == {
            "shape": [2, 3],
            "dtype": "float32",
            "digest": table["tensors"]["w"]["digest"],
        }
        assert digests.compare(table, json.loads(json.dumps(table))) == []

    def test_a_buffer_that_is_used_again_is_read_in_time(self) -> None:
        buffer = torch.zeros(10)

        def stream() -> Any:
            for i in range(4):
                yield f"t{i}", buffer.fill_(i)

        want = digests.digest_table({f"t{i}": torch.full((10,), float(i)) for i in range(4)})
        assert digests.digest_table(stream()) == want

    def test_differences_by_name_and_kind(self) -> None:
        a = digests.digest_table({n: torch.arange(4.0) for n in ("same", "gone", "shape", "dtype", "value")})
        other = {"same": torch.arange(4.0), "shape": torch.arange(4.0).view(2, 2), "dtype": torch.arange(4, dtype=torch.int32),
                 "value": torch.arange(4.0).flip(0), "new": torch.zeros(1)}  # fmt: skip
        found = digests.compare(a, digests.digest_table(other))
        assert [(d.name, d.what) for d in found] == [
            ("gone", "missing"), ("shape", "shape"), ("dtype", "dtype"), ("value", "digest"), ("new", "unexpected"),
        ]  # fmt: skip
        assert str(found[1]) == "shape: shape [2, 2], expected [4]"
        assert found[0].to_dict()["name"] == "gone"

    def test_lists_are_compared_rank_by_rank(self) -> None:
        one, two = (digests.digest_table({"w": torch.full((3,), value)}) for value in (1.0, 2.0))
        found = digests.compare([one, one], [one, two])
        assert [(d.rank, d.name, d.what) for d in found] == [(1, "w", "digest")]
        assert str(found[0]).startswith("rank 1 w: digest")
        with pytest.raises(errors.ConfigError, match="one length"):
            digests.compare([one], one)

    def test_across_ranks(self) -> None:
        def rank(norm: float, shard: float) -> Any:
            return digests.digest_table({"norm": torch.full((3,), norm), "shard": torch.full((3,), shard)})

        good = [rank(1, 1), rank(1, 2)]
        assert digests.across_ranks([rank(5, 6), rank(5, 7)], good) == []
        found = digests.across_ranks([rank(5, 6), rank(4, 6)], good)
        assert [(d.name, d.found) for d in found] == [
            ("norm", "different on some rank"), ("shard", "equal on all ranks"),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "bad",
        [
            None, [], {}, {"schema_version": 2}, {"schema_version": True}, {"schema_version": 1},
            {"schema_version": 1, "algorithm": "sha256", "tensors": {}},
            {"schema_version": 1, "algorithm": "weightlife-64-1", "tensors": []},
            {"schema_version": 1, "algorithm": "weightlife-64-1", "tensors": {"w": "0"}},
            {"schema_version": 1, "algorithm": "weightlife-64-1", "tensors": {"w": {"shape": 3, "dtype": "", "digest": ""}}},
        ],
    )  # fmt: skip
    def test_what_is_no_table_is_refused(self, bad: Any) -> None:
        with pytest.raises(errors.ConfigError):
            digests.check_table(bad)

    def test_names_twice_and_tensors_without_bytes(self) -> None:
        with pytest.raises(errors.ConfigError, match="twice") as twice:
            digests.digest_table([("a", torch.ones(1)), ("a", torch.ones(1))])
        assert twice.value.tensors == ("a",)
        for source in ({"m": torch.ones(2, device="meta")}, iter([("m", torch.ones(2, device="meta"))])):
            with pytest.raises(errors.ConfigError, match="no bytes") as bare:
                digests.digest_table(source)
            assert bare.value.tensors == ("m",)


class TestExpected:
    def test_what_was_sent_arrived(self) -> None:
        served = Served(EVERYTHING)
        weights = served.checkpoint(1)
        table = json.loads(json.dumps(digests.digest_table(weights)))
        with weightlife.session(served.model, expected=table):
            served.send(weights)
        served.weights = weights
        assert torch.equal(served.run(), served.expected())

    @pytest.mark.parametrize("isolation", ["staged", "in_place"])
    @pytest.mark.parametrize("fault", ["bit", "swap", "stale", "missing", "surplus", "shape"])
    def test_any_difference_is_named_and_nothing_is_committed(self, fault: str, isolation: str) -> None:
        served = Served(EVERYTHING, isolation=isolation)
        weights = served.checkpoint(1)
        name = next(n for n, v in weights.items() if v.numel() > 8)
        table = digests.digest_table(weights)
        sent: dict[str, torch.Tensor] = {n: v.clone() for n, v in weights.items()}
        want: type[errors.WeightlifeError] = errors.DigestMismatchError
        if fault == "bit":
            flip(sent[name], 5, 3)
        elif fault == "swap":
            flat = sent[name].view(-1)
            flat[:4], flat[4:8] = flat[4:8].clone(), flat[:4].clone()
        elif fault == "stale":
            sent[name] = served.weights[name]
        elif fault == "missing":
            del sent[name]
            want = errors.MissingTensorError
        elif fault == "surplus":
            del table["tensors"][name]
            want = errors.UnexpectedTensorError
        else:
            table["tensors"][name]["shape"] = [1, *table["tensors"][name]["shape"]]
        session = weightlife.session(served.model, expected=table)
        with unchanged(served.model), pytest.raises(want) as heard, session:
            served.send(sent)
        assert heard.value.tensors == (name,)
        assert heard.value.session
        report = served.life.reports[-1]
        assert report.outcome == "aborted"
        assert report.violations[-1].code == want.code
        assert torch.equal(served.run(), served.expected())

    def test_a_sender_may_use_its_buffer_again(self) -> None:
        """The digest is of what was handed over, not of what is in the buffer at the end."""
        served = Served(EVERYTHING)
        weights = served.checkpoint(1)

        def stream() -> Any:
            for name, value in weights.items():
                buffer = value.clone()
                yield name, buffer
                buffer.fill_(float("nan"))

        with weightlife.session(served.model, expected=digests.digest_table(weights)):
            served.send(stream())
        served.weights = weights
        assert torch.equal(served.run(), served.expected())

    def test_a_repeated_tensor_must_be_right_every_time(self) -> None:
        served = Served(("norm", "packed"), surplus="off")
        weights = served.checkpoint(1)
        name = next(iter(weights))
        session = weightlife.session(served.model, expected=digests.digest_table(weights))
        with pytest.raises(errors.DigestMismatchError) as heard, session:
            served.send([(name, weights[name] + 1), *weights.items()])
        assert heard.value.tensors == (name,)

    def test_hostile_names_do_no_harm(self) -> None:
        served = Served(("norm",))
        weights = served.checkpoint(1)
        table = digests.digest_table({**weights, "<script>\x1b[31m\nWL000]": torch.ones(1)})
        with (
            pytest.raises(errors.MissingTensorError) as heard,
            weightlife.session(served.model, expected=table),
        ):
            served.send(weights)
        assert "\x1b" not in str(heard.value) and "\n" not in str(heard.value)

    def test_what_is_no_table_is_refused_before_anything_begins(self) -> None:
        served = Served(("norm",))
        with pytest.raises(errors.ConfigError):
            weightlife.session(
                served.model, expected={"schema_version": 99, "algorithm": "md5", "tensors": {}}
            )


class TestExpect:
    def test_stays_until_an_update_has_met_it(self) -> None:
        served = Served(EVERYTHING)
        weights = served.checkpoint(1)
        weightlife.expect(served.model, digests.digest_table(weights))
        with pytest.raises(errors.DigestMismatchError):
            served.update({n: v + 1 for n, v in weights.items()})
        with pytest.raises(errors.DigestMismatchError):  # a retry is held against it as well
            served.update({n: v + 1 for n, v in weights.items()})
        served.update(weights)
        served.update(served.checkpoint(2))  # met: the next one is free
        assert torch.equal(served.run(), served.expected())

    def test_is_taken_back(self) -> None:
        served = Served(EVERYTHING)
        weightlife.expect(served.model, digests.digest_table(served.checkpoint(1)))
        weightlife.expect(served.model, None)
        served.update(served.checkpoint(2))

    def test_an_implicit_update_waits_for_all_of_it(self) -> None:
        """Whole layers alone would do for `by_layer`: with a table, the end is when all of it is here."""
        served = Served(("norm", "packed", "dense"))
        weights = served.checkpoint(1)
        weightlife.expect(served.model, digests.digest_table(weights))
        before = served.expected()
        for name, value in weights.items():
            assert torch.equal(served.run(), before)
            served.send({name: value})
        served.weights = weights
        assert torch.equal(served.run(), served.expected())
        assert served.life.generation == 1

    def test_an_implicit_update_with_a_fault_is_dropped_and_the_client_hears_of_it(self) -> None:
        served = Served(("norm", "packed", "dense"))
        weights = served.checkpoint(1)
        weightlife.expect(served.model, digests.digest_table(weights))
        before = served.expected()
        served.send({n: v + (n == list(weights)[-1]) for n, v in weights.items()})
        assert torch.equal(served.run(), before)
        with pytest.raises(errors.WeightlifeError, match="WL210"):
            served.send(weights)

    def test_refused_while_open_and_where_nothing_would_be_checked(self) -> None:
        table = digests.digest_table({})
        served = Served(("norm",))
        served.open()
        with pytest.raises(errors.SessionStateError, match="open"):
            weightlife.expect(served.model, table)
        with pytest.raises(errors.NotInstalledError):
            weightlife.expect(ToyModel(("norm",)), table)
        served.life.abort()
        served.life.observed = "pipeline parallel"
        with pytest.raises(errors.SessionStateError, match="pipeline"):
            weightlife.expect(served.model, table)
        served.life.observed = None


class TestRuntime:
    def test_equal_models_have_equal_digests(self) -> None:
        served = Served(EVERYTHING)
        served.update(served.checkpoint(1))
        ours, theirs = weightlife.digest(served.model), weightlife.digest(cold(served.spec, served.weights))
        assert digests.compare(ours, theirs) == []
        assert (ours[0]["name"], ours[0]["generation"]) == (type(served.model).__name__, 1)

    def test_reaches_what_another_walk_reaches(self) -> None:
        """Every tensor that the oracle's walk finds, by its bytes: paths are spelt differently there."""
        served = Served(tuple(sorted(KINDS)))
        found = {item["digest"] for item in weightlife.digest(served.model)[0]["tensors"].values()}
        for path, tensor in walk(served.model):
            if tensor.numel():
                value = digests.digest_table({path: tensor})["tensors"][path]["digest"]
                assert value in found, path

    def test_clean_after_loads_updates_passes_and_aborts(self) -> None:
        served = Served(EVERYTHING, digests="commit")
        assert weightlife.check_digests(served.model) == []
        for seed in (1, 2):
            served.update(served.checkpoint(seed))
            served.run()
            assert weightlife.check_digests(served.model) == []
        with pytest.raises(errors.MissingTensorError):
            served.update(dict(list(served.checkpoint(3).items())[:-1]))
        assert weightlife.check_digests(served.model) == []
        assert any(phase.name == "digest" for phase in served.life.reports[-2].phases)

    @pytest.mark.parametrize("storage", ["pinned", "adopted"])
    def test_one_flipped_bit_anywhere_is_found_by_path(self, storage: str) -> None:
        served = Served(EVERYTHING, digests="commit", storage=storage)
        served.update(served.checkpoint(1))
        paths = list(weightlife.digest(served.model)[0]["tensors"])
        from weightlife._engine import runtime

        live = dict(runtime.tensors(served.model, served.host.skip, served.host.transient))
        assert list(live) == paths
        for path, tensor in live.items():
            if not tensor.numel():
                continue
            flip(tensor, 0, 6)
            found = weightlife.check_digests(served.model)
            assert path in {d.name for d in found}, path
            shared = {
                p for p, t in live.items() if t.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            }
            assert {d.name for d in found} <= shared
            flip(tensor, 0, 6)
        assert weightlife.check_digests(served.model) == []

    def test_two_views_of_one_memory_are_two_digests(self) -> None:
        model = torch.nn.Linear(8, 8)
        model.turned = model.weight.detach().t()  # the same address, shape and dtype
        table = weightlife.digest(model)[0]["tensors"]
        assert table["weight"]["digest"] != table["turned"]["digest"]

    def test_a_swapped_pair_of_blocks_is_found(self) -> None:
        model = torch.nn.Linear(64, 64)
        before = weightlife.digest(model)
        with torch.no_grad():
            rows = model.weight[:8].clone()
            model.weight[:8], model.weight[8:16] = model.weight[8:16].clone(), rows
        assert [d.name for d in digests.compare(before, weightlife.digest(model))] == ["weight"]

    def test_what_requests_leave_behind_is_no_corruption(self) -> None:
        served = Served(("attention", "packed"), digests="commit")
        served.model.kv_cache = [torch.zeros(4)]  # the toy host calls paths with "cache" transient
        assert weightlife.check_digests(served.model) == []
        served.model.kv_cache[0].fill_(3.0)
        served.model.workspace = torch.zeros(4)  # made by a pass, after the commit
        assert weightlife.check_digests(served.model) == []
        del served.model.kv_cache, served.model.workspace

    def test_a_vanished_tensor_is_missing(self) -> None:
        served = Served(("packed", "norm"), digests="commit")
        name, _ = next(iter(served.model.named_parameters()))
        owner, _, leaf = name.rpartition(".")
        del served.model.get_submodule(owner)._parameters[leaf]
        found = weightlife.check_digests(served.model)
        assert (name, "missing") in {(d.name, d.what) for d in found}

    def test_refusals(self) -> None:
        off = Served(("norm",))
        with pytest.raises(errors.ConfigError, match="digests is off"):
            weightlife.check_digests(off.model)
        with pytest.raises(errors.NotInstalledError):
            weightlife.check_digests(ToyModel(("norm",)))
        on = Served(("norm",), digests="commit")
        on.open()
        for call in (weightlife.check_digests, weightlife.digest):
            with pytest.raises(errors.SessionStateError, match="open"):
                call(on.model)
        on.life.abort()
        on.host.refuse = "the weights are asleep"
        for call in (weightlife.check_digests, weightlife.digest):
            with pytest.raises(errors.SessionStateError, match="asleep"):
                call(on.model)
        on.host.refuse = None
        on.life.lost("a level-2 sleep")
        on.life.poisoned = ""
        guard.OpenSessions.count = 0
        with pytest.raises(errors.ConfigError, match="level-2"):
            weightlife.check_digests(on.model)

    def test_after_the_hosts_own_path_nothing_is_claimed(self) -> None:
        served = Served(("norm",), digests="commit")
        served.life.observe("reload_weights", lambda: None, (), {})
        with pytest.raises(errors.ConfigError, match="host's own path"):
            weightlife.check_digests(served.model)
        served.update(served.checkpoint(1))
        assert weightlife.check_digests(served.model) == []

    def test_digests_that_fail_undo_no_commit_and_are_heard_of(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        served = Served(("norm", "packed"), digests="commit")
        monkeypatch.setattr("weightlife._engine.runtime.table", lambda *_, **__: 1 / 0)
        with caplog.at_level(logging.ERROR, logger="weightlife"):
            served.update(served.checkpoint(1))
        assert torch.equal(served.run(), served.expected())
        assert served.life.reports[-1].outcome == "committed"
        assert any("ZeroDivisionError" in note for note in served.life.reports[-1].notes)
        assert "could not be taken" in caplog.text
        with pytest.raises(errors.ConfigError, match="ZeroDivisionError"):
            weightlife.check_digests(served.model)

    def test_off_keeps_and_computes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("weightlife._engine.runtime.table", lambda *_, **__: 1 / 0)
        served = Served(("norm",))
        served.update(served.checkpoint(1))
        assert served.life.digests.kept is None

    def test_weights_of_one_seed_are_stable(self) -> None:
        """The helper of these tests is deterministic: two tables of one checkpoint agree."""
        model = ToyModel(("norm", "packed"))
        assert digests.compare(*(digests.digest_table(weights_of(model, 5)) for _ in range(2))) == []
