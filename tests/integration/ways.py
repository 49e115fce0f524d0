# SPDX-License-Identifier: Apache-2.0
"""The ways in which weights reach a running engine, one function each.

A way is called with the engine, the folder to load and the folder that serves now, and returns when the
client would regard its update as sent. Ways that have no end mark (bare `load_weights`) rely on the next
batch. All go through worker methods, so each runs in process, over RPC and on every tensor-parallel rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weightlife.testing._source import names

if TYPE_CHECKING:
    from vllm import LLM

Way = Callable[["LLM", Path, Path], None]

BUCKETS: Final = 5


def path(llm: LLM, folder: Path, served: Path) -> None:
    """`reload_weights(weights_path=...)` over RPC, as vLLM documents it."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def iterator(llm: LLM, folder: Path, served: Path) -> None:
    """`model_runner.reload_weights(weights_iterator=...)`, in file order."""
    _rpc(llm, "reload_iterator", folder, names(folder))


def iterator_reused(llm: LLM, folder: Path, served: Path) -> None:
    """The same, shuffled, from a sender that overwrites each tensor when it makes the next."""
    _rpc(llm, "reload_iterator", folder, _shuffled(folder), True)


def layerwise_direct(llm: LLM, folder: Path, served: Path) -> None:
    """vLLM's reload functions called directly round several `load_weights` (SkyRL, verl's delta)."""
    _rpc(llm, "layerwise_start")
    for bucket in _buckets(names(folder)):
        _rpc(llm, "load", folder, bucket)
    _rpc(llm, "layerwise_finish")


def transfer(llm: LLM, folder: Path, served: Path) -> None:
    """A weight-transfer session in five shuffled buckets, through a registered engine."""
    llm.collective_rpc("start_weight_update")
    for bucket in _buckets(_shuffled(folder)):
        llm.collective_rpc("update_weights", kwargs={"update_info": {"folder": str(folder), "names": bucket}})
    llm.collective_rpc("finish_weight_update")


def bare_one_by_one(llm: LLM, folder: Path, served: Path) -> None:
    """`model.load_weights([(name, tensor)])`, a call a tensor, no begin and no end (TRL, OpenRLHF)."""
    for name in names(folder):
        _rpc(llm, "load", folder, [name], True)


def bare_shuffled(llm: LLM, folder: Path, served: Path) -> None:
    """Bare `load_weights` in five shuffled buckets whose memory the sender overwrites after each call."""
    for bucket in _buckets(_shuffled(folder)):
        _rpc(llm, "load", folder, bucket, True)


def bare_processed(llm: LLM, folder: Path, served: Path) -> None:
    """Bare buckets, then module-level `process_weights_after_loading` as the end mark (verl, NeMo-RL)."""
    for bucket in _buckets(names(folder)):
        _rpc(llm, "load", folder, bucket)
    _rpc(llm, "process")


def bare_twice(llm: LLM, folder: Path, served: Path) -> None:
    """Two bare syncs without a batch between them: the served weights again, then the new ones."""
    for source in (served, folder):
        for bucket in _buckets(_shuffled(source)):
            _rpc(llm, "load", source, bucket)


def path_there_and_back(llm: LLM, folder: Path, served: Path) -> None:
    """By path: new, old, new again, with no batch between."""
    for source in (folder, served, folder):
        path(llm, source, served)


def _rpc(llm: LLM, what: str, folder: Path | None = None, *arguments: Any) -> None:
    given = () if folder is None else (str(folder), *arguments)
    llm.collective_rpc(f"weightlife_test_{what}", args=given)


def _shuffled(folder: Path) -> list[str]:
    found = names(folder)
    random.Random(folder.name).shuffle(found)
    return found


def _buckets(found: Sequence[str], count: int = BUCKETS) -> Iterator[list[str]]:
    """`found` in `count` runs of nearly equal length, so that fused layers are split between them."""
    size = -(-len(found) // count)
    for start in range(0, len(found), size):
        yield list(found[start : start + size])


@dataclass(frozen=True)
class Row:
    """One way and where it can run.

    Attributes:
        run: the function.
        remote: also over RPC into other processes.
        dummy: also for an engine whose first load was a dummy (no files, so not by path).
        shuffles: whether tensors arrive in another order than that of the file.
        split: whether one call of the model's `load_weights` may hold a head without its embedding.
    """

    run: Way
    remote: bool = True
    dummy: bool = True
    shuffles: bool = False
    split: bool = False


WAYS: Final[Mapping[str, Row]] = {
    "path": Row(path, dummy=False),
    "iterator": Row(iterator),
    "iterator_reused": Row(iterator_reused, shuffles=True),
    "layerwise_direct": Row(layerwise_direct),
    "transfer": Row(transfer, shuffles=True),
    "bare_one_by_one": Row(bare_one_by_one, split=True),
    "bare_shuffled": Row(bare_shuffled, shuffles=True, split=True),
    "bare_processed": Row(bare_processed, split=True),
    "bare_twice": Row(bare_twice, shuffles=True, split=True),
    "path_there_and_back": Row(path_there_and_back, dummy=False),
}
