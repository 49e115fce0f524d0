# SPDX-License-Identifier: Apache-2.0
"""`wrap_loader` on functions, methods and classes of loaders, with streams and without, sync and async."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import weightlife
from tests.plainnet import (
    INPUT,
    A,
    B,
    C,
    Net,
    Pairs,
    checkpoint,
    cold,
    copy_all,
    life_of,
    nets,
    outcome,
    serves,
)
from weightlife import errors
from weightlife._engine import lifecycle
from weightlife._engine.trust import Trust

__all__ = ["nets"]


# -- what a loader may be ----------------------------------------------------------------------------------------


class Trainer:
    """A loader's owner, with whatever it needs."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.calls = scale, 0

    @weightlife.wrap_loader
    def sync(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        self.calls += 1
        copy_all(model, ((name, tensor * self.scale) for name, tensor in weights))
        return self.calls

    @weightlife.wrap_loader
    @staticmethod
    def static(model: nn.Module, weights: Any) -> None:
        copy_all(model, weights)

    @classmethod
    @weightlife.wrap_loader
    def of_class(cls, model: nn.Module, weights: Any) -> str:
        copy_all(model, weights)
        return cls.__name__


class Plain:
    """A class of loaders that somebody else wrote."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def load(self, model: nn.Module, weights: Any) -> None:
        self.log.append("load")
        copy_all(model, weights)


class Inherits(Plain):
    def load(self, model: nn.Module, weights: Any) -> None:
        super().load(model, weights)
        self.log.append("more")


class Calls:
    def __call__(self, model: nn.Module, weights: Any) -> None:
        copy_all(model, weights)


class Loading(Net):
    """A model that loads itself."""

    @weightlife.wrap_loader
    def load_weights(self, weights: Any) -> None:
        copy_all(self, weights)


class Lightning(nn.Module):
    """A trainer that is a module itself."""

    @weightlife.wrap_loader
    def push(self, model: nn.Module, weights: Any) -> None:
        copy_all(model, weights)


def _itself(model: Any, weights: Any) -> None:
    model.load_weights(weights)


def _keywords(model: Any, weights: Any) -> None:
    weightlife.wrap_loader(copy_all)(model=model, weights=weights)


LOADERS: dict[str, Any] = {
    "function": weightlife.wrap_loader(copy_all),
    "keywords": _keywords,
    "method": Trainer().sync,
    "method by keywords": lambda model, weights: Trainer().sync(model=model, weights=weights),
    "method by call": weightlife.wrap_loader(Plain([]).load),
    "method through its class": functools.partial(Trainer.sync, Trainer()),
    "static method": Trainer().static,
    "class method": Trainer.of_class,
    "class": weightlife.wrap_loader(Plain)([]).load,
    "class that inherits": weightlife.wrap_loader(Inherits)([]).load,
    "class with __call__": weightlife.wrap_loader(Calls)(),
    "object": weightlife.wrap_loader(Calls()),
    "partial": weightlife.wrap_loader(functools.partial(copy_all)),
    "the model itself": _itself,
    "a trainer that is a module": Lightning().push,
}


class TestShapes:
    @pytest.mark.parametrize("what", LOADERS)
    def test_is_one_session_a_call(self, what: str) -> None:
        net, load = Loading() if what == "the model itself" else Net(), LOADERS[what]
        load(net, A)
        assert serves(net) == "A"
        for weights, want in ((B, "B"), (C, "C")):
            load(net, weights)
            assert (serves(net), outcome(net)) == (want, "committed")
        with pytest.raises(errors.MissingTensorError) as caught:
            load(net, A[:-1])
        assert caught.value.tensors == (A[-1][0],)
        assert serves(net) == "C"
        assert len(life_of(net).reports) == 4

    @pytest.mark.parametrize(
        "what", [what for what in LOADERS if not what.startswith(("method", "keywords", "partial"))]
    )
    def test_is_known_again_at_later_calls(self, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Or every item of every later load would be watched: rules are of one loader."""
        known: list[bool] = []
        serves_ = Trust.serves

        def noted(self: Trust, load: Any) -> bool:
            known.append(serves_(self, load))
            return known[-1]

        monkeypatch.setattr(Trust, "serves", noted)
        net, load = Loading() if what == "the model itself" else Net(), LOADERS[what]
        load(net, A)
        load(net, B)
        assert known == [True]

    def test_what_a_method_returns_and_is_bound_to(self) -> None:
        trainer, net = Trainer(), Net()
        assert [trainer.sync(net, weights) for weights in (A, B)] == [1, 2]
        assert Trainer.of_class(net, C) == "Trainer"

    def test_a_class_stays_as_it_was(self) -> None:
        wrapped = weightlife.wrap_loader(Inherits)
        assert issubclass(wrapped, Inherits)
        assert (wrapped.__name__, wrapped.__module__, wrapped.__qualname__) == (
            Inherits.__name__, Inherits.__module__, Inherits.__qualname__,
        )  # fmt: skip
        log: list[str] = []
        loader, net = wrapped(log), Net()
        loader.load(net, A)
        assert log == ["load", "more"]
        bare = Net()
        Inherits([]).load(bare, A)
        assert lifecycle.of(bare) is None

    def test_settings_reach_all_of_them(self) -> None:
        @weightlife.wrap_loader(storage="adopted", chunked=True)
        class Chunks(Plain):
            pass

        net, loader = Net(), Chunks([])
        loader.load(net, A)
        assert serves(net) == "A"
        loader.load(net, B[:3])
        assert serves(net) == "A"
        loader.load(net, B[3:])
        assert serves(net) == "B"
        report = weightlife.last_report(net)
        assert report is not None and report.storage == "adopted"

    @pytest.mark.parametrize("bad", [3, None.__class__, object])
    def test_what_loads_nothing(self, bad: Any) -> None:
        with pytest.raises(errors.ConfigError):
            weightlife.wrap_loader(bad)

    def test_without_a_model(self) -> None:
        for arguments in ((), (A,), (Trainer(), A)):
            with pytest.raises(errors.HostError, match="without a model"):
                weightlife.wrap_loader(copy_all)(*arguments)

    def test_after_uninstall_it_is_the_plain_loader(self) -> None:
        weightlife.install()
        net, trainer = Net(), Trainer()
        trainer.sync(net, A)
        weightlife.uninstall()
        assert trainer.sync(net, []) == 2


# -- what a loader does with its stream ---------------------------------------------------------------------------


def _counts_first(model: nn.Module, weights: Any) -> None:
    assert sum(1 for _ in weights) == len(A)
    copy_all(model, weights)


def _by_index(model: nn.Module, weights: Any) -> None:
    assert isinstance(weights, list) and weights and weights[0] in weights
    copy_all(model, (weights[place] for place in range(len(weights))))


def _peeks(model: nn.Module, weights: Any) -> None:
    assert next(iter(weights))[0] in dict(model.named_parameters())
    copy_all(model, weights)


def _scales_last(model: nn.Module, weights: Any) -> None:
    for last in (False, True):
        copy_all(model, (pair for pair in weights if pair[0].endswith("scale") is last))


def _checks_after(model: nn.Module, weights: Any) -> None:
    copy_all(model, weights)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in weights)


