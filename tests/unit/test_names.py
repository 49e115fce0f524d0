# SPDX-License-Identifier: Apache-2.0
"""Nearest names and wrong prefixes; casts."""

from __future__ import annotations

import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weightlife import _casts
from weightlife._names import PrefixChange, nearest, prefix_change, prefix_clause

PREFIXES = ("model.", "language_model.", "module.", "base_model.model.", "model.language_model.")

parts = st.lists(st.sampled_from(("layers", "0", "1", "2", "q", "kv", "norm", "mlp", "weight", "bias")), min_size=2, max_size=5)  # fmt: skip
known_names = st.sets(parts.map(".".join), min_size=2, max_size=20)
prefixes = st.sampled_from(PREFIXES) | st.lists(
    st.from_regex(r"[a-z]{2,6}", fullmatch=True), min_size=1, max_size=3
).map(lambda found: ".".join(found) + ".")


class TestPrefix:
    @given(known_names, prefixes)
    def test_a_prefix_too_many_is_found(self, known: set[str], prefix: str) -> None:
        sent = {prefix + name for name in known}
        assume(not sent & known)
        change = prefix_change(sent, known)
        assert change is not None
        assert change.resolved == len({change.apply(name) for name in sent} & known)
        assert change.resolved == len(known)

    @given(known_names, prefixes)
    def test_a_prefix_too_few_is_found(self, bare: set[str], prefix: str) -> None:
        known = {prefix + name for name in bare}
        assume(not bare & known)
        change = prefix_change(bare, known)
        assert change is not None
        assert {change.apply(name) for name in bare} <= known

    @given(known_names, prefixes, prefixes)
    def test_one_prefix_in_place_of_another_is_found(self, bare: set[str], one: str, other: str) -> None:
        known, sent = {one + name for name in bare}, {other + name for name in bare}
        assume(not sent & known)
        change = prefix_change(sent, known)
        assert change is not None
        assert {change.apply(name) for name in sent} <= known

    @given(known_names)
    def test_names_that_are_known_need_none(self, known: set[str]) -> None:
        assert prefix_change(known, known) is None
        assert prefix_clause(known, known) == ""

    @given(known_names, known_names)
    def test_what_it_claims_is_true(self, sent: set[str], known: set[str]) -> None:
        change = prefix_change(sent, known)
        if change is not None:
            assert len({change.apply(name) for name in sent} & known) == change.resolved
            assert 2 * change.resolved > len(sent) == change.total

    def test_a_few_strangers_among_many_are_no_wrong_prefix(self) -> None:
        known = {f"layers.{i}.weight" for i in range(10)}
        sent = {*list(known)[:8], "model.layers.8.weight"}
        assert prefix_change(sent, known) is None

    @pytest.mark.parametrize(
        ("sent", "known"),
        [
            # F28: a suffix that adapters put in, on a layer that has none
            ("visual.merger.mlp.0.base_layer.weight", "visual.merger.mlp.0.weight"),
            # F29: a doubled suffix, and a part that a remap left out
            ("layers.3.feed_forward.experts.w13_weight.weight", "layers.3.feed_forward.experts.w13_weight"),
            ("layers.3.experts.w13_weight", "layers.3.feed_forward.experts.w13_weight"),
            # F30: experts that moved under a child
            ("layers.3.mlp.experts.w2_weight", "layers.3.mlp.experts.routed_experts.w2_weight"),
        ],
    )
    def test_a_part_in_the_middle_is_no_prefix_and_the_name_is_found(self, sent: str, known: str) -> None:
        names = {known.replace("3", str(layer)) for layer in range(9)} | {
            f"{known.replace('3', str(layer)).rpartition('.')[0]}.{last}"
            for layer in range(9)
            for last in ("bias", "scale")
        }
        assert nearest(sent, names) == known
        others = {sent.replace("3", str(layer)) for layer in range(9)}
        change = prefix_change(others, names)
        assert change is None or {change.apply(name) for name in others} <= names

    def test_one_short_name_suggests_nothing(self) -> None:
        assert prefix_change(["nowhere.weight"], ["body.weight"]) is None

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (PrefixChange("", "model.", 41, 41), "with the prefix 'model.', 41 of 41 names would be known"),
            (PrefixChange("module.", "", 3, 4), "without the prefix 'module.', 3 of 4 names would be known"),
            (
                PrefixChange("a.", "b.", 2, 2),
                "with prefix 'b.' in place of 'a.', 2 of 2 names would be known",
            ),
        ],
    )
    def test_words(self, change: PrefixChange, words: str) -> None:
        assert str(change) == words

    def test_nothing(self) -> None:
        assert prefix_change([], ["a"]) is None
        assert prefix_change(["a"], []) is None

    def test_a_large_model_is_no_square(self) -> None:
        # DeepSeek-V3 has about 94,000 tensors.
        known = [f"model.layers.{i}.mlp.experts.{e}.w{w}.weight" for i in range(61) for e in range(256) for w in range(6)]  # fmt: skip
        began = time.process_time()
        change = prefix_change([f"module.{name}" for name in known], known)
        assert str(change).startswith("without the prefix 'module.'")
        assert nearest("model.layers.3.mlp.experts.7.w9.weight", known).startswith(
            "model.layers.3.mlp.experts.7."
        )
        assert time.process_time() - began < 20  # 1.2 s where it was written; the square would be hours


