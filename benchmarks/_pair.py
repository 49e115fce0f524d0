# SPDX-License-Identifier: Apache-2.0
"""The two processes that are compared, and samples taken from them in turn."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

SIDES = ("stock", "weightlife")
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


class ChildError(RuntimeError):
    """A child answered with an error, died, or was silent for too long."""


class Child:
    """One engine process. Leaving the context ends it."""

    def __init__(self, side: str, log: Path, timeout: float = 180.0) -> None:
        self.side = side
        self.timeout = timeout
        self._log = log.open("a")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTLIFE")}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(_HERE.parent), *filter(None, [environment.get("PYTHONPATH")])]
        )
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "_child.py"), side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**environment, **_ENVIRONMENT},
        )
        self._answer()

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

    def _answer(self) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], self.timeout)
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
