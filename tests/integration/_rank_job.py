# SPDX-License-Identifier: Apache-2.0
"""Child process of test_ranks.py: two tensor-parallel ranks, and a rank that receives something else."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.integration._rank_client import HANDLES, ClientExtension, find, find_nothing


class RankExtension(ClientExtension):
    """Worker methods of a client whose ranks may disagree."""

    def ranks_update(self, folder: str, odd_rank: int, drop: str, by: str, spoil: str = "") -> str:
        """Start, stream a folder without `drop` on the odd rank, finish. Returns the error, or nothing.

        `spoil`: a tensor of which that rank gets another value in one place.
        """
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        from weightlife.testing.checkpoints import tensors

        runner = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        odd = self.rank == odd_rank  # type: ignore[attr-defined]
        weights = [(n, t) for n, t in tensors(Path(folder)).items() if not (odd and n == drop)]
        if odd and spoil:
            weights = [(n, t.clone()) for n, t in weights]
            dict(weights)[spoil].view(-1)[5] += 1
        if odd and by == "fails":
            weights = [
                *weights[: len(weights) // 2],
                ("model.layers.0.input_layernorm.weight", weights[0][1][:1]),
            ]
        try:
            if by == "iterator":
                runner.reload_weights(weights_iterator=iter(weights))
                return ""
            initialize_layerwise_reload(model)
            try:
                model.load_weights(weights)
            finally:
                finalize_layerwise_reload(model, runner.model_config)
        except Exception as error:  # noqa: BLE001 - the test compares what each rank heard
            return f"{type(error).__name__}: {error}"
        return ""

    def ranks_lost(self, odd_rank: int, lost: bool) -> None:
        """One rank's embedding takes itself for another rank's, or no longer does."""
        import dataclasses

        layer = self.model_runner.get_model().model.embed_tokens  # type: ignore[attr-defined]
        if self.rank == odd_rank:  # type: ignore[attr-defined]
            if lost:
                self._right = layer.shard_indices
                size = layer.shard_indices.org_vocab_end_index - layer.shard_indices.org_vocab_start_index
                layer.shard_indices = dataclasses.replace(
                    layer.shard_indices, org_vocab_start_index=0, org_vocab_end_index=size
                )
            else:
                layer.shard_indices = self._right

    def ranks_raise(self, odd_rank: int) -> None:
        """Fail on one rank, or on all (-2)."""
        if odd_rank in (-2, self.rank):  # type: ignore[attr-defined]
            raise ValueError(f"rank {self.rank} fails")  # type: ignore[attr-defined]

    def ranks_echo(self, value: int) -> list[int]:
        """Rank and value."""
        return [self.rank, value]  # type: ignore[attr-defined]

    def ranks_sdk(self) -> list[str]:
        """What is loaded of OpenTelemetry's SDK and exporters."""
        return sorted(n for n in sys.modules if n.startswith(("opentelemetry.sdk", "opentelemetry.exporter")))

    def ranks_sleep(self, seconds: float) -> None:
        """Be late."""
        time.sleep(seconds)