def _backwards(model: nn.Module, weights: Any) -> None:
    copy_all(model, reversed(weights))


async def _counts_first_later(model: nn.Module, weights: Any) -> None:
    assert sum(1 for _ in weights) == len(weights)
    for pair in weights:
        copy_all(model, [pair])
        await asyncio.sleep(0)


def _run(out: Any) -> None:
    if asyncio.iscoroutine(out):
        asyncio.run(asyncio.wait_for(out, 20))


class TestStreams:
    @pytest.mark.parametrize(
        "plain",
        [_counts_first, _by_index, _peeks, _scales_last, _checks_after, _backwards, _counts_first_later],
    )
    def test_a_list_can_be_read_as_a_list(self, plain: Any) -> None:
        net, load = Net(), weightlife.wrap_loader(plain)
        for weights, want in ((A, "A"), (B, "B"), (C, "C"), (A, "A")):
            _run(load(net, weights))
            assert (serves(net), outcome(net)) == (want, "committed")
        with pytest.raises((errors.MissingTensorError, AssertionError)):
            _run(load(net, B[:-1]))
        assert serves(net) == "A"

    @pytest.mark.parametrize("kind", [list, tuple, set, iter])
    @pytest.mark.parametrize("cls", [str, Path])
    def test_paths(self, kind: Any, cls: Any, tmp_path: Path) -> None:
        def several(model: nn.Module, paths: Any) -> None:
            for path in paths:
                by_path(model, path)

        net, load = Net(), weightlife.wrap_loader(several)
        for weights, want in ((A, "A"), (B, "B"), (C, "C")):
            paths = [tmp_path / f"{want}{part}" for part in range(2)]
            for part, path in enumerate(paths):
                save_file(dict(weights[part::2]), path)
            load(net, kind(map(cls, paths)))
            assert (serves(net), outcome(net)) == (want, "committed")
        with pytest.raises(errors.MissingTensorError):
            load(net, kind(map(cls, paths[:1])))
        assert serves(net) == "C"

    @pytest.mark.parametrize("prefixes", [["a.", "b.", "n."], ["a", "b", "n"]])
    def test_another_list_in_front_of_the_weights(self, prefixes: list[str]) -> None:
        def some(model: nn.Module, prefixes: list[str], weights: Any) -> None:
            copy_all(model, ((n, t) for n, t in weights if any(n.startswith(p) for p in prefixes)))

        net, load = Net(), weightlife.wrap_loader(some)
        for weights, want in ((A, "A"), (B, "B")):
            load(net, prefixes, weights=weights)
            assert (serves(net), outcome(net)) == (want, "committed")
        with pytest.raises(errors.MissingTensorError) as caught:
            load(net, prefixes, weights=A[:-1])
        assert caught.value.tensors == (A[-1][0],)
        assert weightlife.verify(net, B).ok


