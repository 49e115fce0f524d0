# SPDX-License-Identifier: Apache-2.0
"""What hostile code does round an update, on a real engine: rows for `_field_jobs`.

Whatever is done, one of three things holds afterwards: the call raised and the old weights serve exactly; the call
was accepted and the new ones serve exactly; or the model is poisoned, and refuses passes until a complete update.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.integration._field_jobs import Bench, Weights

Change = Callable[[str, Any], Any]

INTERRUPTIONS = 8  # of each way


def heard(call: Callable[[], Any]) -> BaseException | None:
    """What a call raised, if anything."""
    try:
        call()
    except BaseException as caught:  # noqa: BLE001 - what was raised is the verdict
        return caught
    return None


def judged(bench: Bench, change: Callable[[], Any], context: str, may: str = "") -> BaseException | None:
    """Do something that brings the other checkpoint, or is refused. What was raised, if anything.

    Args:
        may: `raise` or `accept`, where only that is right.
    """
    error = heard(change)
    life = _life(bench)
    state = "accepted" if error is None else f"{type(error).__name__}: {str(error)[:160]}"
    bench.notes.append(f"{context}: {state}{' POISONED' if life.poisoned else ''}")
    bench.require(not (error is None and may == "raise"), f"{context}: accepted")
    bench.require(not (error is not None and may == "accept"), f"{context}: {state}")
    if life.poisoned:
        return error
    if error is not None:
        bench.serves(bench.served, f"{context} ({state})")
    elif bench.serves(bench.other, f"{context} (accepted)"):
        bench.served = bench.other
    return error


def done(call: Callable[[], Any]) -> Callable[[], None]:
    """Do it now, while something is exchanged; what comes back raises what was raised."""
    error = heard(call)

    def again() -> None:
        if error is not None:
            raise error

    return again


def healed(bench: Bench, context: str) -> None:
    """A complete update serves exactly, from wherever the model stands."""
    bench.update(f"after {context}", "iterator")


def _life(bench: Bench) -> Any:
    from weightlife._engine import lifecycle

    return lifecycle.of(bench.model)


def _each(weights: Weights, change: Change) -> Iterator[tuple[str, Any]]:
    for name, tensor in weights:
        yield name, change(name, tensor)


# -- tensors ---------------------------------------------------------------------------------------------------


def odd_tensors(bench: Bench) -> None:
    """Layouts, subclasses and wrappers of the right values; things that have no right values."""
    import torch

    class Sub(torch.Tensor):
        pass

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    def strided(_: str, t: Any) -> Any:
        wide = torch.zeros((*t.shape, 2), dtype=t.dtype) if t.dim() else t
        return wide[..., 1].copy_(t) if t.dim() else t

    def grad(_: str, t: Any) -> Any:
        return t.clone().requires_grad_() if t.is_floating_point() else t

    good: dict[str, Change] = {
        "strided": strided,
        "transposed twice": lambda _, t: t.t().contiguous().t() if t.dim() == 2 else t,
        "expanded": lambda _, t: t.unsqueeze(0).expand(3, *t.shape)[2],
        "requires_grad": grad,
        "parameter": lambda _, t: torch.nn.Parameter(t, requires_grad=False),
        "subclass": lambda _, t: t.as_subclass(Sub),
        "loud subclass": lambda _, t: t.as_subclass(Loud),
        "at an odd address": lambda _, t: _unaligned(t),
        "float32": lambda _, t: t.float() if t.dtype is torch.bfloat16 else t,
        "negative view": lambda _, t: torch._neg_view(t.neg()) if t.dtype is torch.bfloat16 else t,
    }
    for context, change in good.items():
        weights = bench.tensors()
        judged(bench, lambda w=weights, c=change: bench.send(_each(w, c)), context)
    bad: dict[str, Change] = {
        "meta": lambda _, t: t.to("meta"),
        "sparse": lambda _, t: t.to_sparse(),
        "numpy": lambda _, t: t.float().numpy(),
        "a list": lambda _, t: t.tolist(),
        "none": lambda _, t: None,
        "complex": lambda _, t: t.to(torch.complex64) if t.is_floating_point() else t,
        "bool": lambda _, t: t.bool(),
    }
    for context, change in bad.items():
        for only in (None, "model.norm.weight"):
            weights = bench.tensors()
            judged(
                bench,
                lambda w=weights, c=change, o=only: bench.send(
                    _each(w, lambda n, t: c(n, t) if o in (None, n) else t)
                ),
                f"{context} {only or ''}",
                "raise",
            )
    healed(bench, "odd tensors")


def _unaligned(tensor: Any) -> Any:
    import torch

    size = tensor.numel() * tensor.element_size()
    memory = torch.zeros(size + 16, dtype=torch.uint8)
    shift = tensor.element_size()
    out = memory[shift : shift + size].view(tensor.dtype).view(tensor.shape)
    return out.copy_(tensor)


# -- sources ---------------------------------------------------------------------------------------------------


def odd_sources(bench: Bench) -> None:
    """Buffers that are used again, iterators that re-enter, end strangely, or work on the model meanwhile."""
    import torch

    def one_buffer() -> Iterator[tuple[str, Any]]:
        memory = torch.zeros(max(t.numel() * t.element_size() for _, t in bench.tensors()), dtype=torch.uint8)
        for name, tensor in bench.tensors():
            view = memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            yield name, view.copy_(tensor)
            memory.fill_(0xFF)

    def zeroed_later() -> Iterator[tuple[str, Any]]:
        weights = bench.tensors()
        yield from weights
        for _, tensor in weights:
            tensor.zero_()

    def resized_later() -> Iterator[tuple[str, Any]]:
        for name, tensor in bench.tensors():
            yield name, tensor
            tensor.resize_(0)

    judged(bench, lambda: bench.send(one_buffer()), "one buffer for all", "accept")
    judged(bench, lambda: bench.send(zeroed_later()), "zeroed at the end", "accept")
    judged(bench, lambda: bench.send(resized_later()), "resized after the yield", "accept")
    for way in ("one buffer", "zeroed"):
        source = one_buffer if way == "one buffer" else zeroed_later
        judged(bench, lambda s=source: bench.model.load_weights(s()), f"bare, {way}", "accept")

    class Ends(BaseException):
        pass

    def ending(error: BaseException, after: int = 7) -> Iterator[tuple[str, Any]]:
        yield from bench.tensors()[:after]
        raise error

    for error in (
        Ends(),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopIteration(),
        MemoryError(),
    ):
        context = f"source raises {type(error).__name__}"
        judged(bench, lambda e=error: bench.send(ending(e)), context, "raise")
        judged(bench, lambda e=error: bench.model.load_weights(ending(e)), f"bare, {context}", "raise")
    healed(bench, "sources that raise")

    def nested(inner: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
        for number, item in enumerate(bench.tensors()):
            if number == 5:
                inner()
            yield item

    old = bench.tensors(bench.served)
    for context, inner in {
        "a load of the same model": lambda: bench.model.load_weights(old[:3]),
        "a reload": lambda: bench.send(old),
        "a submodule's loader": lambda: bench.model.model.load_weights(
            [(n.removeprefix("model."), t) for n, t in old if n.startswith("model.layers.1.")]
        ),
        "writes to live parameters": lambda: [p.data.zero_() for p in list(bench.model.parameters())[:4]],
        "processing": lambda: _process_all(bench),
        "state_dict": lambda: bench.model.state_dict(),
        "load_state_dict of itself": lambda: bench.model.load_state_dict(bench.model.state_dict()),
        "a dtype change": lambda: bench.model.to(torch.float32),
        "a pass": lambda: bench.answers(bench.served, "a pass inside the source"),
    }.items():
        judged(bench, lambda i=inner: bench.send(nested(i)), f"source does: {context}")
        if _life(bench).poisoned:
            healed(bench, context)
    healed(bench, "sources that work on the model")


def _process_all(bench: Bench) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    runner = bench.runner
    process_weights_after_loading(bench.model, runner.model_config, runner.device)


def files_that_change(bench: Bench) -> None:
    """A checkpoint that is written again while a reload by path reads it: a mixture of two, which nobody made."""
    import shutil
    import tempfile

    from safetensors.torch import save_file
    from vllm.model_executor.model_loader import default_loader

    with tempfile.TemporaryDirectory() as place:
        folder, new = Path(place, "checkpoint"), Path(place, "new")
        file = folder / "model.safetensors"
        other = bench.tensors(bench.served)

        def writing(how: str) -> Callable[[Any], Any]:
            def make(inner: Any) -> Any:
                def read(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
                    for number, item in enumerate(inner(*args, **kwargs)):
                        if number == 3:
                            save_file({n: t.contiguous() for n, t in other}, new)
                            if how == "over it":
                                with new.open("rb") as given, file.open("r+b") as old:
                                    shutil.copyfileobj(given, old)
                            elif how == "in its place":
                                new.replace(file)
                            elif how == "removed":
                                shutil.rmtree(folder)
                        yield item

                return read

            return make

        def reload() -> None:
            bench.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})

        for how in ("over it", "in its place", "not at all", "removed"):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(bench.folder(bench.other), folder)
            other = bench.tensors(bench.served)
            with exchanged(default_loader, "safetensors_weights_iterator", writing(how)):
                again = done(reload)
            written = how in ("over it", "in its place")
            error = judged(bench, again, f"written {how}", "raise" if written else "accept")
            bench.require(not written or "WL224" in str(error), f"written {how}: {error}")
    healed(bench, "files that change")


# -- loaders ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def exchanged(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Another attribute for a while."""
    had = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, make(vars(owner).get(name, before)))
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def odd_loaders(bench: Bench) -> None:
    """Inner loaders of experts and linear layers that begin to behave otherwise, for one item or after some."""
    import torch
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.parameter import BasevLLMParameter

    has_experts = any(isinstance(m, RoutedExperts) for m in bench.model.modules())
    copies = "_load_w13" if has_experts else None
    seen = {"n": 0}

    def counting(when: Callable[[int], bool], instead: Callable[..., Any]) -> Callable[[Any], Any]:
        def make(inner: Any) -> Any:
            def loader(*args: Any, **kwargs: Any) -> Any:
                seen["n"] += 1
                if when(seen["n"]):
                    return instead(inner, *args, **kwargs)
                return inner(*args, **kwargs)

            return loader

        seen["n"] = 0
        return make

    def raises(*_: Any, **__: Any) -> None:
        raise RuntimeError("the loader broke")

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def changed(change: Change) -> Callable[..., Any]:
        def instead(inner: Any, *args: Any, **kwargs: Any) -> Any:
            args = tuple(change("", a) if type(a) is torch.Tensor else a for a in args)
            kwargs = {k: change("", v) if k == "loaded_weight" else v for k, v in kwargs.items()}
            return inner(*args, **kwargs)

        return instead

    targets: list[tuple[Any, str]] = []
    if copies:
        targets += [(RoutedExperts, "_load_w13"), (RoutedExperts, "_load_w2")]
    for cls in {type(p) for p in bench.model.parameters()}:
        for name in ("load_qkv_weight", "load_row_parallel_weight", "load_merged_column_weight"):
            if issubclass(cls, BasevLLMParameter) and hasattr(cls, name):
                targets.append((cls, name))
    targets.append((linear.ReplicatedLinear, "weight_loader"))
    bench.notes.append(str([(o.__name__, n) for o, n in targets]))
    for owner, name in targets:
        for context, when, instead, may in (
            ("skips the second", lambda n: n == 2, lambda *a, **k: None, "raise"),
            ("skips the last ones", lambda n: n > 3, lambda *a, **k: None, "raise"),
            ("raises", lambda n: n == 3, raises, "raise"),
            ("is interrupted", lambda n: n == 2, interrupted, "raise"),
            ("twice", lambda n: True, lambda inner, *a, **k: (inner(*a, **k), inner(*a, **k))[0], ""),
            ("wrapped", lambda n: False, raises, "accept"),
            ("from a copy", lambda n: True, changed(lambda _, t: t.clone()), "accept"),
            ("from a copy now and then", lambda n: n % 2, changed(lambda _, t: t.clone()), "accept"),
        ):
            with exchanged(owner, name, counting(when, instead)):
                again = done(lambda: bench.send(bench.tensors()))
            if not seen["n"]:
                judged(bench, again, f"{owner.__name__}.{name} is not used", "accept")
                break
            needed = may if "skips" not in context or seen["n"] > 3 else ""
            judged(bench, again, f"{owner.__name__}.{name} {context} ({seen['n']} calls)", needed)
            if _life(bench).poisoned:
                healed(bench, context)
    healed(bench, "odd loaders")


