# SPDX-License-Identifier: Apache-2.0
"""What reload functions in the field do to layers of three parameters, and what ours must do with the same input.

Plain torch, a loader of the user's own, no vLLM. Each case runs on a layer that processing leaves alone and on one
that it repacks, with storage pinned and adopted. Memory that nobody writes is NaN here, so nothing passes by luck.
The oracle is the same model built and loaded without weightlife.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightlife
from weightlife import errors
from weightlife.testing._poison import poisoned

pytestmark = pytest.mark.plain

WIDTH = 4
INPUT = torch.arange(1.0, WIDTH + 1)
KEYS = ("a", "b", "c")

Weights = dict[str, torch.Tensor]
Stream = Iterable[tuple[str, torch.Tensor]]


# -- layers of three parameters --------------------------------------------------------------------------------


def with_loader(parameter: nn.Parameter, loader: Callable[..., None]) -> nn.Parameter:
    parameter.weight_loader = loader  # type: ignore[attr-defined]
    return parameter


def copy_loader(param: torch.Tensor, loaded: torch.Tensor) -> None:
    assert param.shape == loaded.shape
    param.data.copy_(loaded)


def oddly_named_loader(destination: torch.Tensor, source: torch.Tensor) -> None:
    copy_loader(destination, source)


def first_rows_loader(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data[: loaded.shape[0]].copy_(loaded)


class Plain(nn.Module):
    """Nothing happens after a load."""

    rows = WIDTH
    loader = staticmethod(copy_loader)

    def __init__(self) -> None:
        super().__init__()
        for key in KEYS:
            value = nn.Parameter(torch.full((self.rows, WIDTH), 5.0), requires_grad=False)
            setattr(self, key, with_loader(value, self.loader))
        self.register_buffer("kept", torch.arange(float(WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a @ x, self.b @ x, self.c @ x, self.kept * x])


class Repacked(Plain):
    """Processing replaces a parameter, writes another in place, and derives a plain attribute and a kernel object."""

    def process_weights_after_loading(self) -> None:
        self.a = nn.Parameter(self.a.data.t().contiguous(), requires_grad=False)
        self.b.data.mul_(2.0)
        self.derived = self.c.data.sum(dim=0)
        if not hasattr(self, "kernel"):  # a latch, as real layers have: made on the first call only
            self.kernel = Kernel(self.a)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.kernel(x), self.b @ x, self.c @ x, self.derived, self.kept * x])


class Kernel:
    """Keeps the packed weight that it was made from."""

    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed


class Model(nn.Module):
    """Two such layers. Unknown names are skipped, as many loaders do."""

    def __init__(self, layer: type[Plain], shared: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])
        if shared:
            self.layers[1].c = self.layers[0].c  # type: ignore[union-attr]

    def load_weights(self, weights: Stream) -> set[str]:
        known = dict(self.named_parameters())
        taken = set()
        for name, tensor in weights:
            if name in known:
                known[name].weight_loader(known[name], tensor)  # type: ignore[attr-defined]
                taken.add(name)
        return taken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers])


class WritesRound(Model):
    """A loader that never asks a parameter for its `weight_loader`."""

    def load_weights(self, weights: Stream) -> set[str]:
        known = dict(self.named_parameters())
        taken = set()
        for name, tensor in weights:
            if name in known:
                known[name].data.copy_(tensor)
                taken.add(name)
        return taken


def process(model: nn.Module) -> None:
    for layer in model.modules():
        hook = getattr(layer, "process_weights_after_loading", None)
        if hook is not None:
            hook()


def variant(base: type[Plain], **attributes: Any) -> type[Plain]:
    return type(base.__name__, (base,), attributes)


# -- driving ---------------------------------------------------------------------------------------------------


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that the model reaches, by path."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for group in (module._parameters, module._buffers, vars(module)):
            for name, value in group.items():
                if isinstance(value, torch.Tensor):
                    found[f"{path}.{name}"] = value
        if hasattr(module, "kernel"):
            found[f"{path}.kernel"] = module.kernel.packed
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)


class Rig:
    """A model under weightlife after its first load, and what a cold load of any weights answers."""

    def __init__(self, build: Callable[[], Model], storage: str, rows: int = WIDTH, **settings: Any) -> None:
        self.build = build
        self.rows = rows
        self.model: Any = build()
        wrap = weightlife.wrap_loader(storage=storage, **settings)
        self.reload = wrap(lambda model, weights: model.load_weights(weights))
        self.chunk = weightlife.wrap_loader(chunked=True)(lambda model, weights: model.load_weights(weights))
        self.weights = self.checkpoint(1)
        self.load(self.weights.items())
        self.serves(self.weights)

    @property
    def repacked(self) -> bool:
        """Whether processing changes the layers."""
        report = weightlife.last_report(self.model)
        assert report is not None
        return report.layers_by_strategy.get("rebuild", 0) > 0

    def checkpoint(self, seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        names = [name for name, _ in self.build().named_parameters()]
        return {n: torch.randint(1, 90, (self.rows, WIDTH), generator=generator).float() for n in names}

    def load(self, weights: Stream) -> None:
        """One call of the user's loader: a whole load."""
        self.reload(self.model, weights)

    def bare(self, weights: Stream) -> None:
        """A part, with neither begin nor end: the next pass is the end."""
        self.chunk(self.model, weights)

    def session(self) -> Any:
        return weightlife.session(self.model)

    def cold(self, weights: Weights) -> Model:
        model = self.build()
        model.load_weights(weights.items())
        process(model)
        return model

    def answers(self, weights: Weights) -> bool:
        """Whether a pass answers as a cold load of `weights` does."""
        return same(self.model(INPUT), self.cold(weights)(INPUT))

    def serves(self, weights: Weights) -> None:
        """Outputs and every reachable tensor are those of a cold load."""
        assert self.answers(weights)
        want, got = state(self.cold(weights)), state(self.model)
        assert got.keys() == want.keys()
        assert [path for path in want if not same(got[path], want[path])] == []
        self.weights = weights

    def refused(
        self, change: Callable[[], object], *expected: type[Exception], tensors: Iterable[str] = ()
    ) -> Any:
        """`change` raises, names the tensors, and leaves every tensor where and what it was."""
        before = {
            path: (tensor, tensor.data_ptr(), tensor.clone()) for path, tensor in state(self.model).items()
        }
        with pytest.raises(expected) as caught:
            change()
        for name in tensors:
            assert name in str(caught.value)
        after = state(self.model)
        assert after.keys() == before.keys()
        for path, (tensor, pointer, values) in before.items():
            assert after[path] is tensor, path
            assert tensor.data_ptr() == pointer, path
            assert same(tensor, values), path
        self.serves(self.weights)
        return caught.value

    def update(self, seed: int) -> None:
        """A complete valid update, at once exact."""
        weights = self.checkpoint(seed)
        self.load(weights.items())
        self.serves(weights)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WEIGHTLIFE_POISON", "1")
    with poisoned():
        yield


