# SPDX-License-Identifier: Apache-2.0
"""install, uninstall, status, reports: what a user calls."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weightlife import errors
from weightlife._version import __version__
from weightlife.config import Settings, enabled_from_env
from weightlife.hosts import runtime
from weightlife.hosts.patching import Patcher

if TYPE_CHECKING:
    from weightlife.report import LoadReport

_lock = threading.RLock()
_exported: dict[str, str | None] = {}
_logger: dict[str, Any] = {}
_listeners: dict[str, Callable[[], None]] = {}


def install(**settings: Any) -> None:
    """From here on every weight load in this process and its workers is one session.

    Works before or after vLLM was imported; twice is once (new settings replace the old). Settings travel to
    workers as `WEIGHTLIFE_*` environment variables. `WEIGHTLIFE=0` in the environment wins: nothing is done.

    Raises:
        ConfigError: an unknown setting or a bad value. ActiveSessionError: a session is open.
    """
    wanted = Settings.from_env(os.environ).replace(**settings) if settings else Settings.from_env(os.environ)
    if enabled_from_env(os.environ) is False:
        return
    with _lock:
        _install(wanted)
        _export({"WEIGHTLIFE": "1", **wanted.to_env()})
    _say_if_late()


def _say_if_late() -> None:
    """Engines that stand already have models and workers that never heard of weightlife."""
    import multiprocessing
    import sys

    # Not by looking for engine objects: vLLM freezes the garbage collector, which then forgets them.
    state = sys.modules.get("vllm.distributed.parallel_state")
    here = getattr(state, "_WORLD", None) is not None
    children = [
        p.name for p in multiprocessing.active_children() if p.name.startswith(("EngineCore", "VllmWorker"))
    ]
    if here or children:
        logging.getLogger("weightlife").error(
            "weightlife was installed after an engine was built: that engine's models and workers are not covered"
        )


def install_from_environment() -> None:
    """What the plugin does in each process: nothing is exported."""
    with _lock:
        if not runtime.installed():
            _install(Settings.from_env(os.environ))


def _install(wanted: Settings) -> None:
    from weightlife.hosts.vllm.table import SEAMS

    _refuse_while_open("install")
    patcher = runtime.patcher() if runtime.installed() else Patcher(SEAMS)
    runtime.set_runtime(wanted, patcher)
    log = logging.getLogger("weightlife")
    _logger.setdefault("level", log.level)
    _logger.setdefault("handlers", list(log.handlers))
    log.setLevel(wanted.log_level.upper())
    patcher.apply()
    _listen()


def _listen() -> None:
    if "spans" in _listeners:
        return
    from weightlife.otel.spans import SpanListener

    _listeners["spans"] = SpanListener().subscribe()


def _export(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        _exported.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def _refuse_while_open(what: str) -> None:
    import sys

    module = sys.modules.get("weightlife._engine.lifecycle")
    if module is None:
        return
    for life in module.all_lifecycles():
        if life.session is not None:
            raise errors.ActiveSessionError(
                f"{what} while {life.session.opened_by} is open", model=life.name, session=life.session.id
            )


def uninstall() -> None:
    """Take everything back: every attribute identical, variables restored, hooks inert.

    Raises:
        ActiveSessionError: a session is open; finish or abort it first.
    """
    with _lock:
        if not runtime.installed():
            return
        _refuse_while_open("uninstall")
        runtime.patcher().undo()
        import sys

        module = sys.modules.get("weightlife._engine.lifecycle")
        if module is not None:
            for life in module.all_lifecycles():
                module.release(life.model)
        log = logging.getLogger("weightlife")
        log.setLevel(_logger.pop("level", log.level))
        log.handlers[:] = _logger.pop("handlers", log.handlers)
        for stop in _listeners.values():
            stop()
        _listeners.clear()
        runtime.set_runtime(None, None)
        for name, value in _exported.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _exported.clear()


def observe(on: bool = True) -> None:
    """Switch to observing (change nothing, record and warn) at run time, or back to enforcing.

    Raises:
        NotInstalledError: nothing to switch. ActiveSessionError: a session is open.
    """
    with _lock:
        _refuse_while_open("observe")
        wanted = runtime.settings().replace(mode="observe" if on else "enforce")
        runtime.set_runtime(wanted, runtime.patcher())


def status(target: Any = None) -> dict[str, Any]:
    """This process: version, mode, settings, seams (wrapped, absent, waiting), models and what is only observed.

    Args:
        target: an `LLM` or engine; its workers' status comes under `workers`, one record a rank.

    Raises:
        HandshakeError: a worker runs without weightlife.
    """
    out = local_status()
    if target is not None:
        from weightlife.hosts.vllm import remote

        out["workers"] = remote.ask(target, "status")
    return out


def local_status() -> dict[str, Any]:
    """The status of this process alone, as plain data."""
    import sys

    out: dict[str, Any] = {
        "schema_version": 1,
        "weightlife": __version__,
        "installed": runtime.installed(),
        "pid": os.getpid(),
        "mode": None,
        "settings": {},
        "seams": [],
        "models": [],
        "not_covered": list(NOT_COVERED),
    }
    if not runtime.installed():
        return out
    out["mode"] = runtime.settings().mode
    out["settings"] = runtime.settings().to_env()
    out["seams"] = runtime.patcher().status()
    module = sys.modules.get("weightlife._engine.lifecycle")
    if module is not None:
        for life in module.all_lifecycles():
            out["models"].append(
                {
                    "model": life.name,
                    "status": "poisoned" if life.poisoned else life.status,
                    "observed": life.observed,
                    "generation": life.generation,
                    "session": life.session.id if life.session else None,
                    "failed": str(life.failed) if life.failed else None,
                    "reports": len(life.reports),
                }
            )
    return out


NOT_COVERED = (
    "LoRA-wrapped updates, pipeline parallel, online quantisation and CPU offload run the host's own path, observed",
    "expert re-placement (EPLB) and updates while asleep are refused",
    "votes across ranks compare names and outcomes before the commit; values only with a sender's table of digests",
    "memory is not stepped down by itself: choose isolation='in_place' where B does not fit beside A",
    "completeness after a dummy first load is learned from the first real load",
)


def last_reports(target: Any) -> list[LoadReport]:
    """The report of the last load, one a rank: `target` is a module, `LLM`, engine, worker or runner.

    Raises:
        NotInstalledError: the model was built without weightlife. HandshakeError: a worker runs without it.
    """
    from weightlife._engine import lifecycle
    from weightlife._models import find_model
    from weightlife.report import LoadReport as Report

    try:
        model = find_model(target)
    except errors.HostError:
        from weightlife.hosts.vllm import remote

        if remote.engine_of(target) is None:
            raise
        return [Report.from_dict(reports[-1]) for reports in remote.ask(target, "reports") if reports]
    life = lifecycle.of(model)
    if life is None:
        raise errors.NotInstalledError("this model was not built under weightlife")
    return [life.reports[-1]] if life.reports else []


def last_report(target: Any) -> LoadReport | None:
    """The report of the last load as rank 0 saw it, or the first rank's that differs in outcome.

    Raises:
        as `last_reports`.
    """
    reports = last_reports(target)
    if not reports:
        return None
    return next((report for report in reports if report.outcome != reports[0].outcome), reports[0])
