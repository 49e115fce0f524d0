# SPDX-License-Identifier: Apache-2.0
"""The garbage collector during a first load: it finds what the load left, and walks over nothing that was there before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

import weightlife
from weightlife._engine import memory
from weightlife.hosts.vllm import seams


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    if gc.get_freeze_count():
        gc.unfreeze()
    yield
    gc.enable()
    assert gc.get_freeze_count() == 0


def test_garbage_of_before_is_gone_and_what_the_load_leaves_is_collected() -> None:
    gc.collect()
    gc.disable()  # no pass but those that are asked for
    older = weakref.ref(Knot())
    kept = Knot()
    with memory.set_aside():
        assert older() is None  # its memory may be needed
        reference, kept = weakref.ref(kept), None  # type: ignore[assignment]
        newer = weakref.ref(Knot())
        gc.collect()
        assert newer() is None
        assert reference() is not None  # it was in use as the load began
    gc.collect()
    assert reference() is None


def test_an_inner_load_leaves_it_to_the_outer_one() -> None:
    with memory.set_aside():
        with memory.set_aside():
            pass
        assert gc.get_freeze_count() > 0


def test_a_load_that_fails_is_the_end_of_it() -> None:
    with pytest.raises(KeyError), memory.set_aside():
        raise KeyError
    assert not memory._aside


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with memory.set_aside():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("mode", "frozen"), [("enforce", True), ("observe", False), (None, False)])
def test_a_loader_of_the_host_runs_so_where_weightlife_is_in_force(mode: str | None, frozen: bool) -> None:
    if mode is not None:
        weightlife.install(mode=mode)
    seen = []
    model = object()
    out = seams.load_model(lambda: seen.append(gc.get_freeze_count() > 0) or model, None, (), {})
    assert out is model
    assert seen == [frozen]
