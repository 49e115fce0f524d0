# SPDX-License-Identifier: Apache-2.0
"""Watching by the key: it sees what the mode sees, and goes back to the stack for whatever the key can't show."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.test_receive import READS_FIRST, WAYS
from weightlife import errors
from weightlife._engine import watching
from weightlife._engine.ledger import region
from weightlife._engine.lifecycle import Lifecycle
from weightlife._engine.receive import Receiver
from weightlife._engine.skeleton import storage_key
from weightlife._engine.track import Track, region_of
from weightlife.config import Settings
from weightlife.hosts.torch import TorchHost

N = 24
OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    **WAYS,
    **READS_FIRST,
    "square_": lambda p, x: p.data.copy_(x).square_(),
    "clamp_": lambda p, x: p.data.copy_(x).clamp_(0, 1),
    "masked_fill_": lambda p, x: p.data.masked_fill_(x > 5, 2.0),
    "masked_scatter_": lambda p, x: p.data.masked_scatter_(x > 5, x),
    "where out=": lambda p, x: torch.where(x > 5, x, -x, out=p.data),
    "foreach add": lambda p, x: torch._foreach_add_([p.data[0], p.data[1]], [x[0], x[1]]),
    "foreach mul by a number": lambda p, x: torch._foreach_mul_([p.data], 2.0),
    "einsum": lambda p, x: p.data.copy_(torch.einsum("ij,jk->ik", x, x.t() @ p.data)),
    "init": lambda p, x: nn.init.xavier_uniform_(p.data),
    "cumsum_": lambda p, x: p.data.copy_(x).cumsum_(0),
    "addmm out=": lambda p, x: torch.addmm(x, x[:, :4], x, out=p.data),
    "to another dtype": lambda p, x: p.data.copy_(p.data.to(torch.float64) + x),
    "type_as": lambda p, x: p.data.copy_(x.double().type_as(p.data)),
    "contiguous": lambda p, x: p.data.t().contiguous().t().copy_(x),
    "flatten": lambda p, x: p.data.flatten().copy_(x.flatten()),
    "reshape that copies": lambda p, x: p.data.t().reshape(-1).copy_(x.flatten()),
    "unflatten": lambda p, x: p.data.unflatten(1, (2, 3)).copy_(x.view(4, 2, 3)),
    "tensor_split": lambda p, x: [
        c.copy_(y) for c, y in zip(p.data.tensor_split(3), x.tensor_split(3), strict=True)
    ],
    "diagonal": lambda p, x: p.data.diagonal().copy_(x.diagonal()),
    "unfold": lambda p, x: p.data.view(-1).unfold(0, 6, 6).copy_(x),
    "transposed in place": lambda p, x: p.detach().t_().copy_(x.t()),
    "swapped": lambda p, x: p.data.swapaxes(0, 1).copy_(x.t()),
    "item": lambda p, x: p.data.fill_(x[0, 0].item()),
    "set_": lambda p, x: p.detach().set_(x),
    "resize_": lambda p, x: p.data.resize_(4, 6).copy_(x),
    "sort out=": lambda p, x: torch.sort(x, out=(p.data, torch.empty(4, 6, dtype=torch.long))),
    "script": lambda p, x: scripted(p.data, x),
    "vmap": lambda p, x: torch.vmap(lambda a, b: a.copy_(b))(p.data, x),
}  # fmt: skip


@torch.jit.script
def scripted(p, x):  # type: ignore[no-untyped-def]
    """A loader's helper that the interpreter of torch runs."""
    p[1:3].copy_(x[1:3])
    p[0].fill_(1.0)


class Rig:
    """A receiver over one parameter, as a first load has it: nothing is redirected."""

    def __init__(self) -> None:
        self.param = nn.Parameter(torch.arange(N, dtype=torch.float32).view(4, 6), requires_grad=False)
        track = Track(0, self.param.untyped_storage(), N * 4, torch.float32, False, "param")
        self.seen: list[Any] = []
        self.receiver = Receiver(
            {storage_key(self.param) or 0: track}, self.on_write, None, self.on_read
        )  # fmt: skip

    def on_write(self, track: Track, view: torch.Tensor, func: Any, args: Any) -> None:
        self.seen.append(("write", func._schema.name, region_of(track, view)))

    def on_read(self, track: Track, view: torch.Tensor, func: Any) -> None:
        self.seen.append(("read", func._schema.name, region_of(track, view)))


