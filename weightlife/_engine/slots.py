# SPDX-License-Identifier: Apache-2.0
"""Holders and slots: one uniform view of everything that a model can keep state in.

A *holder* is an object with state: a module, a host object (quant method, kernel, impl), a dict, a list, a
closure. A *slot* is one place in it. The engine never asks what a slot means; it reads all of them, compares
them with an earlier reading, and puts back the ones that differ.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Key = tuple[str, Any]
State = dict[Key, Any]
Owners = set[int] | frozenset[int]

# What `torch.nn.Module.__init__` itself keeps on every module: hooks, flags and the three containers, which
# are read as kinds of their own. `training` changes with `eval()` after the load and is no weight state.
_TORCH_INTERNALS = frozenset(vars(torch.nn.Module()))
_CONTAINERS = {"param": "_parameters", "buffer": "_buffers", "module": "_modules"}
RESERVED_ATTRIBUTE = "_weightlife"
PLACE = "place"  # the kind of slot that a finder tells of: its holder is a `places.Place`

# Values that hold no tensors and have no state of their own.
_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, enum.Enum, range, types.ModuleType,
    types.BuiltinFunctionType, torch.dtype, torch.device, torch.Size, torch.Generator, torch.layout,
)  # fmt: skip

# Of exactly these types are nine in ten slots, and asking a set is all that most of the walk costs.
LEAVES: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, range, types.ModuleType, types.BuiltinFunctionType,
     torch.dtype, torch.device, torch.Size, torch.layout}
)  # fmt: skip
_TENSORS: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})
_NONE_HELD: frozenset[Any] = frozenset()

# What they stand for may be gone, and then even `isinstance` raises. Who holds one does not own what is behind it.
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)

# A host object further away from a module than this was never part of its weight state in any of the 22
# families of the prototype; the deepest that mattered sat at 4 (module, quant method, scheme, kernel, tensor).
MAX_DEPTH = 5
# Longer lists and dicts than this are tables, not structure (a tokenizer's vocabulary, an index of names).
MAX_ITEMS = 4096


@dataclass(eq=False, repr=False)
class Holder:
    """One object with slots. `owners` are the ids of the modules from which it is reached.

    Most have one, and share its set: an object less for each in every garbage collection.
    """

    obj: Any
    path: str
    owners: Owners = frozenset()

    @property
    def is_module(self) -> bool:
        return isinstance(self.obj, torch.nn.Module)


@dataclass(eq=False, repr=False)
class Window:
    """One slot of an object whose other slots are nobody's business: storage that a user declared."""

    obj: Any
    key: Key

    def look(self) -> Any:
        """What is there, or this window itself where nothing is."""
        kind, name = self.key
        if kind == PLACE:
            return self.obj.look(self)
        try:
            return self.obj[name] if kind == "item" else getattr(self.obj, name)
        except (AttributeError, KeyError, IndexError):
            return self

    def put(self, value: Any) -> None:
        """Put a value there."""
        kind, name = self.key
        if kind == PLACE:
            self.obj.put(value)
        elif kind == "item":
            self.obj[name] = value
        elif isinstance(self.obj, (torch.nn.Module, types.ModuleType)):
            setattr(self.obj, name, value)
        else:
            object.__setattr__(self.obj, name, value)


Declared = tuple[str, Any, Key]
"""Path, holder and key of storage that a user declared."""


def is_opaque(obj: Any) -> bool:
    """Whether an object owns a native resource: its type has a finaliser.

    Such an object is replaced whole, never written into: copying a new native pointer into the tensor of the
    old object makes the old one free the new resource (a crash, met with matmul handles on a CPU).
    """
    return hasattr(type(obj), "__del__")


def own(module: Any, key: Key) -> torch.Tensor | None:
    """The tensor in a module's parameter or buffer slot now, or None."""
    value = vars(module)[_CONTAINERS[key[0]]].get(key[1])
    return value if isinstance(value, torch.Tensor) else None


def _slot_names(obj: Any) -> tuple[str, ...]:
    cls: Any = type(obj)
    return _slot_names_of_type(cls)


