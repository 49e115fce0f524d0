# SPDX-License-Identifier: Apache-2.0
"""``weightlife doctor``: would loads in this environment be covered, and would anybody hear of them?

Every check is a sentence with a verdict. Nothing is sent anywhere: an exporter's endpoint is reachable when a TCP
connection to it opens, and it is closed again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weightlife._version import __version__
from weightlife.cli.output import BAD, FAILED, GOOD
from weightlife.config import PREFIX, Settings, enabled_from_env, unknown_variables
from weightlife.errors import ConfigError, clean
from weightlife.hosts.vllm.table import TESTED

__all__ = ["Check", "diagnose", "exit_code", "probe_host", "seam_rows"]

CONNECT_SECONDS = 2.0
_OURS = ("WEIGHTLIFE_POISON", "WEIGHTLIFE_TESTING_CACHE")


@dataclass
class Check:
    """One finding. ``verdict`` is ok, info, warn or fail; ``hint`` the next step where there is one."""

    name: str
    verdict: str
    text: str
    hint: str = ""


def exit_code(checks: list[Check]) -> int:
    """0: nothing to do; 1: works, but something needs a look; 2: loads would not be covered."""
    verdicts = {check.verdict for check in checks}
    return FAILED if "fail" in verdicts else BAD if "warn" in verdicts else GOOD


def probe_host(timeout: float) -> dict[str, Any]:
    """What ``weightlife.hosts.vllm.probe`` finds, in a process of its own; ``error`` says why it found nothing."""
    # The settings are checked here; there they must not keep the plugin from being tried.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    environment["WEIGHTLIFE"] = "1"
    command = [sys.executable, "-m", "weightlife.hosts.vllm.probe"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"vLLM did not import within {timeout:.0f} seconds"}
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return {"error": f"the process that imports vLLM ended with {done.returncode}: {''.join(last)}"}
    return found


def seam_rows(host: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table of seams, as far as there are any."""
    rows = host.get("seams")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def diagnose(environ: Mapping[str, str], host: Mapping[str, Any]) -> list[Check]:
    """All checks, in the order in which they matter."""
    return [
        Check("versions", "info", f"weightlife {__version__}, Python {platform.python_version()}, {platform.platform()}"),
        *_host(host),
        *_plugin(environ, host),
        *_seams(host),
        *_settings(environ),
        *_devices(host),
        *_telemetry(environ),
    ]  # fmt: skip


def _host(host: Mapping[str, Any]) -> list[Check]:
    torch = host.get("torch") or _version("torch")
    checks = [Check("torch", "info" if torch else "fail", f"torch {clean(torch or 'is not installed')}")]
    if host.get("error"):
        checks.append(Check("vllm", "fail", clean(host["error"], 500), "mend the installation of vLLM first"))
    elif not host.get("vllm"):
        checks.append(
            Check("vllm", "warn", "vLLM is not installed: plain modules are covered, through wrap_loader and watch",
                  "install vLLM in this environment if this is where it serves")
        )  # fmt: skip
    else:
        version = str(host["vllm"].get("version", ""))
        text = f"vLLM {clean(version)} (distribution {clean(host['vllm'].get('distribution') or 'unknown')})"
        if version.partition("+")[0] in TESTED:
            checks.append(Check("vllm", "ok", text))
        else:
            hint = "run an update in a test and look at its report before you rely on it"
            checks.append(Check("vllm", "warn", f"{text}; tested are {', '.join(TESTED)}", hint))
    return checks


def _plugin(environ: Mapping[str, str], host: Mapping[str, Any]) -> list[Check]:
    checks = []
    plugin = host.get("plugin")
    if isinstance(plugin, dict):
        if plugin.get("installs"):
            checks.append(
                Check(
                    "plugin", "ok", "vLLM loads weightlife's plugin, in every process that has WEIGHTLIFE=1"
                )
            )
        elif not plugin.get("registered"):
            checks.append(Check("plugin", "fail", "the entry point vllm.general_plugins is not there",
                                "install weightlife with pip; a bare copy of its folder has no entry points"))  # fmt: skip
        else:
            why = f" ({clean(plugin['error'], 300)})" if plugin.get("error") else ""
            named = environ.get("VLLM_PLUGINS")
            hint = (
                "add weightlife to VLLM_PLUGINS" if named is not None else "see the log of the engine's start"
            )
            checks.append(Check("plugin", "fail", f"vLLM does not load weightlife's plugin{why}", hint))
    try:
        enabled = enabled_from_env(environ)
    except ConfigError as error:
        return [*checks, Check("switch", "fail", error.message, error.hint)]
    if enabled is False:
        text = "WEIGHTLIFE=0: weightlife is off, and install() does nothing"
        checks.append(Check("switch", "warn", text, "unset WEIGHTLIFE, or set it to 1"))
    elif enabled:
        checks.append(
            Check("switch", "ok", "WEIGHTLIFE=1: every vLLM process of this environment installs it")
        )
    else:
        text = "WEIGHTLIFE is not set: only a program that calls weightlife.install() is covered"
        hint = "export WEIGHTLIFE=1 where the job starts; its code stays as it is"
        checks.append(Check("switch", "info", text, hint))
    return checks


def _seams(host: Mapping[str, Any]) -> list[Check]:
    rows = seam_rows(host)
    if not rows:
        return []
    missing = [row for row in rows if not row.get("found")]
    text = f"{len(rows) - len(missing)} of {len(rows)} seams are wrapped"
    if not missing:
        return [Check("seams", "ok", text)]
    required = [row for row in missing if row.get("required")]
    names = ", ".join(clean(row.get("seam")) for row in required or missing)
    if required:
        hint = (
            "with this version of vLLM weightlife only observes: loads run vLLM's own path and are recorded"
        )
        return [Check("seams", "fail", f"{text}; required and missing: {names}", hint)]
    return [Check("seams", "warn", f"{text}; missing: {names}", "weightlife seams says what each is for")]


