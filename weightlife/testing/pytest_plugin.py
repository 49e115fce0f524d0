# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of layers and loaders. Ask for them: ``pytest_plugins = ["weightlife.testing.pytest_plugin"]``.

It registers nothing by itself, and imports neither torch nor weightlife's engine until a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from weightlife.testing.contract import Addresses, Captured
    from weightlife.testing.layers import Proof

__all__ = ["weightlife_addresses", "weightlife_captured", "weightlife_poison", "weightlife_prove"]


@pytest.fixture
def weightlife_poison() -> Iterator[None]:
    """Memory that nobody wrote is NaN during the test (the largest value for integers)."""
    from weightlife.testing._poison import poisoned

    with poisoned():
        yield


@pytest.fixture
def weightlife_prove() -> Callable[..., Proof]:
    """`weightlife.testing.layers.prove`: a layer against cold loads of itself, through updates good and broken."""
    from weightlife.testing.layers import prove

    return prove


@pytest.fixture
def weightlife_addresses() -> type[Addresses]:
    """`weightlife.testing.contract.Addresses`: where every tensor of a model is."""
    from weightlife.testing.contract import Addresses

    return Addresses


@pytest.fixture
def weightlife_captured() -> type[Captured]:
    """`weightlife.testing.contract.Captured`: the memory that a graph, captured now, would read for ever."""
    from weightlife.testing.contract import Captured

    return Captured