@functools.lru_cache(maxsize=4096)
def _slot_names_of_type(cls: Any) -> tuple[str, ...]:
    # By descriptor, not by `__slots__`: private names are stored mangled.
    if cls.__module__ == "builtins":
        return ()
    return tuple(
        name
        for base in cls.__mro__
        if base.__module__ != "builtins" and "__slots__" in vars(base)
        for name, value in vars(base).items()
        if inspect.ismemberdescriptor(value)
    )


def names(obj: Any) -> list[Any]:
    """The names of an object's attributes, without their values. Strings, where nobody played tricks."""
    return [*(_dict_of(obj) or ()), *_slot_names(obj)]


def read(obj: Any) -> State:
    """All slots of a holder, in their order. Contents of tensors are never read."""
    state: State = {}
    if isinstance(obj, torch.nn.Module):
        own = vars(obj)
        for kind, container in _CONTAINERS.items():
            for name, value in own[container].items():
                state[kind, name] = value
        held = own["_non_persistent_buffers_set"]
        state["set", "_non_persistent_buffers_set"] = frozenset(held) if held else _NONE_HELD
        for name, value in own.items():
            if name not in _TORCH_INTERNALS and name != RESERVED_ATTRIBUTE and type(value) not in _PROXIES:
                state["attr", name] = value
    elif isinstance(obj, Window):
        value = obj.look()
        if value is not obj:
            state[obj.key] = value
    elif isinstance(obj, dict):
        for name, value in obj.items():
            state["item", name] = value
        _read_attributes(obj, state)
    elif isinstance(obj, (list, tuple, deque)):
        for index, value in enumerate(obj):
            state["item", index] = value
        _read_attributes(obj, state)
    elif isinstance(obj, set):
        state["set", "elements"] = frozenset(obj)
    elif isinstance(obj, types.FunctionType):
        for index, cell in enumerate(obj.__closure__ or ()):
            try:
                state["cell", index] = cell.cell_contents
            except ValueError:  # a cell that was never filled
                continue
        for index, value in enumerate(obj.__defaults__ or ()):
            state["default", index] = value
        for name, value in (obj.__kwdefaults__ or {}).items():
            state["kwdefault", name] = value
    elif isinstance(obj, types.MethodType):
        state["bound", "__self__"] = obj.__self__
        state["bound", "__func__"] = obj.__func__
    elif isinstance(obj, functools.partial):
        state["bound", "func"] = obj.func
        for index, value in enumerate(obj.args):
            state["argument", index] = value
        for name, value in obj.keywords.items():
            state["keyword", name] = value
    else:
        _read_attributes(obj, state)
    return state


def glance(obj: Any) -> tuple[Any, ...] | None:
    """Names and values of all slots of a holder, to be compared by identity; None where only `read` can tell.

    Where two glances are the same objects in the same order, two readings are equal. The reverse does not hold.
    """
    kind = type(obj)
    if isinstance(obj, torch.nn.Module):
        own = vars(obj)
        if own["_non_persistent_buffers_set"]:
            return None
        p, b, m = own["_parameters"], own["_buffers"], own["_modules"]
        return (*own, *own.values(), *p, *p.values(), *b, *b.values(), *m, *m.values())
    if kind is dict:
        return (*obj, *obj.values())
    if kind is list:
        return tuple(obj)
    if kind in (tuple, types.MethodType):
        return ()  # these never change
    if isinstance(obj, (list, tuple, dict, deque, set, functools.partial, types.FunctionType, Window)):
        return None
    own = _dict_of(obj) or {}
    return None if _slot_names(obj) else (*own, *own.values())


def _dict_of(obj: Any) -> dict[str, Any] | None:
    """An object's attributes, or None. Lazy objects and proxies may raise whatever they like when looked at."""
    try:
        found = obj.__dict__
    except Exception:  # noqa: BLE001 - an object that can't be looked at has no slots
        return None
    return found if isinstance(found, dict) else None


def _read_attributes(obj: Any, state: State) -> None:
    for name, value in (_dict_of(obj) or {}).items():
        if type(value) not in _PROXIES:
            state["attr", name] = value
    for name in _slot_names(obj):
        try:
            state["slot", name] = object.__getattribute__(obj, name)
        except AttributeError:
            continue


