# SPDX-License-Identifier: Apache-2.0
"""The engine: private to weightlife, and without any knowledge of a particular host."""
