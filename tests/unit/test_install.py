# SPDX-License-Identifier: Apache-2.0
"""install, uninstall, observe: settings, environment, what is open, and every attribute of the real host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import weightlife
from tests.toyhost import Served, poison
from weightlife import errors
from weightlife._engine import lifecycle
from weightlife.config import Settings
from weightlife.hosts import runtime
from weightlife.hosts.vllm import plugin

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WEIGHTLIFE")]:
        monkeypatch.delenv(name, raising=False)


def child(code: str, **environment: str) -> Any:
    """Run code in a fresh interpreter; its last line is JSON."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTLIFE")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT, env={**keep, **environment}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


class TestEnvironment:
    def test_exported_and_restored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WEIGHTLIFE_STORAGE", "adopted")
        before = dict(os.environ)
        weightlife.install(isolation="in_place")
        assert {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTLIFE")} == {
            k: v for k, v in before.items() if not k.startswith("WEIGHTLIFE")
        }
        assert os.environ["WEIGHTLIFE"] == "1"
        assert os.environ["WEIGHTLIFE_ISOLATION"] == "in_place"
        assert Settings.from_env(os.environ) == Settings(isolation="in_place", storage="adopted")
        assert runtime.settings() == Settings(isolation="in_place", storage="adopted")
        weightlife.uninstall()
        assert dict(os.environ) == before

    def test_ray_workers_get_the_settings_and_no_variable_of_the_host_changes(self) -> None:
        """Every variable of vLLM's is a factor of its compile cache's key, those for Ray too."""
        found = child("""
            import json, os
            import weightlife
            from vllm import envs
            from vllm.ray import ray_env
            from vllm.ray.ray_env import get_env_vars_to_copy

            before, names = envs.compile_factors(), get_env_vars_to_copy()
            weightlife.install(storage="pinned")
            after, copied = envs.compile_factors(), ray_env.get_env_vars_to_copy()
            weightlife.uninstall()
            print(json.dumps({
                "same": before == after,
                "more": sorted(copied - names),
                "undone": ray_env.get_env_vars_to_copy is get_env_vars_to_copy,
            }))
        """)
        assert found["same"]
        assert found["undone"]
        assert {"WEIGHTLIFE", "WEIGHTLIFE_STORAGE"} <= set(found["more"])
        assert all(name.startswith("WEIGHTLIFE") for name in found["more"])

    @pytest.mark.parametrize("off", ["0", "false", "off"])
    def test_zero_wins(self, off: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WEIGHTLIFE", off)
        before = dict(os.environ)
        weightlife.install()
        plugin.register()
        assert not weightlife.status()["installed"]
        assert dict(os.environ) == before

    def test_twice_is_once(self) -> None:
        before = dict(os.environ)
        weightlife.install(storage="pinned")
        patcher = runtime.patcher()
        weightlife.install(storage="adopted")
        assert runtime.patcher() is patcher
        assert runtime.settings().storage == "adopted"
        weightlife.uninstall()
        assert dict(os.environ) == before
        weightlife.uninstall()  # nothing to do is no error

    def test_a_bad_setting_changes_nothing(self) -> None:
        before = dict(os.environ)
        with pytest.raises(errors.ConfigError):
            weightlife.install(isolation="none")
        with pytest.raises(errors.ConfigError, match="isolation"):
            weightlife.install(isolatoin="staged")
        assert not runtime.installed()
        assert dict(os.environ) == before

    def test_a_bad_setting_on_the_second_call_keeps_the_first(self) -> None:
        weightlife.install(storage="pinned")
        with pytest.raises(errors.ConfigError):
            weightlife.install(storage="nowhere")
        assert runtime.settings().storage == "pinned"


class TestPlugin:
    def test_is_inert_unless_asked(self) -> None:
        plugin.register()
        assert not runtime.installed()

    def test_installs_where_the_environment_asks_and_exports_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WEIGHTLIFE", "1")
        monkeypatch.setenv("WEIGHTLIFE_STORAGE", "pinned")
        before = dict(os.environ)
        plugin.register()
        plugin.register()
        assert runtime.settings() == Settings(storage="pinned")
        assert dict(os.environ) == before
        weightlife.uninstall()
        assert dict(os.environ) == before

    @pytest.mark.parametrize(
        ("name", "value"), [("WEIGHTLIFE_STORAGE", "nowhere"), ("WEIGHTLIFE", "perhaps")]
    )
    def test_never_raises_into_the_host(self, name: str, value: str, monkeypatch, caplog) -> None:
        monkeypatch.setenv("WEIGHTLIFE", "1")
        monkeypatch.setenv(name, value)
        with caplog.at_level("ERROR", "weightlife"):
            plugin.register()
        assert not runtime.installed()
        assert "weightlife" in caplog.text

    def test_the_front_ends_install_is_the_plugins_too(self) -> None:
        weightlife.install(storage="pinned")
        plugin.register()
        assert runtime.settings().storage == "pinned"


class TestOpenSessions:
    def test_install_uninstall_and_observe_are_refused(self) -> None:
        weightlife.install()
        served = Served(("packed",))
        session = served.open()
        for call in (weightlife.install, weightlife.uninstall, weightlife.observe):
            with pytest.raises(errors.ActiveSessionError) as caught:
                call()
            assert caught.value.session == session.id
            assert "client" in caught.value.message
        assert runtime.installed()
        served.life.abort()
        weightlife.uninstall()
        assert not runtime.installed()

    def test_uninstall_gives_live_models_back(self) -> None:
        weightlife.install()
        served = Served(("packed", "dense"))
        served.update(served.checkpoint(1))
        want = served.run()
        weightlife.uninstall()
        assert lifecycle.of(served.model) is None
        assert "_weightlife" not in vars(served.model)
        assert torch.equal(served.model(torch.arange(1.0, 5.0)), want)

    def test_a_refused_install_leaves_settings_and_environment(self) -> None:
        weightlife.install(storage="pinned")
        before = dict(os.environ)
        served = Served(("packed",))
        served.open()
        with pytest.raises(errors.ActiveSessionError):
            weightlife.install(storage="adopted")
        assert runtime.settings().storage == "pinned"
        assert dict(os.environ) == before
        served.life.abort()


class TestObserve:
    def test_switches_at_run_time(self) -> None:
        weightlife.install()
        weightlife.observe()
        assert weightlife.status()["mode"] == "observe"
        weightlife.observe(on=False)
        assert weightlife.status()["mode"] == "enforce"

    def test_needs_an_installation(self) -> None:
        with pytest.raises(errors.NotInstalledError):
            weightlife.observe()


class TestStatus:
    def test_before_and_after(self) -> None:
        assert weightlife.status()["installed"] is False
        weightlife.install(storage="pinned")
        status = weightlife.status()
        assert (status["installed"], status["mode"], status["pid"]) == (True, "enforce", os.getpid())
        assert status["settings"]["WEIGHTLIFE_STORAGE"] == "pinned"
        assert {row["state"] for row in status["seams"]} == {"waiting for import"}
        assert all(row["why"] for row in status["seams"])
        json.dumps(status)
        weightlife.uninstall()
        assert weightlife.status()["installed"] is False

    def test_models_are_listed(self) -> None:
        weightlife.install()
        served = Served(("packed",))
        served.update(served.checkpoint(1))
        (row,) = [row for row in weightlife.status()["models"] if row["generation"] == 1]
        assert (row["model"], row["status"], row["session"]) == ("ToyModel", "ready", None)

    def test_last_report(self) -> None:
        weightlife.install()
        served = Served(("packed",))
        report = weightlife.last_report(served.model)
        assert report is not None
        assert report.operation == "first_load"
        with pytest.raises(errors.NotInstalledError):
            weightlife.last_report(torch.nn.Linear(1, 1))
        with pytest.raises(errors.HostError):
            weightlife.last_report(object())


class TestPoison:
    def test_only_where_the_environment_asks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert runtime.fill() is None
        monkeypatch.setenv(runtime.POISON_VARIABLE, "1")
        fill = runtime.fill()
        assert fill is not None
        tensor = torch.zeros(8)[2:4]
        fill(tensor)
        assert torch.empty(0).set_(tensor.untyped_storage(), 0, (8,), (1,)).isnan().all()

    def test_toy_poison_is_the_same(self) -> None:
        tensor = torch.zeros(4)
        poison(tensor)
        assert tensor.isnan().all()


class TestLateCallers:
    """Somebody kept a wrapper (a class attribute, a default argument): after uninstall it is the host's function."""

    @pytest.mark.parametrize(
        "name",
        [
            "initialize_model", "process_weights_after_loading", "load_model", "get_model_loader", "reload_weights",
            "initialize_layerwise_reload", "finalize_layerwise_reload", "update_weights", "finish_weight_update",
            "execute_model", "run_on_a", "load_weights", "process_layer", "sleep", "wake_up", "engine_rpc", "engine_step",
            "reset_prefix_cache", "after_engine",
        ],
    )  # fmt: skip
    def test_wrappers_are_inert_after_uninstall(self, name: str) -> None:
        from types import SimpleNamespace

        from weightlife.hosts.vllm import caches, seams

        weightlife.install()
        weightlife.uninstall()
        model = torch.nn.Linear(1, 1)
        runner = SimpleNamespace(get_model=lambda: model, model=model)
        instance = SimpleNamespace(get_model=lambda: model, model_runner=runner, model_config=None)
        vllm_config = SimpleNamespace(
            model_config=None, load_config=SimpleNamespace(device="cpu", load_format="auto"),
            device_config=SimpleNamespace(device="cpu"),
        )  # fmt: skip
        first: Any = {"initialize_model": vllm_config, "sleep": 1, "wake_up": None}.get(name, model)
        calls: list[Any] = []

        def original(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return model

        owner = model if name == "load_weights" else instance
        out = getattr(caches if hasattr(caches, name) else seams, name)(
            original, owner, (first, None, None), {}
        )
        assert out is model or name.startswith("after_")
        assert calls == [(first, None, None)]
        assert "_weightlife" not in vars(model)


REAL_MODULES = (
    "vllm.model_executor.model_loader", "vllm.model_executor.model_loader.utils",
    "vllm.model_executor.model_loader.base_loader", "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.model_executor.model_loader.default_loader", "vllm.model_executor.model_loader.dummy_loader",
    "vllm.model_executor.model_loader.sharded_state_loader",
)  # fmt: skip

SNAPSHOT = """
import importlib, json, os, pathlib, sys
import weightlife
def snap():
    out = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm") or type(getattr(module, "__dict__", None)) is not dict:
            continue
        for key, value in list(vars(module).items()):
            out[name, key] = value
            if isinstance(value, type) and value.__module__.startswith("vllm"):
                for inner, item in list(vars(value).items()):
                    out[value.__module__, value.__qualname__, inner] = item
    return out
def differences(before, after):
    missing = object()
    keys = before.keys() | after.keys()
    return sorted(str(k) for k in keys if before.get(k, missing) is not after.get(k, missing))
def wrapped(snapshot):
    return sorted(str(k) for k, v in snapshot.items() if type(v).__name__ == "SeamWrapper")
found = {}

# 1. before the host is imported
def exported():
    return {k: v for k, v in os.environ.items() if k.startswith(("WEIGHTLIFE", "VLLM_RAY"))}
environment = exported()
weightlife.install()
found["cheap"] = not {"vllm", "torch"} & sys.modules.keys()
for name in MODULES:
    importlib.import_module(name)
found["early"] = wrapped(snap())
weightlife.uninstall()
found["early_after"] = wrapped(snap())

# 2. after it was imported, twice, with other settings
before = snap()
weightlife.install(storage="pinned")
weightlife.install(storage="adopted")
found["during"] = differences(before, snap())
found["states"] = {row["seam"]: row["state"] for row in weightlife.status()["seams"]}
weightlife.uninstall()
found["once"] = differences(before, snap())

# 3. modules imported in between took the wrapper by name
weightlife.install()
folder = pathlib.Path(sys.modules[MODULES[0]].__file__).parent
late = []
for path in sorted(folder.glob("*_loader.py")):
    name = f"{MODULES[0]}.{path.stem}"
    if name not in sys.modules and "initialize_model" in path.read_text():
        try:
            late.append(importlib.import_module(name))
        except ImportError:
            continue
sample = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("vllm_third_party_loader", None))
exec("from vllm.model_executor.model_loader.utils import initialize_model", vars(sample))
sys.modules["vllm_third_party_loader"] = sample
late.append(sample)
def held():
    return [type(vars(module)["initialize_model"]).__name__ for module in late if "initialize_model" in vars(module)]
found["late_during"] = held()
weightlife.uninstall()
found["late_after"] = held()
found["again"] = differences(before, {k: v for k, v in snap().items() if k in before})
found["environment"] = exported() == environment
print(json.dumps(found))
"""


def test_every_attribute_of_the_real_host_is_identical_after_uninstall() -> None:
    found = child(f"MODULES = {REAL_MODULES!r}\n{SNAPSHOT}", VLLM_LOGGING_LEVEL="ERROR")
    assert found["cheap"], "install must import neither the host nor torch"
    assert any("initialize_model" in name for name in found["early"])
    assert any("BaseModelLoader" in name and "load_model" in name for name in found["early"])
    assert found["early_after"] == []
    assert len(found["during"]) >= 6
    assert found["once"] == []
    assert set(found["late_during"]) == {"SeamWrapper"}
    assert set(found["late_after"]) == {"function"}
    assert found["again"] == []
    assert found["environment"]
    for seam in ("initialize_model", "process_weights_after_loading", "load_model", "get_model_loader"):
        assert found["states"][seam] == "wrapped", found["states"]