class TestPulledElsewhere:
    """A task or a thread of the loader's pulls ahead of it: what it gets is what there is, and is known by name."""

    @staticmethod
    async def _task(model: nn.Module, weights: Any) -> None:
        queue: asyncio.Queue[Any] = asyncio.Queue(2)

        async def produce() -> None:
            if isinstance(weights, AsyncIterator):
                async for pair in weights:
                    await queue.put(pair)
            else:
                for pair in weights:
                    await queue.put(pair)
            await queue.put(None)

        task = asyncio.ensure_future(produce())
        while (pair := await queue.get()) is not None:
            copy_all(model, [pair])
        await task

    @staticmethod
    async def _thread(model: nn.Module, weights: Any) -> None:
        source = iter(weights)
        while (pair := await asyncio.to_thread(next, source, None)) is not None:
            copy_all(model, [pair])

    @pytest.mark.parametrize(
        ("way", "given"),
        [("_task", list), ("_task", iter), ("_task", "later"), ("_thread", list), ("_thread", iter)],
    )
    def test_all_of_it_is_loaded(self, way: str, given: Any) -> None:
        async def later(weights: Pairs) -> AsyncIterator[tuple[str, torch.Tensor]]:
            for pair in weights:
                await asyncio.sleep(0)
                yield pair

        make = later if given == "later" else given
        net, load = Net(), weightlife.wrap_loader(getattr(self, way))
        for weights, want in ((A, "A"), (B, "B"), (C, "C")):
            _run(load(net, make(weights)))
            assert (serves(net), outcome(net)) == (want, "committed")
            report = weightlife.last_report(net)
            assert report is not None and report.tensors_received == len(weights)
        with pytest.raises(errors.MissingTensorError):
            _run(load(net, make(A[:-1])))
        assert serves(net) == "C"


# -- without a stream --------------------------------------------------------------------------------------------