@pytest.fixture(params=["pinned", "adopted"])
def storage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[Plain, Repacked], ids=["plain", "repacked"])
def layer(request: pytest.FixtureRequest) -> type[Plain]:
    found: type[Plain] = request.param
    return found


@pytest.fixture
def rig(layer: type[Plain], storage: str) -> Rig:
    return Rig(lambda: Model(layer), storage)


def without(weights: Weights, *names: str) -> Weights:
    return {name: value for name, value in weights.items() if name not in names}


def broken(weights: Weights, after: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights.items())[:after]
    raise ConnectionError("the trainer went away")


# -- the rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_one_key_of_a_layer_missing(rig: Rig, key: str) -> None:
    gone = f"layers.0.{key}"
    new = rig.checkpoint(2)
    rig.refused(lambda: rig.load(without(new, gone).items()), errors.MissingTensorError, tensors=[gone])
    rig.update(3)


@pytest.mark.parametrize("key", KEYS)
def test_one_key_of_a_layer_missing_in_a_session(rig: Rig, key: str) -> None:
    """A processed layer is refused; one that processing leaves alone keeps the old value of what did not come."""
    gone = f"layers.0.{key}"
    new = without(rig.checkpoint(2), gone)

    def update() -> None:
        with rig.session():
            rig.bare(new.items())

    if rig.repacked:
        rig.refused(update, errors.HalfTouchedLayerError, errors.MissingTensorError, tensors=[gone])
    else:
        update()
        rig.serves({**rig.weights, **new})
    rig.update(3)


@pytest.mark.parametrize("key", KEYS)
def test_one_key_of_a_layer_missing_in_a_session_that_demands_all(rig: Rig, key: str) -> None:
    gone = f"layers.0.{key}"
    new = without(rig.checkpoint(2), gone)

    def update() -> None:
        with weightlife.session(rig.model, partial="forbid"):
            rig.bare(new.items())

    rig.refused(update, errors.MissingTensorError, tensors=[gone])
    rig.update(3)


