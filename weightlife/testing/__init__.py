# SPDX-License-Identifier: Apache-2.0
"""Fixtures and oracles for tests of weight loading, ours and yours.

`checkpoints` makes tiny checkpoints A and B of many model families; `oracle` says, exactly, whether an
engine that was hot-swapped equals one that was loaded cold. Nothing is imported until it is used.
"""
