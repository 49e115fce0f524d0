# SPDX-License-Identifier: Apache-2.0
"""A toy framework: small layers that do what real ones do after a load, and a host that runs their hooks.

Every layer computes on small integers in float32, so that equal weights give equal bits whatever the alignment of
their memory. A model returns the outputs of all its layers side by side: a layer that is wrong is not hidden by the
next one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from weightlife._engine import guard
from weightlife._engine.guard import Pass
from weightlife._engine.lifecycle import Lifecycle
from weightlife._engine.session import WeightLoadSession
from weightlife.config import Settings

WIDTH = 4
EXPERTS = 3

Spec = Any  # a layer's kind, or a tuple of specs (a block)
Weights = dict[str, torch.Tensor]


# -- faults ----------------------------------------------------------------------------------------------------


class Boom(Exception):
    """What an armed fault raises: no exception of torch or of the engine."""


class Faults:
    """Raise at the n-th event of a kind. Not reachable from any model, so no snapshot ever restores it."""

    def __init__(self) -> None:
        self.armed: dict[str, int] = {}
        self.seen: dict[str, int] = {}

    def arm(self, kind: str, after: int) -> None:
        """Raise when the event has happened `after` times already (0: at the next)."""
        self.armed[kind] = after

    def clear(self) -> None:
        self.armed.clear()
        self.seen.clear()

    def tick(self, kind: str) -> None:
        self.seen[kind] = self.seen.get(kind, 0) + 1
        if kind in self.armed:
            if self.armed[kind] == 0:
                del self.armed[kind]
                raise Boom(kind)
            self.armed[kind] -= 1


faults = Faults()


# -- layers ----------------------------------------------------------------------------------------------------


def parameter(*shape: int, loader: Callable[..., None], fill: float | None = None) -> nn.Parameter:
    """A parameter in model format with its loader, as frameworks attach it."""
    data = torch.empty(shape) if fill is None else torch.full(shape, fill)
    out = nn.Parameter(data, requires_grad=False)
    out.weight_loader = loader  # type: ignore[attr-defined]
    return out


class Layer(nn.Module):
    """Base: `sources()` names what a checkpoint holds for the layer; `take` writes one of them."""

    deferred = False

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (WIDTH, WIDTH)}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        target = getattr(self, name)
        target.weight_loader(target, tensor)

    @staticmethod
    def copy(param: torch.Tensor, tensor: torch.Tensor) -> None:
        faults.tick("write")
        param.data.copy_(tensor)


class Dense(Layer):
    """Nothing happens after the load."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH, loader=self.copy)
        self.bias = parameter(WIDTH, loader=self.copy)

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x + self.bias