def run(way: Callable[[Any, Any], Any], by_key: bool, context: Any) -> tuple[list[Any], bool, torch.Tensor]:
    rig, value = Rig(), torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).add_(5)
    torch.manual_seed(3)
    with context(), rig.receiver:
        if by_key:
            assert rig.receiver.by_key()
        way(rig.param, value)
    assert torch._C._len_torch_dispatch_stack() == 0
    return rig.seen, rig.receiver.odd, rig.param.data.clone()


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad], ids=["grad", "no_grad"])
@pytest.mark.parametrize("way", OTHERS)
def test_the_key_shows_what_the_mode_shows(way: str, context: Any) -> None:
    """Every write and read of the parameter, by the same operator, in the same order; the same result."""
    if way == "script":
        scripted(torch.zeros(4, 6), torch.zeros(4, 6))  # profiled runs differ from later ones
    mode, key = run(OTHERS[way], False, context), run(OTHERS[way], True, context)
    assert mode[0] or way == "set_"
    assert key[:2] == mode[:2]
    assert torch.equal(key[2], mode[2])


def test_views_go_past_it() -> None:
    """What it is for: of select, narrow and copy_, the copy alone becomes a call."""
    rig, met = Rig(), []
    dispatch = Receiver.__torch_dispatch__
    rig.receiver.on_copy = None  # a copy has a way of its own
    with rig.receiver:
        assert rig.receiver.by_key()
        for _ in range(2):
            met.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    Receiver, "__torch_dispatch__",
                    lambda self, func, *rest: (met.append(func._schema.name), dispatch(self, func, *rest))[1],
                )  # fmt: skip
                rig.param.data[1].narrow(0, 2, 2).copy_(torch.ones(2))
    assert met == ["aten::ones", "aten::copy_"]


class Halves(TorchDispatchMode):
    """A client's mode: a copy writes the first half only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            args[0][:2].copy_(args[1][:2])
            return args[0]
        return func(*args, **(kwargs or {}))


def test_a_mode_that_the_loader_enters_stands_above_ours() -> None:
    """What the mode makes of an operation counts. Afterwards torch's own function is back in its place."""
    original = _python_dispatch._push_mode
    rig = Rig()
    with rig.receiver:
        assert rig.receiver.by_key()
        rig.param.data[3].fill_(1.0)
        with Halves():
            rig.param.data.copy_(torch.ones(4, 6))
        rig.param.data[2].fill_(1.0)
        assert rig.receiver.by_key()
        rig.param.data[1].fill_(1.0)
    rows = [region(18, (6,), (1,)), region(0, (12,), (1,)), region(12, (6,), (1,)), region(6, (6,), (1,))]
    assert [part for _, _, part in rig.seen] == rows
    assert _python_dispatch._push_mode is original


def test_one_that_is_there_already_keeps_it_on_the_stack() -> None:
    rig = Rig()
    with Halves(), rig.receiver:
        assert not rig.receiver.by_key()
    with rig.receiver, Halves():
        assert not rig.receiver.by_key()


def test_another_load_inside_of_it() -> None:
    """A loader that loads another model: both are seen, and the outer one goes on."""
    outer, inner = Rig(), Rig()
    with outer.receiver:
        assert outer.receiver.by_key()
        with inner.receiver:
            assert not inner.receiver.by_key()
            inner.param.data.fill_(1.0)
            outer.param.data[0].fill_(1.0)
        outer.param.data[1].fill_(1.0)
        assert outer.receiver.by_key()
        outer.param.data[2].fill_(1.0)
    assert [part for _, _, part in outer.seen] == [region(6 * i, (6,), (1,)) for i in range(3)]
    assert [part for _, _, part in inner.seen] == [region(0, (N,), (1,))]


def test_other_threads_are_not_watched() -> None:
    rig, other = Rig(), Rig()
    with rig.receiver:
        assert rig.receiver.by_key()

        def elsewhere() -> None:
            with Halves():
                other.param.data.fill_(1.0)
                rig.param.data.fill_(1.0)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        rig.param.data.fill_(1.0)
    assert len(rig.seen) == 1 and not other.seen


def test_the_source_is_outside_of_it() -> None:
    """Also one that leaves a mode of its own: ours goes below it."""
    rig = Rig()

    def source() -> Iterator[None]:
        rig.param.data.mul_(2.0)
        with Halves():
            yield
        yield

    with rig.receiver:
        assert rig.receiver.by_key()
        items = source()
        rig.receiver.outside(items)
        assert not rig.seen
        rig.param.data.copy_(torch.ones(4, 6))
        items.close()
        rig.param.data.fill_(1.0)
    assert [part for _, _, part in rig.seen] == [region(0, (12,), (1,)), region(0, (N,), (1,))]


