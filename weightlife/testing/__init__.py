# SPDX-License-Identifier: Apache-2.0
"""Fixtures and oracles for tests of weight loading, ours and yours.

`layers.prove` holds a layer of yours against cold loads of itself; `contract` says whether addresses hold;
`pytest_plugin` has both as fixtures. `checkpoints` makes tiny checkpoints A and B of many model families; `oracle`
says, exactly, whether an engine that was hot-swapped equals one that was loaded cold. Nothing is imported until it is
used.
"""