def main(a: str, b: str) -> dict[str, Any]:
    """Run every disagreement and say what each rank heard and whether A still serves."""
    import weightlife

    weightlife.install(handshake="strict")
    from vllm import LLM

    from weightlife.testing import oracle

    llm = LLM(
        a, tensor_parallel_size=2, enforce_eager=True, block_size=32, max_model_len=256, dtype="bfloat16",
        worker_extension_cls="tests.integration._rank_job.RankExtension",
    )  # fmt: skip

    def answers() -> Any:
        llm.reset_prefix_cache()
        out = llm.generate(
            [{"prompt_token_ids": list(p)} for p in oracle.PROMPTS], oracle_parameters(), use_tqdm=False
        )
        return [
            [
                list(o.outputs[0].token_ids),
                [sorted((k, v.logprob) for k, v in d.items()) for d in o.outputs[0].logprobs],
            ]
            for o in out
        ]

    before = answers()
    found: dict[str, Any] = {"sdk": llm.collective_rpc("ranks_sdk"), "telemetry": weightlife.status(llm)}
    found["client"] = client(llm, Path(b), answers)
    llm.collective_rpc("client_reload", args=(a, "rightly"))
    found["declared"] = declared(llm, a, b)
    llm.collective_rpc("ranks_update", args=(a, -1, "", "iterator"))
    last = "model.norm.weight"
    for name, (by, drop) in {
        "missing on one rank, by iterator": ("iterator", last),
        "missing on one rank, by start and finish": ("layerwise", "model.layers.1.mlp.down_proj.weight"),
        "a direct tensor missing on one rank": ("layerwise", last),
        "one rank's loader raises": ("fails", ""),
    }.items():
        heard = llm.collective_rpc("ranks_update", args=(b, 1, drop, by))
        found[name] = {"heard": heard, "a_serves": answers() == before, "ids": ids(llm)}
    for name, by in {"by iterator": "iterator", "by start and finish": "layerwise"}.items():
        heard = llm.collective_rpc(
            "ranks_update", args=(b, 1, "", by, "model.layers.1.input_layernorm.weight")
        )
        found[f"one value on one rank, {name}"] = {"heard": heard, "a_serves": answers() == before}
    agreed = llm.collective_rpc("ranks_update", args=(b, -1, "", "layerwise"))
    found["agreed"] = {"heard": agreed, "changed": answers() != before}
    found["ids"] = ids(llm)
    llm.collective_rpc("ranks_update", args=(a, -1, "", "iterator"))
    found["back"] = {"a_serves": answers() == before}
    llm.collective_rpc("ranks_lost", args=(1, True))
    heard = llm.collective_rpc("ranks_update", args=(b, -1, "", "iterator"))
    llm.collective_rpc("ranks_lost", args=(1, False))
    found["one shard on both ranks"] = {"heard": heard, "a_serves": answers() == before}
    found["in step"] = {"heard": [], "answers": []}
    for odd in (-2, 0, 1):  # every rank raises; one of them
        try:
            llm.collective_rpc("ranks_raise", args=(odd,))
        except Exception as error:  # noqa: BLE001
            found["in step"]["heard"].append(str(error))
        found["in step"]["answers"].append(llm.collective_rpc("ranks_echo", args=(odd,)))
        found["in step"]["answers"].append(llm.collective_rpc("ranks_echo", args=(odd,)))
    try:
        llm.collective_rpc("ranks_sleep", args=(1.5,), timeout=0.2)
    except Exception as error:  # noqa: BLE001
        found["in step"]["late"] = str(error)
    found["in step"]["answers"].append(llm.collective_rpc("ranks_echo", args=(7,)))
    found["in step"]["a_serves"] = answers() == before
    return found


def client(llm: Any, b: Path, answers: Any) -> dict[str, Any]:
    """A reload loader of a client's own that cuts a weight wrongly on two ranks, from the first update on."""
    import weightlife

    out: dict[str, Any] = {}
    before, held = answers(), weightlife.digest(llm)
    for how in (
        "the whole tensor", "the first shard", "the first shard, computed", "another dimension",
        "another dimension, computed",
    ):  # fmt: skip
        out[how] = {
            "heard": llm.collective_rpc("client_reload", args=(str(b), how)),
            "a_serves": answers() == before and weightlife.digest(llm) == held,
            "differs": [d.path for d in weightlife.verify(llm, b).differences]
            if how.endswith("n, computed")
            else None,
        }
    heard = llm.collective_rpc("client_reload", args=(str(b), "rightly"))
    out["rightly"] = {"heard": heard, "differs": [d.path for d in weightlife.verify(llm, b).differences]}
    return out


def declared(llm: Any, a: str, b: str) -> dict[str, Any]:
    """Storage in the workers, declared from here: by a path, by a finder; then a library that replaces it."""
    import weightlife

    module = "tests.integration._rank_client"
    refused = []
    for wrong in (
        lambda model: [], main, find_nothing, f"{module}:ABSENT", HANDLES.get,
    ):  # fmt: skip
        try:
            refused.append(str(weightlife.declare(llm, wrong)))
        except weightlife.errors.ConfigError as error:
            refused.append(str(error))
    out: dict[str, Any] = {"refused": refused, "left": llm.collective_rpc("client_declared")}
    out["paths"] = [weightlife.declare(llm, f"{module}:WORKSPACE['table']"), weightlife.declare(llm, find)]
    out["again"] = weightlife.declare(llm, find)
    out["on workers"] = llm.collective_rpc("client_declared")
    out["in digests"] = [
        sorted(name for name in table["tensors"] if name.startswith("tests."))
        for table in weightlife.digest(llm)
    ]
    out["replaced"] = llm.collective_rpc("client_replace", args=(b, [8]))
    out["sealed"] = weightlife.seal(llm, "a graph of a test")
    out["other size"] = llm.collective_rpc("client_replace", args=(a, [9]))
    return out


def ids(llm: Any) -> list[tuple[str, str, str]]:
    """Session, update and log line of each rank's last load."""
    import weightlife

    return [(r.session_id, r.update_id, r.summary_line()) for r in weightlife.last_reports(llm)]


def oracle_parameters() -> Any:
    """Greedy, with the top 20 log-probabilities."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=6, logprobs=20, ignore_eos=True)


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="0|1",
        VLLM_LOGGING_LEVEL="ERROR", VLLM_WORKER_MULTIPROC_METHOD="spawn", WEIGHTLIFE_POISON="1",
    )  # fmt: skip
    print("RESULT " + json.dumps(main(sys.argv[1], sys.argv[2])), flush=True)
