# SPDX-License-Identifier: Apache-2.0
"""Loads by rule: what the first load made known runs unobserved, and every way to be wrong about it is found."""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightlife import errors
from weightlife._engine import rules as rules_module
from weightlife._engine import trust as trust_module
from weightlife._engine.lifecycle import Lifecycle, OpenSessions
from weightlife._engine.rules import identity, same_loader
from weightlife._engine.trust import Trust
from weightlife.config import Settings
from weightlife.hosts.torch import TorchHost

LAYERS, EXPERTS, ROWS, COLUMNS = 3, 4, 2, 4
Weights = list[tuple[str, torch.Tensor]]


class Experts(nn.Module):
    """Stacked experts, filled one by one. `packed`: repacked after the load, so that it is rebuilt."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.weight = nn.Parameter(torch.full((EXPERTS, ROWS, COLUMNS), -1.0), requires_grad=False)

    def process_weights_after_loading(self) -> None:
        """Transpose, where it is packed."""
        if self.packed:
            self.weight = nn.Parameter(self.weight.data.transpose(1, 2).contiguous(), requires_grad=False)

    def value(self) -> torch.Tensor:
        """The weight in model format."""
        return self.weight.transpose(1, 2) if self.packed else self.weight


Write = Callable[["Model", nn.Parameter, int, int, torch.Tensor], None]


def copy(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """The plain way."""
    weight.data[expert].copy_(value)


class Model(nn.Module):
    """Layers of experts, and a loader whose inner function a test exchanges."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(packed) for _ in range(LAYERS))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The usual loop."""
        parameters = dict(self.named_parameters())
        for name, value in weights:
            _, layer, expert = name.split(".")
            STATE.write(self, parameters[f"layers.{layer}.weight"], int(layer), int(expert), value)

    def values(self) -> torch.Tensor:
        """All weights, in model format."""
        return torch.stack([layer.value() for layer in self.layers])


class State:
    """What a loader may depend on besides its arguments. Not reachable from any model: no snapshot restores it."""

    write: Write = staticmethod(copy)
    loads = 0


STATE = State()


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with the plain loader; samples come when a test says so."""
    STATE.write, STATE.loads = copy, 0
    monkeypatch.setattr(trust_module, "SAMPLE_ONE_IN", 10**9)


@pytest.fixture(autouse=True)
def rigs() -> Iterator[None]:
    """What a test left open or poisoned counts no more: passes of other models would look for it."""
    yield
    for rig in Rig.alive:
        rig.life.abort()
        if rig.life.poisoned:
            OpenSessions.count -= 1
            rig.life.poisoned = ""
    Rig.alive.clear()
    assert OpenSessions.count == 0


@pytest.fixture
def by_rule(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the items that ran by rule."""
    names: list[str] = []
    fold = Trust.fold

    def noted(self: Trust) -> None:
        known = {id(entry): name for name, entry in self.names.items()}
        names.extend(known[id(entry)] for entry in self.pending)
        fold(self)

    monkeypatch.setattr(Trust, "fold", noted)
    return names


