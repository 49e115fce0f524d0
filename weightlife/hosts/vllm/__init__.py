# SPDX-License-Identifier: Apache-2.0
"""vLLM: seams, adapter, plugin and remote calls."""
