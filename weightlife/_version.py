# SPDX-License-Identifier: Apache-2.0
"""The version, on its own so that nothing heavy is imported to read it."""

__version__ = "0.1.0"
