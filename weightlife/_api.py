# SPDX-License-Identifier: Apache-2.0
"""install, uninstall, status, reports: what a user calls."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightlife import errors
from weightlife._version import __version__
from weightlife.config import Settings, enabled_from_env
from weightlife.hosts import runtime
from weightlife.hosts.patching import Patcher

if TYPE_CHECKING:
    from weightlife._manifest import Manifest
    from weightlife.otel.listening import Telemetry
    from weightlife.report import LoadReport

_lock = threading.RLock()
_exported: dict[str, str | None] = {}
_logger: dict[str, Any] = {}
_telemetry: list[Telemetry] = []
_defaults: set[str] = set()  # "watching": the mode in force was auto-instrumentation's choice


def install(**settings: Any) -> None:
    """From here on every weight load in this process and its workers is one session.

    Works before or after vLLM was imported; twice is once (new settings replace the old). Settings travel to
    workers as `WEIGHTLIFE_*` environment variables. `WEIGHTLIFE=0` in the environment wins: nothing is done.

    Raises:
        ConfigError: an unknown setting or a bad value. ActiveSessionError: a session is open.
    """
    environ = dict(os.environ)
    if "watching" in _defaults:
        environ.pop("WEIGHTLIFE_MODE", None)  # auto-instrumentation's choice, not the caller's
    wanted = Settings.from_env(environ)
    wanted = wanted.replace(**settings) if settings else wanted
    if enabled_from_env(os.environ) is False:
        return
    if wanted.runs_dir is not None:
        wanted = wanted.replace(runs_dir=str(Path(wanted.runs_dir).absolute()))
    with _lock:
        _install(wanted)
        _defaults.discard("watching")
        export({"WEIGHTLIFE": "1", **wanted.to_env()})
    _say_if_late()


def instrument(tracer_provider: Any = None, meter_provider: Any = None) -> bool:
    """What OpenTelemetry's auto-instrumentation does: watch, and no more than that unless the environment asks for it.

    Returns whether weightlife was installed by this call.
    """
    if enabled_from_env(os.environ) is False:
        return False
    fresh = not runtime.installed()
    if fresh:
        asked = enabled_from_env(os.environ) or bool(os.environ.get("WEIGHTLIFE_MODE"))
        install(**({} if asked else {"mode": "observe"}))
        if not asked:
            _defaults.add("watching")
    with _lock:
        if tracer_provider is not None or meter_provider is not None:
            listen(runtime.settings(), tracer_provider, meter_provider)
        else:
            # It takes itself out of PYTHONPATH: workers set up the SDK from the same OTEL_* variables themselves.
            export({"WEIGHTLIFE_OTEL": "1"})
    return fresh


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
            if os.environ.get("WEIGHTLIFE_OTEL") == "1":
                from weightlife.otel import providers

                providers.configure_worker(os.environ)


def _install(wanted: Settings) -> None:
    from weightlife.hosts.vllm.table import SEAMS, TESTED

    _refuse_while_open("install")
    patcher = runtime.patcher() if runtime.installed() else Patcher(SEAMS, "vllm", TESTED)
    runtime.set_runtime(wanted, patcher)
    log = logging.getLogger("weightlife")
    _logger.setdefault("level", log.level)
    _logger.setdefault("handlers", list(log.handlers))
    log.setLevel(wanted.log_level.upper())
    patcher.apply()
    listen(wanted)
    keep_runs(wanted.runs_dir)


def listen(wanted: Settings, tracer_provider: Any = None, meter_provider: Any = None) -> None:
    """Make spans and metrics of every session. Given providers take the place of those that are used now."""
    from weightlife.otel.listening import Telemetry

    if tracer_provider is not None or meter_provider is not None:
        silence()
    if not _telemetry:
        _telemetry.append(Telemetry(tracer_provider, meter_provider))
    _telemetry[0].configure(wanted.trace_layers, wanted.trace_layer_ms / 1e3)


def ensure_listening(wanted: Settings) -> None:
    """For plain modules, whose user need not have called `install()`."""
    with _lock:
        if not _telemetry:
            listen(wanted)


def silence() -> None:
    """No spans or metrics from here on."""
    for telemetry in _telemetry:
        telemetry.close()
    _telemetry.clear()


def keep_runs(folder: str | None) -> None:
    """Keep sessions in a directory, or no longer. What nobody asked for is not imported."""
    import sys

    if folder is not None or "weightlife.runs.writer" in sys.modules:
        from weightlife.runs import writer

        writer.keep(folder)


def export(variables: dict[str, str]) -> None:
    """Set variables that workers inherit; `uninstall()` puts the former values back."""
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
            keep_runs(None)  # a watched module of this process may have asked for it
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
        silence()
        _defaults.clear()
        keep_runs(None)
        runtime.set_runtime(None, None)
        for name, value in _exported.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _exported.clear()


def configure_otel(
    endpoint: str | None = None, *, protocol: str | None = None, service_name: str | None = None
) -> dict[str, str]:
    """Set up OpenTelemetry where there is none: the SDK, and OTLP exporters for traces and metrics.

    Call it before the engine is made: workers are told by environment variables, and set up the same. A provider that
    is there already, or that vLLM sets for `--otlp-traces-endpoint`, is kept. Nothing else in weightlife ever sets one.

    Args:
        endpoint: an URL; by default OTEL_EXPORTER_OTLP_ENDPOINT, or this machine (port 4318, or 4317 for gRPC).
        protocol: "http/protobuf" (the default) or "grpc"; else OTEL_EXPORTER_OTLP_PROTOCOL.
        service_name: by default OTEL_SERVICE_NAME, or "vllm".

    Returns:
        signal -> the address that it goes to, "kept", "none" (OTEL_*_EXPORTER=none) or "disabled" (OTEL_SDK_DISABLED).

    Raises:
        ConfigError: the SDK is not installed, or an argument is not legal.
    """
    from weightlife.otel import providers

    before = dict(os.environ)
    with _lock:
        done = providers.configure(endpoint, protocol, service_name, os.environ)
        changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
        for name in changed:
            _exported.setdefault(name, before.get(name))
    return done


def observe(on: bool = True) -> None:
    """Switch to observing (change nothing, record and warn) at run time, or back to enforcing.

    Where this version of the host can't be enforced it stays at observing, and `status()` says why.

    Raises:
        NotInstalledError: nothing to switch. ActiveSessionError: a session is open.
    """
    with _lock:
        _refuse_while_open("observe")
        wanted = runtime.settings().replace(mode="observe" if on else "enforce")
        runtime.set_runtime(wanted, runtime.patcher())
        if not on and runtime.unproven():
            runtime.say_observing()


def status(target: Any = None) -> dict[str, Any]:
    """This process: version, mode, settings, seams (wrapped, absent, waiting), models and what is only observed.

    `mode` is the one in force and `mode_asked` the setting; where they differ `mode_why` tells the reason. `host` is
    the host's name and version, `host_tested` whether it is one that the test-suite runs against.

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
        "mode_asked": None,
        "mode_why": "",
        "host": None,
        "host_tested": None,
        "settings": {},
        "seams": [],
        "models": [],
        "runs": None,
        "not_covered": list(NOT_COVERED),
        "telemetry": _telemetry_status(),
    }
    writer = sys.modules.get("weightlife.runs.writer")
    if writer is not None:
        out["runs"] = writer.status()
    if not runtime.installed():
        return out
    out["mode_why"] = runtime.unproven(decide=True)
    out["mode"], out["mode_asked"] = runtime.mode(), runtime.settings().mode
    if runtime.version() is not None:
        out["host"], out["host_tested"] = runtime.host_version(), runtime.is_tested()
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