def _settings(environ: Mapping[str, str]) -> list[Check]:
    checks = []
    for name, nearest in unknown_variables(environ).items():
        if name not in _OURS:
            hint = f"did you mean {nearest}?" if nearest else "docs/settings.md lists all"
            checks.append(Check("settings", "warn", f"{clean(name)} is no setting of weightlife", hint))
    try:
        settings = Settings.from_env(environ)
    except ConfigError as error:
        return [*checks, Check("settings", "fail", error.message, error.hint)]
    changed = {k: v for k, v in settings.to_env().items() if v != Settings().to_env()[k]}
    listed = ", ".join(f"{name}={clean(value)}" for name, value in changed.items())
    checks.append(Check("settings", "ok", f"set: {listed}" if changed else "all at their defaults"))
    if settings.mode == "observe":
        text = "nothing would be enforced: mode is observe, loads run the host's own path and are recorded"
        checks.append(Check("enforced", "warn", text, "unset WEIGHTLIFE_MODE"))
    else:
        strict = [
            n
            for n in ("surplus", "casts", "empty", "nonfinite", "contract")
            if getattr(settings, n) == "strict"
        ]
        text = f"refused would be incomplete loads (partial_disk={settings.partial_disk}, "
        text += f"partial_update={settings.partial_update}) and what is strict: {', '.join(strict) or 'nothing'}; "
        text += f"isolation={settings.isolation}, storage={settings.storage}"
        checks.append(Check("enforced", "ok", text))
    if settings.runs_dir is None:
        text = "sessions are not kept: WEIGHTLIFE_RUNS_DIR is not set"
        checks.append(
            Check(
                "runs",
                "info",
                text,
                "export WEIGHTLIFE_RUNS_DIR=$PWD/runs/first where the job starts, then: weightlife report runs/first",
            )
        )
    else:
        checks.append(_writable(Path(settings.runs_dir)))
    return checks  # fmt: skip


def _writable(folder: Path) -> Check:
    # the writer makes the directory when there is something to keep; here the nearest one that exists is tried
    nearest = next((p for p in (folder, *folder.absolute().parents) if p.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        text = f"sessions can't be kept in {clean(folder)}: {clean(error.strerror)}"
        return Check("runs", "warn", text, "name a directory that this user may write to")
    if not folder.is_absolute():
        text = f"sessions are kept in {clean(folder)}, below the working directory of each process"
        return Check("runs", "ok", text, "an absolute path is the same one for all of them")
    return Check("runs", "ok", f"sessions are kept in {clean(folder)}")


def _devices(host: Mapping[str, Any]) -> list[Check]:
    devices = host.get("devices") or []
    if devices:
        text = f"{len(devices)} CUDA devices: {', '.join(sorted({clean(name) for name in devices}))}"
        hint = "docs/not-covered.md says what was never run on a device"
        checks = [Check("devices", "info", text, hint)]
    else:
        on = f" (vLLM runs on {clean(host['platform'])})" if host.get("platform") else ""
        checks = [Check("devices", "info", f"no CUDA device{on}")]
    triton = host.get("triton") or _version("triton")
    text = f"Triton {clean(triton)}" if triton else "no Triton; it is optional"
    return [*checks, Check("triton", "info", text)]


def _telemetry(environ: Mapping[str, str]) -> list[Check]:
    sdk = _version("opentelemetry-sdk")
    checks = [
        Check("opentelemetry", "info", f"opentelemetry-sdk {clean(sdk)}" if sdk else "no OpenTelemetry SDK: spans go nowhere",
              "" if sdk else "pip install 'weightlife[otel]'")
    ]  # fmt: skip
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        checks.append(Check("exporter", "info", "OTEL_SDK_DISABLED=true: nothing is exported"))
        return checks
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint:
        checks.append(Check("exporter", "info", "no exporter is configured (OTEL_EXPORTER_OTLP_ENDPOINT)"))
        return checks
    protocol = (
        environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "grpc"
    )
    wanted = "opentelemetry.exporter.otlp.proto." + ("http" if protocol.startswith("http") else "grpc")
    if not _importable(wanted):
        hint = "pip install 'weightlife[otel]'"
        checks.append(Check("exporter", "warn", f"an endpoint is set, and {wanted} is not installed", hint))
    checks.append(_reachable(endpoint, protocol))
    return checks


def _reachable(endpoint: str, protocol: str) -> Check:
    """Whether a TCP connection opens. The endpoint is named without user, password and query."""
    try:
        parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
        name, port = parts.hostname, parts.port
    except ValueError:
        name, port = None, None
    if not name:
        return Check(
            "exporter", "warn", "the OTLP endpoint is no URL", "http://HOST:4317 (gRPC) or :4318 (HTTP)"
        )
    port = port or (443 if parts.scheme == "https" else 4318 if protocol.startswith("http") else 4317)
    shown = f"{clean(name)}:{port}"
    try:
        with socket.create_connection((name, port), timeout=CONNECT_SECONDS):
            return Check(
                "exporter", "ok", f"something accepts connections at {shown} (for {clean(protocol)})"
            )
    except OSError as error:
        why = clean(error.strerror or type(error).__name__)
        hint = "start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT; loads go on without it"
        return Check("exporter", "warn", f"the OTLP endpoint {shown} is not reachable: {why}", hint)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
