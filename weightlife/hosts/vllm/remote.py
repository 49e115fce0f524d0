# SPDX-License-Identifier: Apache-2.0
"""Questions to workers: one reserved private method on the worker carries plain data both ways.

vLLM refuses worker extensions whose attribute exists on `Worker`, so no public name is added there; it sends
callables only with insecure serialisation, so method names and plain data travel.
"""

from __future__ import annotations

import logging
from typing import Any

from weightlife import errors
from weightlife._version import __version__
from weightlife.hosts import runtime
from weightlife.hosts.vllm.adapter import VllmHost

METHOD = "_weightlife_rpc"


def answer(worker: Any, question: str, payload: dict[str, Any] | None = None) -> Any:
    """Answer in a worker. Runs as a method of the worker.

    Raises:
        HostError: an unknown question.
    """
    from weightlife import _api
    from weightlife._engine import lifecycle

    if question == "hello":
        rank = getattr(worker, "rank", 0)
        why = runtime.unproven(decide=True)
        return {
            "weightlife": __version__,
            "digest": runtime.settings().digest(),
            "rank": rank,
            "unproven": why,
        }
    if question == "observe":
        return runtime.degrade(str((payload or {}).get("why", "")))
    if question == "status":
        return _api.local_status()
    if question == "reports":
        model = worker.model_runner.get_model()
        life = lifecycle.of(model)
        return [] if life is None else [report.to_dict() for report in life.reports]
    if question == "abort":
        from weightlife.hosts.vllm import seams

        return seams.abort_update(worker, str((payload or {}).get("reason", "")))
    if question == "manifest":
        life = lifecycle.of(worker.model_runner.get_model())
        if life is None or life.observed is not None or life.first is not None:
            return None
        return _api.local_manifest(life, (payload or {}).get("checkpoint")).to_dict()
    if question == "scrub":
        return scrub(worker)
    if question == "generations":
        from weightlife.hosts.vllm import caches

        return caches.generations(worker)
    if question == "verify":
        from weightlife import _verify

        return _verify.local_verify(worker.model_runner.get_model(), **(payload or {})).to_dict()
    if question in ("digest", "check_digests", "expect"):
        return _integrity(worker, question, payload or {})
    if question in ("declare", "withdraw", "seal"):
        return _addressed(worker, question, payload or {})
    raise errors.HostError(f"unknown question {question!r}")


def call(worker: Any, payload: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the worker in the context of the front end's caller."""
    from weightlife.otel.carrier import attached

    method = getattr(worker, payload["method"], None)
    if method is None:  # in the host's words
        raise NotImplementedError(f"Method {payload['method']!r} is not implemented.")
    with attached(payload["carrier"]):
        return method(*args, **kwargs)


def method_of(method: Any, args: Any) -> Any:
    """The method that a `collective_rpc` means, also where it goes through the reserved one."""
    if method == METHOD and args and args[0] == "call":
        return args[1]["method"]
    return method


def _addressed(worker: Any, question: str, payload: dict[str, Any]) -> Any:
    from weightlife import _addresses

    model, given = worker.model_runner.get_model(), str(payload.get("text", ""))
    if question == "seal":
        return _addresses.local_seal(model, given)
    finder = bool(payload.get("finder"))
    if question == "declare":
        return _addresses.answer_declare(model, given, finder)
    if payload["new"][getattr(worker, "rank", 0)]:
        _addresses.local_withdraw(model, given, finder)
    return None


def _integrity(worker: Any, question: str, payload: dict[str, Any]) -> Any:
    from weightlife import _integrity as local

    model = worker.model_runner.get_model()
    if question == "digest":
        return local.local_digest(model)
    if question == "expect":
        return local.local_expect(model, payload["table"])
    return [difference.to_dict() for difference in local.local_check(model)]


def scrub(worker: Any) -> bool:
    """Zero the key-value caches if a former generation left NaN in them. Call it when no request is running.

    Masked slots of a block that is used again would spread it. A NaN anywhere in the model reaches the keys and
    values of every later layer, so the last cache tells for all: one layer's read, once a generation.
    """
    import torch

    from weightlife._engine import lifecycle

    runner = getattr(worker, "model_runner", None)
    life = lifecycle.of(runner.get_model()) if runner is not None else None
    caches = [
        c
        for c in getattr(runner, "kv_caches", ())
        if isinstance(c, torch.Tensor) and c.is_floating_point() and c.element_size() > 1 and c.numel()
    ]
    if (
        life is None
        or not caches
        or not isinstance(life.host, VllmHost)
        or life.host.scrubbed == life.generation
    ):
        return False
    life.host.scrubbed = life.generation
    # Extremes carry NaN: 5.6 ms for 128 MiB of bf16 on one core, where isfinite().all() takes 280.
    if all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(caches[-1])):
        return False
    for cache in caches:
        cache.zero_()
    life.note("the key-value caches held NaN of former weights and were zeroed")
    return True


def engine_of(target: Any) -> Any:
    """The outermost thing with a synchronous `collective_rpc`, or None."""
    for candidate in (target, getattr(target, "llm_engine", None), getattr(target, "model_executor", None)):
        if candidate is not None and callable(getattr(candidate, "collective_rpc", None)):
            return candidate
    return None


def ask(target: Any, question: str, payload: dict[str, Any] | None = None) -> list[Any]:
    """One answer a rank.

    Raises:
        HandshakeError: a worker runs without weightlife. HostError: `target` has no workers to ask.
    """
    engine = engine_of(target)
    if engine is None:
        raise errors.HostError(f"{type(target).__name__} has no collective_rpc")
    try:
        answers = engine.collective_rpc(METHOD, args=(question, payload))
    except Exception as error:
        known = errors.from_message(str(error))
        if known is not None:
            raise known from error
        if METHOD in str(error) or isinstance(error, (AttributeError, NotImplementedError)):
            raise errors.HandshakeError("a worker runs without weightlife") from error
        raise
    return list(answers)


def shake_hands(target: Any, policy: str) -> None:
    """Every worker runs the same weightlife with the same settings, and can enforce, or the user hears of it.

    Where one worker can only observe, all of them do from here on, and so does this process: ranks that enforce beside
    one that does not would end with different weights.

    Raises:
        HandshakeError: they differ, or one only observes, and the policy is `strict`.
    """
    if policy == "off" or not runtime.installed():
        return
    problem: errors.HandshakeError | None = None
    mine = (__version__, runtime.settings().digest())
    try:
        answers = ask(target, "hello")
        _observe_together(target, answers, policy)
        for other in answers:
            theirs = (other["weightlife"], other["digest"])
            if theirs != mine:
                problem = errors.HandshakeError(f"rank {other['rank']} runs {theirs}, this process {mine}")
    except errors.HandshakeError as error:
        problem = error
    if problem is None:
        return
    if policy == "strict":
        raise problem
    logging.getLogger("weightlife").error("%s", problem)


def _observe_together(target: Any, answers: list[Any], policy: str) -> None:
    why = [
        f"rank {other['rank']} only observes: {other['unproven']}"
        for other in answers
        if other.get("unproven")
    ]
    if not why or runtime.settings().mode == "observe":
        return
    if policy == "strict":
        raise errors.HandshakeError(why[0], hint="serve with a version that weightlife was tested with")
    if len(why) < len(answers):
        ask(target, "observe", {"why": why[0]})
    runtime.degrade(why[0])  # one line; none where this process has said it already