def _telemetry_status() -> dict[str, Any]:
    """Whether anything listens, and how many sessions an exporter did not take in time."""
    state: dict[str, Any] = {"listening": bool(_telemetry), "traces": "none", "metrics": "none", "dropped": 0}
    for telemetry in _telemetry:
        state.update(telemetry.status())
    return state


NOT_COVERED = (
    "pipeline parallel, experts under LoRA, online quantisation and CPU offload run the host's own path, observed",
    "expert re-placement (EPLB) and updates while asleep are refused",
    "votes across ranks compare replicas and samples of shards; each value of a shard only with a sender's table of digests",
    "memory is not stepped down by itself: choose isolation='in_place' where B does not fit beside A",
    "completeness after a dummy first load is learned from the first real load",
)


def last_reports(target: Any) -> list[LoadReport]:
    """The report of the last load, one a rank: `target` is a module, `LLM`, engine, worker or runner.

    Raises:
        NotInstalledError: the model was built without weightlife. HandshakeError: a worker runs without it.
    """
    from weightlife._engine import lifecycle
    from weightlife._models import find_here
    from weightlife.report import LoadReport as Report

    model = find_here(target)
    if model is None:
        from weightlife.hosts.vllm import remote

        return [Report.from_dict(reports[-1]) for reports in remote.ask(target, "reports") if reports]
    life = lifecycle.of(model)
    if life is None:
        raise errors.NotInstalledError("this model was not built under weightlife")
    return [life.reports[-1]] if life.reports else []