def checkpoint(seed: int) -> Weights:
    """A value for every expert, no two alike."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"layers.{layer}.{expert}", torch.randn(ROWS, COLUMNS, generator=generator))
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
    ]


def wanted(weights: Weights) -> torch.Tensor:
    """What a model holds that was loaded from this."""
    return torch.stack([value for _, value in weights]).view(LAYERS, EXPERTS, ROWS, COLUMNS)


class Rig:
    """A model that had its first load."""

    alive: ClassVar[list[Rig]] = []

    def __init__(self, packed: bool, first: Weights | None = None, **settings: Any) -> None:
        self.alive.append(self)
        self.model = Model(packed)
        self.life = Lifecycle(self.model, TorchHost(self.model), Settings(log_level="error", **settings))
        STATE.loads = 1
        self.life.load_weights(self.model.load_weights, checkpoint(0) if first is None else first)
        assert self.life.first is not None

        def process() -> None:
            for layer in self.model.layers:
                layer.process_weights_after_loading()

        self.life.first.process(process)
        self.a = self.model.values().clone()

    def update(self, *chunks: Any, partial: str = "forbid", load: Any = None) -> None:
        """An explicit update."""
        STATE.loads += 1
        with self.life.owned("test"):
            self.life.open("test", "update", True, partial)
        for chunk in chunks:
            self.life.load_weights(load or self.model.load_weights, chunk)
        self.life.finish("test")

    def holds(self, weights: Weights) -> bool:
        """Whether exactly these weights serve."""
        return not self.life.poisoned and torch.equal(self.model.values(), wanted(weights))


MODES = [
    {"isolation": "staged"},
    {"isolation": "staged", "storage": "adopted"},
    {"isolation": "in_place"},
    {"isolation": "in_place", "undo_budget_bytes": 0},
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(map(str, m.values())))
@pytest.mark.parametrize("source", ["list", "generator", "chunks", "reversed", "items", "ordered"])
def test_an_update_by_rule_is_exact(
    packed: bool, mode: dict[str, Any], source: str, by_rule: list[str]
) -> None:
    """All but the first item, in every mode; memory that serves is only ever written under observation."""
    rig = Rig(packed, **mode)
    for seed in (1, 2, 3):
        weights = checkpoint(seed)
        chunks: dict[str, list[Any]] = {
            "list": [weights], "generator": [(item for item in weights)],
            "chunks": [weights[:5], weights[5:6], iter(weights[6:])], "reversed": [weights[::-1]],
            "items": [dict(weights).items()], "ordered": [OrderedDict(weights).items()],
        }  # fmt: skip
        by_rule.clear()
        rig.update(*chunks[source])
        assert rig.holds(weights)
        report = rig.life.reports[-1]
        assert report.tensors_received == len(weights)
        assert report.bytes_received == sum(value.nbytes for _, value in weights)
        if packed or mode["isolation"] == "staged":
            assert len(by_rule) == len(weights) - 1
        else:
            assert by_rule == []


@pytest.mark.parametrize("packed", [False, True])
def test_no_mode_stands_over_an_item_by_rule_and_the_mode_is_back_after_it(packed: bool) -> None:
    """The stack is empty while it is written; the source and what comes after the last item are observed."""
    depths: list[int] = []

    def looks(*arguments: Any) -> None:
        depths.append(torch._C._len_torch_dispatch_stack())
        copy(*arguments)

    rig = Rig(packed)
    STATE.write = looks
    pulled: list[int] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for item in checkpoint(1):
            pulled.append(torch._C._len_torch_dispatch_stack())
            yield item

    rig.update(source())
    assert depths == [1] + [0] * (LAYERS * EXPERTS - 1)
    assert set(pulled) == {1} and torch._C._len_torch_dispatch_stack() == 0
    assert rig.holds(checkpoint(1))


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_missing_is_still_missing(packed: bool, by_rule: list[str]) -> None:
    """Completeness, surplus and unknown names do not depend on who saw the writes; A serves, unharmed."""
    rig = Rig(packed)
    weights = checkpoint(1)
    for stream, kind in (
        (weights[:-1], errors.MissingTensorError),
        ([*weights, weights[3]], errors.SurplusTensorError),
    ):
        by_rule.clear()
        with pytest.raises(kind) as caught:
            rig.update(stream)
        assert len(by_rule) > LAYERS
        assert not rig.life.poisoned and torch.equal(rig.model.values(), rig.a)
        assert set(caught.value.tensors) & {weights[-1][0], weights[3][0]}
    rig.update(weights)
    assert rig.holds(weights)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_credited_is_what_would_have_been_seen(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages that are credited by counting names: lost, repeated, sampled, in pieces, written by a name without a rule."""
    chance = random.Random(seed)
    monkeypatch.setattr(trust_module, "SAMPLE_ONE_IN", chance.choice([2, 5, 10**9]))
    weights = checkpoint(1)
    if chance.random() < 0.5:
        chance.shuffle(weights)
    for _ in range(chance.choice([0, 0, 1, 3])):
        weights.pop(chance.randrange(len(weights)))
    for _ in range(chance.choice([0, 0, 1, 2])):
        name, value = chance.choice(weights)
        again = chance.choice([name, "other." + name.partition(".")[2]])
        weights.insert(chance.randrange(len(weights) + 1), (again, value))
    cut = chance.choice([0, chance.randrange(len(weights))])
    books = []
    for watch in ("sampled", "all"):
        rig = Rig(seed % 2 == 0, watch_writes=watch)
        with rig.life.owned("test"):
            rig.life.open("test", "update", True, "forbid")
        for chunk in (weights[:cut], weights[cut:]):
            rig.life.load_weights(rig.model.load_weights, iter(chunk))
        session = rig.life.session
        assert (
            session is not None and session.stage is not None and (session.trust is None) == (watch == "all")
        )
        books.append({
            number: (track.written, track.ever) for number, track in session.stage.by_number.items() if track.ever
        })  # fmt: skip
        books.append(session.intake.tensors)
        rig.life.abort()
    assert books[:2] == books[2:]
    assert sum(written.total() for written, _ in books[0].values()) == len(weights)