class Norm(Layer):
    """A loaded weight and a buffer that the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, loader=self.copy)
        self.register_buffer("positions", torch.arange(WIDTH, dtype=torch.float32), persistent=False)

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (WIDTH,)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x + self.positions


class Fused(Layer):
    """Three sources in one parameter, cut by its loader."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = parameter(3 * WIDTH, WIDTH, loader=self.shard)

    def sources(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("q", "k", "v"), (WIDTH, WIDTH))

    def take(self, name: str, tensor: torch.Tensor) -> None:
        if name == "qkv":  # a sender that fuses
            self.copy(self.qkv, tensor)
        else:
            self.qkv.weight_loader(self.qkv, tensor, "qkv".index(name))

    def shard(self, param: torch.Tensor, tensor: torch.Tensor, index: int) -> None:
        faults.tick("write")
        param.data.narrow(0, index * WIDTH, WIDTH).copy_(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv @ x


class FusedPacked(Fused):
    """The same, transposed after the load: a layer that can be half loaded and is processed."""

    def process(self) -> None:
        faults.tick("hook")
        self.qkv = nn.Parameter(self.qkv.data.t().contiguous(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.qkv


class Kernel:
    """What hooks make once and keep: it holds the packed weight itself."""

    def __init__(self, packed: torch.Tensor, scale: float) -> None:
        self.packed = packed
        self.scale = scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.packed) * self.scale


class Method:
    """A quant method with a latch: the kernel is made on the first call only, as real ones do."""

    def __init__(self) -> None:
        self.kernel: Kernel | None = None
        self.calls = 0

    def process(self, layer: Any) -> None:
        self.calls += 1
        packed = layer.weight.data.t().contiguous()
        layer.weight = nn.Parameter(packed, requires_grad=False)
        layer.scale = float(packed.abs().max())
        if self.kernel is None:
            self.kernel = Kernel(layer.weight.data, layer.scale)


class Packed(Layer):
    """Repacked into a new parameter that a kernel object keeps; a scale is a plain float."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH, loader=self.copy)
        self.quant_method = Method()

    def process(self) -> None:
        faults.tick("hook")
        self.quant_method.process(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.quant_method.kernel is not None
        return self.quant_method.kernel(x) + self.scale * self.quant_method.calls


class Scaled(Layer):
    """Written in place by its hook: a second call would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH, loader=self.copy)

    def process(self) -> None:
        faults.tick("hook")
        self.weight.data.mul_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


class Swapped(Layer):
    """`param.data = other`: the same object, other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH, loader=self.copy)

    def process(self) -> None:
        faults.tick("hook")
        self.weight.data = self.weight.data.t().contiguous() * 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


class Renamed(Layer):
    """One name goes, others come: a parameter, a buffer, a plain tensor, a closure over them."""

    apply_fn: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH, loader=self.copy)

    def process(self) -> None:
        faults.tick("hook")
        values = self.weight.data
        del self.weight
        self.register_parameter("packed", nn.Parameter(values.flip(0).contiguous(), requires_grad=False))
        self.register_buffer("scales", values.abs().sum(dim=1))
        self.table = values.sum(dim=0)
        packed, table = self.packed.data, self.table
        self.apply_fn = lambda x: packed @ x + table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_fn(x) + self.scales


class Padded(Layer):
    """Two rows that no load writes; they take part in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH + 2, WIDTH, loader=self.rows, fill=7.0)

    def rows(self, param: torch.Tensor, tensor: torch.Tensor) -> None:
        faults.tick("write")
        param.data[:WIDTH].copy_(tensor)

    def process(self) -> None:
        faults.tick("hook")
        self.weight = nn.Parameter(self.weight.data.t().contiguous(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class PaddedPlain(Padded):
    """The same without processing."""

    process = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


@dataclass(frozen=True)
class Frozen:
    """A kernel's arguments."""

    packed: torch.Tensor
    names: tuple[str, ...] = ("packed",)


class Narrow:
    """A kernel without a `__dict__`."""

    __slots__ = ("extra", "frozen")

    def __init__(self, frozen: Frozen) -> None:
        self.frozen = frozen
        self.extra = [frozen.packed * 2, {"sum": frozen.packed.sum()}]


class Nested(Layer):
    """Tensors in a slots class, a frozen dataclass, a list and a dict."""

    kernel: Narrow | None

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH, loader=self.copy)
        self.kernel = None

    def process(self) -> None:
        faults.tick("hook")
        packed = self.weight.data.t().contiguous()
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.kernel = Narrow(Frozen(packed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.kernel is not None
        doubled, sums = self.kernel.extra
        return x @ self.kernel.frozen.packed + x @ doubled + sums["sum"]


class Handles:
    """The native side of opaque handles: which are alive, and who freed one twice."""

    def __init__(self) -> None:
        self.alive: dict[int, torch.Tensor] = {}
        self.double_frees = 0
        self._next = 1

    def make(self, content: torch.Tensor) -> int:
        self._next += 1
        self.alive[self._next] = content.clone()
        return self._next

    def free(self, handle: int) -> None:
        if self.alive.pop(handle, None) is None:
            self.double_frees += 1


handles = Handles()


class Handle:
    """An owner of a native resource, whose address it keeps in an integer tensor."""

    def __init__(self, content: torch.Tensor) -> None:
        self.pointer = torch.tensor([handles.make(content)])

    def __del__(self) -> None:
        handles.free(int(self.pointer))


class Native(Layer):
    """Computes through an opaque handle."""

    handle: Handle | None

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH, loader=self.copy)
        self.handle = None

    def process(self) -> None:
        faults.tick("hook")
        self.handle = Handle(self.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.handle is not None
        return handles.alive[int(self.handle.pointer)] @ x


class Aliased(Layer):
    """A buffer that is a view of the weight, and stays one after processing in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH, loader=self.copy)
        self.register_buffer("first_row", self.weight.data[0])

    def process(self) -> None:
        faults.tick("hook")
        self.weight.data.add_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x + self.first_row


class Experts(Layer):
    """Many sources in one parameter through a composed loader; packed after the load."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = parameter(EXPERTS, 2 * WIDTH, WIDTH, loader=self.expert)

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {f"{e}-{w}": (WIDTH, WIDTH) for e in range(EXPERTS) for w in ("w1", "w3")}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        expert, shard = name.split("-")
        self.w13.weight_loader(self.w13, tensor, int(expert), 0 if shard == "w1" else 1)

    def expert(self, param: torch.Tensor, tensor: torch.Tensor, expert: int, shard: int) -> None:
        faults.tick("write")
        self.half(param.data[expert], tensor, shard)

    @staticmethod
    def half(data: torch.Tensor, tensor: torch.Tensor, shard: int) -> None:
        data.narrow(0, shard * WIDTH, WIDTH).copy_(tensor)

    def process(self) -> None:
        faults.tick("hook")
        self.w13 = nn.Parameter(self.w13.data.transpose(1, 2).contiguous(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w13).flatten()


class Attention(Layer):
    """A deferred hook with scales of its own: it consumes the parameter that was loaded."""

    deferred = True
    scale: float

    def __init__(self) -> None:
        super().__init__()
        self.k_scale = parameter(1, loader=self.copy, fill=-1.0)

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {"k_scale": (1,)}

    def process(self) -> None:
        faults.tick("hook")
        self.scale = float(self.k_scale) * 2.0
        del self.k_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Tied(Layer):
    """Reads another layer's weight in model format; it has no source of its own."""

    def __init__(self, other: Layer) -> None:
        super().__init__()
        self.weight = other.weight

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


class Block(nn.Module):
    """A module without tensors of its own."""

    def __init__(self, children: Iterable[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.inner])


KINDS: dict[str, type[Layer]] = {
    "dense": Dense,
    "norm": Norm,
    "fused": Fused,
    "fused_packed": FusedPacked,
    "packed": Packed,
    "scaled": Scaled,
    "swapped": Swapped,
    "renamed": Renamed,
    "padded": Padded,
    "padded_plain": PaddedPlain,
    "nested": Nested,
    "native": Native,
    "aliased": Aliased,
    "experts": Experts,
    "attention": Attention,
}
TIEABLE = ("dense", "packed", "scaled", "swapped", "renamed", "native")


class ToyModel(nn.Module):
    """A tree of layers. `("dense", ("packed", "tied"))` is a layer and a block of two; a `tied` layer shares the
    weight of the nearest layer before it that has one to share.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self._tie_to: Layer | None = None
        self.body = self._build(spec if isinstance(spec, tuple) else (spec,))
        del self._tie_to
        self.gain: float = 0.0

    def _build(self, spec: Spec) -> nn.Module:
        if isinstance(spec, tuple):
            return Block([self._build(part) for part in spec])
        if spec == "tied":
            assert self._tie_to is not None, "a tied layer needs one before it"
            return Tied(self._tie_to)
        layer = KINDS[spec]()
        if spec in TIEABLE:
            # Kept outside `_modules`: it must not be registered a second time.
            object.__setattr__(self, "_tie_to", layer)
        return layer

    def layers(self) -> Iterator[tuple[str, Layer]]:
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield path, module

    def sources(self) -> dict[str, tuple[int, ...]]:
        """Every source name with its shape."""
        return {
            f"{path}.{name}": shape
            for path, layer in self.layers()
            for name, shape in layer.sources().items()
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As frameworks have it: a stream of names and tensors, written by each parameter's loader."""
        taken = set()
        for name, tensor in weights:
            path, _, source = name.rpartition(".")
            self.get_submodule(path).take(source, tensor)  # type: ignore[operator]
            taken.add(name)
        return taken

    def process(self) -> None:
        """The model's own hook."""
        faults.tick("model_hook")
        self.gain = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.body(x), x * self.gain])


# -- the host --------------------------------------------------------------------------------------------------


class Foreign:
    """A process-wide object that layers hold but do not own."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class ToyHost:
    """`weightlife.hosts.protocol.Host` for toy models. What it answers may be set."""

    name = "toy"

    def __init__(self, model: nn.Module) -> None:
        self._model: Callable[[], nn.Module | None] = __import__("weakref").ref(model)
        self.observe: str | None = None
        self.refuse: str | None = None
        self.not_adoptable: str | None = None
        self.ranks = (0, 1)
        self.others: list[list[int]] | None = None
        self.calls: list[str] = []
        self.load: Callable[[Any], Any] | None = getattr(model, "load_weights", None)
        self.source: Any = None

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    def skip(self, obj: Any) -> bool:
        return isinstance(obj, Foreign)

    def transient(self, path: str) -> bool:
        return "cache" in path

    def layer_hook(self, layer: nn.Module) -> str | None:
        hook = getattr(layer, "process", None)
        return (
            type(layer).__name__ if hook and layer is not self.model and not self.is_deferred(layer) else None
        )

    def process_layer(self, layer: nn.Module) -> None:
        self.calls.append(f"layer {type(layer).__name__}")
        layer.process()  # type: ignore[operator]

    def is_deferred(self, layer: nn.Module) -> bool:
        return bool(getattr(layer, "deferred", False))

    def process_deferred(self, layer: nn.Module) -> None:
        self.calls.append(f"deferred {type(layer).__name__}")
        layer.process()  # type: ignore[operator]

    def loader(self) -> Callable[[Any], Any] | None:
        return self.load

    def headers(self, path: Any) -> Any:
        return self.source

    def may_process_early(self, layer: object) -> bool:
        return True

    def rerun_deferred(self) -> bool:
        return False

    def before_processing(self) -> None:
        self.calls.append("before")

    def process_model(self) -> None:
        self.calls.append("model")
        hook = getattr(self.model, "process", None)
        if hook is not None:
            hook()

    def ties_late(self) -> bool:
        return False

    def has_model_hook(self) -> bool:
        return getattr(self.model, "process", None) is not None

    def probe(self, layer: nn.Module) -> torch.Tensor | None:
        return None

    def contexts(self) -> Any:
        return nullcontext()

    def observe_reason(self) -> str | None:
        return self.observe

    def refuse_reason(self, operation: str) -> str | None:
        return self.refuse

    def adoptable(self) -> str | None:
        return self.not_adoptable

    def rank(self) -> tuple[int, int]:
        return self.ranks

    def exchange(self, words: list[int]) -> list[list[int]]:
        others = self.others if self.others is not None else [words] * (self.ranks[1] - 1)
        return [words, *others]

    def commit_notes(self) -> list[str]:
        faults.tick("commit_notes")
        return ["a toy has no caches"]

    def versions(self) -> dict[str, str]:
        return {"toy": "1"}


def process_all(model: nn.Module, host: ToyHost | None = None) -> None:
    """The host's own processing of a whole model, in its order."""
    host = host or ToyHost(model)
    host.before_processing()
    for layer in list(model.modules()):
        if host.layer_hook(layer) is not None:
            host.process_layer(layer)
    for layer in list(model.modules()):
        if host.is_deferred(layer):
            host.process_deferred(layer)
    host.process_model()


# -- driving ---------------------------------------------------------------------------------------------------


class One(ToyModel):
    """A toy model with one more layer of a test's own."""

    def __init__(self, make: Callable[[], Layer]) -> None:
        super().__init__(("norm",))
        self.special = make()


def one(make: Callable[[], Layer]) -> Callable[[], nn.Module]:
    """A constructor of such a model."""
    return lambda: One(make)


def poison(tensor: torch.Tensor) -> None:
    """Every byte of a storage 0xFF: NaN in floats."""
    storage = tensor.untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).fill_(0xFF)  # type: ignore[call-overload]


def weights_of(model: Any, seed: int) -> Weights:
    """A checkpoint of a toy model: integers between 1 and 97, different for every seed and name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(1, 98, shape, generator=generator).to(torch.float32)
        for name, shape in model.sources().items()
    }


def cold(spec: Spec | Callable[[], nn.Module], weights: Mapping[str, torch.Tensor]) -> Any:
    """A model that was built and loaded without weightlife: the oracle."""
    model = spec() if callable(spec) else ToyModel(spec)
    model.load_weights(iter(weights.items()))  # type: ignore[operator]
    process_all(model)
    return model


INPUT = torch.arange(1, WIDTH + 1, dtype=torch.float32)


class Served:
    """A toy model under a lifecycle, after its first load."""

    alive: list[Served] = []  # noqa: RUF012 - what a test leaves open is closed by a fixture

    def __init__(
        self,
        spec: Spec | Callable[[], nn.Module],
        seed: int = 0,
        provisional: bool = False,
        weights: Weights | None = None,
        **settings: Any,
    ) -> None:
        self.spec = spec
        self.model: Any = spec() if callable(spec) else ToyModel(spec)
        self.host = ToyHost(self.model)
        self.life = Lifecycle(self.model, self.host, Settings(**settings), provisional, poison)
        self.weights = weights_of(self.model, seed) if weights is None else dict(weights)
        assert self.life.first is not None
        if provisional:
            for value in self.model.state_dict().values():
                value.uniform_(-1e-3, 1e-3)
        else:
            self.life.load_weights(self.model.load_weights, iter(self.weights.items()))
        self.life.first.process(lambda: process_all(self.model, self.host))
        self.host.calls.clear()
        Served.alive.append(self)

    @classmethod
    def close_all(cls) -> None:
        """Abort what is open and forget every model."""
        from weightlife._engine import lifecycle

        for served in cls.alive:
            served.life.abort()
            lifecycle.forget(served.model)
        cls.alive.clear()

    def checkpoint(self, seed: int) -> Weights:
        """Another checkpoint of the same shapes."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randint(1, 98, tuple(value.shape), generator=generator).to(torch.float32)
            for name, value in self.weights.items()
        }

    def open(self, partial: str = "forbid", operation: str = "update") -> WeightLoadSession:
        with self.life.owned("client"):
            return self.life.open("client", operation, True, partial)

    def send(self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> Any:
        items = iter(weights.items()) if isinstance(weights, Mapping) else weights
        return self.life.load_weights(self.model.load_weights, items)

    def finish(self) -> None:
        self.life.finish("client")

    def update(self, weights: Mapping[str, torch.Tensor], partial: str = "forbid") -> None:
        """One explicit update. An exception of any phase comes out as it is."""
        self.open(partial)
        self.send(weights)
        self.finish()
        self.weights = {**self.weights, **weights}

    def run(self, kind: Pass = Pass.REAL) -> torch.Tensor:
        """A forward pass as a host makes it, under the guard."""
        return guard.guarded([self.life], kind, lambda: self.model(INPUT)).clone()

    def expected(self, weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """What a cold load of `weights` over the present checkpoint answers."""
        return cold(self.spec, {**self.weights, **(weights or {})})(INPUT)


# -- exactness -------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """One tensor: the object, its memory, its geometry and its bytes."""

    tensor: torch.Tensor
    pointer: int
    storage: int
    geometry: tuple[Any, ...]
    attributes: dict[str, Any]
    content: bytes


def _content(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    return bytes(storage.tolist()) if storage.nbytes() else b""


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, type(tensor), tensor.requires_grad,
    )  # fmt: skip


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Every slot of an object, found without the engine's help."""
    if isinstance(obj, nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            yield from ((f"{group}.{name}", value) for name, value in vars(obj)[group].items())
        yield from (
            (name, value) for name, value in vars(obj).items()
            if name not in ("_parameters", "_buffers", "_modules", "_weightlife") and not name.endswith("_hooks")
        )  # fmt: skip
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, FunctionType):
        yield from ((f"cell {i}", cell.cell_contents) for i, cell in enumerate(obj.__closure__ or ()))
        yield from ((f"default {i}", value) for i, value in enumerate(obj.__defaults__ or ()))
    elif isinstance(obj, functools.partial):
        yield from (("func", obj.func), ("args", obj.args), ("keywords", obj.keywords))
    elif isinstance(obj, torch.Tensor):
        yield from vars(obj).items()
    elif not isinstance(obj, (MethodType, type)) and type(obj).__module__ != "builtins":
        yield from vars(obj).items() if hasattr(obj, "__dict__") else ()
        for cls in type(obj).__mro__:
            names = vars(cls).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if hasattr(obj, name):
                    yield name, getattr(obj, name)


class Snapshot:
    """Everything that a model reaches: which object sits in which slot, in which order, and every storage's bytes.

    It keeps what it saw alive, so that an address can't be used again and pass for the same.
    """

    def __init__(self, model: nn.Module) -> None:
        self.slots: dict[str, Any] = {}
        self.tensors: dict[str, Seen] = {}
        self.modules = [name for name, _ in model.named_modules()]
        queue: list[tuple[str, Any]] = [("", model)]
        entered: set[int] = set()
        while queue:
            path, obj = queue.pop()
            if id(obj) in entered:
                continue
            entered.add(id(obj))
            for name, value in _parts(obj):
                where = f"{path}/{name}"
                self.slots[where] = value
                if isinstance(value, torch.Tensor):
                    self.tensors[where] = Seen(
                        value, value.data_ptr(), value.untyped_storage()._cdata, geometry(value), dict(vars(value)),
                        _content(value),
                    )  # fmt: skip
                queue.append((where, value))

    def differences(self, other: Snapshot) -> list[str]:
        """What `other` (later) has different, in words. Plain data compare by value, objects by identity."""
        out = [] if self.modules == other.modules else ["the modules"]
        if list(self.slots) != list(other.slots):
            gone, new = self.slots.keys() - other.slots.keys(), other.slots.keys() - self.slots.keys()
            out.append(
                f"slots: gone {sorted(gone)}, new {sorted(new)}" if gone or new else "the order of slots"
            )
        for path, value in self.slots.items():
            now = other.slots.get(path)
            plain = isinstance(value, (bool, int, float, str, type(None), MethodType)) and type(now) is type(
                value
            )
            if path in other.slots and now is not value and not (plain and now == value):
                out.append(f"{path}: another object")
        for path, seen in self.tensors.items():
            then = other.tensors.get(path)
            if then is None:
                continue
            kinds = ("pointer", "storage", "geometry", "content")
            out += [f"{path}: {kind}" for kind in kinds if getattr(seen, kind) != getattr(then, kind)]
        return out

    def pointers(self) -> dict[str, int]:
        return {path: seen.pointer for path, seen in self.tensors.items()}


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """The model is exactly the same after the block."""
    before = Snapshot(model)
    yield
    assert before.differences(Snapshot(model)) == []


def chunks(weights: Weights, count: int) -> list[Weights]:
    """A checkpoint in `count` parts, in order."""
    items = list(weights.items())
    size = max(1, -(-len(items) // count))
    return [dict(items[i : i + size]) for i in range(0, len(items), size)]


def pick(weights: Weights, names: Sequence[str]) -> Weights:
    return {name: weights[name] for name in names}
