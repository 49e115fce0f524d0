# SPDX-License-Identifier: Apache-2.0
"""Child process of test_digests.py: an engine with `digests="commit"`, tables of a sender, and faults in live memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


class DigestExtension:
    """Worker methods that do what a broken transport or a stray write does."""

    def digest_fault(self, path: str, kind: str, rank: int | None = None) -> bool:
        """Flip one bit of a live tensor, or exchange two of its 16-byte blocks; again undoes it.

        Returns whether that changed a byte. `rank`: on this one alone.
        """
        import torch

        if rank is not None and self.rank != rank:  # type: ignore[attr-defined]
            return False
        from weightlife._engine import lifecycle, runtime

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        host = lifecycle.of(model).host  # type: ignore[union-attr]
        tensor = dict(runtime.tensors(model, host.skip, host.transient))[path]
        start = tensor.storage_offset() * tensor.element_size()
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[start:]  # type: ignore[call-overload]
        if kind == "bit":
            memory[min(7, tensor.numel() * tensor.element_size() - 1)] ^= 1 << 4
            return True
        size = tensor.numel() * tensor.element_size() // 32 * 16
        if not tensor.is_contiguous() or not size:
            return False
        first, second = memory[:16], memory[size : size + 16]
        changed = not torch.equal(first, second)
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
        return changed

    def digest_update(self, folder: str, spoil: str) -> str:
        """Reload from an iterator over a folder, in which one bit of the tensor `spoil` is wrong."""
        import torch

        from weightlife.testing.checkpoints import tensors

        weights = tensors(Path(folder))
        if spoil:
            weights[spoil] = weights[spoil].clone()
            weights[spoil].view(-1).view(torch.uint8)[3] ^= 1
        try:
            self.model_runner.reload_weights(weights_iterator=iter(weights.items()))  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - the test judges what the client hears
            return f"{type(error).__name__}: {error}"
        return ""


def main(a: Path, b: Path, faults: int) -> dict[str, Any]:
    """Load A, update to B, go back under a table; seed `faults` faults of each kind."""
    import weightlife
    from weightlife import digests
    from weightlife.testing import checkpoints, oracle

    weightlife.install(digests="commit")
    from vllm import LLM

    llm = LLM(
        **oracle.engine_arguments(
            a,
            worker_extension_cls="tests.integration._digest_job.DigestExtension",
            weight_transfer_config=None,
        )
    )
    prompts: Any = [{"prompt_token_ids": list(p)} for p in oracle.PROMPTS]

    def wrong() -> list[str]:
        llm.generate(prompts, use_tqdm=False)
        return [str(difference) for difference in weightlife.check_digests(llm)]

    cold = weightlife.digest(llm)
    found: dict[str, Any] = {"clean": [wrong()]}
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(b)})
    found["clean"].append(wrong())
    found["changed"] = len(digests.compare(cold, weightlife.digest(llm)))

    table = digests.digest_table(checkpoints.tensors(a))
    spoilt = max(table["tensors"], key=lambda name: table["tensors"][name]["shape"])
    weightlife.expect(llm, table)
    found["spoilt"] = spoilt
    found["heard"] = llm.collective_rpc("digest_update", args=(str(a), spoilt))
    found["clean"].append(wrong())  # B still serves, untouched
    found["then"] = llm.collective_rpc("digest_update", args=(str(a), ""))
    found["clean"].append(wrong())
    # Back on A: what the engine holds is what a cold load of A holds, but for where it was allocated.
    found["back"] = [str(d) for d in digests.compare(cold, weightlife.digest(llm))]

    sizes = {
        path: item for path, item in weightlife.digest(llm)[0]["tensors"].items() if 0 not in item["shape"]
    }
    step = max(1, len(sizes) // faults)
    found["faults"] = []
    for path in list(sizes)[::step]:
        for kind in ("bit", "swap"):
            if llm.collective_rpc("digest_fault", args=(path, kind))[0]:
                said = [difference.name for difference in weightlife.check_digests(llm)]
                found["faults"].append([path, kind, path in said, len(said)])
            llm.collective_rpc("digest_fault", args=(path, kind))
    found["clean"].append([str(difference) for difference in weightlife.check_digests(llm)])
    found["tensors"] = len(sizes)
    report = weightlife.last_report(llm)
    assert report is not None
    found["seconds"] = {phase.name: round(phase.seconds, 5) for phase in report.phases}
    return found


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING=sys.argv[3], VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
        WEIGHTLIFE_POISON="1",
    )  # fmt: skip
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), 12)), flush=True)
