# SPDX-License-Identifier: Apache-2.0
"""Sources and loaders that do what no one should: on a plain net, whatever happens, A serves or B does."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import weightlife
from tests.plainnet import A, B, C, Net, Pairs, copy_all, life_of, load, nets, outcome, push, served, serves
from weightlife import errors
from weightlife._engine.lifecycle import Lifecycle
from weightlife.config import Settings
from weightlife.hosts.torch import TorchHost

__all__ = ["nets"]


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def broken(weights: Pairs, error: BaseException, after: int = 1) -> Iterator[tuple[str, torch.Tensor]]:
    yield from weights[:after]
    raise error


class TestExceptions:
    def test_one_that_has_no_text_does_not_wedge_the_model(self) -> None:
        net = served()
        with pytest.raises(Mute):
            load(net, broken(B, Mute()))
        assert life_of(net).session is None
        assert weightlife.last_report(net).error == "Mute"
        assert serves(net) == "A"
        load(net, B)
        assert serves(net) == "B"

    def test_one_without_text_at_the_batch_that_commits(self) -> None:
        class Late(Net):
            fails = False

            def process_weights_after_loading(self) -> None:
                if self.fails:
                    raise Mute

        net = served(Late)
        Late.fails = True
        push(net, B)
        assert serves(net) == "A"  # the commit failed; the pass lives
        assert life_of(net).session is None
        Late.fails = False

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_an_interrupted_source(self, kind: type[BaseException]) -> None:
        net = served()
        with pytest.raises(kind):
            load(net, broken(B, kind(), 3))
        assert (serves(net), outcome(net)) == ("A", "aborted")
        load(net, B)
        assert serves(net) == "B"

    def test_an_interrupted_pass_between_two_chunks(self) -> None:
        class Stops(Net):
            stops = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.stops:
                    raise KeyboardInterrupt
                return super().forward(x)

        net = served(Stops)
        with weightlife.session(net):
            push(net, B[:2])
            Stops.stops = True
            with pytest.raises(KeyboardInterrupt):
                net(torch.ones(4))
            Stops.stops = False
            push(net, B[2:])  # the tree shows generation B again, and no lock is held
            in_thread(lambda: serves(net))
        assert serves(net) == "B"


def in_thread(call: Callable[[], Any]) -> Any:
    """Run in another thread, within 20 seconds. Its exception is raised here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(20)


class TestFirstLoadInChunks:
    def test_the_pass_is_its_end(self) -> None:
        net = Net()
        push(net, A[:3])
        push(net, A[3:])
        assert serves(net) == "A"
        assert set(life_of(net).manifest.names) == {name for name, _ in A}

    def test_it_teaches_what_complete_means(self) -> None:
        net = Net()
        push(net, A[:3])
        push(net, A[3:])
        serves(net)
        with pytest.raises(errors.MissingTensorError) as caught:
            load(net, B[:3])
        assert set(caught.value.tensors) == {name for name, _ in B[3:]}
        assert serves(net) == "A"


class TestContext:
    def test_a_task_that_the_source_started_is_not_inside_later(self) -> None:
        """It inherits the context variable, and runs when the session is over: its load is one of its own."""
        net = served()

        async def main() -> object:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[object] = loop.create_future()

            def later() -> None:
                try:
                    done.set_result(load(net, [("n.weight", B[4][1])]))
                except errors.WeightlifeError as error:
                    done.set_result(error)

            def source() -> Iterator[tuple[str, torch.Tensor]]:
                yield from A
                loop.call_later(0.01, later)

            load(net, source())
            return await done

        assert isinstance(asyncio.run(main()), errors.MissingTensorError)
        assert serves(net) == "A"


