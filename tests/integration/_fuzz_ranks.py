# SPDX-License-Identifier: Apache-2.0
"""The same over several ranks: each worker makes its own stream, and says in words what its client would hear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _fuzz_bench import Bench, Wrong, source
from fuzz_streams import Item

from weightlife.testing.worker_ext import TestWorkerExtension


class Heard(Exception):
    """What the ranks said, as one error of the client."""


class FuzzExtension(TestWorkerExtension):
    """Worker methods that answer with an error's text: an exception would leave other ranks' answers unread."""

    def weightlife_test_fuzz(
        self, what: str, folders: dict[str, str], items: list[list[str]], stop: int
    ) -> str:
        """Do a part of a stream; returns what was raised, or nothing."""
        from weightlife.testing.checkpoints import tensors

        known = self.__dict__.setdefault(
            "_weightlife_test_tensors", {side: tensors(Path(folder)) for side, folder in folders.items()}
        )
        weights = source(known, [Item(*item) for item in items], stop)
        calls: dict[str, Callable[[], Any]] = {
            "start": self.weightlife_test_layerwise_start,
            "finish": self.weightlife_test_layerwise_finish,
            "chunk": lambda: self.model_runner.get_model().load_weights(weights),
            "iterator": lambda: self.model_runner.reload_weights(weights_iterator=weights),
        }
        return self._weightlife_test_said(calls[what])

    def weightlife_test_fuzz_path(self, folder: str) -> str:
        """Reload by path."""
        return self._weightlife_test_said(lambda: self.model_runner.reload_weights(weights_path=folder))

    @staticmethod
    def _weightlife_test_said(call: Callable[[], Any]) -> str:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the driver judges what each rank heard
            return f"{type(error).__name__}: {error}"
        return ""

    def weightlife_test_fuzz_state(self, forgive: bool) -> dict[str, Any]:
        """Where this rank's weightlife stands."""
        from weightlife._engine import lifecycle

        life: Any = lifecycle.of(self.model_runner.get_model())
        if forgive:
            life.failed = None
        return {
            "generation": life.generation, "must": life.must_complete, "open": life.session is not None,
            "poisoned": bool(life.poisoned),
        }  # fmt: skip


class RankBench(Bench):
    """An engine of several ranks, in processes of their own."""

    def reach(self) -> None:
        """There is no model in this process."""
        self._folders = {side: str(getattr(self.folders, side)) for side in ("a", "b")}

    def state(self) -> dict[str, Any]:
        """That of all ranks.

        Raises:
            Wrong: they differ.
        """
        return self._state(forgive=False)

    def _state(self, forgive: bool) -> dict[str, Any]:
        first, *others = self.llm.collective_rpc("weightlife_test_fuzz_state", args=(forgive,))
        if any(other != first for other in others):
            raise Wrong(f"ranks stand apart: {[first, *others]}")
        return dict(first)

    def forgive(self) -> None:
        self._state(forgive=True)

    def abort(self) -> None:
        import weightlife

        weightlife.abort(self.llm)

    def _do(self, what: str, items: Sequence[Any] = (), stop: int = -1) -> None:
        rows = [[item.name, item.side, item.sent, item.change] for item in items]
        self._raise(self.llm.collective_rpc("weightlife_test_fuzz", args=(what, self._folders, rows, stop)))

    def _raise(self, heard: list[str]) -> None:
        said = [text for text in heard if text]
        if said:
            self.abort()  # a client ends an update of which a part failed on all ranks, also where it did not
            raise Heard(
                said[0] if len(said) == len(heard) else f"on {len(said)} of {len(heard)} ranks: {said[0]}"
            )

    def start(self) -> None:
        self._do("start")

    def finish(self) -> None:
        self._do("finish")

    def chunk(self, items: Sequence[Any], stop: int) -> None:
        self._do("chunk", items, stop)

    def by_iterator(self, items: Sequence[Any], stop: int) -> None:
        self._do("iterator", items, stop)

    def by_path(self, folder: Path) -> None:
        self._raise(self.llm.collective_rpc("weightlife_test_fuzz_path", args=(str(folder),)))

    def interrupted(self, error: BaseException | None) -> bool:
        return isinstance(error, Heard) and str(error).startswith("Interrupted: ")
