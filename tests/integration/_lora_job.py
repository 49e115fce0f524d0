# SPDX-License-Identifier: Apache-2.0
"""Child process of test_lora.py: an engine with adapters whose base weights are updated."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weightlife.testing import oracle

RANK = 8


def adapter(base: Path, folder: Path) -> Path:
    """An adapter of all linear layers of `base`, with values large enough to change every answer."""
    from weightlife.testing.checkpoints import tensors

    generator = torch.Generator().manual_seed(7)
    content, modules = {}, set()
    for name, tensor in tensors(base).items():
        layer = name.removesuffix(".weight")
        if "_proj" not in layer or tensor.ndim != 2:
            continue
        modules.add(layer.rsplit(".", 1)[1])
        rows, columns = tensor.shape
        for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
            value = torch.randn(shape, generator=generator) * 0.2
            content[f"base_model.model.{layer}.{part}.weight"] = value.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(content, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": sorted(modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return folder


class Engine:
    """One engine, and its answers with the adapter and without."""

    def __init__(self, folder: str, adapter: Path, **more: Any) -> None:
        from vllm import LLM

        self.adapter = adapter
        arguments = oracle.engine_arguments(folder, enable_lora=True, max_lora_rank=RANK, max_loras=1, **more)
        self.llm = LLM(**arguments)

    def answers(self) -> dict[str, Any]:
        """Tokens and top-20 log-probabilities, as text where NaN is equal to itself; and hashes of base weights."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        plain = oracle.fingerprint(self.llm)
        self.llm.reset_prefix_cache()
        out = self.llm.generate(
            [{"prompt_token_ids": list(p)} for p in oracle.PROMPTS],
            SamplingParams(temperature=0.0, max_tokens=8, logprobs=20, ignore_eos=True),
            lora_request=LoRARequest("x", 1, str(self.adapter)), use_tqdm=False,
        )  # fmt: skip
        adapted = [
            [list(o.outputs[0].token_ids),
             [sorted((k, v.logprob.hex()) for k, v in d.items()) for d in o.outputs[0].logprobs or ()]]
            for o in out
        ]  # fmt: skip
        return {"plain": [plain["tokens"], plain["logprobs"]], "adapted": adapted}


def main(a: str, b: str, scratch: str, way: str, ranks: int) -> dict[str, Any]:
    """`way` "cold": what B answers under stock. Else what A, a refused update, and B by `way` answer."""
    under = way != "cold"
    if under:
        import weightlife

        weightlife.install(handshake="strict")
    oracle.poison()
    engine = Engine(a if under else b, adapter(Path(a), Path(scratch)), tensor_parallel_size=ranks)
    if not under:
        return {"b": engine.answers()}
    from tests.integration.ways import WAYS

    found: dict[str, Any] = {"a": engine.answers()}
    broken = {"folder": b, "names": ["model.layers.0.self_attn.q_proj.weight"]}
    try:
        engine.llm.collective_rpc("start_weight_update")
        engine.llm.collective_rpc("update_weights", kwargs={"update_info": broken})
        engine.llm.collective_rpc("finish_weight_update")
        found["error"] = ""
    except Exception as error:  # noqa: BLE001 - the test looks at what was heard
        found["error"] = str(error)
    found["a again"] = engine.answers()
    WAYS[way].run(engine.llm, Path(b), Path(a))
    found["b"] = engine.answers()
    found["reports"] = [[r.outcome, r.operation] for r in weightlife.last_reports(engine.llm)]
    return found


if __name__ == "__main__":
    several = int(sys.argv[5]) > 1
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="1" if several else "0", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR", VLLM_WORKER_MULTIPROC_METHOD="spawn", OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind", WEIGHTLIFE_POISON="1", WEIGHTLIFE_TEST_POISON="1",
    )  # fmt: skip
    print("RESULT " + json.dumps(main(*sys.argv[1:5], int(sys.argv[5]))), flush=True)
