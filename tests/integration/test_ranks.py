# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks commit together or not at all; in an environment that has no OpenTelemetry SDK."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.integration._child import ROOT, result_of
from weightlife import errors
from weightlife.testing import checkpoints

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pair = checkpoints.pair("qwen2", tmp_path_factory.mktemp("ranks"))
    # Python runs it at the start of each process: what is asked for under these names is not installed.
    without = tmp_path_factory.mktemp("without")
    (without / "sitecustomize.py").write_text(
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Without())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(without), str(ROOT)])}
    return result_of("_rank_job", pair.a, pair.b, timeout=420, env=env)


def test_without_an_sdk_there_are_reports_and_no_provider(found: dict[str, Any]) -> None:
    assert found["sdk"] == [[], []]
    said = found["telemetry"]
    for process in (said, *said["workers"]):
        assert (process["telemetry"]["traces"], process["telemetry"]["metrics"]) == ("none", "none"), process
    assert all(line for _, _, line in found["ids"])


@pytest.mark.parametrize(
    "case",
    [
        "missing on one rank, by iterator", "missing on one rank, by start and finish",
        "a direct tensor missing on one rank", "one rank's loader raises",
    ],
)  # fmt: skip
def test_ranks_that_disagree_keep_the_old_weights(found: dict[str, Any], case: str) -> None:
    heard = found[case]["heard"]
    assert all(heard), f"a rank committed alone: {heard}"
    assert isinstance(errors.from_message(heard[0]), errors.RankMismatchError), heard
    assert found[case]["a_serves"]
    (first, update, _), (_, of_the_other, _) = found[case]["ids"]
    assert update == first
    assert of_the_other == (
        "" if "raises" in case else first
    )  # one that failed before the vote has not heard it


@pytest.mark.parametrize("by", ["by iterator", "by start and finish"])
def test_one_value_on_one_rank_is_named(found: dict[str, Any], by: str) -> None:
    seen = found[f"one value on one rank, {by}"]
    for heard in seen["heard"]:
        problem = errors.from_message(heard)
        assert isinstance(problem, errors.RankMismatchError), heard
        assert problem.tensors == ("model.layers.1.input_layernorm.weight",)
        assert "ranks [0] hold" in problem.message
    assert seen["a_serves"]


def test_a_rank_that_takes_another_ones_shard(found: dict[str, Any]) -> None:
    """Names, shapes and dtypes agree; both ranks load the first half of the vocabulary."""
    seen = found["one shard on both ranks"]
    problems = [errors.from_message(heard) for heard in seen["heard"]]
    assert [type(problem) for problem in problems] == [errors.RankMismatchError, errors.WrongPartError]
    assert [problem and problem.tensors for problem in problems] == [("model.embed_tokens.weight",)] * 2
    assert seen["a_serves"]


TARGET = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        ("the whole tensor", [errors.ShapeMismatchError, errors.ShapeMismatchError]),
        ("the first shard", [errors.RankMismatchError, errors.WrongPartError]),
        ("the first shard, computed", [errors.RankMismatchError, errors.RankMismatchError]),
        ("another dimension", [errors.WrongPartError, errors.WrongPartError]),
    ],
)
def test_a_clients_loader_that_cuts_wrongly(found: dict[str, Any], how: str, kinds: list[type]) -> None:
    """A reload loader of a client's own (F75), wrong in the first update already: refused on both ranks, by name."""
    seen = found["client"][how]
    problems = [errors.from_message(heard) for heard in seen["heard"]]
    assert [type(problem) for problem in problems] == kinds
    for rank, problem in enumerate(problems):
        assert problem is not None
        assert problem.tensors == (TARGET,)
        said = {
            errors.RankMismatchError: "ranks [1] failed"
            if how == "the first shard"
            else "equal on ranks [0, 1]"
        }.get(type(problem), f"on rank {rank} of 2")
        assert said in problem.message
    assert seen["a_serves"]


def test_what_a_clients_loader_computes_is_found_by_verify(found: dict[str, Any]) -> None:
    """Another dimension of a computed tensor: it commits, and differs from a cold load on both ranks, there only."""
    seen = found["client"]["another dimension, computed"]
    assert seen["heard"] == ["", ""]
    assert len(seen["differs"]) == 2
    assert all(path.startswith(TARGET.removesuffix(".weight")) for path in seen["differs"])
    assert found["client"]["rightly"] == {"heard": ["", ""], "differs": []}


FIND, TABLE = "tests.integration._rank_client.find:scale", "tests.integration._rank_client:WORKSPACE['table']"


def test_storage_is_declared_in_the_workers(found: dict[str, Any]) -> None:
    """By a path and by a finder, from the process of the engine's client."""
    seen = found["declared"]
    assert seen["paths"] == [[[TABLE]] * 2, [[FIND]] * 2]
    assert seen["again"] == [[FIND]] * 2
    assert seen["on workers"] == [[FIND, TABLE]] * 2
    assert seen["in digests"] == [[FIND, TABLE]] * 2


def test_a_finder_that_some_worker_can_not_have_is_declared_on_none(found: dict[str, Any]) -> None:
    """A lambda, functions of the client's own program, a finder that raises on one rank, a path to nothing."""
    seen = found["declared"]
    for text, words in zip(
        seen["refused"],
        [
            "which is another one there",
            "which is another one there",
            "ranks [1] of 2",
            "ranks [0, 1] of 2",
            "no name",
        ],
        strict=True,
    ):
        problem = errors.from_message(text)
        assert isinstance(problem, errors.ConfigError)
        assert words in problem.message
        assert problem.hint
    assert seen["left"] == [[], []]


def test_declared_storage_that_is_replaced_in_a_worker(found: dict[str, Any]) -> None:
    """Of the same size: the values go where graphs read. Of another, with addresses captured: refused, by its path."""
    for seen in found["declared"]["replaced"]:
        assert (seen["heard"], seen["stayed"], seen["values"]) == ("", [True, True], [2.0, 3.0])
    assert all(count > 0 for count in found["declared"]["sealed"])
    for seen in found["declared"]["other size"]:
        problem = errors.from_message(seen["heard"])
        assert isinstance(problem, errors.StorageMovedError), seen
        assert problem.layer == TABLE
        assert seen["stayed"] == [True, True]


def test_ranks_that_agree_commit(found: dict[str, Any]) -> None:
    assert found["agreed"] == {"heard": ["", ""], "changed": True}
    assert found["back"]["a_serves"]
    (first, *_), (second, *_) = found["ids"]
    assert first != second
    assert [update for _, update, _ in found["ids"]] == [first, first]
    assert [f"session {first} " in found["ids"][0][2], f"of update {first} " in found["ids"][1][2]] == [
        True
    ] * 2


def test_answers_stay_with_their_questions_after_a_failure(found: dict[str, Any]) -> None:
    """Stock leaves the answers of later ranks behind: each is then heard as that of the next question."""
    seen = found["in step"]
    assert ["rank 0" in seen["heard"][0], "rank 0" in seen["heard"][1], "rank 1" in seen["heard"][2]] == [
        True
    ] * 3
    assert "timed out" in seen["late"]
    assert seen["answers"] == [[[0, odd], [1, odd]] for odd in (-2, -2, 0, 0, 1, 1, 7)]
    assert seen["a_serves"]