def half_an_expert(bench: Bench) -> None:
    """The loader of one expert writes a part of it, or elsewhere, or into memory that serves."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    experts = next((m for m in bench.model.modules() if isinstance(m, RoutedExperts)), None)
    if experts is None:
        return
    live = [p.data for p in experts.parameters()]

    def loader(kind: str) -> Callable[[Any], Any]:
        calls = {"n": 0}

        def make(inner: Any) -> Any:
            def load(self: Any, *args: Any, **kwargs: Any) -> Any:
                calls["n"] += 1
                odd = calls["n"] == 5
                if odd and kind == "half":
                    kwargs["loaded_weight"] = kwargs["loaded_weight"].clone()
                    data = kwargs["expert_data"]
                    keep = data.clone()
                    out = inner(self, *args, **kwargs)
                    row = 0 if kwargs["shard_id"] == "w1" else -1  # of its own half
                    data[row].copy_(keep[row])
                    return out
                if odd and kind == "live":
                    for memory in live:
                        memory.view(-1)[:8].zero_()
                if odd and kind == "live raw":
                    for memory in live:
                        ctypes.memset(memory.data_ptr(), 0, 16)
                if odd and kind == "other expert":
                    return None
                if kind == "other expert" and calls["n"] == 6:
                    inner(self, *args, **kwargs)
                return inner(self, *args, **kwargs)

            return load

        return make

    for kind in ("half", "live", "live raw", "other expert"):
        with exchanged(RoutedExperts, "_load_w13", loader(kind)):
            again = done(lambda: bench.send(bench.tensors()))
        judged(bench, again, f"expert: {kind}", "" if kind.startswith("live") else "raise")
        if _life(bench).poisoned:
            healed(bench, kind)
    healed(bench, "half an expert")


# -- the model between updates ---------------------------------------------------------------------------------


def changed_between(bench: Bench) -> None:
    """User code works on the model between two updates."""
    import torch

    def parameters(kind: str) -> list[tuple[Any, str, Any]]:
        return [
            (module, name, value)
            for module in bench.model.modules()
            for name, value in list(module._parameters.items())
            if value is not None and (kind != "norm" or value.dim() == 1)
        ]

    def replace(module: Any, name: str, value: Any) -> None:
        new = torch.nn.Parameter(value.data.clone(), requires_grad=False)
        new.__dict__.update(value.__dict__)
        module._parameters[name] = new

    def bare_parameter(module: Any, name: str, value: Any) -> None:
        module._parameters[name] = torch.nn.Parameter(value.data.clone(), requires_grad=False)

    def moved(module: Any, name: str, value: Any) -> None:
        value.data = value.data.clone()

    def loader(module: Any, name: str, value: Any) -> None:
        inner = getattr(value, "weight_loader", None)
        if inner is not None:
            with contextlib.suppress(AttributeError):
                value.weight_loader = lambda *a, **k: inner(*a, **k)

    def tagged(module: Any, name: str, value: Any) -> None:
        value.mine = "a note"

    for context, change in {
        "replaced": replace, "replaced bare": bare_parameter, "other data": moved, "other loader": loader, "tagged": tagged,
    }.items():  # fmt: skip
        for kind in ("norm", "all"):
            for how in ("a reload", "a bare load"):
                saved = parameters(kind)[: 2 if kind == "norm" else None]
                for module, name, value in saved:
                    change(module, name, value)
                load = bench.send if how == "a reload" else bench.model.load_weights
                judged(bench, lambda call=load: call(bench.tensors()), f"{context} {kind}, then {how}")
                for module, name, value in saved:  # what nobody can load without
                    module._parameters[name].__dict__.update(value.__dict__)
                if _life(bench).poisoned:
                    healed(bench, context)
    bench.model.eval(), bench.model.train(), bench.model.requires_grad_(True)
    judged(bench, lambda: bench.send(bench.tensors()), "train and requires_grad")
    bench.model.requires_grad_(False), bench.model.eval()
    healed(bench, "changes between")


# -- hooks -----------------------------------------------------------------------------------------------------


def hooks_that_load(bench: Bench) -> None:
    """A quant hook that loads, saves, runs a pass, raises or is interrupted."""
    import weightlife

    methods = {
        type(m.quant_method)
        for m in bench.model.modules()
        if callable(getattr(getattr(m, "quant_method", None), "process_weights_after_loading", None))
    }
    old = bench.tensors(bench.served)

    def stop() -> None:
        raise KeyboardInterrupt

    actions: dict[str, Callable[[], Any]] = {
        "loads": lambda: bench.model.load_weights(old[:4]),
        "reloads": lambda: bench.send(old),
        "processes": lambda: _process_all(bench),
        "is interrupted": stop,
        "begins an update": lambda: bench.llm.collective_rpc("weightlife_test_layerwise_start"),
        "ends the update": lambda: bench.llm.collective_rpc("weightlife_test_layerwise_finish"),
        "aborts": lambda: weightlife.abort(bench.llm),
    }
    for cls in methods:
        for context, action in actions.items():
            calls = {"n": 0}

            def make(inner: Any, act: Callable[[], Any] = action, c: dict[str, int] = calls) -> Any:
                def hook(self: Any, layer: Any) -> Any:
                    c["n"] += 1
                    out = inner(self, layer)
                    if c["n"] == 1:
                        act()
                    return out

                return hook

            with exchanged(cls, "process_weights_after_loading", make):
                again = done(lambda: bench.send(bench.tensors()))
            judged(bench, again, f"{cls.__name__} {context} ({calls['n']} calls)")
            if _life(bench).poisoned or _life(bench).session is not None:
                bench.require(_life(bench).session is None, f"{context}: a session is left open")
                healed(bench, context)
    healed(bench, "hooks")


# -- interruptions and threads ---------------------------------------------------------------------------------


class Interrupts:
    """Raises KeyboardInterrupt as some function of the engine is entered: the n-th, of those that a block enters."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.calls = 0
        self.where = ""

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "/weightlife/_engine/" in frame.f_code.co_filename:
            self.calls += 1
            if self.calls == self.at:
                self.where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_qualname}"
                raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def interrupted_anywhere(bench: Bench) -> None:
    """Ctrl-C in many functions of an update: A or B serves exactly, or nothing does; the next update is exact."""
    calls: dict[str, Callable[[Weights], Any]] = {"reload": bench.send, "bare": bench.model.load_weights}
    for way, call in calls.items():
        weights = bench.tensors()
        with Interrupts() as counted:
            call(weights)
        bench.serves(bench.other, f"{way}, traced")
        bench.served = bench.other
        for number in range(INTERRUPTIONS):
            at = 1 + counted.calls * number // INTERRUPTIONS
            weights = bench.tensors()
            with Interrupts(at) as interrupted:
                again = done(lambda c=call, w=weights: c(w))
            context = f"{way}, interrupted at call {at} of {counted.calls}, {interrupted.where}"
            error = _either(bench, again, context)
            if error is not None:
                healed(bench, context)


