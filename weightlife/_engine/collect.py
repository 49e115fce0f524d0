# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a model reaches, by attribute path: found by one walk, then read along remembered steps.

A load exchanges whole objects (a kernel, a closure), so what is remembered is the way to a tensor and not the holder of
it: step by step from a module, which stays. Two ways to one tensor are two paths. Contents are never read.
"""

from __future__ import annotations

import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weightlife._engine import slots

# Deeper than what a reload restores (`slots.MAX_DEPTH`): here a far holder costs one step to look at, no more.
MAX_DEPTH = 32

_ITEMS = (list, tuple, dict, deque)
_ABSENT: Any = object()
_MEMBER = "member"  # an element of a set: it has no key, so it is known by a weak reference
_SCALAR = "_float"  # `x_float` beside `x`: the host's own copy of a device scalar


@dataclass(eq=False, repr=False)
class Step:
    """One step from a holder (`parent`, -1: a root) to a value."""

    parent: int
    key: slots.Key
    path: str
    is_tensor: bool
    firm: bool  # of the model itself or declared; else something process-wide that its code keeps
    owner: int  # id of the module it was reached from, 0 for process-wide holders


class Walk:
    """One look at everything, and the steps that lead there.

    Args:
        model: the model.
        skip: host objects that are not entered.
        transient: paths of what requests leave behind, which is no runtime storage.
        declared: (path, holder, key) of storage that the user declared.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        skip: Callable[[Any], bool],
        transient: Callable[[str], bool],
        declared: Iterable[tuple[str, Any, slots.Key]] = (),
    ) -> None:
        self.steps: list[Step] = []
        self.mirrors: list[tuple[int, slots.Key, slots.Key, str]] = []
        self._roots: dict[int, Any] = {}  # step -> how to get at a root
        self._skip, self._transient = skip, transient
        self._entered: set[int] = set()
        self._keep: list[
            Any
        ] = []  # bound methods are made anew by each access: their ids must not be used again
        self._types: set[type] = set()
        self._files: set[str] = set()
        modules = list(model.named_modules())
        self._entered.update(id(module) for _, module in modules)
        roots = [self._root(name, module, True, id(module)) for name, module in modules]
        for (_, module), index in zip(modules, roots, strict=True):
            self._breadth_first(index, module, id(module))
        for path, holder, key in declared:
            self._declared(path, holder, key)
        for path, container in self._process_wide():
            if id(container) not in self._entered:
                self._entered.add(id(container))
                self._breadth_first(self._root(path, container, False, 0), container, 0, plain=True)
        self._keep.clear()
        self._prune()

    def _root(self, path: str, obj: Any, firm: bool, owner: int) -> int:
        self.steps.append(Step(-1, ("root", path), path, False, firm, owner))
        try:
            self._roots[len(self.steps) - 1] = weakref.ref(obj)
        except TypeError:  # a dict or a list
            self._roots[len(self.steps) - 1] = lambda: obj
        return len(self.steps) - 1

    def _declared(self, path: str, holder: Any, key: slots.Key) -> None:
        value = get(holder, key)
        if isinstance(value, torch.Tensor) and any(step.path == path for step in self.steps):
            return  # the model leads there
        index = self._root(path, holder, True, 0)
        queue: deque[tuple[int, Any, int]] = deque()
        self._visit(index, key, path, value, queue, 1, 0, False)
        self._drain(queue, 0)

    def _breadth_first(self, index: int, obj: Any, owner: int, plain: bool = False) -> None:
        self._drain(deque([(index, obj, 0)]), owner, plain)

    def _drain(self, queue: deque[tuple[int, Any, int]], owner: int, plain: bool = False) -> None:
        while queue:
            parent, holder, depth = queue.popleft()
            step = self.steps[parent]
            self._note(holder)
            # What an owner of a native resource holds goes with it: its tensors have no address to keep.
            if depth and slots.is_opaque(holder):
                continue
            state = contents(holder)
            self._mirrors(parent, state)
            for key, value in state.items():
                if key[0] not in ("module", "set"):
                    where = path_of(step.path, key)
                    self._visit(parent, key, where, value, queue, depth + 1, owner, plain)

    def _visit(
        self,
        parent: int,
        key: slots.Key,
        path: str,
        value: Any,
        queue: deque[tuple[int, Any, int]],
        depth: int,
        owner: int,
        plain: bool,
    ) -> None:
        if isinstance(value, torch.Tensor):
            if self._transient(path):
                return
            self.steps.append(Step(parent, key, path, True, self.steps[parent].firm, owner))
            if getattr(value, "__dict__", None) and id(value) not in self._entered:
                self._entered.add(id(value))
                queue.append((len(self.steps) - 1, value, depth))
            return
        if depth > MAX_DEPTH or id(value) in self._entered or not enters(value, plain) or self._skip(value):
            return
        self._entered.add(id(value))
        self._keep.append(value)
        self.steps.append(Step(parent, key, path, False, self.steps[parent].firm, owner))
        queue.append((len(self.steps) - 1, value, depth))

    def _mirrors(self, parent: int, state: slots.State) -> None:
        for mirror, _, key, _ in _copies(state):
            self.mirrors.append((parent, key, mirror, path_of(self.steps[parent].path, mirror)))

    def _note(self, obj: Any) -> None:
        """Remember whose code holds this: what that code keeps beside it is looked at, too."""
        if isinstance(obj, types.FunctionType):
            self._files.add(obj.__module__ or "")
        elif type(obj) not in self._types:
            for cls in type(obj).__mro__:
                if (cls.__module__ or "").partition(".")[0] not in ("builtins", "torch", "typing", "abc"):
                    self._types.add(cls)
                    self._files.add(cls.__module__ or "")

    def _process_wide(self) -> Iterator[tuple[str, Any]]:
        """Containers of classes and Python modules whose code is at work in the model: caches that a load fills."""
        ours = __package__.partition(".")[0]
        for name in sorted(self._files):
            module = sys.modules.get(name)
            if module is not None and name.partition(".")[0] not in (ours, "torch"):
                yield from (
                    (f"{name}:{key}", value)
                    for key, value in list(vars(module).items())
                    if type(value) in _ITEMS and value
                )
        for cls in sorted(self._types, key=lambda c: (c.__module__, c.__qualname__)):
            if cls.__module__.partition(".")[0] not in (ours, "torch"):
                yield from (
                    (f"{cls.__module__}:{cls.__qualname__}.{key}", value)
                    for key, value in list(vars(cls).items())
                    if type(value) in _ITEMS and value
                )

    def _prune(self) -> None:
        """Forget steps that lead to no tensor."""
        useful = [step.is_tensor for step in self.steps]
        for index in {mirror[0] for mirror in self.mirrors}:
            useful[index] = True
        for index in range(len(self.steps) - 1, -1, -1):
            if useful[index] and self.steps[index].parent >= 0:
                useful[self.steps[index].parent] = True
        place: dict[int, int] = {-1: -1}
        kept: list[Step] = []
        for index, step in enumerate(self.steps):
            if useful[index]:
                place[index] = len(kept)
                kept.append(
                    Step(place[step.parent], step.key, step.path, step.is_tensor, step.firm, step.owner)
                )
        self._roots = {place[index]: root for index, root in self._roots.items() if useful[index]}
        self.mirrors = [(place[index], *rest) for index, *rest in self.mirrors]  # type: ignore[misc]
        self.steps = kept

    def values(self) -> list[Any]:
        """What stands at the end of every step now; `None` where the way there is gone."""
        out: list[Any] = []
        roots = self._roots
        for index, step in enumerate(self.steps):
            if step.parent < 0:
                out.append(roots[index]())
            else:
                holder = out[step.parent]
                value = _ABSENT if holder is None else get(holder, step.key)
                out.append(None if value is _ABSENT else value)
        return out

    def tensors(self, values: list[Any] | None = None) -> Iterator[tuple[Step, torch.Tensor | None]]:
        """Every path, and the tensor that stands there now, or None."""
        now = self.values() if values is None else values
        for step, value in zip(self.steps, now, strict=True):
            if step.is_tensor:
                yield step, value if isinstance(value, torch.Tensor) else None


