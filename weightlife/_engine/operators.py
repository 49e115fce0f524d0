# SPDX-License-Identifier: Apache-2.0
"""What a dispatch mode alone does not see: custom operators, raw memory, a client's modes that stand over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _pop_mode, _push_mode

from weightlife._engine.flow import Flow
from weightlife._engine.receive import Receiver
from weightlife._engine.rules import Kind, kind_of
from weightlife._engine.signatures import signature_of
from weightlife._engine.watching import Watch

# Calls that give a tensor's memory away, below any mode.
_RAW = frozenset(
    {torch.Tensor.numpy, torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__array__,
     torch.Tensor.__dlpack__}
)  # fmt: skip
# Calls that look at values where no mode sees it: what a loader does then may depend on them.
_LOOKS = _RAW | {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__}


class CustomOperators(TorchFunctionMode):
    """Sees the host's own C++ operators, half of which never reach a dispatch mode.

    Operators registered as composite implicit run below dispatch. Here their tensor arguments are prepared like
    those of any other operation, writes that their schema declares are reported, and tensors handed to an operator
    that returns no tensor (an integer handle, a script object) are remembered: native code may keep their address.
    """

    def __init__(
        self,
        receiver: Receiver | None,
        on_written: Callable[[torch.Tensor], None] | None,
        flow: Flow | None = None,
    ) -> None:
        super().__init__()
        self.flow = flow
        self.receiver = receiver
        self.on_written = on_written
        self.handed_over: dict[int, StorageWeakRef] = {}
        self.used = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS and self.receiver is not None:
            self.receiver.odd = True
        if func in _RAW and self.receiver is not None and args and isinstance(args[0], torch.Tensor):
            return func(self.receiver.hand_out(args[0]), *args[1:], **kwargs)
        if not isinstance(func, (torch._ops.OpOverloadPacket, torch._ops.OpOverload)):
            return func(*args, **kwargs)
        schema = _packet_schema(func)
        if schema is None or schema.name.startswith("aten::"):
            return func(*args, **kwargs)
        self.used = True
        if self.receiver is not None:
            self.receiver.odd = True
        declared = {i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write}
        receiver = self.receiver
        if receiver is not None:
            args = tuple(receiver.redirect(v, i in declared) for i, v in enumerate(args))
            kwargs = {k: receiver.redirect(v, False) for k, v in kwargs.items()}
            seen = receiver.writes
        out = func(*args, **kwargs)
        if receiver is not None and receiver.writes == seen:
            for position in declared:  # a composite operator: the dispatch mode met nothing of it
                if position < len(args):
                    receiver.enter(args[position])
        values = [*args, *kwargs.values()]
        if not isinstance(out, (torch.Tensor, tuple, list, type(None))):
            for value in values:
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    storage = value.untyped_storage()
                    self.handed_over[int(storage._cdata)] = StorageWeakRef(storage)
        if self.flow is not None:
            self.flow.saw(schema.name, values, [args[i] for i in declared if i < len(args)], out)
        if self.on_written is not None:
            for position in declared:
                if position < len(args) and isinstance(args[position], torch.Tensor):
                    self.on_written(args[position])
        return out


class Sampled:
    """Holds a function mode off for source names of which two alike were watched.

    Every `.data` and `.shape` of a parameter goes through a function mode: 71,159 calls and 80 ms for 2,304 expert
    tensors, all loaded by the same lines. Use it as a context.

    Args:
        mode: the function mode.
        kinds: of names that were met in earlier calls; grows.
        call: the number of this call, from one.
    """

    def __init__(self, mode: TorchFunctionMode, kinds: dict[Any, Kind], call: int) -> None:
        self.mode = mode
        self.off = False
        self.kinds = kinds
        self.call = call
        self._depth = 0  # of the stack below the mode, while it is off

    def __enter__(self) -> Sampled:
        self.mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stand()
        self.mode.__exit__(*error)

    def begin(self, name: str, tensor: Any = None) -> Kind:
        """A tensor of this name is about to be loaded. Returns its kind."""
        # By shape and dtype, too: a mixed checkpoint packs some layers of a kind and copies others.
        kind = kind_of(self.kinds, name, tensor)
        if kind.call != self.call:
            kind.call, kind.seen = self.call, 0
        if kind.seen < 2:
            kind.seen += 1
            self.stand()
        elif not self.off:
            depth = torch._C._len_torch_function_stack()
            if depth and torch._C._get_function_stack_at(depth - 1) is self.mode:
                torch._C._pop_torch_function_stack()
                self.off, self._depth = True, depth - 1
        return kind

    def stand(self) -> None:
        """Watch again: nobody knows what comes next. Below what was entered meanwhile."""
        if self.off:
            self.off = False
            above = []
            while torch._C._len_torch_function_stack() > self._depth:
                above.append(torch._C._pop_torch_function_stack())
            torch._C._push_on_torch_function_stack(self.mode)
            for other in reversed(above):
                torch._C._push_on_torch_function_stack(other)


@lru_cache(maxsize=1024)
def _packet_schema(func: Any) -> Any:
    if isinstance(func, torch._ops.OpOverload):
        return func._schema
    names = func.overloads()
    return getattr(func, names[0])._schema if names else None


class WriteObserver(Watch):
    """Notes which of the constructor's storages the first processing writes in place, and what it computes of them."""

    def __init__(self, table: dict[int, int], flow: Flow | None = None) -> None:
        super().__init__()
        self.flow = flow
        self.table = table
        self.written: set[int] = set()

    def note(self, tensor: Any) -> None:
        """Enter a written tensor."""
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.layout is torch.strided:
            number = self.table.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.written.add(number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        signature = signature_of(func)
        for position in signature.writes:
            if position < len(args):
                for value in (
                    args[position] if isinstance(args[position], (list, tuple)) else [args[position]]
                ):
                    self.note(value)
        for name in signature.keyword_writes & kwargs.keys():
            self.note(kwargs[name])
        out = func(*args, **kwargs)
        if self.flow is not None and not signature.passive:
            written = [args[i] for i in signature.writes if i < len(args)]
            written += [kwargs[name] for name in signature.keyword_writes & kwargs.keys()]
            self.flow.saw(signature.name, [*args, *kwargs.values()], written, out)
        return out


@contextmanager
def below_foreign_modes() -> Iterator[list[Any]]:
    """Take a client's own dispatch modes off, innermost first, and put them back at the end.

    Modes that are entered meanwhile stand below them once they are there `again`: they must meet the model's real
    storages first.
    """
    foreign = []
    while torch._C._len_torch_dispatch_stack():
        foreign.append(_pop_mode())
    try:
        yield foreign
    finally:
        for mode in reversed(foreign):
            _push_mode(mode)


@contextmanager
def again(foreign: list[Any]) -> Iterator[None]:
    """The modes that `below_foreign_modes` took off, on top of what was entered since."""
    for mode in reversed(foreign):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in foreign:
            _pop_mode()


__all__ = ["CustomOperators", "Sampled", "WriteObserver", "again", "below_foreign_modes"]
