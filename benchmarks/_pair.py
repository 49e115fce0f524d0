# SPDX-License-Identifier: Apache-2.0
"""The two processes that are compared, and samples taken from them in turn."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _memory import Watch

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

SIDES = ("stock", "weightlife")
SAMPLE_SECONDS = 0.004
_HERE = Path(__file__).resolve().parent
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}


def _threads(count: int | None) -> dict[str, str]:
    """Variables for `count` OpenMP threads, left to the scheduler; nothing for the host's own choice."""
    return {} if count is None else {"OMP_NUM_THREADS": str(count), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class ChildError(RuntimeError):
    """A child answered with an error, died, or was silent for too long."""


class Child:
    """One engine process. Leaving the context ends it."""

    def __init__(self, side: str, log: Path, threads: int | None = None, timeout: float = 300.0) -> None:
        self.side = side
        self.timeout = timeout
        self._log = log.open("a")
        self._watch: Watch | None = None
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTLIFE")}
        # The host is installed with its byte code. An editable checkout has its own only if it may write it.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(_HERE.parent), *filter(None, [environment.get("PYTHONPATH")])]
        )
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "_child.py"), side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**environment, **_ENVIRONMENT, **_threads(threads)},
        )
        self._answer()
        self.boot_seconds = time.perf_counter() - began
        """From the start of the process until the host is imported."""

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            ChildError: see the class.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(f"the {self.side} process has died") from None
        answer = self._answer()
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer

    def measure(self, do: str, release: bool = False, **arguments: Any) -> dict[str, Any]:
        """As `ask`, with `peak_bytes`: the highest private memory during the command over the level before it.

        With `release` the level before is without what the allocator keeps for later, so that the peak is what the
        work needs and not what was left over.
        """
        self.ask("settle", release=release)
        self._watch = watch = Watch(self._process.pid)
        try:
            return {**self.ask(do, **arguments), "peak_bytes": watch.over}
        finally:
            self._watch = None

    def _answer(self) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        end = time.monotonic() + self.timeout
        while True:
            ready, _, _ = select.select([out], [], [], SAMPLE_SECONDS if self._watch else self.timeout)
            if self._watch is not None:
                self._watch.sample()
            if ready or time.monotonic() > end:
                break
        line = out.readline() if ready else ""
        if not line:
            code = self._process.poll()
            what = "was silent for too long" if not ready else f"has died (exit status {code})"
            raise ChildError(f"the {self.side} process {what}; its log is {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        if kind is None:
            self._process.stdin.close()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
        else:
            self._process.kill()
        self._process.wait()
        self._log.close()