def _either(bench: Bench, again: Callable[[], None], context: str) -> BaseException | None:
    """After something that may have come before or after the commit: one of the two serves, or nothing."""
    from weightlife.testing import oracle

    error = heard(again)
    life = _life(bench)
    bench.notes.append(
        f"{context}: {error!r:.120}{' POISONED' if life.poisoned else ''}{' open' if life.session else ''}"
    )
    if not life.poisoned:
        got = oracle.fingerprint(bench.llm)
        bench.checks += 1
        found = {side: oracle.differences(got, want) for side, want in bench.want.items()}
        bench.require(
            not all(found.values()), f"{context}: neither A nor B: {found['a'][:2]} / {found['b'][:2]}"
        )
        bench.served = next((side for side, wrong in found.items() if not wrong), bench.served)
    life.failed = None
    return error


def threads_at_once(bench: Bench) -> None:
    """Two threads update at once, by every pair of ways; one of the checkpoints serves exactly."""
    import weightlife

    for first, second in (("send", "send"), ("send", "bare"), ("bare", "bare"), ("bare", "layerwise")):
        results: dict[str, Any] = {}
        gate = threading.Barrier(2)

        def one(
            way: str, key: str, gate: threading.Barrier = gate, results: dict[str, Any] = results
        ) -> None:
            weights = bench.tensors()
            gate.wait()
            try:
                if way == "send":
                    bench.send(weights)
                elif way == "bare":
                    for start in range(0, len(weights), 3):
                        bench.model.load_weights(weights[start : start + 3])
                else:
                    bench.layerwise(weights[:9], weights[9:])
                results[key] = None
            except BaseException as error:  # noqa: BLE001
                results[key] = error

        threads = [threading.Thread(target=one, args=(way, str(n))) for n, way in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        def again(r: dict[str, Any] = results) -> None:
            for error in r.values():
                if error is not None:
                    raise error

        _either(bench, again, f"{first} and {second} at once")
        if _life(bench).session is not None:
            weightlife.abort(bench.llm)
        healed(bench, f"{first} and {second} at once")


ROWS: dict[str, Callable[[Any], None]] = {
    row.__name__: row
    for row in (
        odd_tensors, odd_sources, files_that_change, odd_loaders, half_an_expert, changed_between, hooks_that_load, interrupted_anywhere,
        threads_at_once,
    )
}  # fmt: skip
