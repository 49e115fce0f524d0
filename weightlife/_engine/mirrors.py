# SPDX-License-Identifier: Apache-2.0
"""Numbers that the host keeps beside tensors: a float that is the value of a scale on the device."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from weightlife import errors
from weightlife._engine.collect import equal, get, is_scalar, scalar_values

if TYPE_CHECKING:
    from weightlife._engine.seal import Seal
    from weightlife._engine.session import WeightLoadSession


class Mirrors:
    """The host's copies of scalars of one model, as its contract's walk finds them.

    Args:
        seal: the contract.
    """

    def __init__(self, seal: Seal) -> None:
        self._seal = weakref.ref(seal)
        self._agreed: list[int] = []  # those that were their tensor's value after the first load

    @property
    def seal(self) -> Seal:
        """The contract."""
        seal = self._seal()
        assert seal is not None
        return seal

    def learn(self, values: list[Any]) -> None:
        """Note which numbers agree with their tensors. `values`: what stands at each step of the walk."""
        life, walk = self.seal.life, self.seal.walk
        assert walk is not None
        # Weights that are lost have no values to read.
        pairs = [] if life.poisoned else self._pairs(values)
        self._agreed = [i for i, (mirror, value) in enumerate(pairs) if equal(mirror, value)]
        if life.agreed:
            known = enumerate((id(values[parent]), key) for parent, _, key, _ in walk.mirrors)
            self._agreed = sorted({*self._agreed, *(i for i, key in known if key in life.agreed)})
            life.agreed = set()

    def check(self, session: WeightLoadSession) -> None:
        """Hold the host's own copies of scalars against the tensors that they are copies of.

        Raises:
            StaleDerivedError: one is not its tensor's value, by policy.
        """
        if session.settings.contract == "off":
            return
        started = time.perf_counter()
        paths = self.stale()
        self.seal.seconds += time.perf_counter() - started
        if paths:
            session.problem(
                errors.StaleDerivedError(
                    f"{len(paths)} numbers are not those of the tensors that they are copies of; first {paths[0]}",
                    model=session.life.name, layer=paths[0], session=session.id,
                ),
                session.settings.contract,
            )  # fmt: skip

    def stale(self) -> list[str]:
        """Paths of numbers that agreed with their tensors after the first load, and do not now."""
        self.seal.due()
        walk = self.seal.walk
        if walk is None or not self._agreed:
            return []
        pairs = self._pairs(walk.values(), self._agreed)
        return [
            walk.mirrors[index][3]
            for index, pair in zip(self._agreed, pairs, strict=True)
            if not equal(*pair)
        ]

    def after_wake(self) -> None:
        """Memory came back from a sleep: tell of scales that did not come back with it."""
        paths = [] if self.seal.life.poisoned else self.stale()
        if paths:
            self.seal.life.note(
                f"{self.seal.life.name}: after waking, {len(paths)} numbers are not those of the tensors that they are copies"
                f" of; first {paths[0]}: update the weights before anything is served"
            )

    def _pairs(self, values: list[Any], only: list[int] | None = None) -> list[tuple[Any, float | None]]:
        """(number, value of its tensor), None where either is gone. One transfer from each device."""
        walk = self.seal.walk
        assert walk is not None
        numbers: list[Any] = []
        scalars: list[torch.Tensor | None] = []
        chosen = walk.mirrors if only is None else [walk.mirrors[index] for index in only]
        for parent, key, mirror, _ in chosen:
            tensor = get(values[parent], key)
            numbers.append(get(values[parent], mirror))
            scalars.append(tensor if isinstance(tensor, torch.Tensor) and is_scalar(tensor) else None)
        return list(zip(numbers, scalar_values(scalars), strict=True))


__all__ = ["Mirrors"]