def by_path(model: nn.Module, path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        parameters = dict(model.named_parameters())
        for name in file.keys():  # noqa: SIM118 - it is no dict
            parameters[name].data.copy_(file.get_tensor(name))


def by_state_dict(model: nn.Module, state: dict[str, torch.Tensor], strict: bool = True) -> None:
    model.load_state_dict(state, strict=strict)


class TestWithoutAStream:
    def test_a_path_is_handed_through(self, tmp_path: Path) -> None:
        load, net = weightlife.wrap_loader(by_path), Net()
        for name, weights in (("a", A), ("b", B), ("short", C[:-1])):
            save_file(dict(weights), tmp_path / name)
        load(net, tmp_path / "a")
        assert serves(net) == "A"
        load(net, tmp_path / "b")
        assert (serves(net), outcome(net)) == ("B", "committed")
        with pytest.raises(errors.MissingTensorError, match="not written whole"):
            load(net, tmp_path / "short")
        assert serves(net) == "B"
        load(net, str(tmp_path / "a"))
        assert serves(net) == "A"

    def test_a_state_dict_is_handed_through(self) -> None:
        load, net = weightlife.wrap_loader(by_state_dict), Net()
        load(net, dict(A))
        load(net, dict(B))
        assert (serves(net), outcome(net)) == ("B", "committed")
        with pytest.raises(errors.MissingTensorError):
            load(net, dict(C[1:]), strict=False)
        with pytest.raises(RuntimeError, match=r"a\.weight"):
            load(net, dict(C[1:]))  # the loader's own word, unchanged
        assert serves(net) == "B"

    @pytest.mark.parametrize("way", ["assign", "data"])
    def test_one_that_replaces_parameters(self, way: str) -> None:
        def replacing(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
            if way == "assign":
                model.load_state_dict(state, assign=True, strict=False)
                return
            for name, tensor in state.items():
                model.get_parameter(name).data = tensor

        mine = [{name: tensor.clone() for name, tensor in weights} for weights in (A, B)]
        load, net = weightlife.wrap_loader(replacing), Net()
        load(net, mine[0])
        assert serves(net) == "A"
        load(net, mine[1])
        assert (serves(net), outcome(net)) == ("B", "committed")
        with pytest.raises(errors.MissingTensorError):
            load(net, dict(C[:-1]))
        assert serves(net) == "B"
        load(net, dict(C))
        for sent, original in zip(mine, (A, B), strict=True):  # no commit wrote into them
            assert all(torch.equal(sent[name], tensor) for name, tensor in original)

    def test_no_argument_at_all(self) -> None:
        now = [A]
        load, net = weightlife.wrap_loader(lambda model: copy_all(model, now[0])), Net()
        load(net)
        now[0] = B
        load(net)
        assert (serves(net), outcome(net)) == ("B", "committed")


# -- asynchronous ------------------------------------------------------------------------------------------------


async def _tick() -> None:
    await asyncio.sleep(0)


async def _later(weights: Pairs, wait: bool = True) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for item in weights:
        if wait:
            await _tick()
        yield item


async def between(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Waits while it has a tensor, and after it has written one."""
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        await _tick()
        parameters[name].data.copy_(tensor)
        await _tick()
    return "done"


async def at_the_source(model: nn.Module, weights: AsyncIterator[tuple[str, torch.Tensor]]) -> str:
    parameters = dict(model.named_parameters())
    async for name, tensor in weights:
        parameters[name].data.copy_(tensor)
    return "done"


async def never(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Without an await."""
    copy_all(model, weights)
    return "done"


ASYNC: dict[str, tuple[Any, Any]] = {
    "between items": (between, list),
    "a generator": (between, iter),
    "at the source": (at_the_source, _later),
    "a source that never waits": (at_the_source, lambda weights: _later(weights, wait=False)),
    "without an await": (never, list),
}


class TestAsync:
    @pytest.mark.parametrize("how", ASYNC)
    def test_is_one_session_a_call(self, how: str) -> None:
        function, source = ASYNC[how]
        load, net = weightlife.wrap_loader(function), Net()

        async def run() -> None:
            assert await load(net, source(A)) == "done"
            assert serves(net) == "A"
            for weights, want in ((B, "B"), (C, "C")):
                assert await load(net, source(weights)) == "done"
                assert (serves(net), outcome(net)) == (want, "committed")
            for index, (name, _) in enumerate(A):
                with pytest.raises(errors.MissingTensorError) as caught:
                    await load(net, source(A[:index] + A[index + 1 :]))
                assert caught.value.tensors == (name,)
                assert serves(net) == "C"

        asyncio.run(run())
        assert len(life_of(net).reports) == 3 + len(A)

    @pytest.mark.parametrize("how", ["between items", "at the source"])
    def test_passes_of_other_tasks_see_the_old_weights_until_the_end(self, how: str) -> None:
        function, source = ASYNC[how]
        load, net, seen = weightlife.wrap_loader(function), Net(), []

        async def serve(update: asyncio.Task[str]) -> None:
            while not update.done():
                seen.append(serves(net))
                await _tick()

        async def run() -> None:
            await load(net, source(A))
            update = asyncio.create_task(load(net, source(B)))
            await serve(update)
            assert await update == "done"

        asyncio.run(run())
        # A pass that comes in the turn in which the last step was made sees what was committed.
        assert len(seen) > len(B)
        assert set(seen[:-1]) == {"A"}
        assert serves(net) == "B"

    @pytest.mark.parametrize("second", [between, copy_all], ids=["async", "sync"])
    def test_two_at_once_are_both_named_and_one_is_refused(self, second: Any) -> None:
        net = Net()
        load, other = weightlife.wrap_loader(between), weightlife.wrap_loader(second)

        async def meets(weights: Pairs) -> None:
            await _tick()
            out = other(net, weights)
            if out is not None:
                await out

        async def run(weights: Pairs) -> tuple[Any, Any]:
            return await asyncio.gather(load(net, weights), meets(C), return_exceptions=True)

        for weights, want in ((A, "A"), (B, "B")):  # a first load, and an update
            first, met = asyncio.run(run(weights))
            assert first == "done"
            assert isinstance(met, errors.SessionConflictError)
            assert "between" in met.message and second.__name__ in met.message
            assert serves(net) == want

    def test_a_pass_meets_a_first_load_that_waits(self) -> None:
        net = Net()

        async def run() -> None:
            load = asyncio.create_task(weightlife.wrap_loader(between)(net, A))
            await _tick()
            with pytest.raises(errors.SessionStateError, match="not at its end"):
                net(INPUT)
            await load

        asyncio.run(run())
        assert serves(net) == "A"

    def test_cancelled_it_leaves_what_served(self) -> None:
        load, net, cleaned = weightlife.wrap_loader(self._cleaning), Net(), []

        async def run() -> None:
            await load(net, A, [])
            update = asyncio.create_task(load(net, B, cleaned))
            for _ in range(4):
                await _tick()
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update

        asyncio.run(run())
        assert cleaned == ["cleaned"]
        assert (serves(net), outcome(net), life_of(net).session) == ("A", "aborted", None)
        asyncio.run(load(net, B, []))
        assert serves(net) == "B"

    @staticmethod
    async def _cleaning(model: nn.Module, weights: Pairs, cleaned: list[str]) -> None:
        try:
            await between(model, weights)
        except asyncio.CancelledError:
            cleaned.append("cleaned")
            raise

    def test_a_failure_between_two_awaits_comes_out_unchanged(self) -> None:
        async def fails(model: nn.Module, weights: Pairs) -> None:
            await between(model, itertools.islice(weights, 3))
            raise OSError("gone")

        net = Net()

        async def run() -> None:
            await weightlife.wrap_loader(between)(net, A)
            with pytest.raises(OSError, match="gone"):
                await weightlife.wrap_loader(fails)(net, B)

        asyncio.run(run())
        assert (serves(net), outcome(net)) == ("A", "aborted")

    def test_a_failed_await_may_be_caught_by_the_loader(self) -> None:
        async def retries(model: nn.Module, weights: Pairs) -> None:
            async def broken() -> None:
                await _tick()
                raise OSError("once")

            try:
                await broken()
            except OSError:
                await between(model, weights)

        net = Net()
        load = weightlife.wrap_loader(retries)
        asyncio.run(load(net, A))
        asyncio.run(load(net, B))
        assert (serves(net), outcome(net)) == ("B", "committed")

    def test_one_that_is_dropped_is_aborted(self) -> None:
        net = Net()
        asyncio.run(weightlife.wrap_loader(between)(net, A))
        update = weightlife.wrap_loader(between)(net, B)
        update.send(None)
        update.close()
        assert (serves(net), outcome(net), life_of(net).session) == ("A", "aborted", None)

    def test_in_chunks_and_inside_a_session(self) -> None:
        net = Net()
        load, push = weightlife.wrap_loader(between), weightlife.wrap_loader(chunked=True)(between)

        async def run() -> None:
            await load(net, A)
            await push(net, B[:3])
            assert serves(net) == "A"
            await push(net, B[3:])
            assert serves(net) == "B"
            with weightlife.session(net, expected=dict(C)):
                await load(net, C[:2])
                assert serves(net) == "B"
                await load(net, C[2:])
            assert serves(net) == "C"

        asyncio.run(run())

    def test_methods_and_classes(self) -> None:
        @weightlife.wrap_loader
        class Puller:
            async def load(self, model: nn.Module, weights: Any) -> None:
                await between(model, weights)

        class Calling:
            async def __call__(self, model: nn.Module, weights: Any) -> None:
                await between(model, weights)

        for load in (Puller().load, weightlife.wrap_loader(Calling())):
            net = Net()
            asyncio.run(load(net, A))
            asyncio.run(load(net, B))
            assert (serves(net), outcome(net)) == ("B", "committed")

    def test_a_promise_that_nobody_awaited_is_no_load(self) -> None:
        """A decorator that hides `async def`: what it returns has loaded nothing."""

        def hides(model: nn.Module, weights: Any) -> Any:
            return between(model, weights)

        net = Net()
        with pytest.raises(errors.HostError, match="coroutine"):
            weightlife.wrap_loader(hides)(net, A)
        weightlife.wrap_loader(copy_all)(net, A)
        assert serves(net) == "A"
        with pytest.raises(errors.HostError, match="coroutine"):
            weightlife.wrap_loader(hides)(net, B)
        with pytest.raises(errors.HostError, match="asynchronously"):
            weightlife.wrap_loader(copy_all)(net, _later(B))
        assert serves(net) == "A"

    def test_observe_mode_leaves_it_alone(self) -> None:
        load, net = weightlife.wrap_loader(mode="observe")(between), Net()
        asyncio.run(load(net, A))
        asyncio.run(load(net, B[4:]))  # a third of it: nothing checks that
        assert life_of(net).session is None


# -- quant methods on layers of a plain module -------------------------------------------------------------------


class Halves:
    """A quant method as frameworks write it: an object on the layer that processes the layer it is given."""

    def __init__(self) -> None:
        self.calls = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        self.calls += 1
        layer.packed = nn.Parameter((layer.weight / 2).t().contiguous(), requires_grad=False)
        del layer.weight


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4), requires_grad=False)
        self.quant_method = Halves()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed


class Both(Quantised):
    """And a hook of its own, which comes after."""

    def process_weights_after_loading(self) -> None:
        self.total = self.packed.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed + self.total


class TestQuantMethods:
    @pytest.mark.parametrize("kind", [Quantised, Both])
    @pytest.mark.parametrize("deferred", [False, True])
    def test_run_once_a_session_on_what_the_constructor_made(self, kind: type[Any], deferred: bool) -> None:
        def build() -> Any:
            net = nn.Sequential(kind(), kind())
            for layer in net:
                layer.deferred = deferred
            return net

        def numbers(seed: int) -> Pairs:
            generator = torch.Generator().manual_seed(seed)
            shape = (4, 4)
            return [(f"{i}.weight", torch.randint(1, 9, shape, generator=generator).float()) for i in (0, 1)]

        def want(weights: Pairs) -> torch.Tensor:
            net = build()
            copy_all(net, weights)
            for layer in net:
                layer.quant_method.process_weights_after_loading(layer)
                if kind is Both:
                    layer.process_weights_after_loading()
            return net(INPUT)

        load, net = weightlife.wrap_loader(copy_all), build()
        for seed in (1, 2, 3):
            load(net, numbers(seed))
            assert torch.equal(net(INPUT), want(numbers(seed)))
        with pytest.raises(errors.MissingTensorError):
            load(net, numbers(4)[:1])
        assert torch.equal(net(INPUT), want(numbers(3)))
        assert life_of(net).plan.layers[id(net[0])].strategy == "rebuild"
        assert weightlife.verify(net, numbers(3)).ok
        assert not weightlife.verify(net, numbers(4)).ok

    def test_nothing_else_that_is_called_so_is_a_hook(self) -> None:
        net = Net()
        net.n.quant_method = "int8"  # a name
        weightlife.wrap_loader(copy_all)(net, checkpoint(1))
        assert torch.equal(net(INPUT), cold(A))
