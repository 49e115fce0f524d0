# SPDX-License-Identifier: Apache-2.0
"""The arguments of a wrapped call, which a caller may give by place or by name."""

from __future__ import annotations

from typing import Any

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def argument(args: Args, kwargs: Kwargs, position: int, name: str, default: Any = None) -> Any:
    """One argument; `default` where it was not given."""
    return args[position] if len(args) > position else kwargs.get(name, default)


__all__ = ["Args", "Kwargs", "argument"]
