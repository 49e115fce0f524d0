# SPDX-License-Identifier: Apache-2.0
"""Hosts: how the engine reaches the framework that owns a model."""
