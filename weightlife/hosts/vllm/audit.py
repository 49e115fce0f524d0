# SPDX-License-Identifier: Apache-2.0
"""What post-load processing does here: ``python -m weightlife.hosts.vllm.audit`` prints JSON lines about it.

Of the implementations of ``process_weights_after_loading`` (`hooks`), as many as can be built on this machine are run,
twice on the same input, through the engine's own first load and reload, and what is left is compared. What can't be
built is only read, and the line says so. Runs in a process of its own: hooks call native code, which may
crash; then the caller starts it again without what crashed (``weightlife audit``).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from weightlife._engine.lifecycle import Lifecycle
from weightlife.config import Settings
from weightlife.errors import safe_text
from weightlife.hosts.vllm.adapter import VllmHost
from weightlife.hosts.vllm.forced import Chooser, supported
from weightlife.hosts.vllm.hooks import HOOK
from weightlife.hosts.vllm.recipes import SIZE, Layers, layer_recipes


class Bench:
    """One vLLM process without an engine: a group of one rank, and a configuration."""

    def __init__(self) -> None:
        import torch
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        self.torch = torch
        self.calls: list[str] = []
        self.config = VllmConfig()
        with set_current_vllm_config(self.config):
            folder = tempfile.mkdtemp(prefix="weightlife-audit-")
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        self.build = Layers(torch)
        self._wrapped: set[type] = set()

    def watch(self) -> None:
        """Note every hook that runs, of all classes that are imported by now."""
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm."):
                for cls in list(vars(module).values()):
                    if isinstance(cls, type) and HOOK in vars(cls) and cls not in self._wrapped:
                        self._wrapped.add(cls)
                        self._wrap(cls)

    def _wrap(self, cls: type) -> None:
        original = vars(cls)[HOOK]
        if not inspect.isfunction(original):
            return
        name = f"{cls.__module__}:{cls.__qualname__}"

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return original(*args, **kwargs)

        setattr(cls, HOOK, noted)

    def layer(self, make: Callable[[], Any]) -> dict[str, Any]:
        """Prove a layer of its own, with made-up values."""
        model_config = _ModelConfig(self.torch.bfloat16)
        with contextlib.suppress(Exception):  # a version that checks what is assigned does without
            self.config.model_config = model_config
        root = self.torch.nn.Module()

        def build() -> Any:
            root.layer = make()
            return root

        def load(stream: Any) -> None:
            parameters = dict(root.named_parameters())
            for name, tensor in stream:
                parameters[name].data.copy_(tensor)

        def host(model: Any) -> Any:
            made = VllmHost(model, self.config, model_config, self.torch.device("cpu"))
            # Nothing is tied, and a bare module has no hook of its own.
            made.before_processing = made.process_model = lambda: None  # type: ignore[method-assign]
            return made

        made: dict[str, Any] = {}

        def weights() -> Iterator[tuple[str, Any]]:
            made.update(made or self.build.weights(root))
            return iter(made.items())

        return self.prove(build, host, load, weights)

    def checkpoint(self, folder: str) -> dict[str, Any]:
        """Prove the whole model of a checkpoint, with its values. No engine is started."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.utils import initialize_model

        try:
            config = EngineArgs(
                model=folder, enforce_eager=True, skip_tokenizer_init=True, max_model_len=256
            ).create_engine_config()
        except Exception as error:  # noqa: BLE001 - what can't be built is what this is to find out
            return {"built": False, "why": safe_text(error)[:300]}
        loader: Any = get_model_loader(config.load_config)
        model_config = config.model_config
        before, self.config = self.config, config
        models: list[Any] = []

        def build() -> Any:
            models.append(initialize_model(config, model_config=model_config))
            return models[0]

        try:
            return self.prove(
                build,
                lambda model: VllmHost(model, config, model_config, self.torch.device("cpu")),
                lambda stream: models[0].load_weights(stream),  # noqa: PLW0108 - it is made later
                lambda: loader.get_all_weights(model_config, models[0]),
                model_config,
            )
        finally:
            self.config = before

    def prove(
        self,
        make: Callable[[], Any],
        host: Callable[[Any], Any],
        load: Callable[[Any], Any],
        weights: Callable[[], Any],
        model_config: Any = None,
    ) -> dict[str, Any]:
        """Build something, load and process it; load and process the same again; compare. Plain data."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import utils

        torch = self.torch
        config = model_config or _ModelConfig(torch.bfloat16)
        with set_current_vllm_config(self.config), _default_dtype(torch, config.dtype):
            try:
                root = make()
            except Exception as error:  # noqa: BLE001 - as above
                return {"built": False, "why": safe_text(error)[:300]}
            self.watch()
            self.calls.clear()
            # A layer without parameters (attention) is processed all the same.
            life = Lifecycle(root, host(root), Settings(empty="off"), False)
            if life.observed is not None or life.first is None:
                return {"built": False, "why": f"runs the host's own path: {life.observed}"}
            try:
                life.load_weights(load, weights())
                life.first.process(
                    lambda: utils.process_weights_after_loading(root, config, torch.device("cpu"))
                )
            except Exception as error:  # noqa: BLE001 - as above
                return {"built": False, "classes": self._called(),
                        "why": f"the first pass raised {safe_text(error)[:300]}"}  # fmt: skip
            return {"built": True, **self._again(life, load, weights)}

    def _called(self) -> list[str]:
        return list(dict.fromkeys(self.calls))

    def _again(
        self, life: Lifecycle, load: Callable[[Any], Any], weights: Callable[[], Any]
    ) -> dict[str, Any]:
        """The second pass, and what it left."""
        classes = self._called()
        try:
            before = life.digests.now()["tensors"]
        except Exception as error:  # noqa: BLE001 - as above
            return {
                "built": False,
                "classes": classes,
                "why": f"it can't be compared: {safe_text(error)[:300]}",
            }
        layers = {p.path: (p.strategy, p.reason) for p in life.plan.layers.values()}
        out: dict[str, Any] = {"classes": classes, "tensors": len(before)}
        refused = next((why for strategy, why in layers.values() if strategy == "refuse"), None)
        rebuilt = next((why for strategy, why in layers.values() if strategy == "rebuild"), None)
        if refused is not None:
            return {**out, "verdict": "unsafe", "why": f"an update is refused: {refused}"}
        try:
            with life.owned("audit"):
                session = life.open("audit", "reload", True, "forbid")
            life.load_weights(load, weights())
            life.finish("audit")
        except Exception as error:  # noqa: BLE001 - as above
            return {**out, "verdict": "unsafe",
                    "why": f"the second pass raised {safe_text(error)[:300]}"}  # fmt: skip
        after = life.digests.now()["tensors"]
        wrong = [path for path in {**before, **after} if before.get(path) != after.get(path)]
        kept = [c["path"] for c in session.report.contract_changes if c["kind"] == "kept"]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            return {**out, "verdict": "unsafe", "why": f"{wrong[0]}{more} differs after the second pass"}
        if rebuilt is None:
            return {**out, "verdict": "direct", "why": "processing changed nothing"}
        told = f"; {kept[0]} was handed out again" if kept else ""
        return {**out, "verdict": "rebuild", "why": rebuilt + told}


class _ModelConfig:
    """What layers ask of a model's configuration: a few answers, and None to everything else."""

    model = "audit"
    max_model_len = 256

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        """Absent is None, as most fields of a configuration are; configurations below it are such, too."""
        if name.startswith("__"):
            raise AttributeError(name)
        return _ModelConfig(self.dtype) if name.startswith("hf_") else None


