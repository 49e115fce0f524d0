# SPDX-License-Identifier: Apache-2.0
"""Storage that finders find: places of tensors which the model does not reach, asked for anew at each look.

A place outlives what stands in it: what processing exchanges is found at the same name afterwards, and what an update
left there can be taken back.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from weightlife import _finders, errors
from weightlife._engine import slots

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle

# A finder tells of workspaces and tables. One that yields without end would stop the load.
MAX_PLACES = 65_536
MAX_NAME = 512


class Place:
    """Where one thing of a finder's stands: an object and an attribute, a container and a key, or two functions."""

    __slots__ = ("__weakref__", "_first", "_second", "_way", "failed")

    def __init__(self, way: str, first: Any, second: Any) -> None:
        self._way, self._first, self._second = way, first, second
        self.failed = ""  # why something could not be put there

    def follow(self, other: Place) -> None:
        """The finder names another holder now."""
        self._way, self._first, self._second = other._way, other._first, other._second

    def look(self, otherwise: Any) -> Any:
        """What stands there, or `otherwise`. Who asks the finder hears why there is nothing."""
        try:
            return self.get()
        except Exception:  # noqa: BLE001 - a getter may raise what it likes: `Places.ask` names it
            return otherwise

    def get(self) -> Any:
        """What stands there.

        Raises:
            LookupError: nothing does. What a getter raises.
        """
        if self._way == "functions":
            return self._first()
        try:
            return self._first[self._second] if self._way == "item" else getattr(self._first, self._second)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise LookupError(f"nothing is there ({type(error).__name__})") from error

    def put(self, value: Any) -> None:
        """Put a value there, for an abort or a pass on generation A."""
        try:
            if self._way == "functions":
                self._second(value)
            elif self._way == "item":
                self._first[self._second] = value
            else:
                setattr(self._first, self._second, value)
        except Exception as error:  # noqa: BLE001 - the rest has to be put back all the same: `Places.failed` is asked for
            self.failed = errors.safe_text(error)


def place_of(given: Any) -> Place:
    """The place that a finder means.

    Raises:
        ValueError: it gave something else; the text says what, without values.
    """
    if not isinstance(given, tuple) or len(given) != 2:
        kind = type(given).__name__
        raise ValueError(
            f"{kind} is no place: give (object, 'attribute'), (container, key) or (getter, setter)"
        )
    first, second = given
    if isinstance(first, (list, dict, deque, Mapping)):
        return Place("item", first, second)
    if callable(first) and callable(second):
        return Place("functions", first, second)
    if isinstance(second, str):
        return Place("attribute", first, second)
    raise ValueError(f"({type(first).__name__}, {type(second).__name__}) is no place")


class Places:
    """What the finders of one model find."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = weakref.ref(life)
        self._own: list[_finders.Finder] = []  # of this model
        self._known: dict[str, tuple[str, Place, slots.Key]] = {}
        self.changed = False  # other names than at the last look

    def add(self, finder: _finders.Finder) -> list[str]:
        """Ask one more finder about this model, from here on. Returns the paths of its places.

        Raises:
            ConfigError: it raises, or gives nonsense. It is not asked again then.
        """
        life = self._life()
        assert life is not None
        _finders.check(finder)
        known = [*self._own, *_finders.for_classes(life.model)]
        if not any(finder is other for other in known):
            self._own.append(finder)
        try:
            self.ask()
        except errors.ConfigError:
            self._own = [other for other in self._own if other is not finder]
            raise
        prefix = self._labels()[id(finder)] + ":"
        return [path for path in self._known if path.startswith(prefix)]

    def has(self, finder: _finders.Finder) -> bool:
        """Whether a finder is asked about this model."""
        return any(finder is other for other in self._all())

    def drop(self, finder: _finders.Finder) -> None:
        """Ask a finder of this model no more."""
        self._own = [other for other in self._own if other is not finder]
        self.ask()

    def known(self) -> dict[str, tuple[str, Place, slots.Key]]:
        """What was found when they were asked last."""
        return self._known

    def failed(self) -> str:
        """The first place in which something could not be put since this was asked, and why; "" where there is none."""
        told = ""
        for path, place, _ in self._known.values():
            if place.failed:
                told = told or f"{path}: {errors.clean(place.failed)}"
                place.failed = ""
        return told

    def _all(self) -> list[_finders.Finder]:
        life = self._life()
        assert life is not None
        unique = {id(finder): finder for finder in (*self._own, *_finders.for_classes(life.model))}
        return list(unique.values())

    def _labels(self) -> dict[int, str]:
        """Names of the finders, by `id`; functions that one factory made are numbered."""
        out: dict[int, str] = {}
        for finder in self._all():
            base = name = _finders.label(finder)
            count = 1
            while name in out.values():
                count += 1
                name = f"{base}#{count}"
            out[id(finder)] = name
        return out

    def ask(self) -> dict[str, tuple[str, Place, slots.Key]]:
        """Ask all finders: path -> (path, place, key), as for other storage that a user declares.

        Raises:
            ConfigError: one raises, or gives nonsense; it is named, and what was known before stays.
        """
        finders = self._all()
        if not finders and not self._known:
            return self._known
        labels = self._labels()
        found: dict[str, tuple[str, Place, slots.Key]] = {}
        for finder in finders:
            for name, place in self._asked(finder, labels[id(finder)]):
                path = f"{labels[id(finder)]}:{name}"
                before = self._known.get(path)
                if before is not None:
                    before[1].follow(place)
                found[path] = before or (path, place, (slots.PLACE, name))
        self.changed = self.changed or found.keys() != self._known.keys()
        self._known = found
        return found

    def _asked(self, finder: _finders.Finder, label: str) -> list[tuple[str, Place]]:
        life = self._life()
        assert life is not None
        out: dict[str, Place] = {}
        at = [""]
        try:
            _fill(out, finder(life.model), at)
        except Exception as error:
            name = at[0]
            where = f" at {name!r}" if name else ""
            # Its own words are hostile text, as names are.
            raise errors.ConfigError(
                f"the finder {label} can't be asked{where}: {errors.clean(errors.safe_text(error))}", model=life.name,
                layer=f"{label}:{name}" if name else label,
                hint="a finder gives pairs of a name and (object, 'attribute'), (container, key) or (getter, setter)",
            ) from error  # fmt: skip
        return list(out.items())


def _fill(out: dict[str, Place], given: Any, at: list[str]) -> None:
    """Take what a finder gave. `at`: the name that is looked at.

    Raises:
        ValueError: it is nonsense. What the finder raises while it yields, and a getter of its.
    """
    pairs: Iterable[Any] = given.items() if isinstance(given, Mapping) else given
    for pair in pairs:
        at[0] = ""
        at[0], where = _pair(pair)
        if at[0] in out:
            raise ValueError("it gives this name twice")
        if len(out) >= MAX_PLACES:
            raise ValueError(f"more than {MAX_PLACES} places")
        place = place_of(where)
        value = place.get()
        if not _holds(value):
            raise ValueError(f"{type(value).__name__} is no tensor and holds none")
        out[at[0]] = place


def _pair(pair: Any) -> tuple[str, Any]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{type(pair).__name__} is no pair of a name and a place")
    name, where = pair
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{type(name).__name__} is no name")
    if len(name) > MAX_NAME:
        raise ValueError(f"a name of {len(name)} characters")
    return errors.clean(name), where


def _holds(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) or slots._descends(value)


__all__ = ["Place", "Places", "place_of"]