@pytest.mark.parametrize("missing", ["key", "taken", "blind"])
def test_a_torch_that_cannot_do_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the mode stays on the stack."""
    monkeypatch.setattr(watching, "_key", None)
    monkeypatch.setattr(watching, "_LIBRARIES", {})
    if missing == "key":
        monkeypatch.setattr(torch._C, "_parse_dispatch_key", lambda name: None)
    elif missing == "taken":
        monkeypatch.setattr(torch._C, "_dispatch_has_backend_fallback", lambda key: True)
    else:
        monkeypatch.setattr(torch._C, "_dispatch_has_backend_fallback", lambda key: False)
        monkeypatch.setattr(torch.library.Library, "fallback", lambda *args: None)
        monkeypatch.setattr(watching, "switch", lambda *args: None)
    assert watching.key() is False
    rig = Rig()
    with rig.receiver:
        assert not rig.receiver.by_key()
        rig.param.data.fill_(1.0)
    assert len(rig.seen) == 1


# -- a first load by it ----------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A tensor with a dispatch of its own."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.inner if isinstance(a, Wrapped) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Model(nn.Module):
    """Rows of one weight, by a loader that a test gives."""

    def __init__(self, write: Callable[[Model, int, torch.Tensor], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 6), requires_grad=False)
        self.write = write

    def load_weights(self, weights: Any) -> None:
        """The usual loop."""
        for name, tensor in weights:
            self.write(self, int(name.split(".")[1]), tensor)


def plain(model: Model, row: int, tensor: torch.Tensor) -> None:
    """The plain way."""
    model.weight.data[row].copy_(tensor)


def half(model: Model, row: int, tensor: torch.Tensor) -> None:
    """One row in two pieces, and only one in a mode."""
    if row == 8:
        with Halves():
            model.weight.data[row].view(6, 1).copy_(tensor.view(6, 1))
            model.weight.data[row][2:].fill_(8.0)
    else:
        plain(model, row, tensor)


def always_in_a_mode(model: Model, row: int, tensor: torch.Tensor) -> None:
    """A loader with a mode of its own."""
    with Halves():
        model.weight.data[row].copy_(tensor)
        model.weight.data[row][2:].fill_(8.0)


def wrapped(model: Model, row: int, tensor: torch.Tensor) -> None:
    """A loader that wraps what it gets."""
    model.weight.data[row].copy_(Wrapped(tensor) + 0.0)


def twice(model: Model, row: int, tensor: torch.Tensor) -> None:
    """Does something else for one row, long after others like it."""
    plain(model, row, tensor)
    if row == 9:
        model.weight.data[2].copy_(tensor)
        model.weight.data[3].add_(1.0)


@pytest.mark.parametrize("write", [plain, half, always_in_a_mode, wrapped, twice])
def test_a_first_load_teaches_the_same_by_key_and_by_mode(write: Any) -> None:
    """Manifest, rules and weights."""
    found = []
    for watch in ("sampled", "all"):
        model = Model(write)
        life = Lifecycle(model, TorchHost(model), Settings(log_level="error", watch_writes=watch))
        life.load_weights(model.load_weights, [(f"row.{i}", torch.full((6,), float(i))) for i in range(12)])
        assert life.first is not None
        life.first.process(lambda: None)
        names = {name: (entry.writes, entry.kind) for name, entry in life.manifest.names.items()}
        regions = None if life.manifest.rules is None else life.manifest.rules.regions
        found.append((names, life.manifest.expected, life.manifest.late, regions, model.weight.tolist()))
    assert found[0] == found[1]


def test_a_class_of_tensors_that_turns_up_late_is_refused_with_the_way_out() -> None:
    """Nobody could have known, and the operation did not run."""

    def late(model: Model, row: int, tensor: torch.Tensor) -> None:
        (wrapped if row == 7 else plain)(model, row, tensor)

    weights = [(f"row.{i}", torch.full((6,), float(i))) for i in range(12)]
    model = Model(late)
    life = Lifecycle(model, TorchHost(model), Settings(log_level="error"))
    with pytest.raises(errors.BypassError, match="dispatch of its own") as caught:
        life.load_weights(model.load_weights, weights)
    assert list(caught.value.tensors) == ["row.7"] and "watch_writes" in caught.value.hint
    life.load_weights(model.load_weights, weights)  # from now on under the mode
    assert model.weight[7].tolist() == [7.0] * 6
