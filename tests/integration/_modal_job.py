# SPDX-License-Identifier: Apache-2.0
"""Child process of test_modal.py: the same image, asked about before and after an update, caches left alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

WAYS = ("path", "iterator", "transfer", "layerwise_direct", "bare_shuffled", "bare_processed")


def _ask(llm: Any, question: dict[str, Any]) -> list[Any]:
    """The answer of an image alone: shorter than a block, so that no block is cached."""
    from vllm import SamplingParams

    from weightlife.testing import _modal, oracle

    sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=20, ignore_eos=True)
    done = llm.generate(_modal.prompt(question), sampling, use_tqdm=False)[0].outputs[0]
    return [list(done.token_ids), [oracle._ranked(position) for position in done.logprobs]]


def _in_flight(llm: Any, question: dict[str, Any], way: str, target: Path, served: Path) -> bool:
    """A request with the image runs while the update comes, and ends. Whether it ended well."""
    from vllm import SamplingParams

    from tests.integration.ways import WAYS as ALL
    from weightlife.testing import _modal

    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.add_request("running", _modal.prompt(question), sampling)
    for _ in range(3):
        engine.step()
    ALL[way].run(llm, target, served)
    ended = []
    while engine.has_unfinished_requests():
        ended += [out for out in engine.step() if out.finished]
    return [len(out.outputs[0].token_ids) for out in ended] == [12]


def main(mode: str, a: Path, b: Path) -> dict[str, Any]:
    """For each way: does the image's answer equal a cold load's, alone and with a request in flight.

    Args:
        mode: cold, stock, stock-iterator or weightlife.
        a: the first checkpoint.
        b: the other one.
    """
    from vllm import LLM

    from tests.integration.ways import WAYS as ALL
    from weightlife.testing import _modal, oracle

    question = _modal.asked(a)
    assert question is not None
    if mode == "cold":
        return {"answer": _ask(LLM(**oracle.engine_arguments(b)), question)}
    if mode == "weightlife":
        import weightlife

        weightlife.install(storage="pinned")
    llm = LLM(**oracle.engine_arguments(a))
    found: dict[str, Any] = {"ways": {}}
    if mode != "weightlife":
        _ask(llm, question)
        try:
            ALL["iterator" if mode == "stock-iterator" else "transfer"].run(llm, b, a)
            return {"answer": _ask(llm, question)}
        except Exception as error:  # noqa: BLE001 - the test judges what the client hears
            return {"heard": f"{type(error).__name__}: {error}"}
    first = _ask(llm, question)
    for way in WAYS:
        ALL[way].run(llm, b, a)
        there = _ask(llm, question)
        ended = _in_flight(llm, question, way, a, b)
        found["ways"][way] = {"there": there, "in_flight": ended, "back": _ask(llm, question) == first}
    return found


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING=sys.argv[2], VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
        WEIGHTLIFE_POISON="1",
    )  # fmt: skip
    print("RESULT " + json.dumps(main(sys.argv[1], Path(sys.argv[3]), Path(sys.argv[4]))), flush=True)
