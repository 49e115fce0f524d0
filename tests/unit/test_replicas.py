# SPDX-License-Identifier: Apache-2.0
"""Ranks hold the same where they must and differ where they must, or none of them commits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import weightlife
from tests.toyhost import (
    WIDTH,
    Layer,
    Norm,
    Packed,
    Served,
    Snapshot,
    ToyHost,
    Weights,
    faults,
    parameter,
    weights_of,
)
from weightlife import errors
from weightlife._engine import replicas
from weightlife._engine.ranks import update_id

LEAN: dict[str, Any] = {"isolation": "in_place", "storage": "pinned"}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    faults.clear()
    Served.close_all()


class Shard(Layer):
    """Each rank keeps its own half of the rows; `process` transposes them."""

    rank = 0

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.weight = parameter(WIDTH, WIDTH, loader=self.cut)
        self.computes = False  # cuts a copy of what came

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (2 * WIDTH, WIDTH)}

    def cut(self, param: torch.Tensor, tensor: torch.Tensor) -> None:
        given = tensor * 1.0 if self.computes else tensor
        param.data.copy_(given.narrow(0, self.rank * WIDTH, WIDTH))

    def process(self) -> None:
        self.weight = nn.Parameter(self.weight.data.t().contiguous(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class OnFirst(Layer):
    """A bias that is added once: all ranks but the first load zeros, by writing into what they were given."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.bias = parameter(WIDTH, loader=self.once)

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {"bias": (WIDTH,)}

    def once(self, param: torch.Tensor, tensor: torch.Tensor) -> None:
        param.data.copy_(torch.zeros_like(tensor) if self.rank else tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Body(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = Norm()
        self.gate = Packed()
        self.shard = Shard(rank)
        self.on_first = OnFirst(rank)

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {f"{n}.{k}": s for n, m in self.named_children() for k, s in m.sources().items()}  # type: ignore[operator]

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            layer, key = name.split(".")
            getattr(self, layer).take(key, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.children()])


class Ranks:
    """Two ranks in one process, each in a thread of its own where they vote."""

    def __init__(self, provisional: bool = False, own: bool = False, **settings: Any) -> None:
        """`own`: the first load brings each rank other values."""
        self.served: list[Served] = []
        for rank in range(2):
            weights = weights_of(Body(rank), 10 + rank * own)
            with (
                pytest.MonkeyPatch.context() as patch
            ):  # the size of the world is asked for at the first load, too
                patch.setattr(ToyHost, "rank", lambda _, rank=rank: (rank, 2))
                patch.setattr(ToyHost, "exchange", lambda _, words: [words, words])
                self.served.append(Served(lambda rank=rank: Body(rank), 0, provisional, weights, **settings))  # type: ignore[misc]
        self.pool = ThreadPoolExecutor(2)
        self.barrier = threading.Barrier(2, timeout=20)
        self.board: list[list[int]] = [[], []]
        for rank, served in enumerate(self.served):
            served.host.ranks = (rank, 2)
            served.host.exchange = lambda words, rank=rank: self._exchange(rank, words)  # type: ignore[method-assign,misc]

    def _exchange(self, rank: int, words: list[int]) -> list[list[int]]:
        self.board[rank] = list(words)
        self.barrier.wait()
        out = list(self.board)
        self.barrier.wait()
        return out

    def update(self, *weights: Weights) -> list[errors.WeightlifeError | None]:
        """One update, with the weights of each rank (of all, where one is given). What each raised."""
        given = weights if len(weights) == 2 else weights * 2
        jobs = [
            self.pool.submit(self._one, served, sent) for served, sent in zip(self.served, given, strict=True)
        ]
        return [job.result(30) for job in jobs]

    @staticmethod
    def _one(served: Served, sent: Weights) -> errors.WeightlifeError | None:
        try:
            served.update({name: value.clone() for name, value in sent.items()})
        except errors.WeightlifeError as error:
            return error
        return None

    def checkpoint(self, seed: int) -> Weights:
        return self.served[0].checkpoint(seed)

    def exact(self) -> bool:
        return all(torch.equal(served.run(), served.expected()) for served in self.served)


def by_handle(served: Served, weights: Weights) -> None:
    """An update as a user writes it. A rank that fails inside of it tells the others, which wait for its vote."""
    with weightlife.session(served.model, partial="forbid"):
        served.send(weights)
    served.weights = {**served.weights, **weights}


def changed(weights: Weights, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    return {**weights, name: change(weights[name].clone())}


def one_value(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[2] += 1
    return tensor


@pytest.mark.parametrize("settings", [{}, LEAN, {**LEAN, "processing": "at_finish"}, {"storage": "adopted"}])
@pytest.mark.parametrize("name", ["norm.weight", "gate.weight"])
def test_one_value_on_one_rank(name: str, settings: dict[str, Any]) -> None:
    """A layer that is written as it is and one that a hook repacks; the first update that could show it."""
    ranks = Ranks(**settings)
    a = [Snapshot(served.model) for served in ranks.served]
    good = ranks.checkpoint(1)
    for error in ranks.update(good, changed(good, name, one_value)):
        assert isinstance(error, errors.RankMismatchError)
        assert error.tensors == (name,)
        assert error.layer == name.partition(".")[0]
        assert "ranks [0] hold" in error.message
        assert "ranks [1] hold" in error.message
        assert "weightlife.expect" in error.hint
    assert [was.differences(Snapshot(served.model)) for was, served in zip(a, ranks.served, strict=True)] == [
        [],
        [],
    ]
    assert ranks.update(good) == [None, None]
    assert ranks.exact()


@pytest.mark.parametrize("spoilt", [False, True])
def test_all_ranks_call_an_update_by_the_lowest_ones_session(spoilt: bool) -> None:
    ranks = Ranks()
    good = ranks.checkpoint(1)
    other = changed(good, "norm.weight", one_value) if spoilt else good
    heard = ranks.update(good, other)
    assert [isinstance(error, errors.RankMismatchError) for error in heard] == [spoilt] * 2
    first, *_ = reports = [served.life.reports[-1] for served in ranks.served]
    assert [report.update_id for report in reports] == [first.session_id] * 2
    assert len({report.session_id for report in reports}) == 2


def test_a_rank_without_a_session_leaves_the_name_to_the_next_and_one_that_did_not_come_too() -> None:
    assert update_id([[0, 0, 0], [1, 5, 0xAB], [1, 5, 0xCD]]) == "0000000000ab"
    assert update_id([[0, 0], [1, 5, 0xAB, 1, 2, 3, 4]]) == "0000000000ab"
    assert update_id([[0, 0, 0], [0, 0]]) == ""


def test_without_undo_it_poisons_and_a_good_update_heals() -> None:
    ranks = Ranks(**LEAN, undo_budget_bytes=0)
    good = ranks.checkpoint(1)
    assert all(ranks.update(good, changed(good, "gate.weight", one_value)))
    assert all(served.life.poisoned for served in ranks.served)
    assert ranks.update(good) == [None, None]
    assert ranks.exact()


@pytest.mark.parametrize("settings", [{}, LEAN])
def test_shards_that_are_cut_in_one_place(settings: dict[str, Any]) -> None:
    """A rank that gets lost between updates: the loader is the same code, and names, shapes and dtypes agree."""
    ranks = Ranks(**settings)
    for served in ranks.served:
        served.update = partial(by_handle, served)  # type: ignore[method-assign]
    shard: Any = ranks.served[1].model.shard
    shard.rank = 0
    heard = ranks.update(ranks.checkpoint(1))
    assert [type(error) for error in heard] == [errors.RankMismatchError, errors.WrongPartError]
    assert [error and error.tensors for error in heard] == [("shard.weight",)] * 2
    assert "ranks [1] failed at 'shard.weight'" in str(heard[0])
    assert "on rank 1 of 2" in str(heard[1])
    assert ranks.exact()
    shard.rank = 1
    assert ranks.update(ranks.checkpoint(2)) == [None, None]
    assert ranks.exact()


@pytest.mark.parametrize("settings", [{}, LEAN])
def test_shards_of_a_computed_tensor_that_are_cut_in_one_place(settings: dict[str, Any]) -> None:
    """What a loader computes can't be followed to its tensor: shards that differed in the first load are equal now."""
    ranks = Ranks(**settings)
    shard: Any = ranks.served[1].model.shard
    for served in ranks.served:
        served.model.shard.computes = True
    for seed, lost in ((1, True), (2, False), (3, True)):
        shard.rank = 0 if lost else 1
        for error in ranks.update(ranks.checkpoint(seed)):
            assert (error is not None) is lost
            if error is not None:
                assert isinstance(error, errors.RankMismatchError)
                assert error.tensors == ("shard.weight",)
                assert "another shard on each rank" in error.message
        shard.rank = 1
        assert ranks.exact()


def test_what_is_meant_to_differ_or_to_agree_is_no_finding() -> None:
    """A bias on the first rank only, and shards of a constant, there and back, also from a dummy start."""
    for provisional in (False, True):
        ranks = Ranks(provisional=provisional)
        first = ranks.checkpoint(1)
        zeros = changed(changed(first, "shard.weight", torch.zeros_like), "on_first.bias", torch.zeros_like)
        for weights in (first, zeros, ranks.checkpoint(2), zeros, first):
            assert ranks.update(weights) == [None, None]
            assert ranks.exact()


def test_after_a_dummy_the_second_update_is_held_to_the_first() -> None:
    ranks = Ranks(provisional=True)
    good = ranks.checkpoint(1)
    assert ranks.update(good) == [None, None]
    assert any("on_first.bias" in note for note in ranks.served[0].life.reports[-1].notes)
    assert all(ranks.update(good, changed(good, "norm.weight", one_value)))
    assert ranks.exact()


@pytest.mark.parametrize(("policy", "violations"), [("warn", 1), ("off", 0)])
def test_policies(policy: str, violations: int) -> None:
    ranks = Ranks(rank_values=policy)
    good = ranks.checkpoint(1)
    assert ranks.update(good, changed(good, "norm.weight", one_value)) == [None, None]
    assert [len(served.life.reports[-1].violations) for served in ranks.served] == [violations] * 2


def test_a_part_is_compared_as_far_as_it_goes() -> None:
    ranks = Ranks(partial_update="by_layer")
    for served in ranks.served:
        served.update = lambda sent, served=served: (
            served.open("by_layer"),
            served.send(sent),
            served.finish(),
        )  # type: ignore[method-assign,misc,assignment]
    part = {"norm.weight": torch.full((WIDTH,), 3.0)}
    assert ranks.update(part) == [None, None]
    assert all(ranks.update(part, changed(part, "norm.weight", one_value)))


def test_a_source_that_cuts_before_it_sends() -> None:
    """Each rank gets its own part under one name and shape, in the first load as well: it may differ, and must."""
    ranks = Ranks(own=True)
    parts = [ranks.checkpoint(1), ranks.checkpoint(2)]
    assert ranks.update(*parts) == [None, None]
    for error in ranks.update(ranks.checkpoint(3)):
        assert isinstance(error, errors.RankMismatchError)
        assert "another shard on each rank" in error.message


def test_a_sample_of_a_large_shard_reaches_both_ends() -> None:
    flat = torch.zeros(replicas._BLOCKS * replicas._BLOCK + 4099, dtype=torch.uint8)
    flat[0], flat[-20:] = 3, 7  # the last block ends within 16 bytes a block of the end
    found = replicas._sampled(flat)
    assert found.shape == (replicas._BLOCKS * replicas._BLOCK,)
    assert (int(found[0]), bool((found == 7).any())) == (3, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_one_value_over_and_over(dtype: torch.dtype) -> None:
    once = torch.full((100,), 5, dtype=dtype)
    late = once.clone()
    late[99] = 6
    flat = [tensor.view(torch.uint8) for tensor in (once, late, once[:1])]
    assert replicas._constants(flat, [dtype.itemsize] * 3) == [True, False, True]
