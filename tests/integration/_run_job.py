# SPDX-License-Identifier: Apache-2.0
"""Child process of test_stored_runs.py: an engine with two ranks that is told to keep its sessions by variables alone.

It gets a good update and one that lacks a tensor, and then dies without a farewell, as a pre-empted job does.
"""

from __future__ import annotations

import json
import os
import signal
import sys


def main(good: str, broken: str) -> None:
    """Load, update, fail; say what the client heard."""
    import multiprocessing

    from vllm import LLM

    llm = LLM(
        good, tensor_parallel_size=2, enforce_eager=True, block_size=32, max_model_len=256, dtype="bfloat16",
        skip_tokenizer_init=True, num_gpu_blocks_override=256,
    )  # fmt: skip
    heard = []
    for folder in (good, broken):
        try:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        except Exception as error:  # noqa: BLE001 - the test judges what the client hears
            heard.append(f"{type(error).__name__}: {error}")
    print("RESULT " + json.dumps(heard), flush=True)
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