class TestNearest:
    def test_the_same_place_under_another_prefix(self) -> None:
        known = [f"layers.{i}.{n}.weight" for i in range(30) for n in ("q", "k", "v")]
        assert nearest("model.layers.17.k.weight", known) == "layers.17.k.weight"

    def test_a_misspelt_part(self) -> None:
        assert (
            nearest("layers.1.q_prj.weight", ["layers.1.q_proj.weight", "head"]) == "layers.1.q_proj.weight"
        )

    def test_nothing_is_near(self) -> None:
        assert nearest("zz", ["layers.0.weight"]) == ""
        assert nearest("zz", []) == ""

    def test_hostile_lengths_cost_nothing(self) -> None:
        began = time.process_time()
        assert nearest("a" * 1_000_000, ["b" * 1_000_000] * 100) == ""
        assert nearest("a.b", ["a" * 1_000_000] * 100) == ""
        assert time.process_time() - began < 5


FLOATS = ("float16", "bfloat16", "float32", "float64")
EIGHT = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


class TestCasts:
    @pytest.mark.parametrize("one", FLOATS)
    @pytest.mark.parametrize("other", FLOATS)
    def test_floats_become_floats(self, one: str, other: str) -> None:
        assert _casts.allowed(one, other)

    @pytest.mark.parametrize("wide", FLOATS)
    @pytest.mark.parametrize("stored", [*EIGHT, "int8", "uint8", "int32", "int64", "bool"])
    def test_storage_is_no_float_and_no_float_is_storage(self, wide: str, stored: str) -> None:
        assert not _casts.allowed(stored, wide)
        assert not _casts.allowed(wide, stored)

    def test_integers_never_get_narrower(self) -> None:
        assert _casts.allowed("int32", "int64")
        assert _casts.allowed("uint8", "int8")  # the same bits
        assert not _casts.allowed("int64", "int32")
        assert not _casts.allowed("int32", "int8")

    @given(st.sampled_from([*FLOATS, *EIGHT, *_casts.INTEGERS, "complex64", "strange"]))
    def test_anything_becomes_itself(self, dtype: str) -> None:
        assert _casts.allowed(dtype, dtype)

    @pytest.mark.parametrize("one", EIGHT)
    @pytest.mark.parametrize("other", EIGHT)
    def test_eight_bit_floats_are_not_each_other(self, one: str, other: str) -> None:
        assert _casts.allowed(one, other) is (one == other)

    def test_an_id_table_never_goes_through_a_float(self) -> None:
        # 383 becomes 384 in bfloat16.
        assert not _casts.allowed("bfloat16", "int64")
        assert not _casts.allowed("int64", "bfloat16")
