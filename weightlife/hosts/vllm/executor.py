# SPDX-License-Identifier: Apache-2.0
"""Answers of several workers stay with their questions after one of them failed.

vLLM's multiprocessing executor (Ray's newer one is a subclass) reads the workers' answers in order of rank and raises
the first failure; what the later ranks answered stays in their queues, and from then on each of their answers belongs
to the question before. A refused update on two ranks makes the next one, a good one, fail; later an update that fails
on the second rank alone is reported as done. A time-out leaves its answers behind in the same way.
"""

from __future__ import annotations

import weakref
from typing import Any

from weightlife.hosts import runtime
from weightlife.hosts.vllm.calls import Args, Kwargs, argument

_TIMEOUT, _NON_BLOCK, _REPLY_RANK = 1, 4, 5  # places among the arguments


class _Answers:
    """A worker's queue of answers, for one question."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.read = False

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        out = self._queue.dequeue(*args, **kwargs)
        self.read = True
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


_owed: weakref.WeakKeyDictionary[Any, dict[int, list[_Answers]]] = weakref.WeakKeyDictionary()


def executor_rpc(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """One question to the workers. What an earlier, failed one left in the queues that it reads is thrown away.

    Not at once: a rank may have failed while the others wait for it in a collective, and the caller must hear of that.
    """
    if runtime.mode() != "enforce":
        return wrapped(*args, **kwargs)
    rank = argument(args, kwargs, _REPLY_RANK, "unique_reply_rank")
    queues = getattr(instance, "response_mqs", None)
    if not queues:
        return wrapped(*args, **kwargs)
    _throw_away(instance, rank, argument(args, kwargs, _TIMEOUT, "timeout"))
    if rank is not None or len(queues) < 2 or argument(args, kwargs, _NON_BLOCK, "non_block"):
        return wrapped(*args, **kwargs)
    watched = [_Answers(queue) for queue in queues]
    instance.response_mqs = watched
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        if isinstance(error, TimeoutError) or any(
            answers.read for answers in watched
        ):  # else it was never asked
            owed = _owed.setdefault(instance, {})
            for number, answers in enumerate(watched):
                if not answers.read:
                    owed.setdefault(number, []).append(answers)
        raise
    finally:
        if instance.response_mqs is watched:  # a shutdown may have emptied it
            instance.response_mqs = queues


def _throw_away(instance: Any, rank: int | None, timeout: float | None) -> None:
    owed = _owed.get(instance)
    if not owed:
        return
    for number in list(owed) if rank is None else [rank]:
        late = owed.get(number, [])
        while late:
            late[0].dequeue(timeout=timeout)
            del late[0]
        owed.pop(number, None)


__all__ = ["executor_rpc"]