@contextlib.contextmanager
def _default_dtype(torch: Any, dtype: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# -- the sweep ---------------------------------------------------------------------------------------------------


def sweep(
    say: Callable[[dict[str, Any]], None], skip: set[str], only: str = "", checkpoints: tuple[str, ...] = ()
) -> None:
    """Run everything that can be built, a line each: `begin`, then what came of it."""
    bench = Bench()

    def run(name: str, prove: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        if name in skip or only not in name:
            return None
        say({"begin": name})
        out = prove()
        say({"recipe": name, "forced": "", **out})
        return out

    for folder in checkpoints:
        run(f"checkpoint {folder}", lambda folder=folder: bench.checkpoint(folder))  # type: ignore[misc]
    chooser = Chooser()
    done: set[str] = set()
    told: set[str] = set()

    def forced(name: str, make: Callable[[], Any], cls: Any, table: str) -> None:
        label = f"{cls.__module__}:{cls.__qualname__}"
        if label in done:
            return

        def prove() -> dict[str, Any]:
            with chooser.forced(cls, table):
                return bench.layer(make)

        recipe = f"{name} by {cls.__qualname__}"
        if recipe in skip or only not in recipe:
            return
        say({"begin": recipe})
        out = prove()
        if out["built"]:
            done.add(label)
        # Of what can't be built, the first reason is told: each kernel is tried in many layers.
        if out["built"] or label not in told:
            told.add(label)
            why = supported(cls) if table else "vLLM would not choose it here"
            say({"recipe": recipe, "forced": why, "class": label, **out})

    for name, make in layer_recipes(bench.build):
        with chooser.spying() as spies:
            out = run(name, lambda make=make: bench.layer(make))  # type: ignore[misc]
        if out is not None and out["built"]:
            done.update(out["classes"])
        for table, spy in spies.items():
            for cls in chooser.kernels(table) if spy.asked else ():
                forced(name, make, cls, table)
        if name.endswith(" experts"):
            for cls in chooser.experts():
                forced(name, make, cls, "")


def _main() -> None:
    # stdout belongs to the answer: what the host prints there goes to stderr
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        answer.write(json.dumps(line) + "\n")
        answer.flush()

    orders = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    try:
        vllm: Any = importlib.import_module("vllm")
        say({"vllm": str(getattr(vllm, "__version__", "")), "size": SIZE})
        sweep(
            say,
            set(orders.get("skip", ())),
            str(orders.get("only", "")),
            tuple(orders.get("checkpoints", ())),
        )
        say({"done": True})
    except Exception as error:  # noqa: BLE001 - the caller prints it
        say({"error": safe_text(error)[:500]})
    answer.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a half-started host are nobody's business here


if __name__ == "__main__":
    _main()
