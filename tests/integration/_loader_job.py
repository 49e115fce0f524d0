# SPDX-License-Identifier: Apache-2.0
"""Child process of test_loaders.py: engines whose first load is by a loader that somebody registered with vLLM.

python -m tests.integration._loader_job A B
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def register() -> list[str]:
    """Three loaders that override `load_model`, after vLLM's documentation: they process once, never, and twice."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from weightlife.testing import checkpoints

    class Registered(BaseModelLoader):
        times = 1

        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(iter(checkpoints.tensors(Path(model_config.model)).items()))

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            with set_default_torch_dtype(model_config.dtype):
                model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                self.load_weights(model, model_config)
                for _ in range(self.times):
                    process_weights_after_loading(model, model_config, self._device(vllm_config))
            return model.train() if self.times == 0 else model.eval()

        @staticmethod
        def _device(vllm_config: Any) -> Any:
            import torch

            return torch.device(vllm_config.device_config.device)

    for name, times in (("once", 1), ("never", 0), ("twice", 2)):
        register_model_loader(f"weightlife_{name}")(type(name, (Registered,), {"times": times}))
    return ["once", "never", "twice"]


def heard(call: Callable[[], Any]) -> str:
    """The name of what a call raised, and its kind where the host has one for it."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test judges it
        own = " NotImplementedError" if isinstance(error, NotImplementedError) else ""
        return type(error).__name__ + own
    return ""


def main(a: Path, b: Path) -> dict[str, Any]:
    """What is found with each loader."""
    import weightlife

    weightlife.install()
    from weightlife.testing import oracle

    want = {"a": oracle.cold(a), "b": oracle.cold(b)}
    return {name: measure(name, a, b, want) for name in register()}


def measure(name: str, a: Path, b: Path, want: dict[str, Any]) -> dict[str, Any]:
    """One loader: what its engine answers, then updates by iterator, by path, and with experts that may have moved."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from weightlife._engine import lifecycle
    from weightlife.testing import checkpoints, oracle

    arguments = {
        **oracle.engine_arguments(a, weight_transfer_config=None),
        "load_format": f"weightlife_{name}",
    }
    llm = LLM(**arguments)

    def serves(side: str) -> list[str]:
        return oracle.differences(oracle.fingerprint(llm), want[side])[:3]

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner  # type: ignore[union-attr]
    model = runner.get_model()
    life = lifecycle.of(model)
    assert life is not None
    here: dict[str, Any] = {"status": life.status, "training": model.training, "first": serves("a")}
    runner.reload_weights(weights_iterator=iter(checkpoints.tensors(b).items()))
    here["update"] = serves("b")
    # A loader without `get_all_weights` can't reload a path.
    here["notes"] = life.reports[0].notes
    here["by_path"] = heard(lambda: llm.collective_rpc("reload_weights", kwargs={"weights_path": str(a)}))
    here["refused"] = [life.reports[-1].outcome, life.reports[-1].error]
    here["after_path"] = serves("b")
    if name == "once":
        here.update(decorated(model, life, a, b, serves))
        parallel = life.host.vllm_config.parallel_config  # type: ignore[attr-defined]
        parallel.enable_eplb = True
        here["eplb"] = heard(lambda: model.load_weights(iter(checkpoints.tensors(a).items())))
        parallel.enable_eplb = False  # this build's sampler would look for moved experts
        here["after_eplb"] = serves("b")
    cleanup_dist_env_and_memory()
    return here


def decorated(model: Any, life: Any, a: Path, b: Path, serves: Callable[[str], list[str]]) -> dict[str, Any]:
    """What vLLM's decorator of `AutoWeightsLoader.load_weights` does for TorchAO: begin and end inside of a load."""
    from vllm.model_executor.model_loader.reload import set_torchao_reload_attrs

    from weightlife.testing import checkpoints

    set_torchao_reload_attrs(model, life.host.model_config)
    here: dict[str, Any] = {"decorated": []}
    for folder, side in ((a, "a"), (b, "b")):
        model.load_weights(iter(checkpoints.tensors(folder).items()))
        here["decorated"].append(serves(side))
        here["open"] = life.session is not None
    short = [
        item for item in checkpoints.tensors(a).items() if not item[0].endswith("0.self_attn.v_proj.weight")
    ]
    here["decorated_short"] = heard(lambda: model.load_weights(iter(short)))
    here["decorated_after"] = serves("b")
    here["decorated_reports"] = [report.outcome for report in list(life.reports)[-3:]]
    del model._do_torchao_reload, model._model_config
    return here


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
        OMP_WAIT_POLICY="PASSIVE", WEIGHTLIFE_POISON="1", WEIGHTLIFE_TEST_POISON="1",
    )  # fmt: skip
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))), flush=True)