class TestSourceThatCallsBack:
    """The source of a load may not begin, end or abort one: it is refused, and the load that pulls it is whole."""

    @pytest.mark.parametrize("what", ["load", "prepare", "finish", "abort", "abort_on_request"])
    def test_it_is_refused(self, what: str) -> None:
        net = served()
        handle = weightlife.session(net)
        calls: dict[str, Callable[[], Any]] = {
            "load": lambda: load(net, C),
            "prepare": lambda: weightlife.session(net).prepare(),
            "finish": handle.finish,
            "abort": handle.abort,
            "abort_on_request": lambda: weightlife.abort(net),
        }
        refused = []

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            yield B[0]
            try:
                calls[what]()
            except errors.SessionConflictError as error:
                refused.append(error)
            yield from B[1:]

        with handle:
            push(net, source())
        assert len(refused) == 1
        assert (serves(net), outcome(net)) == ("B", "committed")

    def test_unless_it_survives_that_the_update_is_undone(self) -> None:
        net = served()
        handle = weightlife.session(net)

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            yield B[0]
            handle.abort()

        with pytest.raises(errors.SessionConflictError), handle:
            push(net, source())
        assert (serves(net), outcome(net)) == ("A", "aborted")


def prefetching(
    apply: Callable[[dict[str, Any], str, torch.Tensor], None], swallow: bool = False
) -> Callable[[Any, Iterable[tuple[str, torch.Tensor]]], None]:
    """A loader that pulls its source in a thread of its own and writes in the caller's."""

    def loader(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(model.named_parameters())
        ready: queue.Queue[Any] = queue.Queue(2)

        def pull() -> None:
            try:
                for item in weights:
                    ready.put(item)
            except BaseException:
                if not swallow:
                    raise
            finally:
                ready.put(None)

        thread = threading.Thread(target=pull)
        thread.start()
        while (item := ready.get()) is not None:
            apply(parameters, *item)
        thread.join()

    return loader


def write(parameters: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    parameters[name].data.copy_(tensor)


class Gate:
    """A source that stops before an item until the loader has written the one before it."""

    def __init__(self, weights: Pairs) -> None:
        self.weights = weights
        self.written = threading.Semaphore(0)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(self.weights):
            if index:
                # The thread is inside of the source now, while the loader writes the item before.
                assert self.written.acquire(timeout=20)
            yield item

    def write(self, parameters: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
        write(parameters, name, tensor)
        self.written.release()


class TestPrefetch:
    def test_writes_while_another_thread_is_inside_the_source(self) -> None:
        """They are the loader's, and no read of the source's."""
        net = Net()
        for weights, want in ((A, "A"), (B, "B"), (C, "C")):
            gate = Gate(weights)
            weightlife.wrap_loader(prefetching(gate.write))(net, gate)
            assert serves(net) == want
            assert outcome(net) == "committed"

    def test_no_write_is_booked_under_a_name_that_came_too_early(self) -> None:
        net = Net()
        gate = Gate(A)
        weightlife.wrap_loader(prefetching(gate.write))(net, gate)
        names = life_of(net).manifest.names
        assert set(names) == {name for name, _ in A}
        assert all(entry.writes == [] for entry in names.values())

    def test_an_incomplete_load_is_refused(self) -> None:
        net = Net()
        loader = weightlife.wrap_loader(prefetching(write))
        loader(net, A)
        with pytest.raises(errors.MissingTensorError, match="not known"):
            loader(net, B[:-1])
        assert serves(net) == "A"

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize("swallow", [True, False])
    def test_a_source_that_dies_in_the_thread_ends_the_load(self, swallow: bool) -> None:
        """Nobody hears a thread's exception: the part that came would be an update, and by layers a legal one."""
        net = served()
        loader = weightlife.wrap_loader(prefetching(write, swallow), partial_disk="by_layer")
        net = Net()
        loader(net, A)
        with pytest.raises(OSError, match="gone"):
            loader(net, broken(B, OSError("gone"), 2))
        assert (serves(net), outcome(net)) == ("A", "aborted")

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_what_is_refused_when_it_arrives_in_the_thread_ends_the_load(self) -> None:
        loader = weightlife.wrap_loader(prefetching(write), nonfinite="strict", partial_disk="by_layer")
        net = Net()
        loader(net, A)
        bad = [*B[:2], ("n.weight", torch.full((4,), float("nan")))]
        with pytest.raises(errors.NonFiniteError) as caught:
            loader(net, bad)
        assert caught.value.tensors == ("n.weight",)
        assert serves(net) == "A"

    def test_a_nested_call_of_the_loader_is_not_the_sources(self) -> None:
        """A loader that loads through another one while its thread is inside the source."""
        net = Net()
        load(net, A)
        gate = Gate(B)

        def outer(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            def through(parameters: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
                load(model, [(name, tensor)])
                gate.written.release()

            prefetching(through)(model, weights)

        weightlife.wrap_loader(outer)(net, gate)
        assert serves(net) == "B"

    def test_a_loader_that_takes_everything_first(self) -> None:
        @weightlife.wrap_loader
        def greedy(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            copy_all(model, dict(weights).items())

        net = Net()
        greedy(net, A)
        greedy(net, B)
        assert serves(net) == "B"
        with pytest.raises(errors.MissingTensorError):
            greedy(net, C[:-1])
        assert serves(net) == "B"


class TestTails:
    """What is sent after a failure is the rest of an update that is dead, and never one of its own."""

    BAD = ("a.scale", torch.ones(7))

    def test_of_an_explicit_update_whose_client_swallows_the_error(self) -> None:
        net = served()

        def update() -> None:
            with weightlife.session(net):
                with pytest.raises(errors.ShapeMismatchError):
                    push(net, [B[0], self.BAD])
                push(net, B[2:])

        with pytest.raises(errors.SessionStateError, match="aborted"):
            update()
        assert life_of(net).session is None  # the tail is not left open either
        assert serves(net) == "A"
        load(net, B)
        assert serves(net) == "B"

    def test_of_an_update_that_the_host_began_and_ends(self) -> None:
        net = served()
        life = life_of(net)
        with life.owned("begin"):
            life.open("begin", "update", True, life.settings.partial_update)
        with pytest.raises(errors.ShapeMismatchError):
            push(net, [B[0], self.BAD])
        push(net, B[2:])
        with pytest.raises(errors.SessionStateError, match="no session is open"):
            life.finish_explicit("end")
        assert serves(net) == "A"

    def test_of_an_implicit_update(self) -> None:
        net = served()
        with pytest.raises(errors.ShapeMismatchError):
            push(net, [B[0], self.BAD])
        push(net, B[4:])  # whole by layers, but the rest of what failed
        assert serves(net) == "A"
        push(net, B[:4])
        assert serves(net) == "B"


class TestIntoAnImplicitSession:
    def test_a_complete_load_is_not_taken_for_a_chunk_of_it(self) -> None:
        net = served()
        push(net, [B[5]])  # a stray chunk
        with pytest.raises(errors.MissingTensorError):
            load(net, B[:-2])
        assert outcome(net) == "aborted"
        assert torch.equal(net.n.weight, A[4][1])

    def test_a_finished_implicit_update_ends_where_an_explicit_one_begins(self) -> None:
        net = served()
        push(net, B)
        with weightlife.session(net):
            assert serves(net) == "B"
            push(net, C)
        assert serves(net) == "C"

    def test_an_unfinished_one_is_dropped(self) -> None:
        net = served()
        push(net, [B[0]])
        load(net, C)
        assert serves(net) == "C"


class Whole(nn.Module):
    """Parameters that are sent whole, under their own names."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.one = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.two = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        """By name."""
        parameters = dict(self.named_parameters())
        for name, value in weights:
            parameters[name].data.copy_(value)

    def process_weights_after_loading(self) -> None:
        """Replace one, where it is packed."""
        if self.packed:
            self.two = nn.Parameter(self.two.data.clone(), requires_grad=False)


@pytest.mark.parametrize("isolation", ["staged", "in_place"])
@pytest.mark.parametrize("sends", ["parameters", "views", "generator", "exchanged"])
def test_a_sender_that_sends_what_serves(isolation: str, sends: str) -> None:
    """Its own parameters show generation B as soon as that is written: what it means is what they held."""
    model = Whole(False)
    life = Lifecycle(model, TorchHost(model), Settings(log_level="error", isolation=isolation))
    first = {"one": torch.randn(4, 4), "two": torch.randn(4, 4)}
    life.load_weights(model.load_weights, list(first.items()))
    assert life.first is not None
    life.first.process(model.process_weights_after_loading)
    names = ["two", "one"] if sends == "exchanged" else ["one", "two"]
    stream: Any = {
        "parameters": lambda: list(model.named_parameters()),
        "views": lambda: list(model.state_dict().items()),
        "generator": lambda: ((name, p) for name, p in model.named_parameters()),
        "exchanged": lambda: list(zip(names, model.parameters(), strict=True)),
    }[sends]()
    with life.owned("test"):
        life.open("test", "update", True, "forbid")
    life.load_weights(model.load_weights, stream)
    life.finish("test")
    for name, sent in zip(names, ("one", "two"), strict=True):
        assert torch.equal(getattr(model, name), first[sent])


def test_a_sender_that_sends_what_serves_when_nothing_of_it_is_kept() -> None:
    """In place and without an undo log: what was overwritten is gone. Sent under its own name it still stands."""
    model = Whole(False)
    settings = Settings(log_level="error", isolation="in_place", undo_budget_bytes=0)
    life = Lifecycle(model, TorchHost(model), settings)
    first = {"one": torch.randn(4, 4), "two": torch.randn(4, 4)}
    life.load_weights(model.load_weights, list(first.items()))
    assert life.first is not None
    life.first.process(model.process_weights_after_loading)
    for _ in range(2):
        life.load_weights(model.load_weights, model.named_parameters())
    life.finish("test")
    assert torch.equal(model.one, first["one"]) and torch.equal(model.two, first["two"])
    with pytest.raises(errors.SessionStateError, match=r"overwritten.*tensors=\[two\]"):
        life.load_weights(model.load_weights, zip(["one", "two"], [model.two, model.one], strict=True))
    assert life.poisoned
    life.load_weights(model.load_weights, list(first.items()))
    life.finish("test")
    assert not life.poisoned and torch.equal(model.two, first["two"])


class TestContexts:
    """A context is copied into each task and by `asyncio.to_thread`. What is inside of a load is a thread."""

    def test_a_thread_of_the_loader_that_has_its_context(self) -> None:
        net = served()
        heard: list[BaseException | None] = []

        def other(call: Callable[[], Any]) -> None:
            heard.append(None)
            try:
                call()
            except errors.SessionConflictError as error:
                heard[-1] = error

        @weightlife.wrap_loader
        def loader(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for number, item in enumerate(weights):
                if number == 2:
                    for call in (
                        lambda: load(net, C),
                        lambda: push(net, C[:3]),
                        lambda: weightlife.abort(net),
                    ):
                        context = contextvars.copy_context()
                        thread = threading.Thread(target=lambda c=context, f=call: c.run(other, f))
                        thread.start()
                        thread.join(20)
                copy_all(model, [item])

        loader(net, B)
        assert len(heard) == 3 and all(heard)
        assert serves(net) == "B"

    @pytest.mark.parametrize("what", ["load", "push", "pass", "abort"])
    def test_a_task_of_the_loader_that_runs_while_it_waits(self, what: str) -> None:
        net = served()

        async def other() -> str:
            if what == "pass":
                return serves(net)
            if what == "abort":
                return str(weightlife.abort(net))
            try:
                (load if what == "load" else push)(net, C[:3])
            except errors.WeightlifeError as error:
                return type(error).__name__
            return "accepted"

        @weightlife.wrap_loader
        async def loader(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
            tasks = []
            for number, item in enumerate(weights):
                if number == 3:
                    tasks.append(asyncio.create_task(other()))
                copy_all(model, [item])
                await asyncio.sleep(0)
            return await tasks[0]

        said: Any = None
        try:
            said = asyncio.run(loader(net, B))
        except errors.WeightlifeError as error:
            said = type(error).__name__
        assert {
            "load": ("SessionConflictError", "B"),
            "push": ("SurplusTensorError", "A"),  # it joins the session, and is counted
            "pass": ("A", "B"),
            "abort": ("SessionStateError", "A"),
        }[what] == (said, serves(net))


def test_a_sender_that_sends_memory_that_is_being_filled() -> None:
    """A parameter of a layer that is rebuilt holds nothing yet: refused, and A serves."""
    model = Whole(True)
    life = Lifecycle(model, TorchHost(model), Settings(log_level="error"))
    first = {"one": torch.randn(4, 4), "two": torch.randn(4, 4)}
    life.load_weights(model.load_weights, list(first.items()))
    assert life.first is not None
    life.first.process(model.process_weights_after_loading)
    with life.owned("test"):
        life.open("test", "update", True, "forbid")
    with pytest.raises(errors.SessionStateError, match="being replaced"):
        life.load_weights(model.load_weights, ((name, p) for name, p in model.named_parameters()))
    assert torch.equal(model.one, first["one"]) and torch.equal(model.two, first["two"])
