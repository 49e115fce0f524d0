# SPDX-License-Identifier: Apache-2.0
"""An engine for a command that needs one."""

from __future__ import annotations

from typing import Any


def start(model: str, **arguments: Any) -> Any:
    """A `vllm.LLM`, eager, without a tokenizer and for short sequences where `arguments` say nothing else.

    Raises:
        ImportError: vLLM is not there. Else what the engine raises.
    """
    from vllm import LLM

    return LLM(
        model, **{"enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 256, **arguments}
    )
