# SPDX-License-Identifier: Apache-2.0
"""A sender without vLLM, numba or Triton makes the same table as one that has them, and a receiver checks it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import weightlife
from weightlife import digests, errors
from weightlife.kernels import digest

pytestmark = pytest.mark.plain


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((8, 8), value), "bias": torch.arange(8.0) * value}


def make(**settings: Any) -> Any:
    @weightlife.wrap_loader(**settings)
    def load(model: nn.Module, stream: Any) -> None:
        parameters = dict(model.named_parameters())
        for name, tensor in stream:
            parameters[name].data.copy_(tensor)

    model = nn.Linear(8, 8)
    load(model, weights(1.0).items())
    return model, load


def test_the_table_does_not_depend_on_what_is_installed() -> None:
    if find_spec("numba") is None:
        assert digest.words_total() is digest.numpy_total
    table = digests.digest_table({"t": torch.arange(5000, dtype=torch.int16)})
    assert table["tensors"]["t"] == {"shape": [5000], "dtype": "int16", "digest": KNOWN}


def test_a_receiver_commits_what_was_sent_and_nothing_else() -> None:
    model, load = make()
    table = digests.digest_table(weights(2.0))
    wrong = weights(2.0)
    wrong["bias"][3] += 1
    with pytest.raises(errors.DigestMismatchError, match="bias"), weightlife.session(model, expected=table):
        load(model, wrong.items())
    assert torch.equal(model.weight, weights(1.0)["weight"])
    with weightlife.session(model, expected=table):
        load(model, weights(2.0).items())
    assert torch.equal(model.weight, weights(2.0)["weight"])


def test_a_stray_write_is_found() -> None:
    model, load = make(digests="commit")
    load(model, weights(3.0).items())
    model(torch.ones(8))
    assert weightlife.check_digests(model) == []
    with torch.no_grad():
        model.bias[2] = 7.0
    assert [difference.name for difference in weightlife.check_digests(model)] == ["bias"]


KNOWN = "ccba4201171f9dd4"
