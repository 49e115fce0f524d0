# SPDX-License-Identifier: Apache-2.0
"""A dispatch mode that can do without the stack of modes, where what it watches is plain.

Under a dispatch mode each operation becomes a Python call of 3 to 5 us, and a loader call is four: views and the copy.
Views are nothing to us. torch's dispatcher can be asked for less: a *fallback* for a dispatch key sees all operations
of a thread in which the key is switched on, and operators registered as *fallthrough* for it go past it in C++. Views,
and operators that are only made of others, are let through from the first time that they are met; what is left costs
2 us, and a view nothing.

The key is `DeferredInit`. torch keeps it for code outside of its tree (torchdistx, given up in 2023), registers nothing
for it, and it lies directly under the modes' own: the same operations come by. `Library.fallback` and
`fallthrough_kernel` are torch's public way to do this; the switch is not public. Where a torch has no such key, where
somebody has taken it, or where it shows less than it should, the mode stays on the stack.

A fallback in Python can't be called while a mode is on the stack, nor for a tensor of a class with a dispatch of its
own (torch looks for it in the wrong place, and raises). So whoever enters a mode sends ours back to the stack first,
below theirs; and who watches by the key makes sure that no such tensor is about.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _pop_mode, _push_mode

from weightlife._engine.signatures import signature_of
from weightlife._engine.untraced import UntracedMode, leave_alone

# What torch's own functions for it call, without the Python round it.
push, pop = torch._C._push_on_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack
at = torch._C._get_dispatch_stack_at
length = torch._C._len_torch_dispatch_stack

_COPY = torch.ops.aten.copy_.default
_NAME = "DeferredInit"
# Kernels of an operator's own. One that has none of these is made of others, which come by in its stead.
_OWN = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CPU", "CUDA", "Meta", "XPU", "MPS",
        "PrivateUse1", "QuantizedCPU", "QuantizedCUDA", "SparseCPU", "SparseCUDA")  # fmt: skip


class _Here(threading.local):
    """What watches this thread by the key."""

    watch: Watch | None = None


_HERE = _Here()
_SEEN: set[int] = set()  # identities of operators that are not let through; `signature_of` keeps them alive
_LIBRARIES: dict[str, torch.library.Library] = {}
_lock = threading.Lock()
_key: Any = None  # the key, once it was found to work; False: it does not
switch: Any = getattr(torch._C, "_dispatch_tls_set_dispatch_key_included", None)
_level: Any = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", None)


def dispatches(cls: type) -> bool:
    """Whether a class of tensors has a dispatch of its own."""
    return getattr(cls, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


def could_not_show(error: BaseException) -> bool:
    """Whether this is what torch raises where a fallback can't be called: an assertion with the place of its source."""
    return isinstance(error, RuntimeError) and "python_dispatch.cpp" in str(error)


def key() -> Any:
    """The dispatch key, or False where this torch can't be watched by it. Registered when it is first asked for."""
    global _key
    if _key is None:
        with _lock:
            if _key is None:
                _key = _register()
    return _key


def _register() -> Any:
    try:
        found = torch._C._parse_dispatch_key(_NAME)
        if found is None or torch._C._dispatch_has_backend_fallback(found) or None in (switch, _level):
            return False
        if not leave_alone(_met):
            return False
        library = _LIBRARIES["_"] = torch.library.Library("_", "IMPL")
        library.fallback(_met, _NAME)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return found if _shows(found) else False