def manifests(target: Any, *, checkpoint: Any = None, loader: Any = None) -> list[Manifest]:
    """What a complete load of a model brings, writes and leaves alone, one a rank.

    Args:
        target: a module, `LLM`, engine, worker or runner.
        checkpoint: tell it of this checkpoint instead of the last complete load, from headers alone: a folder of
            safetensors files (as each worker sees it), or names -> (dtype, shape). The model's loader runs over
            tensors without memory; what serves is not touched. The result is provisional.
        loader: with `checkpoint`, the loader of a plain module, `loader(model, weights)`.

    Raises:
        NotInstalledError: the model was built without weightlife, or is not loaded yet.
        HandshakeError: a worker runs without it. RoutingError: the loader can't run without values, or the
        checkpoint has no headers. SessionStateError: with `checkpoint`, an update is open.
    """
    from weightlife._engine import lifecycle
    from weightlife._manifest import Manifest as Made
    from weightlife._models import find_here

    missing = errors.NotInstalledError("this model was not built under weightlife, or is not loaded yet")
    model = find_here(target)
    if model is None:
        from weightlife.hosts.vllm import remote

        if loader is not None:
            raise errors.ConfigError("a loader can't be sent to workers")
        answers = remote.ask(target, "manifest", {"checkpoint": _plain_checkpoint(checkpoint)})
        if not answers or any(answer is None for answer in answers):
            raise missing
        return [Made.from_dict(answer) for answer in answers]
    life = lifecycle.of(model)
    if life is None or life.observed is not None or life.first is not None:
        raise missing
    return [local_manifest(life, checkpoint, loader)]


def local_manifest(life: Any, checkpoint: Any = None, loader: Any = None) -> Manifest:
    """The manifest of a model in this process; see `manifests`."""
    import inspect

    from weightlife import _declared
    from weightlife._engine import export, routing

    if checkpoint is None:
        return export.manifest_of(life)
    if isinstance(checkpoint, (str, os.PathLike)):
        source = life.host.headers(checkpoint)
        if source is None:
            raise errors.RoutingError(
                f"no headers can be read from {errors.clean(checkpoint)}", model=life.name,
                hint="name a local folder of safetensors files, in the format that the engine loads",
            )  # fmt: skip
        source.require()
        headers = source.headers
    else:
        headers = _declared.as_headers(checkpoint)
    plain = None if loader is None else inspect.unwrap(loader)  # without `wrap_loader`'s session
    load = None if plain is None else lambda weights: plain(life.model, weights)
    return export.manifest_of(life, known=routing.route(life, headers, load))


def _plain_checkpoint(checkpoint: Any) -> Any:
    """A checkpoint's path or headers as workers are told them."""
    from weightlife import _declared

    if checkpoint is None or isinstance(checkpoint, (str, os.PathLike)):
        return None if checkpoint is None else os.fspath(checkpoint)
    headers = _declared.as_headers(checkpoint)
    return {name: [h.dtype, None if h.shape is None else list(h.shape)] for name, h in headers.items()}


def manifest(target: Any, rank: int = 0, *, checkpoint: Any = None, loader: Any = None) -> Manifest:
    """The manifest of one rank: names are the same on all, the elements that they write are a rank's own.

    Args: as for `manifests`.

    Raises:
        as `manifests`. ConfigError: there is no such rank.
    """
    found = manifests(target, checkpoint=checkpoint, loader=loader)
    for one in found:
        if one.rank == rank:
            return one
    if len(found) == 1 and rank == 0:
        return found[0]
    raise errors.ConfigError(f"no rank {rank} among {[one.rank for one in found]}")


def last_report(target: Any) -> LoadReport | None:
    """The report of the last load as rank 0 saw it, or the first rank's that differs in outcome.

    Raises:
        as `last_reports`.
    """
    reports = last_reports(target)
    if not reports:
        return None
    return next((report for report in reports if report.outcome != reports[0].outcome), reports[0])