def test_one_key_of_a_layer_comes_late(storage: str) -> None:
    """Bare chunks: passes run on the old weights until the layer is whole."""
    rig = Rig(lambda: Model(Repacked), storage)
    new = rig.checkpoint(2)
    rig.bare(without(new, "layers.0.b").items())
    assert rig.answers(rig.weights)
    assert rig.answers(rig.weights)
    rig.bare([("layers.0.b", new["layers.0.b"])])
    rig.serves(new)


@pytest.mark.parametrize("key", KEYS)
def test_one_key_sent_twice(rig: Rig, key: str) -> None:
    twice = f"layers.0.{key}"
    new = rig.checkpoint(2)
    stream = [(twice, rig.weights[twice]), *new.items()]
    rig.refused(lambda: rig.load(stream), errors.SurplusTensorError, tensors=[twice])
    rig.update(3)


def test_one_key_sent_twice_in_place_of_another(rig: Rig) -> None:
    new = rig.checkpoint(2)
    stream = [("layers.0.a", new["layers.0.a"]), *without(new, "layers.0.c").items()]
    rig.refused(
        lambda: rig.load(stream), errors.MissingTensorError, errors.SurplusTensorError, tensors=["layers.0."]
    )
    rig.update(3)


def test_one_key_sent_twice_bare(rig: Rig) -> None:
    """Without begin and end a repeat is a retry: the later value wins."""
    new = rig.checkpoint(2)
    rig.bare([("layers.0.b", rig.checkpoint(9)["layers.0.b"]), *new.items()])
    rig.serves(new)


@pytest.mark.parametrize("bad", ["layers.0.b", "layers.1.a", "layers.1.c"])
@pytest.mark.parametrize("shape", [(WIDTH - 1, WIDTH), (1, WIDTH), (1,), (WIDTH, WIDTH + 1)], ids=str)
def test_wrong_shape_in_mid_stream_then_a_correct_retry(rig: Rig, bad: str, shape: tuple[int, ...]) -> None:
    new = rig.checkpoint(2)
    stream = {**new, bad: torch.ones(shape)}
    rig.refused(lambda: rig.load(stream.items()), errors.ShapeMismatchError, tensors=[bad])
    rig.load(new.items())
    rig.serves(new)


@pytest.mark.parametrize("shape", [(1, WIDTH), (1,), (WIDTH, 1)], ids=str)
def test_wrong_shape_that_would_be_broadcast(
    layer: type[Plain], storage: str, shape: tuple[int, ...]
) -> None:
    """A loader that asserts nothing: `copy_` would spread one row over all."""
    rig = Rig(lambda: WritesRound(layer), storage)
    stream = {**rig.checkpoint(2), "layers.1.b": torch.ones(shape)}
    rig.refused(lambda: rig.load(stream.items()), errors.ShapeMismatchError, tensors=["layers.1.b"])
    rig.update(3)


@pytest.mark.parametrize("after", range(7))
def test_failed_load_then_everything_again(rig: Rig, after: int) -> None:
    new = rig.checkpoint(2)
    rig.refused(lambda: rig.load(broken(new, after)), ConnectionError)
    rig.load(new.items())
    rig.serves(new)


