# SPDX-License-Identifier: Apache-2.0
"""Make vLLM build a layer with a kernel that this machine would not choose, so that its processing can be run."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any


class _Spy(dict[Any, Any]):
    """A table of possible kernels that notes whether it was asked."""

    asked = False

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked = True
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.asked = True
        return super().__getitem__(key)


class Chooser:
    """Makes vLLM choose a kernel that it would not choose here, by saying that it is supported."""

    def __init__(self) -> None:
        self._linear = importlib.import_module("vllm.model_executor.kernels.linear")
        self.tables = {n: v for n, v in vars(self._linear).items() if n.startswith("_POSSIBLE")}
        moe = importlib.import_module("vllm.model_executor.layers.fused_moe.modular_kernel")
        self._experts: Any = getattr(moe, "FusedMoEExperts", None)

    @contextlib.contextmanager
    def spying(self) -> Iterator[dict[str, _Spy]]:
        """Which tables a build asks."""
        spies = {name: _Spy(table) for name, table in self.tables.items()}
        vars(self._linear).update(spies)
        try:
            yield spies
        finally:
            vars(self._linear).update(self.tables)

    def kernels(self, table: str) -> list[type]:
        """Every kernel of a table, of whatever platform."""
        return list(dict.fromkeys(cls for found in self.tables[table].values() for cls in found))

    def experts(self) -> list[type]:
        """Every kernel for experts that is imported."""
        out: list[type] = []
        todo = [] if self._experts is None else [self._experts]
        while todo:
            for cls in todo.pop().__subclasses__():
                todo.append(cls)
                if cls not in out and not inspect.isabstract(cls):
                    out.append(cls)
        return sorted(out, key=lambda cls: cls.__qualname__)

    @contextlib.contextmanager
    def forced(self, cls: Any, table: str = "") -> Iterator[None]:
        """Only `cls` is possible, and supported."""
        yes = classmethod(lambda *_, **__: (True, None))
        patched: list[tuple[Any, str, Any]] = []

        def patch(owner: Any, name: str, value: Any) -> None:
            patched.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, value)

        if table:
            only = {key: [cls] for key in self.tables[table]}
            vars(self._linear)[table] = _Everywhere(only, [cls])
            patch(cls, "is_supported", yes)
            patch(cls, "can_implement", yes)
        else:
            patch(
                self._experts,
                "is_supported_config",
                # vLLM calls it with the class as an explicit argument
                staticmethod(lambda kernel, *_, **__: (kernel is cls, "not the one that is audited")),
            )
        try:
            yield
        finally:
            for owner, name, old in reversed(patched):
                delattr(owner, name) if old is None else setattr(owner, name, old)
            if table:
                vars(self._linear)[table] = self.tables[table]


class _Everywhere(dict[Any, Any]):
    def __init__(self, table: dict[Any, Any], kernels: list[type]) -> None:
        super().__init__(table)
        self._kernels = kernels

    def get(self, key: Any, default: Any = None) -> Any:
        return list(self._kernels)

    def __missing__(self, key: Any) -> Any:
        return list(self._kernels)


def supported(cls: Any) -> str:
    """Why a kernel says that it does not run here, or ''."""
    try:
        answer = cls.is_supported()
    except Exception as error:  # noqa: BLE001 - what it needs to answer may be absent, too
        return f"is_supported() raised {type(error).__name__}"
    good, why = answer if isinstance(answer, tuple) else (answer, None)
    return "" if good else f"is_supported(): {why or 'no'}"
