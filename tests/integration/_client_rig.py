# SPDX-License-Identifier: Apache-2.0
"""One engine under test, and the helpers of its scenarios."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weightlife.testing._source import names, read
from weightlife.testing.checkpoints import tensors
from weightlife.testing.worker_ext import spoil


@dataclass
class Rig:
    """One engine of one family, with the cold fingerprints of A and B."""

    llm: Any
    a: Path
    b: Path
    want: dict[Path, Any]
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def worker(self) -> Any:
        """The worker, as TRL reaches it."""
        return self.llm.llm_engine.model_executor.driver_worker

    @property
    def model(self) -> Any:
        """The model, as TRL reaches it."""
        return self.worker.model_runner.model

    def require(self, condition: bool, message: str) -> None:
        """Note a problem unless `condition`."""
        if not condition:
            self.problems.append(message)

    def equal(self, folder: Path, when: str) -> None:
        """The engine must equal a cold load of `folder` exactly."""
        from weightlife.testing import oracle

        found = oracle.differences(oracle.fingerprint(self.llm), self.want[folder])
        if found:
            self.problems.append(
                f"{when}: {len(found)} differences from a cold load of {folder.name}: {found[:4]}"
            )

    def answers(self, folder: Path, when: str) -> None:
        """Tokens and log-probabilities must equal those of a cold load; between passes the tree may show B."""
        from weightlife.testing import oracle

        got = {**oracle.fingerprint(self.llm), "ranks": self.want[folder]["ranks"]}
        found = oracle.differences(got, self.want[folder])
        if found:
            self.problems.append(
                f"{when}: {len(found)} differences from a cold load of {folder.name}: {found[:4]}"
            )

    def rpc(self, method: str, *args: Any) -> Any:
        """`collective_rpc` to the one worker."""
        return self.llm.collective_rpc(method, args=args)[0]

    def report(self) -> Any:
        """The last report."""
        import weightlife

        return weightlife.last_report(self.llm)

    def life(self) -> Any:
        """The engine's record of the model: the guard's table is about its session and generation."""
        from weightlife._engine import lifecycle

        return lifecycle.of(self.worker.model_runner.get_model())

    def add(self, tag: str, max_tokens: int = 20) -> list[str]:
        """Add the oracle's two short prompts (below one block: no prefix is cached) as running requests."""
        from vllm import SamplingParams

        from weightlife.testing import oracle

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=20, ignore_eos=True)
        for index, prompt in enumerate(oracle.PROMPTS[:2]):
            self.llm.llm_engine.add_request(f"{tag}-{index}", {"prompt_token_ids": list(prompt)}, sampling)
        return [f"{tag}-{index}" for index in range(2)]

    def steps(self, count: int | None = None) -> dict[str, Any]:
        """Step the engine; outputs of requests that finished, as plain data."""
        engine = self.llm.llm_engine
        out: dict[str, Any] = {}
        while engine.has_unfinished_requests() and (count is None or count > 0):
            for done in engine.step():
                if done.finished:
                    completion = done.outputs[0]
                    out[done.request_id.partition("-")[2]] = (
                        list(completion.token_ids),
                        completion.finish_reason,
                        [
                            sorted((int(t), float(e.logprob).hex()) for t, e in p.items())
                            for p in completion.logprobs or ()
                        ],
                    )
            count = None if count is None else count - 1
        return out


Scenario = Callable[[Rig], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Register a scenario under its name. It starts from an engine that serves A and notes what is wrong."""
    SCENARIOS[function.__name__] = function
    return function


def send(rig: Rig, folder: Path, wanted: list[str]) -> None:
    for name, tensor in read(folder, wanted):
        sent = tensor.clone()
        rig.model.load_weights([(name, sent)])
        spoil(sent)


def halves(rig: Rig) -> tuple[list[str], list[str]]:
    """Names of a checkpoint in two parts that cut a fused layer in two."""
    order = names(rig.b)
    first = next(n for n in order if ".q_proj." in n)
    return [first], [n for n in order if n != first]


def chunks(order: list[str], count: int) -> Iterator[list[str]]:
    size = -(-len(order) // count)
    for start in range(0, len(order), size):
        yield order[start : start + size]


def raised_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what it is, is the answer
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def variant(rig: Rig, name: str, make: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]) -> Path:
    """A third checkpoint, computed from A and B, beside them."""
    folder = rig.a.parent / f"client_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(rig.a, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    a, b = tensors(rig.a), tensors(rig.b)
    content = {n: make(n, a[n], b[n]).contiguous() for n in a}
    save_file(content, folder / "model.safetensors", {"format": "pt"})
    return folder


def every_seventh(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.clone().reshape(-1)
    out[::7] = b.reshape(-1)[::7]
    return out.reshape(a.shape)