@pytest.mark.parametrize("after", range(7))
def test_failed_session_then_everything_again(rig: Rig, after: int) -> None:
    new = rig.checkpoint(2)

    def update() -> None:
        with rig.session():
            rig.bare(list(new.items())[: after // 2])
            rig.bare(broken(new, after))

    rig.refused(update, ConnectionError)
    with rig.session():
        for item in new.items():
            rig.bare([item])
    rig.serves(new)


def test_failed_bare_chunk_then_everything_again(rig: Rig) -> None:
    new = rig.checkpoint(2)
    rig.refused(lambda: rig.bare(broken(new, 4)), ConnectionError)
    rig.bare(new.items())
    rig.serves(new)


def test_one_buffer_reused_for_all_tensors(rig: Rig) -> None:
    new = rig.checkpoint(2)
    buffer = torch.empty(WIDTH, WIDTH)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in new.items():
            yield name, buffer.copy_(value)
        buffer.fill_(torch.nan)

    rig.load(stream())
    rig.serves(new)
    new = rig.checkpoint(3)
    for name, value in new.items():
        rig.bare([(name, buffer.copy_(value))])
        buffer.fill_(torch.nan)
    rig.serves(new)


def test_writes_by_copy_and_not_by_weight_loader(layer: type[Plain], storage: str) -> None:
    rig = Rig(lambda: WritesRound(layer), storage)
    rig.update(2)
    gone = "layers.1.c"
    new = rig.checkpoint(3)
    rig.refused(lambda: rig.load(without(new, gone).items()), errors.MissingTensorError, tensors=[gone])
    rig.update(4)


def test_one_parameter_shared_by_two_layers(layer: type[Plain], storage: str) -> None:
    rig = Rig(lambda: Model(layer, shared=True), storage)
    assert rig.model.layers[0].c is rig.model.layers[1].c
    assert "layers.1.c" not in rig.checkpoint(2)
    rig.update(2)
    assert rig.model.layers[0].c is rig.model.layers[1].c
    new = rig.checkpoint(3)
    rig.refused(
        lambda: rig.load(without(new, "layers.0.c").items()),
        errors.MissingTensorError,
        tensors=["layers.0.c"],
    )
    rig.bare(reversed(list(new.items())))
    rig.serves(new)
    assert rig.model.layers[0].c is rig.model.layers[1].c


def test_loader_writes_part_of_a_padded_parameter(layer: type[Plain], storage: str) -> None:
    """The tail keeps what the constructor gave it, as in a cold load, and takes part in processing."""
    padded = variant(layer, rows=WIDTH + 2, loader=staticmethod(first_rows_loader))
    rig = Rig(lambda: Model(padded), storage)
    assert rig.model.layers[0].c.shape == (WIDTH + 2, WIDTH)
    rig.update(2)
    rig.update(3)
    assert torch.equal(rig.model.layers[1].c[WIDTH:], torch.full((2, WIDTH), 5.0))


def chunks_that_split_layers(weights: Weights) -> Iterator[list[tuple[str, torch.Tensor]]]:
    items = list(weights.items())
    for start in range(0, len(items), 2):
        yield items[start : start + 2]


def test_a_session_per_chunk_where_chunks_split_layers(rig: Rig) -> None:
    for part in chunks_that_split_layers(rig.checkpoint(2)):

        def update(part: Any = part) -> None:
            with rig.session():
                rig.bare(part)

        if rig.repacked:
            rig.refused(update, errors.HalfTouchedLayerError, errors.MissingTensorError)
        else:
            update()
            rig.weights = {**rig.weights, **dict(part)}
            rig.serves(rig.weights)
    rig.update(3)


def test_a_load_per_chunk_where_chunks_split_layers(rig: Rig) -> None:
    for part in chunks_that_split_layers(rig.checkpoint(2)):
        rig.refused(lambda p=part: rig.load(p), errors.MissingTensorError)
    rig.update(3)


def test_one_session_over_chunks_that_split_layers(rig: Rig) -> None:
    new = rig.checkpoint(2)
    with rig.session():
        for part in chunks_that_split_layers(new):
            rig.bare(part)
    rig.serves(new)


def test_weight_loader_with_another_argument_name(layer: type[Plain], storage: str) -> None:
    odd = variant(layer, loader=staticmethod(oddly_named_loader))
    rig = Rig(lambda: Model(odd), storage)
    rig.update(2)
    new = rig.checkpoint(3)
    for item in new.items():
        rig.bare([item])
    rig.serves(new)


def test_persistent_buffer_that_is_not_in_the_stream(rig: Rig) -> None:
    buffers = [layer.kept for layer in rig.model.layers]
    pointers = [buffer.data_ptr() for buffer in buffers]
    for seed in (2, 3):
        rig.update(seed)
    for block, buffer, pointer in zip(rig.model.layers, buffers, pointers, strict=True):
        assert torch.equal(block.kept, torch.arange(float(WIDTH)))
        assert block.kept is buffer
        assert block.kept.data_ptr() == pointer


def test_persistent_buffer_that_the_engine_wrote_keeps_its_value(storage: str) -> None:
    """What serving put into a buffer (a calibrated scale, a counter) is not a weight, and stays."""
    rig = Rig(lambda: Model(Plain), storage)
    for block in rig.model.layers:
        block.kept.fill_(3.0)
    rig.load(rig.checkpoint(2).items())
    for block in rig.model.layers:
        assert torch.equal(block.kept, torch.full((WIDTH,), 3.0))


def test_plain_derived_attribute_and_kernel_object(storage: str) -> None:
    rig = Rig(lambda: Model(Repacked), storage)
    before = state(rig.model)
    new = rig.checkpoint(2)
    rig.load(new.items())
    rig.serves(new)
    for index, block in enumerate(rig.model.layers):
        assert torch.equal(block.derived, new[f"layers.{index}.c"].sum(dim=0))
        assert torch.equal(block.kernel.packed, new[f"layers.{index}.a"].t())
        assert block.kernel.packed.data_ptr() == block.a.data_ptr()
    if storage == "pinned":
        after = state(rig.model)
        assert [p for p in before if after[p].data_ptr() != before[p].data_ptr()] == []


def test_every_key_has_a_wrong_prefix(rig: Rig) -> None:
    wrong = {f"model.{name}": value for name, value in rig.checkpoint(2).items()}
    error = rig.refused(
        lambda: rig.load(wrong.items()), errors.EmptyUpdateError, errors.MissingTensorError,
        errors.UnexpectedTensorError,
    )  # fmt: skip
    assert "layers.0.a" in str(error)

    def update() -> None:
        with rig.session():
            rig.bare(wrong.items())

    error = rig.refused(update, errors.EmptyUpdateError, errors.UnexpectedTensorError)
    assert "model.layers.0.a" in str(error)
    assert "nearest known name is 'layers.0.a'" in str(error)
    rig.update(3)


def test_some_keys_have_a_wrong_prefix(rig: Rig) -> None:
    new = rig.checkpoint(2)
    wrong = {f"model.{n}" if n.startswith("layers.1") else n: value for n, value in new.items()}
    expected = (errors.MissingTensorError, errors.UnexpectedTensorError)
    rig.refused(lambda: rig.load(wrong.items()), *expected, tensors=["layers.1.a"])
    rig.update(3)


@pytest.mark.parametrize("place", ["", "layers.1"])
def test_keys_with_a_part_too_many(rig: Rig, place: str) -> None:
    """Adapters put `base_layer` into the names of the layers that they wrap: all of them, or some."""
    new = rig.checkpoint(2)

    def wrapped(name: str) -> str:
        path, _, last = name.rpartition(".")
        return f"{path}.base_layer.{last}" if name.startswith(place) else name

    wrong = {wrapped(name): value for name, value in new.items()}
    expected = (errors.EmptyUpdateError, errors.MissingTensorError, errors.UnexpectedTensorError)
    error = rig.refused(lambda: rig.load(wrong.items()), *expected)
    assert "base_layer" in str(error)
    assert place + "." in str(error)
    rig.update(3)


def test_a_tensor_without_elements(rig: Rig) -> None:
    """A parameter that its sender had not gathered."""
    stream = {**rig.checkpoint(2), "layers.1.b": torch.empty(0)}
    error = rig.refused(lambda: rig.load(stream.items()), errors.ShapeMismatchError, tensors=["layers.1.b"])
    assert "[0]" in str(error)
    rig.update(3)


def test_forward_inside_an_open_session(rig: Rig) -> None:
    new = rig.checkpoint(2)
    with rig.session():
        assert rig.answers(rig.weights)
        for item in new.items():
            rig.bare([item])
            assert rig.answers(rig.weights)
    rig.serves(new)


def test_forward_inside_a_session_that_fails(rig: Rig) -> None:
    new = rig.checkpoint(2)

    def update() -> None:
        with rig.session():
            rig.bare(list(new.items())[:4])
            assert rig.answers(rig.weights)
            rig.bare(broken(new, 5))

    rig.refused(update, ConnectionError)
    rig.update(3)


def test_forward_from_inside_the_source(rig: Rig) -> None:
    """The sender runs the model while it is asked for the next tensor: the old weights, or a clear refusal."""
    new = rig.checkpoint(2)
    want = rig.cold(rig.weights)(INPUT)
    seen: list[bool] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in new.items():
            yield name, value
            seen.append(same(rig.model(INPUT), want))

    try:
        rig.load(stream())
    except errors.SessionError:
        rig.serves(rig.weights)
    else:
        rig.serves(new)
    assert all(seen)
    rig.update(3)


def test_all_this_needs_no_vllm(rig: Rig) -> None:
    rig.update(2)
    report = weightlife.last_report(rig.model)
    assert report is not None
    assert report.outcome == "committed"
    assert report.tensors_received == 6
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]
