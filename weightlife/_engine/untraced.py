# SPDX-License-Identifier: Apache-2.0
"""Keep torch.compile out of our dispatch modes without paying for it on each operation.

torch wraps every `__torch_dispatch__` in a function that turns its compiler off for the length of the call: compiled
code that runs under a mode would otherwise have the mode itself compiled. The wrapper is Python, and costs 0.8 us of
the 3.8 us that an operation under an empty mode takes, whether or not anything was ever compiled. The compiler can be
told the same once, by the mode's code object: then it looks away by itself, and nothing is to be done on a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def leave_alone(function: Callable[..., Any]) -> bool:
    """Have the compiler skip a function and all that it calls. False where this torch has no way to say so."""
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError, TypeError):
        return False
    return True


class UntracedMode(TorchDispatchMode):
    """A dispatch mode whose `__torch_dispatch__` the compiler never sees.

    Where a torch can't be told (or has no such question to ask) its own wrapper stays.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch when a subclass is made: whether to put its wrapper round `__torch_dispatch__`."""
        dispatch = cls.__dict__.get("__torch_dispatch__")
        return dispatch is None or not leave_alone(dispatch)


__all__ = ["UntracedMode", "leave_alone"]