def is_scalar(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one floating number that can be read."""
    return (
        not tensor.is_meta
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.numel() == 1
    )


def _copies(state: slots.State) -> Iterator[tuple[slots.Key, float, slots.Key, torch.Tensor]]:
    """Numbers that by their name are copies of a scalar beside them: (key, number, key of the scalar, scalar)."""
    for mirror, number in state.items():
        if type(number) is float and mirror[0] in ("attr", "slot") and str(mirror[1]).endswith(_SCALAR):
            name = str(mirror[1]).removesuffix(_SCALAR)
            for key in (("buffer", name), ("param", name), ("attr", name), ("slot", name)):
                scalar = state.get(key)
                if isinstance(scalar, torch.Tensor) and is_scalar(scalar):
                    yield mirror, number, key, scalar
                    break


def _may_have_copies(holder: Any) -> bool:
    """By names, all at once: few holders have such a number, and there are hundreds."""
    try:
        return _SCALAR in ".".join(slots.names(holder))
    except TypeError:  # names that are no strings
        return True


def agreeing(holders: Iterable[Any]) -> set[tuple[int, slots.Key]]:
    """Numbers that are what their scalars are: (id of the holder, key). They should stay so."""
    found = [
        (id(holder), key, number, scalar)
        for holder in holders
        if _may_have_copies(holder)
        for key, number, _, scalar in _copies(contents(holder))
    ]
    values = scalar_values([scalar for *_, scalar in found])
    pairs = zip(found, values, strict=True)
    return {(ident, key) for (ident, key, number, _), value in pairs if equal(number, value)}


def scalar_values(tensors: list[torch.Tensor] | list[torch.Tensor | None]) -> list[float | None]:
    """The values of scalars, None where there is none. One transfer from each device."""
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, scalar in enumerate(tensors):
        if scalar is not None:
            by_device.setdefault(scalar.device, []).append((index, scalar))
    out: list[float | None] = [None] * len(tensors)
    for items in by_device.values():
        flat = [scalar.detach().reshape(1).double() for _, scalar in items]
        for (index, _), value in zip(items, torch.cat(flat).tolist(), strict=True):
            out[index] = value
    return out


def equal(number: Any, value: float | None) -> bool:
    """Whether a number is a scalar's value, NaN being equal to itself."""
    if value is None or not isinstance(number, float):
        return False
    return number == value or (number != number and value != value)


def path_of(path: str, key: slots.Key) -> str:
    """The path of a slot, as a person would write it."""
    return f"{path}{{{key[1][0]}}}" if key[0] == _MEMBER else slots.step(path, key)


def enters(value: Any, plain: bool) -> bool:
    """Whether a value may hold tensors. `plain`: containers alone, of objects that nobody said belong to the model."""
    if isinstance(value, (set, frozenset)):
        return not plain and 0 < len(value) <= slots.MAX_ITEMS
    if plain:
        return type(value) in _ITEMS and 0 < len(value) <= slots.MAX_ITEMS
    if isinstance(value, types.FunctionType) and value.__dict__:
        return True
    return slots._descends(value)


def contents(holder: Any) -> slots.State:
    """The slots of a holder, with those that a reload never restores: function attributes, elements of sets."""
    if isinstance(holder, torch.Tensor):
        return {("attr", name): value for name, value in vars(holder).items()}
    if isinstance(holder, (set, frozenset)):
        found = [value for value in holder if isinstance(value, torch.Tensor)]
        return {(_MEMBER, (index, weakref.ref(value))): value for index, value in enumerate(found)}
    state = slots.read(holder)
    if isinstance(holder, types.FunctionType):
        state.update({("attr", name): value for name, value in vars(holder).items()})
    return state


def get(holder: Any, key: slots.Key) -> Any:
    """What is in one slot now, or `_ABSENT`. The same slots as `slots.read`, one at a time."""
    kind, name = key
    try:
        if kind == "attr":
            return vars(holder).get(name, _ABSENT)
        if kind in ("param", "buffer"):
            return vars(holder)["_parameters" if kind == "param" else "_buffers"].get(name, _ABSENT)
        if kind == "item":
            return holder[name]
        if kind == slots.PLACE:
            return holder.look(_ABSENT)
        if kind == "cell":
            return holder.__closure__[name].cell_contents
        if kind == "slot":
            return object.__getattribute__(holder, name)
        if kind == "bound":
            return getattr(holder, name)
        if kind == "argument":
            return holder.args[name]
        if kind == "keyword":
            return holder.keywords[name]
        if kind == "default":
            return holder.__defaults__[name]
        if kind == "kwdefault":
            return holder.__kwdefaults__[name]
        if kind == _MEMBER:
            value = name[1]()
            return value if value is not None and value in holder else _ABSENT
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        pass
    return _ABSENT


# -- storage that a user declares ------------------------------------------------------------------------------

_PART = r"\.?(\w+)|\[(-?\d+)\]|\[(?:'([^'\]]*)'|\"([^\"\]]*)\")\]"


def locate(model: torch.nn.Module, path: str) -> tuple[str, Any, slots.Key]:
    """The (path, holder, key) of a declared path.

    Args:
        model: the model that the path begins at.
        path: attributes and items, `layers[0].mlp.table['w']`; with `package.module:` before it, those of a Python
            module that is imported.

    Raises:
        LookupError: there is nothing there, with a text that says how far it went.
    """
    module_name, colon, rest = path.rpartition(":")
    here: Any = model
    if colon:
        here = sys.modules.get(module_name)
        if here is None:
            raise LookupError(f"the Python module {module_name} is not imported")
    parts: list[tuple[bool, Any]] = []
    position = 0
    while position < len(rest):
        match = re.compile(_PART).match(rest, position)
        if match is None:
            raise LookupError(f"{rest[position:]!r} is no attribute or item")
        position = match.end()
        if match[1] is not None:
            parts.append((True, match[1]))
        else:
            parts.append((False, int(match[2]) if match[2] is not None else match[3] or match[4] or ""))
    if not parts:
        raise LookupError("the path is empty")
    holder: Any = None
    for index, (is_attribute, name) in enumerate(parts):
        holder = here
        try:
            here = getattr(holder, name) if is_attribute else holder[name]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise LookupError(f"step {index + 1} ({name!r}) leads nowhere: {type(error).__name__}") from error
    is_attribute, name = parts[-1]
    return path, holder, (_kind(holder, name) if is_attribute else "item", name)


def _kind(holder: Any, name: str) -> str:
    if isinstance(holder, torch.nn.Module):
        for kind, container in (("param", "_parameters"), ("buffer", "_buffers")):
            if name in vars(holder)[container]:
                return kind
    return "attr" if name in getattr(holder, "__dict__", {}) else "slot"


__all__ = [
    "Step", "Walk", "agreeing", "contents", "enters", "equal", "get", "is_scalar", "locate", "path_of", "scalar_values",
]  # fmt: skip
