# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own, told what to do by JSON lines on its standard input.

    python benchmarks/_child.py stock|weightlife

Answers come as JSON lines on standard output; what vLLM prints goes to standard error.
"""

from __future__ import annotations

import copy
import functools
import gc
import hashlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _memory import measured, peak_of, trim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLUGIN = "weightlife"
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [50, 60, 70]]


class Engine:
    """An `LLM`, with or without weightlife, and what can be measured on it."""

    def __init__(self, side: str) -> None:
        self.weightlife = side == "weightlife"
        if self.weightlife:
            os.environ["WEIGHTLIFE"] = "1"
        else:
            # Stock means that nothing of weightlife runs, its inert plugin included.
            others = importlib.metadata.entry_points(group="vllm.general_plugins")
            os.environ["VLLM_PLUGINS"] = ",".join(point.name for point in others if point.name != PLUGIN)
            os.environ["WEIGHTLIFE"] = "0"
        import vllm
        from vllm.model_executor.model_loader import base_loader, default_loader  # noqa: F401

        self.vllm = vllm
        self.llm: Any = None
        self.parts: dict[str, dict[str, float]] = {}
        self.held: dict[str, list[tuple[str, Any]]] = {}

    # -- measuring inside the load ---------------------------------------------------------------------------------

    def _time_parts(self) -> None:
        """Time construction, `load_weights` and processing from outside: whatever wraps them is inside."""
        from vllm.model_executor.model_loader import base_loader, default_loader

        loader = default_loader.DefaultModelLoader
        base_loader.initialize_model = self._timed("construct", base_loader.initialize_model)
        loader.load_weights = self._timed("load", loader.load_weights)
        base_loader.process_weights_after_loading = self._timed(
            "process", base_loader.process_weights_after_loading
        )

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with measured(self.parts.setdefault(part, {}), collect=False):
                return call(*args, **kwargs)

        return timed

    def _load_phase(self) -> dict[str, Any]:
        """`load_weights` and processing as one figure, and the seconds of each part."""
        load, process = self.parts["load"], self.parts["process"]
        out: dict[str, Any] = {key: load[key] + process[key] for key in load}
        return {**out, "parts": {part: values["seconds"] for part, values in self.parts.items()}}

    # -- commands --------------------------------------------------------------------------------------------------

    def start(self, model: str) -> dict[str, Any]:
        """Construct the engine (with weightlife: `install()` too) and answer a prompt."""
        out: dict[str, Any] = {}
        with measured(out):
            if self.weightlife:
                import weightlife

                weightlife.install()
            self._time_parts()
            self.llm = self.vllm.LLM(
                model,
                skip_tokenizer_init=True,
                enforce_eager=True,
                block_size=32,
                max_model_len=256,
                dtype="bfloat16",
                seed=0,
            )
        self._check_side()
        return {**out, "load_phase": self._load_phase(), "answer": self.answer()}

    def _check_side(self) -> None:
        """A figure under a wrong name is worse than none."""
        if not self.weightlife:
            assert "weightlife" not in sys.modules, "weightlife was imported into the stock process"
            return
        from weightlife._engine import lifecycle
        from weightlife._models import find_model

        life = lifecycle.of(find_model(self.llm))
        status = "none" if life is None else life.status
        assert status == "ready", f"weightlife does not manage the model: {status}"

    def settle(self, release: bool = False) -> dict[str, Any]:
        """Collect garbage; with `release`, hand memory back to the system as well."""
        trim() if release else gc.collect()
        return {}

    def load(self) -> dict[str, Any]:
        """A first load of another model object in the warm process: construction, `load_weights`, processing."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader

        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        config = copy.copy(runner.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        gc.collect()
        with set_current_vllm_config(config):
            model = get_model_loader(config.load_config).load_model(config, config.model_config)
        del model
        gc.collect()
        return self._load_phase()

    def hooks(self) -> dict[str, Any]:
        """What the host's own hook of the largest layer needs in a cold load: that layer as it was loaded, and more.

        Another model object is loaded in the warm process. Private memory is read by a thread while the hook runs; the
        level is that before the layer was loaded, so its parameters are added.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import base_loader, get_model_loader

        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        config = copy.copy(runner.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        found: dict[str, Any] = {"bytes": 0, "peak_bytes": 0}

        def process(model: Any, *_: Any) -> None:
            for layer in model.modules():
                hook = getattr(getattr(layer, "quant_method", None), "process_weights_after_loading", None)
                size = sum(p.nbytes for p in layer.parameters(recurse=False))
                if hook is None or size < found["bytes"]:
                    continue
                trim()
                with peak_of() as over:
                    hook(layer)
                found.update(bytes=size, peak_bytes=size + over[0])

        stock, base_loader.process_weights_after_loading = base_loader.process_weights_after_loading, process
        try:
            with set_current_vllm_config(config):
                model = get_model_loader(config.load_config).load_model(config, config.model_config)
        finally:
            base_loader.process_weights_after_loading = stock
        del model
        trim()
        return found

    def hold(self, paths: list[str]) -> dict[str, Any]:
        """Read checkpoints into memory of this process, as a trainer beside it would have them."""
        from safetensors import safe_open

        self.held.clear()
        for path in paths:
            tensors = self.held[path] = []
            for shard in sorted(Path(path).glob("*.safetensors")):
                with safe_open(shard, framework="pt") as file:
                    tensors += [(name, file.get_tensor(name).clone()) for name in file.keys()]  # noqa: SIM118
        return {"bytes": sum(t.nbytes for _, t in self.held[paths[0]]) if paths else 0}

    def reload(self, path: str, source: str, mode: list[str]) -> dict[str, Any]:
        """One `reload_weights`, by path or from tensors in memory, and an answer after it."""
        if self.weightlife:
            self._set_mode(*mode)
        if source == "path":
            kwargs: dict[str, Any] = {"weights_path": path}
        else:
            kwargs = {"weights_iterator": self._stream(path)}
        out: dict[str, Any] = {}
        with measured(out):
            self.llm.collective_rpc("reload_weights", kwargs=kwargs)
        if self.weightlife:
            import weightlife

            report = weightlife.last_report(self.llm)
            assert report is not None
            out["phases"] = {phase.name: phase.seconds for phase in report.phases}
            out["mode"] = f"{report.isolation}/{report.storage}"
            if report.outcome != "committed":
                raise RuntimeError(f"the reload ended {report.outcome}: {report.error}")
        return {**out, "answer": self.answer()}

    def verify(self, path: str, layers: float = 1.0, seed: int = 0) -> dict[str, Any]:
        """One `weightlife.verify` against a checkpoint, and an answer after it."""
        import weightlife

        out: dict[str, Any] = {}
        with measured(out):
            report = weightlife.verify(self.llm, path, layers=layers, seed=seed)
        (rank,) = report.ranks
        return {
            **out, "ok": report.ok, "differences": len(rank.differences), "largest_bytes": rank.largest_bytes,
            "bytes": rank.bytes, "probed": rank.probed, "phases": rank.phases, "groups": rank.groups,
            "answer": self.answer(),
        }  # fmt: skip

    def _stream(self, path: str) -> Iterator[tuple[str, Any]]:
        yield from self.held[path]

    def _set_mode(self, isolation: str, storage: str, undo: str) -> None:
        """Another isolation, storage and undo for the next session on the live model."""
        import weightlife
        from weightlife._engine import lifecycle
        from weightlife._models import find_model

        chosen = {
            "isolation": isolation,
            "storage": storage,
            "undo_budget_bytes": 0 if undo == "no undo" else None,
        }
        weightlife.install(**chosen)
        life = lifecycle.of(find_model(self.llm))
        assert life is not None
        life.settings = life.settings.replace(**chosen)

    def answer(self) -> str:
        """Digest of greedy tokens and top-20 log-probabilities: equal weights give equal digests."""
        self.llm.reset_prefix_cache()
        sampling = self.vllm.SamplingParams(
            temperature=0, max_tokens=3, logprobs=20, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
        outputs = [o.outputs[0] for o in self.llm.generate(prompts, sampling, use_tqdm=False)]
        content = [
            (list(out.token_ids), [sorted((i, p.logprob) for i, p in step.items()) for step in out.logprobs])
            for out in outputs
        ]
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    def versions(self) -> dict[str, Any]:
        """What runs here."""
        import torch

        return {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "vllm": self.vllm.__version__,
            "threads": torch.get_num_threads(),
        }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine(sys.argv[1])
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        try:
            out = getattr(engine, command.pop("do"))(**command)
        except Exception as error:  # noqa: BLE001 - the parent decides; the traceback is in our log
            import traceback

            traceback.print_exc()
            out = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(out) + "\n")
        sys.stderr.flush()
    answers.flush()
    os._exit(0)  # the engine's own teardown takes seconds and is not measured


if __name__ == "__main__":
    main()
