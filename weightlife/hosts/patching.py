# SPDX-License-Identifier: Apache-2.0
"""Seams as data: where the host is wrapped, applied with wrapt, undone to the identical object.

A seam is applied when its module is imported, or at once if it already is. Functions are imported by name all over a
host, so modules that already hold the original are swept, reading `vars(module)` only: `getattr` on a lazy module
would import half of its package.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import wrapt

Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Seam:
    """One place in the host.

    Attributes:
        name: how `status()` calls it.
        module: the module that defines the target.
        attribute: `function` or `Class.method`.
        wrapper: a wrapt wrapper `(wrapped, instance, args, kwargs)`.
        required: without it a process can only observe (`Patcher.missing`).
        since: the first host version that has it, as "0.22", where that is known; for `status()`.
        why: what it is for.
    """

    name: str
    module: str
    attribute: str
    wrapper: Wrapper
    required: bool = False
    since: str = ""
    why: str = ""
    adds: bool = False  # a new attribute: the wrapper itself is put there, and deleted again


class SeamWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapper that copies and pickles as what it wraps: clients send classes and parameters by value."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__wrapped__

    def __copy__(self) -> Any:
        return self.__wrapped__

    def __reduce__(self) -> Any:
        return self.__wrapped__.__qualname__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__qualname__


@dataclass(eq=False, repr=False)
class Applied:
    """What was done for one seam: every (owner, attribute) that now holds the wrapper."""

    seam: Seam
    original: Any
    wrapper: Any
    inherited: bool
    places: list[tuple[Any, str]] = field(default_factory=list)


class Patcher:
    """Applies a table of seams, and takes it back.

    Args:
        seams: the table.
        host: the package that it is a table of.
        tested: versions of it that the test-suite runs against.
    """

    def __init__(self, seams: list[Seam], host: str = "", tested: tuple[str, ...] = ()) -> None:
        self.seams, self.host, self.tested = seams, host, tested
        self.applied: dict[str, Applied] = {}
        self.failures: dict[str, str] = {}
        self.classes: list[Applied] = []
        self.active = False
        self._hooked: set[str] = set()
        self._lock = threading.RLock()

    def apply(self) -> None:
        """Wrap what is imported already; the rest follows as it is imported. Twice is once."""
        with self._lock:
            self.active = True
            modules = {seam.module for seam in self.seams}
            self._sweep(
                [done for m in modules if m in sys.modules for done in self._apply_module(sys.modules[m])]
            )
            for module in modules:
                if module not in self._hooked:
                    # wrapt keeps post-import hooks for ever: this one asks whether it is still wanted.
                    self._hooked.add(module)
                    wrapt.register_post_import_hook(self._on_import, module)

    def _on_import(self, module: Any) -> None:
        with self._lock:
            if self.active and (applied := self._apply_module(module)):
                self._sweep(applied, since(module))

    def _sweep(self, applied: list[Applied], modules: list[Any] | None = None) -> None:
        """Put wrappers in the place of functions that other modules hold by name. One walk for all of them."""
        if modules is None and applied:
            # A walk over 5,000 modules takes 13 ms, over the host's 400 one, and after that one mostly nobody is left.
            packages = {done.seam.module.partition(".")[0] for done in applied}
            near = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in packages]
            self._exchange(applied, near)
            applied = [done for done in applied if held_elsewhere(done)]
        self._exchange(applied, modules)

    @staticmethod
    def _exchange(applied: list[Applied], modules: list[Any] | None) -> None:
        places = sweep({id(done.original): (done.original, done.wrapper) for done in applied}, modules)
        for done in applied:
            done.places += places.get(id(done.original), [])

    def _apply_module(self, module: Any) -> list[Applied]:
        """Wrap what is in a module. Returns the functions that other modules may hold by name."""
        functions = []
        for seam in self.seams:
            if seam.module != module.__name__ or seam.name in self.applied:
                continue
            try:
                done = self._apply_seam(module, seam)
            except Exception as error:  # noqa: BLE001 - in the host's import; `status()` and `missing()` tell of it
                self.failures[seam.name] = f"wrapping failed ({type(error).__name__}: {error})"
                continue
            if done is not None:
                functions.append(done)
        return functions

    def _apply_seam(self, module: Any, seam: Seam) -> Applied | None:
        """Wrap one target, or note why not. Returns what other modules may hold by name."""
        owner, attribute, original = self._resolve(module, seam)
        if seam.adds and owner is not None:
            if original is None:
                setattr(owner, attribute, seam.wrapper)
                self.applied[seam.name] = Applied(seam, None, seam.wrapper, True, [(owner, attribute)])
            return None
        if owner is None:
            there = f" (there since {seam.since})" if seam.since else ""
            self.failures[seam.name] = f"absent in this version{there}: {seam.module}:{seam.attribute}"
            return None
        if not callable(original) and not isinstance(original, classmethod):
            self.failures[seam.name] = f"not callable in this version: {seam.module}:{seam.attribute}"
            return None
        self.applied[seam.name] = done = self.wrap(owner, attribute, seam.wrapper, seam, original)
        self.failures.pop(seam.name, None)
        return None if isinstance(owner, type) else done

    @staticmethod
    def _resolve(module: Any, seam: Seam) -> tuple[Any, str, Any]:
        owner: Any = module
        *path, attribute = seam.attribute.split(".")
        for part in path:
            owner = vars(owner).get(part)
            if owner is None:
                return None, attribute, None
        if isinstance(owner, type):
            for base in owner.__mro__:
                if attribute in vars(base):
                    original = vars(base)[attribute]
                    while isinstance(original, SeamWrapper) and base is not owner:
                        original = original.__wrapped__  # wrapped on the class that it is inherited from
                    return owner, attribute, original
            return (owner if seam.adds else None), attribute, None
        original = vars(owner).get(attribute)
        return (None, attribute, None) if original is None else (owner, attribute, original)

    def wrap(self, owner: Any, attribute: str, wrapper: Wrapper, seam: Seam, original: Any) -> Applied:
        """Put a wrapper in place of `owner.attribute`."""
        wrapped = SeamWrapper(original, wrapper)
        inherited = isinstance(owner, type) and attribute not in vars(owner)
        done = Applied(seam, original, wrapped, inherited)
        setattr(owner, attribute, wrapped)
        done.places.append((owner, attribute))
        return done

    def wrap_class(self, cls: type, attribute: str, wrapper: Wrapper) -> None:
        """Wrap a method of a class met at run time (a model class, a loader class). Twice is once."""
        with self._lock:
            own = vars(cls).get(attribute)
            if isinstance(own, SeamWrapper) or not self.active:
                return
            original = own
            if original is None:
                original = next((vars(b)[attribute] for b in cls.__mro__ if attribute in vars(b)), None)
            if original is None:
                return
            while isinstance(
                original, SeamWrapper
            ):  # inherited from a class that is wrapped: go to the function
                original = original.__wrapped__
            seam = Seam(
                f"{cls.__qualname__}.{attribute}", cls.__module__, f"{cls.__qualname__}.{attribute}", wrapper
            )
            self.classes.append(self.wrap(cls, attribute, wrapper, seam, original))

    def undo(self) -> None:
        """Every attribute identical to what it was; wrappers of inherited methods deleted; hooks inert."""
        with self._lock:
            self.active = False
            back: dict[int, tuple[Any, Any]] = {}
            for done in [*reversed(self.classes), *reversed(list(self.applied.values()))]:
                for owner, attribute in done.places:
                    if vars(owner).get(attribute) is not done.wrapper:
                        continue
                    if done.inherited and isinstance(owner, type):
                        delattr(owner, attribute)
                    else:
                        setattr(owner, attribute, done.original)
                if not done.seam.adds and not isinstance(done.places[0][0], type):
                    back[id(done.wrapper)] = (done.wrapper, done.original)
            sweep(back)  # modules imported since then took the wrappers by name
            self.classes.clear()
            self.applied.clear()
            self.failures.clear()

    def missing(self, absent: bool = False) -> dict[str, str]:
        """Required seams that can't be applied in this process, with the reason: what they prove is unproven here.

        A seam whose module was not imported yet, or is being imported now, is not decided.

        Args:
            absent: look also for modules that are nowhere to be imported from (a look at the disk for each).
        """
        with self._lock:
            if not self.active:
                return {}
            required = [seam for seam in self.seams if seam.required and seam.name not in self.applied]
            if any(seam.name in self.failures for seam in required):
                self.apply()  # installed while a module was still being imported: it may be whole now
            found = {}
            for seam in required:
                module = sys.modules.get(seam.module)
                if module is not None and _being_imported(module):
                    continue
                if seam.name in self.failures:
                    found[seam.name] = self.failures[seam.name]
                elif module is None and absent and not _may_exist(seam.module):
                    found[seam.name] = f"module absent in this version: {seam.module}"
            return found

    def status(self) -> list[dict[str, Any]]:
        """A row a seam: name, target, state, required, why."""
        if self.active and self.failures:
            self.apply()  # installed while a module was still being imported: it may be whole now
        rows = []
        for seam in self.seams:
            if seam.name in self.applied:
                state = "wrapped"
            elif seam.name in self.failures:
                state = self.failures[seam.name]
            elif seam.module in sys.modules:
                state = "not applied"
            else:
                state = "waiting for import" if _may_exist(seam.module) else "module absent in this version"
            rows.append(
                {"seam": seam.name, "target": f"{seam.module}:{seam.attribute}", "state": state,
                 "required": seam.required, "why": seam.why}
            )  # fmt: skip
        return rows


def sweep(
    exchange: dict[int, tuple[Any, Any]], modules: list[Any] | None = None
) -> dict[int, list[tuple[Any, str]]]:
    """Replace objects by others under every module-level name in the process. Returns where, by old identity.

    Args:
        exchange: identity of the old object -> (old, new).
        modules: where to look (None: everywhere).
    """
    places: dict[int, list[tuple[Any, str]]] = {}
    if not exchange:
        return places
    wanted = frozenset(exchange)
    for module in list(sys.modules.values()) if modules is None else modules:
        names = getattr(module, "__dict__", None)
        # Nearly all hold none, and 185,000 names one by one in Python take 23 ms; by their identities in C, 12.
        if type(names) is not dict or wanted.isdisjoint(map(id, list(names.values()))):
            continue
        for name, value in list(names.items()):
            pair = exchange.get(id(value))
            if pair is not None and not name.startswith("__wrapped"):
                names[name] = pair[1]
                places.setdefault(id(value), []).append((module, name))
    return places


def held_elsewhere(done: Applied) -> bool:
    """Whether anything but weightlife still refers to the original of a wrapped function.

    By its number of references, against that of a function which nothing else can know: more than that may be a module
    that holds it by name, or something else (a closure, a call that runs now).
    """
    if not isinstance(done.original, types.FunctionType):
        return True
    fresh = types.FunctionType(held_elsewhere.__code__, {})
    unknown = Applied(done.seam, fresh, SeamWrapper(fresh, done.seam.wrapper), False)
    del fresh
    return sys.getrefcount(done.original) > sys.getrefcount(unknown.original)


def since(module: Any) -> list[Any]:
    """Modules that may hold a name of `module` at the end of its import: begun after it, or not yet ended."""
    found, seen = [], False
    for other in reversed(list(sys.modules.values())):  # in the order in which imports began
        found.append(other)
        if other is module:
            seen = True
            break
    frame = sys._getframe() if seen else None  # what is still being imported is on the stack
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            unfinished = sys.modules.get(frame.f_globals.get("__name__", ""))
            if unfinished is not None:
                found.append(unfinished)
        frame = frame.f_back
    return found


def _being_imported(module: Any) -> bool:
    return bool(getattr(vars(module).get("__spec__"), "_initializing", False))


def _may_exist(module: str) -> bool:
    """Whether a module that is not imported could be.

    Nothing is imported for it: below the first package that is not imported either, nothing is known.
    """
    path = module.split(".")
    known = next((i for i in range(len(path) - 1, 0, -1) if ".".join(path[:i]) in sys.modules), 0)
    if known == 0:
        return True
    try:
        return importlib.util.find_spec(".".join(path[: known + 1])) is not None
    except (ImportError, ValueError):
        return False
