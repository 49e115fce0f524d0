# SPDX-License-Identifier: Apache-2.0
"""Prove that a layer survives updates: `prove` loads it, updates it, breaks an update, and compares with cold loads.

For authors of models and kernels: a layer, its loader, two sets of weights, and a call that uses it. Nothing of vLLM is
needed. What is compared with is made by the layer's own code in another instance, without weightlife.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import weightlife
from weightlife.testing._poison import poisoned
from weightlife.testing._walk import digests
from weightlife.testing.contract import Addresses, Captured

__all__ = ["Proof", "cold", "prove"]

HOOK = "process_weights_after_loading"
Weights = Mapping[str, torch.Tensor]
Load = Callable[[Any, Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass
class Proof:
    """What was seen. `problems` is empty where the layer is proven.

    `strategies`: module path -> (direct, rebuild or refuse; why). `kept`: paths of tensors that a hook handed out again
    as they were; they are equal to a cold load's, or they would be among the problems.
    """

    problems: list[str] = field(default_factory=list)
    strategies: dict[str, tuple[str, str]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


def _process(model: nn.Module) -> None:
    """Hooks as `weightlife.hosts.torch` orders them: layers, deferred ones, the root."""
    hooked = [module for module in model.modules() if callable(getattr(module, HOOK, None))]
    late = [module for module in hooked if getattr(module, "deferred", False) and module is not model]
    for module in [*(m for m in hooked if m not in late and m is not model), *late]:
        getattr(module, HOOK)()
    if model in hooked:
        getattr(model, HOOK)()


def cold(
    make: Callable[[], nn.Module],
    load: Load,
    weights: Weights,
    process: Callable[[Any], object] = _process,
    seed: int = 0,
) -> nn.Module:
    """A fresh instance, loaded and processed once, without weightlife."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        load(model, iter(weights.items()))
        process(model)
    return model


def prove(
    make: Callable[[], nn.Module],
    load: Load,
    a: Weights,
    b: Weights,
    run: Callable[[Any], Any],
    *,
    process: Callable[[Any], object] = _process,
    host: Callable[[nn.Module], Any] | None = None,
    **settings: Any,
) -> Proof:
    """Load A, update to B and back, break an update, update again; hold each against a cold load.

    Args:
        make: builds the module. It is called several times, each time after the same seed.
        load: a loader, ``load(model, weights)``, weights being an iterable of (name, tensor).
        a: the weights of the first load.
        b: other weights of the same names.
        run: one pass, ``run(model)``; its result is compared bit by bit.
        process: the processing after a cold load; by default every method ``process_weights_after_loading``, in the
            order of `weightlife.hosts.torch`.
        host: makes the host protocol of a module, if it is another than `TorchHost`.
        settings: as for `weightlife.install`; by default ``storage="pinned"``.

    Raises:
        AssertionError: something is not as after a cold load, or moved: every problem, with its path.
    """
    with poisoned(), torch.no_grad():
        proof = _prove(make, load, dict(a), dict(b), run, process, host, {"storage": "pinned", **settings})
    if proof.problems:
        raise AssertionError("\n".join([f"{len(proof.problems)} problems", *proof.problems]))
    return proof


def _prove(
    make: Callable[[], nn.Module],
    load: Load,
    a: dict[str, torch.Tensor],
    b: dict[str, torch.Tensor],
    run: Callable[[Any], Any],
    process: Callable[[Any], object],
    host: Callable[[nn.Module], Any] | None,
    settings: dict[str, Any],
) -> Proof:
    proof = Proof()
    # All instances live until the end, and each load is made twice: a cache by `id(self)` or by address would else hand
    # the entry of a dead instance to the next one at the same place, and make the cold load of B as stale as the update.
    want: dict[str, Any] = {}
    alive = []
    for name, weights in (("A", a), ("B", b), ("B", b), ("A", a)):
        alive.append(cold(make, load, weights, process))
        seen = (digests(alive[-1]), _bits(run(alive[-1])))
        if want.setdefault(name, seen) != seen:
            proof.problems.append(
                f"two cold loads of {name} differ: the layer is not determined by its weights, or reads state outside it"
            )
    if want["A"][1] == want["B"][1]:
        proof.problems.append(
            "cold loads of A and B give the same result of a pass, so that no update can be told from a lost one: choose "
            "weights that differ in it, or look for state outside the layer (a cache by name) that the load of A filled"
        )
    torch.manual_seed(0)
    model = make()
    weightlife.watch(model, None if host is None else host(model), **settings)
    update = weightlife.wrap_loader(load)
    update(model, iter(a.items()))
    _compare(proof, "the first load", model, run, want["A"])
    graph, addresses = Captured(lambda: run(model), model), Addresses(model)
    weightlife.seal(model, "weightlife.testing.prove")
    for step, weights, name in (("update to B", b, "B"), ("update back to A", a, "A")):
        try:
            update(model, iter(weights.items()))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a problem of the layer
            proof.problems.append(f"{step}: {weightlife.errors.safe_text(error)}")
            continue
        _compare(proof, step, model, run, want[name])
        proof.problems += [f"{step}: {line}" for line in addresses.moved(model) + graph.problems()]
    broken = dict(list(b.items())[:-1])
    if broken:
        try:
            update(model, iter(broken.items()))
        except weightlife.errors.WeightlifeError:
            pass
        else:
            proof.problems.append("an update that lacks its last tensor was taken")
        _compare(proof, "after a refused update", model, run, want["A"])
    report = weightlife.last_report(model)
    if report is not None:
        proof.strategies = {layer.name: (layer.strategy, layer.reason) for layer in report.layers}
        proof.kept = [c["path"] for c in report.contract_changes if c["kind"] == "kept"]
    return proof


def _compare(proof: Proof, step: str, model: nn.Module, run: Callable[[Any], Any], want: Any) -> None:
    held, output = want
    now = digests(model)
    for what in ("tensors", "aliases"):
        for path in {**held[what], **now[what]}:
            if held[what].get(path) != now[what].get(path):
                proof.problems.append(
                    f"{step}: {path}: {now[what].get(path, 'gone')}, cold {held[what].get(path, 'absent')}"
                )
    if _bits(run(model)) != output:
        proof.problems.append(f"{step}: the result of a pass is not that of a cold load")


def _bits(result: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """A result as plain data: every tensor in it, exactly."""
    from torch.utils._pytree import tree_leaves

    out = []
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            data = leaf.detach().cpu().contiguous()
            out.append(
                (str(data.dtype), tuple(data.shape), data.reshape(-1).view(torch.uint8).numpy().tobytes())
            )
        else:
            out.append((type(leaf).__name__, (), repr(leaf).encode()))
    return out