def write(obj: Any, target: State, changed: list[Key]) -> None:
    """Give the `changed` slots of a holder the value (or the absence) that they have in `target`.

    The order of names in a module's containers is made that of `target`: `named_parameters()` of a restored
    module must list what a fresh one lists, in the same order.
    """
    if isinstance(obj, torch.nn.Module):
        _write_module(obj, target, changed)
    elif isinstance(obj, Window):
        if obj.key in target:
            obj.put(target[obj.key])
    elif isinstance(obj, (list, deque)):
        if any(kind == "item" for kind, _ in changed):
            wanted = [value for (kind, _), value in target.items() if kind == "item"]
            obj.clear()
            obj.extend(wanted)
        _write_attributes(obj, target, changed)
    elif isinstance(obj, dict):
        if any(kind == "item" for kind, _ in changed):
            entries = {name: value for (kind, name), value in target.items() if kind == "item"}
            obj.clear()
            obj.update(entries)
        _write_attributes(obj, target, changed)
    elif isinstance(obj, set):
        obj.clear()
        obj.update(target["set", "elements"])
    elif isinstance(obj, types.FunctionType):
        _write_function(obj, target, changed)
    elif not isinstance(obj, (tuple, types.MethodType, functools.partial)):
        _write_attributes(obj, target, changed)


def _write_attributes(obj: Any, target: State, changed: list[Key]) -> None:
    for kind, name in changed:
        present = (kind, name) in target
        if kind == "attr":
            if present:
                vars(obj)[name] = target[kind, name]
            else:
                vars(obj).pop(name, None)
        elif kind == "slot":
            if present:
                object.__setattr__(obj, name, target[kind, name])
            elif hasattr(obj, name):
                object.__delattr__(obj, name)


def _write_function(function: types.FunctionType, target: State, changed: list[Key]) -> None:
    for kind, index in changed:
        if kind == "cell" and function.__closure__ is not None and (kind, index) in target:
            function.__closure__[index].cell_contents = target[kind, index]
    if any(kind == "default" for kind, _ in changed):
        function.__defaults__ = tuple(value for (kind, _), value in target.items() if kind == "default")
    if any(kind == "kwdefault" for kind, _ in changed):
        function.__kwdefaults__ = {
            name: value for (kind, name), value in target.items() if kind == "kwdefault"
        }


def _write_module(module: torch.nn.Module, target: State, changed: list[Key]) -> None:
    own = vars(module)
    kinds = {kind for kind, _ in changed}
    for kind, container in _CONTAINERS.items():
        if kind not in kinds:
            continue
        # Touch only what changed: the engine may have bound other names meanwhile.
        names = {name for k, name in changed if k == kind}
        live = own[container]
        kept = {name: value for name, value in live.items() if name not in names}
        wanted: dict[str, Any] = {}
        for (k, name), value in target.items():
            if k != kind:
                continue
            if name in names:
                wanted[name] = value
            elif name in kept:
                wanted[name] = kept[name]
        wanted.update({name: value for name, value in kept.items() if name not in wanted})
        live.clear()
        live.update(wanted)
    for kind, name in changed:
        if kind == "set":
            live_set = own["_non_persistent_buffers_set"]
            live_set.clear()
            live_set.update(target[kind, name])
        elif kind == "attr":
            if (kind, name) in target:
                own[name] = target[kind, name]
            else:
                own.pop(name, None)