def test_a_list_with_an_iterator_of_its_own_is_no_list() -> None:
    """What it does while it is pulled is seen."""

    class Lazy(list[tuple[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for item in checkpoint(1):
                depths.append(torch._C._len_torch_dispatch_stack())
                yield item

    depths: list[int] = []
    rig = Rig(True)
    rig.update(Lazy())
    assert set(depths) == {1} and rig.holds(checkpoint(1))


def test_a_partial_update_keeps_what_it_does_not_bring(by_rule: list[str]) -> None:
    """Marks in memory that nothing came for never reach the model."""
    rig = Rig(False)
    weights = checkpoint(1)
    rig.update(weights[1:6], partial="by_layer")
    assert len(by_rule) == 4
    expected = rig.a.clone().view(-1, ROWS, COLUMNS)
    expected[1:6] = wanted(weights).view(-1, ROWS, COLUMNS)[1:6]
    assert torch.equal(rig.model.values().view(-1, ROWS, COLUMNS), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_bare_calls(packed: bool, by_rule: list[str]) -> None:
    """Calls without an end: one tensor each, shuffled, and a second pass that replaces the first."""
    rig = Rig(packed)
    order = torch.randperm(LAYERS * EXPERTS, generator=torch.Generator().manual_seed(3)).tolist()
    first, second = checkpoint(1), checkpoint(2)
    for weights in (first, second):
        for index in order:
            rig.life.load_weights(rig.model.load_weights, [weights[index]])
    rig.life.finish("test")
    assert rig.holds(second)
    assert len(by_rule) == len(order) - 1  # the second pass repeats names: observed
    assert rig.life.reports[-1].notes  # two epochs
    rig.life.load_weights(rig.model.load_weights, first[:-1])
    if packed:
        with pytest.raises(errors.CompletenessError):
            rig.life.finish("test")
    else:  # a layer that is not rebuilt may be sent in part
        rig.life.finish("test")
        assert rig.holds([*first[:-1], second[-1]])


def test_names_of_one_kind_that_lead_to_other_parameters(by_rule: list[str]) -> None:
    """Numbers apart they are alike: the first item of each parameter's size is observed."""

    class Two(Model):
        def __init__(self) -> None:
            super().__init__(True)
            for index, layer in enumerate(self.layers):
                if index:
                    layer.weight = nn.Parameter(
                        torch.zeros(EXPERTS + index, ROWS, COLUMNS), requires_grad=False
                    )

    model = Two()
    life = Lifecycle(model, TorchHost(model), Settings(log_level="error"))
    life.load_weights(model.load_weights, checkpoint(0))
    assert life.first is not None
    life.first.process(lambda: [layer.process_weights_after_loading() for layer in model.layers])
    with life.owned("test"):
        life.open("test", "update", True, "forbid")
    life.load_weights(model.load_weights, checkpoint(1))
    life.finish("test")
    assert by_rule == [name for name, _ in checkpoint(1) if not name.endswith(".0")]


# -- loaders that do not do again what they did --------------------------------------------------------------------


def skips(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Leaves one expert out, from the second load on."""
    if STATE.loads < 2 or (layer, expert) != (1, 2):
        weight.data[expert].copy_(value)


def writes_half(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Writes the first row of one expert only."""
    rows = 1 if STATE.loads >= 2 and (layer, expert) == (1, 2) else ROWS
    weight.data[expert][:rows].copy_(value[:rows])


def goes_elsewhere(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Takes another expert's place."""
    weight.data[0 if STATE.loads >= 2 and (layer, expert) == (1, 2) else expert].copy_(value)


def replaces(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Gives the parameter other memory."""
    if STATE.loads >= 2 and (layer, expert) == (1, 2):
        weight.data = weight.data.clone()
    weight.data[expert].copy_(value)


def catches(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Fails at one item and goes on."""
    with contextlib.suppress(ValueError):
        rows = int("none") if STATE.loads >= 2 and (layer, expert) == (1, 2) else ROWS
        weight.data[expert][:rows].copy_(value)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "write", [skips, writes_half, goes_elsewhere, replaces, catches], ids=lambda w: w.__name__
)
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=["staged", "lean"])
@pytest.mark.parametrize("few", [0, 16], ids=["indexed", "words"])
def test_a_loader_that_changes_its_mind(
    packed: bool,
    write: Write,
    mode: dict[str, Any],
    few: int,
    by_rule: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found before anything is made of it. Nothing serves that nobody can vouch for; a complete update heals."""
    monkeypatch.setattr(rules_module, "FEW", few)  # both ways of marking memory
    STATE.write = write
    rig = Rig(packed, **mode)
    if not packed and mode["isolation"] == "in_place":  # no item runs by rule there
        STATE.write = copy
        rig.update(checkpoint(1))
        assert by_rule == [] and rig.holds(checkpoint(1))
        return
    with pytest.raises(errors.LoaderChangedError) as caught:
        rig.update(checkpoint(1))
    assert "layers.1.2" in caught.value.tensors
    assert rig.life.poisoned
    STATE.write, STATE.loads = copy, 0
    by_rule.clear()
    rig.update(checkpoint(2))
    assert rig.holds(checkpoint(2))
    assert by_rule == []  # all of it was observed


@pytest.mark.parametrize("packed", [False, True])
def test_a_sample_that_differs_after_others_ran(
    packed: bool, by_rule: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts that change places leave no element unwritten: only looking shows it."""

    def swaps(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
        weight.data[expert ^ 1 if STATE.loads >= 2 and layer == 2 else expert].copy_(value)

    STATE.write = swaps
    rig = Rig(packed)
    monkeypatch.setattr(trust_module, "SAMPLE_ONE_IN", 2)  # one of three at the least
    with pytest.raises(errors.LoaderChangedError) as caught:
        rig.update(checkpoint(1))
    assert by_rule and caught.value.tensors[0].startswith("layers.2.")
    assert rig.life.poisoned


@pytest.mark.parametrize("packed", [False, True])
def test_another_way_of_loading_from_the_first_item_on_is_no_error(packed: bool, by_rule: list[str]) -> None:
    """A loader that was exchanged legally: its first item is observed, and then all of them, for good."""
    rig = Rig(packed)

    def rows(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
        for row in range(ROWS):
            weight.data[expert][row].copy_(value[row])

    STATE.write = rows
    for seed in (1, 2):
        rig.update(checkpoint(seed))
        assert rig.holds(checkpoint(seed)) and by_rule == []


# -- loaders that never get a rule ---------------------------------------------------------------------------------


def by_value(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Looks at a value."""
    if value[0, 0].item() < 100:
        weight.data[expert].copy_(value)


def by_list(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Looks at values where no dispatch mode sees it."""
    if value.tolist()[0][0] < 100:
        weight.data[expert].copy_(value)


def reads(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Looks at what stands in the parameter."""
    assert weight.data.abs().sum() is not None
    weight.data[expert].copy_(value)


def computes(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Writes what it made of the tensor."""
    weight.data[expert].copy_(value * 1.0)


def transforms(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Changes what it wrote."""
    weight.data[expert].copy_(value)
    weight.data[expert].mul_(1.0)


def indexes(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Assigns by a tensor of indices."""
    weight.data[torch.tensor([expert])] = value


def collects(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
    """Writes a pair of experts when both are there."""
    held = HELD.setdefault(layer, [])
    held.append((expert, value))
    if len(held) % 2 == 0:
        for other, kept in held[-2:]:
            weight.data[other].copy_(kept)


HELD: dict[int, list[tuple[int, torch.Tensor]]] = {}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "write", [by_value, by_list, computes, transforms, indexes, collects], ids=lambda w: w.__name__
)
def test_a_loader_that_does_more_than_copy_is_always_observed(
    packed: bool, write: Write, by_rule: list[str]
) -> None:
    """Its writes may depend on what no rule names."""
    HELD.clear()
    STATE.write = write
    rig = Rig(packed)
    HELD.clear()
    order = torch.randperm(LAYERS * EXPERTS, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = [checkpoint(1)[index] for index in order]
    rig.update(shuffled)
    assert rig.holds(checkpoint(1)) and by_rule == []


def test_a_loader_that_reads_its_parameter_is_always_observed(by_rule: list[str]) -> None:
    """On memory that is read before it is written."""
    STATE.write = reads
    rig = Rig(True)
    rig.update(checkpoint(1))
    assert rig.holds(checkpoint(1)) and by_rule == []


def test_names_that_write_the_same_elements_are_observed(by_rule: list[str]) -> None:
    """Two names for one place: how often it was written has to be seen."""

    def shares(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
        weight.data[min(expert, 2)].copy_(value)

    STATE.write = shares
    rig = Rig(False)
    rig.update(checkpoint(1))
    assert all(name.endswith((".0", ".1")) for name in by_rule) and by_rule


# -- items that are not those of the first load --------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_another_layout_or_dtype_is_observed(packed: bool, by_rule: list[str]) -> None:
    """A transposed source, a wider one, a parameter: legal, and none of the rule's business."""
    rig = Rig(packed)
    weights = checkpoint(1)
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.t().contiguous().t(),
        lambda t: t.double(),
        lambda t: nn.Parameter(t, requires_grad=False),
    ]
    for change in changes:
        stream = [
            (name, change(value)) if index % 2 else (name, value)
            for index, (name, value) in enumerate(weights)
        ]
        by_rule.clear()
        rig.update(stream)
        assert rig.holds(weights)
        assert by_rule == [name for name, _ in weights[2::2]]


@pytest.mark.parametrize("isolation", ["staged", "in_place"])
@pytest.mark.parametrize("partial", ["forbid", "by_layer"])
def test_a_source_on_memory_of_the_model_is_observed(
    isolation: str, partial: str, by_rule: list[str]
) -> None:
    """What serves, sent back to where it came from."""
    rig = Rig(False, isolation=isolation)
    own = [
        (name, rig.model.layers[int(name.split(".")[1])].weight.data[int(name[-1])])
        for name, _ in checkpoint(0)
    ]
    weights = checkpoint(0)
    rig.update([*weights[:-2], *own[-2:]], partial=partial)
    assert rig.holds(weights)
    rig.update(((name, value) for name, value in own), partial=partial)
    assert rig.holds(weights)
    assert not {name for name, _ in own[-2:]} & set(by_rule)


@pytest.mark.parametrize("packed", [False, True])
def test_views_that_a_loader_took_before(packed: bool, by_rule: list[str]) -> None:
    """A loader that writes by `state_dict()` writes what serves, if nobody redirects it: it is always observed."""

    class ByState(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            held = self.state_dict()
            for name, value in weights:
                _, layer, expert = name.split(".")
                held[f"layers.{layer}.weight"][int(expert)].copy_(value)

    rig = Rig.__new__(Rig)
    Rig.alive.append(rig)
    rig.model = ByState(packed)
    rig.life = Lifecycle(rig.model, TorchHost(rig.model), Settings(log_level="error"))
    rig.life.load_weights(rig.model.load_weights, checkpoint(0))
    assert rig.life.first is not None
    rig.life.first.process(lambda: [layer.process_weights_after_loading() for layer in rig.model.layers])
    a = rig.model.values().clone()
    addresses = [layer.weight.data_ptr() for layer in rig.model.layers]
    with pytest.raises(errors.MissingTensorError):
        rig.update(checkpoint(1)[:-1])
    assert torch.equal(rig.model.values(), a) and not rig.life.poisoned
    rig.update(checkpoint(1))
    assert rig.holds(checkpoint(1))
    assert [layer.weight.data_ptr() for layer in rig.model.layers] == addresses
    assert bool(by_rule) is packed  # a placeholder's memory is B's by whatever view


def test_parameters_that_a_loader_kept_from_the_first_load() -> None:
    """The object of a rebuilt layer is A's: its first item shows that it goes there, and none runs by rule."""
    kept: dict[str, nn.Parameter] = {}

    def cached(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
        kept.setdefault(f"{layer}", weight).data[expert].view(ROWS, COLUMNS).copy_(value)

    STATE.write = cached
    rig = Rig(True)
    for index, layer in enumerate(rig.model.layers):
        kept[f"{index}"] = layer.weight
    with pytest.raises(errors.WeightlifeError):
        rig.update(checkpoint(1))
    assert torch.equal(rig.model.values(), rig.a)


@pytest.mark.parametrize("packed", [False, True])
def test_another_loader_is_observed(packed: bool, by_rule: list[str]) -> None:
    """Another function, other arguments, a lambda: not what the first load knew."""
    rig = Rig(packed)

    def other(weights: Any) -> None:
        rig.model.load_weights(weights)

    rig.update(checkpoint(1), load=other)
    rig.update(checkpoint(1), load=lambda weights: rig.model.load_weights(weights))
    assert by_rule == [] and rig.holds(checkpoint(1))
    rig.update(checkpoint(2))
    assert by_rule and rig.holds(checkpoint(2))


def test_identities() -> None:
    """Code, bound objects and arguments; what can't be told is nothing."""
    model, twin = Model(False), Model(False)

    def make(target: Any, **options: Any) -> Callable[[Any], Any]:
        def call(stream: Any) -> Any:
            return target(stream, **options)

        return call

    def same(a: Any, b: Any) -> bool:
        return same_loader(identity(a), identity(b))

    assert same(model.load_weights, model.load_weights)
    assert not same(model.load_weights, twin.load_weights)
    assert same(make(model.load_weights), make(model.load_weights))
    assert not same(make(model.load_weights), make(twin.load_weights))
    assert same(make(model.load_weights, strict=True), make(model.load_weights, strict=True))
    assert not same(make(model.load_weights, strict=True), make(model.load_weights, strict=False))
    assert not same(make(model.load_weights), model.load_weights)
    assert not same(make(model.load_weights, held=object()), make(model.load_weights, held=object()))
    gone = identity(Model(False).load_weights)
    assert not same_loader(gone, gone)
    assert not same_loader(None, None)


@pytest.mark.parametrize("packed", [False, True])
def test_a_mode_of_the_callers(packed: bool, by_rule: list[str]) -> None:
    """Over the call: observed, all of it. Inside the loader: it stays where the loader put it."""

    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counts.seen += "copy_" in str(func)
            return func(*args, **(kwargs or {}))

    def under(*arguments: Any) -> None:
        with Counts():
            copy(*arguments)

    rig = Rig(packed)
    if not packed:
        with Counts():
            rig.update(checkpoint(1))
        assert by_rule == [] and rig.holds(checkpoint(1))
    Counts.seen = 0
    STATE.write = under
    rig.update(iter(checkpoint(2)))
    assert Counts.seen == LAYERS * EXPERTS and by_rule and rig.holds(checkpoint(2))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_mode_that_a_loader_holds_over_its_loop(by_rule: list[str]) -> None:
    """It stands over ours, which can't step aside then."""

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Held(Model):
        def load_weights(self, weights: Any) -> None:
            if STATE.loads >= 2:
                with Nothing():
                    return super().load_weights(weights)
            return super().load_weights(weights)

    rig = Rig.__new__(Rig)
    Rig.alive.append(rig)
    rig.model = Held(True)
    rig.life = Lifecycle(rig.model, TorchHost(rig.model), Settings(log_level="error"))
    STATE.loads = 1
    rig.life.load_weights(rig.model.load_weights, checkpoint(0))
    assert rig.life.first is not None
    rig.life.first.process(lambda: [layer.process_weights_after_loading() for layer in rig.model.layers])
    rig.update(checkpoint(1))
    assert by_rule == [] and rig.holds(checkpoint(1))
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_loader_that_fails_at_an_item_by_rule(packed: bool, by_rule: list[str]) -> None:
    """The host's exception comes out as it is, A serves, no mode is left, and the next update is exact."""

    class Boom(Exception):
        pass

    def fails(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
        if STATE.loads == 2 and (layer, expert) == (1, 2):
            raise Boom
        weight.data[expert].copy_(value)

    STATE.write = fails
    rig = Rig(packed)
    for stream in (checkpoint(1), iter(checkpoint(1))):
        STATE.loads = 1
        with pytest.raises(Boom):
            rig.update(stream)
        assert torch.equal(rig.model.values(), rig.a) and not rig.life.poisoned
        assert torch._C._len_torch_dispatch_stack() == 0
    assert by_rule
    rig.update(checkpoint(2))
    assert rig.holds(checkpoint(2))


def test_a_shape_error_of_an_item_by_rule_names_it() -> None:
    """What a bare assertion meant is told of the item that it met."""

    def asserts(model: Model, weight: nn.Parameter, layer: int, expert: int, value: torch.Tensor) -> None:
        assert STATE.loads < 2 or (layer, expert) != (1, 2), "no"
        weight.data[expert].copy_(value)

    STATE.write = asserts
    rig = Rig(True)
    with pytest.raises(AssertionError):
        rig.update(checkpoint(1))
    assert torch.equal(rig.model.values(), rig.a)


def test_a_loader_that_stops_early() -> None:
    """It read to the end in the first load. What it does after its last item was not seen: nothing is vouched for."""

    class Stops(Model):
        def load_weights(self, weights: Any) -> None:
            for index, (name, value) in enumerate(weights):
                _, layer, expert = name.split(".")
                self.layers[int(layer)].weight.data[int(expert)].copy_(value)
                if STATE.loads >= 2 and index == LAYERS * EXPERTS - 1:
                    break
            self.layers[0].weight.data[0].mul_(1.0)

    rig = Rig.__new__(Rig)
    Rig.alive.append(rig)
    rig.model = Stops(True)
    rig.life = Lifecycle(rig.model, TorchHost(rig.model), Settings(log_level="error"))
    STATE.loads = 1
    rig.life.load_weights(rig.model.load_weights, checkpoint(0))
    assert rig.life.first is not None
    rig.life.first.process(lambda: [layer.process_weights_after_loading() for layer in rig.model.layers])
    if rig.life.manifest.rules is None:
        pytest.fail("the loader was read to its end")
    with pytest.raises(errors.LoaderChangedError):
        rig.update(checkpoint(1))
    assert rig.life.poisoned


@pytest.mark.parametrize("setting", [{"nonfinite": "strict"}])
def test_sessions_that_look_at_every_tensor_observe_all(setting: dict[str, Any], by_rule: list[str]) -> None:
    """And find what they look for."""
    rig = Rig(True, **setting)
    weights = checkpoint(1)
    weights[7][1][0, 0] = float("nan")
    with pytest.raises(errors.NonFiniteError):
        rig.update(weights)
    assert by_rule == [] and torch.equal(rig.model.values(), rig.a)


def test_the_setting_that_observes_everything(by_rule: list[str]) -> None:
    """One word turns rules off."""
    rig = Rig(True, watch_writes="all")
    rig.update(checkpoint(1))
    assert by_rule == [] and rig.holds(checkpoint(1))


def test_a_source_that_reads_what_is_being_replaced_is_refused(by_rule: list[str]) -> None:
    """Also between two items that run by rule."""
    rig = Rig(True)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, value) in enumerate(checkpoint(1)):
            if index == 7:
                value = value + rig.model.layers[0].weight.data[0] * 0
            yield name, value

    with pytest.raises(errors.SessionStateError, match="the source reads"):
        rig.update(source())
    assert by_rule and torch.equal(rig.model.values(), rig.a)


def test_attributes_that_somebody_gave_a_parameter_that_serves(by_rule: list[str]) -> None:
    """Another loader on it, say: its storage is observed, others are not."""
    rig = Rig(False)
    rig.model.layers[1].weight.weight_loader = print  # type: ignore[attr-defined]
    rig.update(checkpoint(1))
    assert rig.holds(checkpoint(1))
    assert by_rule and not any(name.startswith("layers.1.") for name in by_rule)
