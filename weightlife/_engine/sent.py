# SPDX-License-Identifier: Apache-2.0
"""What a sender says it sent: a table of digests that a session's source tensors are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weightlife import digests, errors
from weightlife.kernels import digest

if TYPE_CHECKING:
    from weightlife._engine.session import WeightLoadSession


class Sent:
    """The table of one session, and what came so far.

    Digests are begun when a tensor is handed to the loader, for its buffer may be used again right after, and read
    at the end: a stream from a device is not stopped at each tensor.

    Args:
        table: checked by `digests.check_table`.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self._wanted: dict[str, Any] = table["tensors"]
        self._arrived: list[tuple[str, dict[str, Any]]] = []
        self._pending = digest.Pending()
        self._names: set[str] = set()
        self._strange: dict[str, str] = {}  # name -> why it can't be compared

    def arrived(self, name: str, tensor: Any) -> None:
        """A source tensor, before the loader gets it. Whatever is wrong with it is said by `problem`."""
        self._names.add(name)
        if not isinstance(tensor, torch.Tensor):
            self._strange[name] = f"a {type(tensor).__name__} arrived"
            return
        try:
            self._pending.add([tensor])
        except ValueError as error:
            self._strange[name] = str(error)
            return
        self._arrived.append((name, digests.entry(tensor, 0)))

    def missing(self, session: WeightLoadSession) -> errors.MissingTensorError | None:
        """The error for announced tensors that have not come."""
        lacking = [name for name in self._wanted if name not in self._names]
        if not lacking:
            return None
        return errors.MissingTensorError(
            f"{len(lacking)} of {len(self._wanted)} announced tensors did not arrive",
            model=session.life.name, tensors=lacking, session=session.id,
            hint="send what the table of digests names, or a table of what you send",
        )  # fmt: skip

    def problem(self, session: WeightLoadSession) -> errors.CompletenessError | None:
        """The error for what arrived, held against the table: too little, too much, or not what the sender had."""
        lacking = self.missing(session)
        if lacking is not None:
            return lacking
        surplus = sorted(name for name in self._names if name not in self._wanted)
        if surplus:
            return errors.UnexpectedTensorError(
                f"{len(surplus)} tensors arrived that the table of digests does not name",
                model=session.life.name, tensors=surplus, session=session.id,
            )  # fmt: skip
        found = [
            difference
            for (name, entry), value in zip(self._arrived, self._pending.values(), strict=True)
            for difference in digests.differences(
                name, self._wanted[name], {**entry, "digest": f"{value:016x}"}
            )
        ]
        bad = list(dict.fromkeys([*self._strange, *(difference.name for difference in found)]))
        if not bad:
            return None
        first = self._strange.get(bad[0]) or next(
            f"{d.what} {d.found}, the sender had {d.expected}" for d in found if d.name == bad[0]
        )
        return errors.DigestMismatchError(
            f"{len(bad)} of {len(self._wanted)} tensors are not what the sender had; the first: {first}",
            model=session.life.name, tensors=bad, session=session.id,
        )  # fmt: skip