def same(a: Any, b: Any) -> bool:
    """Whether two slot values are the same thing: one object, equal plain data, or equal bound methods."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (bool, int, str, bytes, complex, torch.dtype, torch.device, torch.Size, frozenset)):
        return bool(a == b)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    if isinstance(a, types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return False


def differing(before: State, after: State) -> list[Key]:
    """Keys whose value appeared, vanished or became another object."""
    missing = object()
    keys = [key for key, value in before.items() if not same(value, after.get(key, missing))]
    keys += [key for key in after if key not in before]
    return keys


def _descends(value: Any) -> bool:
    if type(value) in _PROXIES or isinstance(value, (*_ATOMS, torch.Tensor, torch.nn.Module)):
        return False
    if isinstance(value, (list, dict, set, deque)):
        # Empty ones too: what a hook puts in later is the difference that must be found.
        return len(value) <= MAX_ITEMS
    if isinstance(value, tuple):
        return 0 < len(value) <= MAX_ITEMS
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    if isinstance(value, (types.MethodType, functools.partial)):
        return True
    if isinstance(value, (weakref.ref, frozenset)) or (callable(value) and isinstance(value, type)):
        return False
    # Objects of torch itself (operators, streams, groups, compiled callables) are not weight state.
    if (type(value).__module__ or "").partition(".")[0] == "torch":
        return False
    return _dict_of(value) is not None or bool(_slot_names(value))


def step(path: str, key: Key) -> str:
    """The attribute path of a slot, as a person would write it."""
    kind, name = key
    if kind == "item":
        return f"{path}[{name!r}]"
    if kind == "cell":
        return f"{path}.<closure {name}>"
    if kind in ("default", "argument"):
        return f"{path}.<{kind} {name}>"
    return f"{path}.{name}" if path and not path.endswith(":") else f"{path}{name}"


def _children(state: State, path: str, depth: int) -> Iterator[tuple[Any, str, Key, int]]:
    """Values that may have slots, and their way from the root. Most have none: their path is made when it is asked for."""
    for key, value in state.items():
        cls = type(value)
        if cls not in LEAVES and cls not in _TENSORS and key[0] not in ("module", "set"):
            yield value, path, key, depth


def walk(
    model: torch.nn.Module,
    skip: Callable[[Any], bool] = lambda obj: False,
    declared: Iterable[Declared] = (),
) -> tuple[dict[int, Holder], dict[int, State]]:
    """Every holder of a model by `id`, with its slots, then those of storage that a user declared.

    Modules come first in module order. Objects for which `skip` is true (process-wide configuration, groups)
    are not entered. The returned states hold strong references: drop or convert them soon.
    """
    holders: dict[int, Holder] = {}
    states: dict[int, State] = {}
    modules = [(name, module) for name, module in model.named_modules()]
    for name, module in modules:
        holders[id(module)] = Holder(module, name, frozenset((id(module),)))
        states[id(module)] = read(module)
    for name, module in modules:
        _walk_objects(holders[id(module)].owners, name, states[id(module)], holders, states, skip)
    for path, obj, key in declared:
        _walk_declared(path, Window(obj, key), holders, states, skip)
    return holders, states


def _walk_declared(
    path: str,
    window: Window,
    holders: dict[int, Holder],
    states: dict[int, State],
    skip: Callable[[Any], bool],
) -> None:
    kind, name = window.key
    above = path.removesuffix(f"[{name!r}]") if kind == "item" else path.removesuffix(str(name)).rstrip(".")
    found: dict[int, Holder] = {}
    inside: dict[int, State] = {}
    state = read(window)
    value = state.get(window.key)
    if id(value) in holders:
        return
    found[id(window)], inside[id(window)] = Holder(window, above), state
    _walk_objects(frozenset((0,)), above, state, found, inside, lambda obj: id(obj) in holders or skip(obj))
    for ident, holder in found.items():
        holder.owners = frozenset()  # nobody's: no layer's strategy follows from it
        holders[ident], states[ident] = holder, inside[ident]


def _walk_objects(
    owners: Owners,
    path: str,
    state: State,
    holders: dict[int, Holder],
    states: dict[int, State],
    skip: Callable[[Any], bool],
) -> None:
    (owner,) = owners
    # Breadth first: an object counts by the shortest way to it.
    queue = deque(_children(state, path, 1))
    while queue:
        value, above, key, depth = queue.popleft()
        if depth > MAX_DEPTH or not _descends(value):
            continue
        known = holders.get(id(value))
        where = step(above, key)
        if known is not None:
            if owner in known.owners:
                continue
            if isinstance(known.owners, frozenset):
                known.owners = set(known.owners)
            known.owners.add(owner)
        elif skip(value):
            continue
        else:
            holders[id(value)] = Holder(value, where, owners)
            states[id(value)] = read(value)
        queue.extend(_children(states[id(value)], where, depth + 1))