def _shows(found: Any) -> bool:
    """Whether a write by a view is seen as such, a view is not, and the switch works. Asked once."""
    global _key
    met: list[str] = []

    class Probe(UntracedMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            met.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    probe: Any = Probe()  # type: ignore[no-untyped-call]
    probe.on_copy = None
    memory, value = torch.zeros(2, 2), torch.ones(1, 2)
    _key, before, _HERE.watch = found, _HERE.watch, probe
    try:
        for _ in range(2):
            met.clear()
            switch(found, True)
            try:
                memory.narrow(0, 1, 1).copy_(value)
            finally:
                switch(found, False)
            memory.fill_(0.0)
    except Exception:  # noqa: BLE001 - a torch in which this does not work is watched by the mode
        return False
    finally:
        _key, _HERE.watch = None, before
    return met == ["aten::copy_"]


def _let_through(op: Any) -> bool:
    """An operator is met for the first time: let it through from now on, if it is a view or made of others."""
    signature, name = signature_of(op), op.name()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = has(name, "CompositeImplicitAutograd") and not any(has(name, own) for own in _OWN)
    if (signature.passive or composite) and not signature.replaces:
        space = op.namespace
        try:
            if space not in _LIBRARIES:
                _LIBRARIES[space] = torch.library.Library(space, "IMPL")
            _LIBRARIES[space].impl(op, torch.library.fallthrough_kernel, _NAME)
            return True
        except RuntimeError:
            pass  # it is seen, as every operator is under a mode
    _SEEN.add(id(op))
    return False


def _met(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The fallback: an operation in a thread that is watched."""
    if id(op) not in _SEEN and _let_through(op):
        return op(*args, **kwargs)
    watch = _HERE.watch
    switch(_key, False)
    if watch is None:  # a thread of torch's own that inherited the switch
        return op(*args, **kwargs)
    if _level() is not None:  # what functorch makes of it counts
        watch.by_mode()
        return op(*args, **kwargs)
    _HERE.watch = None  # what the operation does inside, with modes of its own, is none of ours
    try:
        if op is _COPY and watch.on_copy is not None and not kwargs:
            return watch.on_copy(op, args)
        return watch.__torch_dispatch__(op, (), args, kwargs)  # type: ignore[no-untyped-call]
    finally:
        _HERE.watch = watch
        switch(_key, True)


def _push_other(mode: Any) -> None:
    """In the place of torch's `_push_mode`, while some thread is watched by the key: ours goes below."""
    if _HERE.watch is not None:
        _HERE.watch.by_mode()
    _push_mode(mode)


class _Pushes:
    """Notices modes that are entered, while anybody needs to know."""

    users = 0

    @classmethod
    def notice(cls) -> None:
        with _lock:
            cls.users += 1
            _python_dispatch._push_mode = _push_other

    @classmethod
    def forget(cls) -> None:
        with _lock:
            cls.users -= 1
            if not cls.users:
                _python_dispatch._push_mode = _push_mode


def _take(depth: int) -> list[Any]:
    above = []
    while length() > depth:
        above.append(_pop_mode())
    return above


def put_below(mode: Any, depth: int) -> None:
    """Put a mode on the stack at a depth, below what stands there."""
    above = _take(depth)
    _push_mode(mode)
    for other in reversed(above):
        _push_mode(other)


class Watch(UntracedMode):
    """A dispatch mode that can leave the stack and come back, or be shown operations by the key instead.

    A subclass defines `__torch_dispatch__`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.aside = False  # sees nothing, for items whose writes are known
        self.keyed = False  # is shown operations by the key, and is not on the stack
        self.depth = -2  # of the stack below it, while it is not on it
        self.on_copy: Callable[[Any, tuple[Any, ...]], Any] | None = None  # does a plain `copy_`, by the key
        self._noticing = False

    def __exit__(self, *error: Any) -> None:
        self.by_mode()
        if self._noticing:
            self._noticing = False
            _Pushes.forget()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _on_top(self) -> bool:
        depth = length()
        return bool(depth) and at(depth - 1) is self

    def by_key(self) -> bool:
        """Be shown operations by the key from now on, if that can be. Whether it is so."""
        if self.keyed:
            return True
        # Another mode below would get what we pass on, and with one on the stack the key shows nothing.
        if self.aside or length() != 1 or at(0) is not self or _HERE.watch is not None:
            return False
        pop(None)
        if not key():
            push(self)
            return False
        if not self._noticing:
            self._noticing = True
            _Pushes.notice()
        self.depth = 0
        self.keyed, _HERE.watch = True, self
        switch(_key, True)
        return True

    def by_mode(self) -> None:
        """Be on the stack again."""
        if self.keyed:
            switch(_key, False)
            self.keyed, _HERE.watch = False, None
            put_below(self, self.depth)

    def step_aside(self) -> bool:
        """See nothing more, if it is on top of the stack. Whether it is so."""
        if not self._on_top():
            return False
        pop(None)
        self.depth = length()
        self.aside = True
        return True

    def stand(self) -> None:
        """See again, where it did: on the stack below what was entered meanwhile."""
        if not self.aside:
            return
        self.aside = False
        if length() == self.depth:
            push(self)
        else:
            put_below(self, self.depth)

    def unseen(self, call: Callable[..., Any], *args: Any) -> Any:
        """`call(*args)`, of which nothing is shown if this stands on top of the stack."""
        if not self._on_top():
            return call(*args)
        pop(None)
        try:
            return call(*args)
        finally:
            push(self)

    def outside(self, source: Iterator[Any]) -> Any:
        """`next(source)` unseen: safetensors' own operators are not the ledger's business.

        They would cost 19 us a tensor under the mode.
        """
        if self.keyed:
            if _HERE.watch is not self:
                return next(source)
            switch(_key, False)
            _HERE.watch = None
            try:
                return next(source)
            finally:
                _HERE.watch = self
                if length():  # it left a mode of its own
                    self.by_mode()
                else:
                    switch(_key, True)
        if not self._on_top():
            return next(source)
        pop(None)
        try:
            return next(source)
        finally:
            push(self)


__all__ = ["Watch", "at", "could_not_show", "dispatches", "key", "length", "pop", "push", "put_below"]
