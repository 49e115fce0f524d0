# SPDX-License-Identifier: Apache-2.0
"""Copying many tensors: whichever way is chosen, the result is that of one exact copy after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weightlife.kernels import backends
from weightlife.kernels.backends import copy_pairs

WAYS = ("auto", "foreach", "copy")
way = pytest.mark.parametrize("way", WAYS)


@way
class TestExact:
    def test_strides_dtypes_and_empty_ones(self, way: str) -> None:
        pairs = [
            (torch.zeros(2, 3).t(), torch.arange(6.0).view(3, 2)),
            (torch.zeros(4, 6).t(), torch.arange(24.0).view(4, 6).t()),
            (torch.zeros(8, 8)[1:5, 2:6], torch.arange(16.0).view(4, 4)),
            (torch.zeros(0), torch.zeros(0)),
            (torch.zeros(2, dtype=torch.int8), torch.ones(2, dtype=torch.int8)),
            (
                torch.zeros(3, dtype=torch.bfloat16),
                torch.tensor([1.0, float("nan"), 3.0], dtype=torch.bfloat16),
            ),
            (torch.zeros(()), torch.tensor(7.0)),
        ]
        done = copy_pairs(pairs, way)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
        assert done.same == 1
        assert done.foreach + done.copy + done.triton == len(pairs) - 1

    def test_a_tie_is_copied_once(self, way: str) -> None:
        to, of = torch.zeros(16), torch.arange(16.0)
        done = copy_pairs([(to, of), (to.view(4, 4), of.view(4, 4)), (to[:], of[:])], way)
        assert torch.equal(to, of)
        assert done.same >= 1
        assert done.foreach + done.copy + done.same == 3

    def test_the_same_memory_is_left_alone(self, way: str) -> None:
        of = torch.arange(16.0)
        assert copy_pairs([(of[:8], of[:8])], way).same == 1

    @pytest.mark.parametrize("shift", [1, 3, 8, 500, 999])
    def test_source_and_destination_overlap(self, way: str, shift: int) -> None:
        memory = torch.arange(2000, dtype=torch.int32)
        want = memory.clone()
        want[shift : shift + 1000] = memory[:1000].clone()
        copy_pairs([(memory[shift : shift + 1000], memory[:1000])], way)
        assert torch.equal(memory, want)

    def test_one_pair_reads_what_another_writes(self, way: str) -> None:
        a, b, c = torch.full((64,), 1.0), torch.full((64,), 2.0), torch.full((64,), 3.0)
        done = copy_pairs([(b, a), (c, b)], way)
        assert (float(b[0]), float(c[0])) == (1.0, 1.0), "in order"
        assert done.copy == 2

    def test_two_pairs_write_one_place(self, way: str) -> None:
        to = torch.zeros(64)
        copy_pairs([(to, torch.ones(64)), (to[32:], torch.full((32,), 2.0))], way)
        assert to.tolist() == [1.0] * 32 + [2.0] * 32

    def test_autograd_records_nothing(self, way: str) -> None:
        parameter = torch.nn.Parameter(torch.zeros(4))
        copy_pairs([(parameter, torch.ones(4, requires_grad=True))], way)
        assert parameter.grad_fn is None
        assert parameter.tolist() == [1.0] * 4


@way
class TestRefused:
    @pytest.mark.parametrize(
        ("bad", "match"),
        [
            ((torch.zeros(4), torch.ones(1)), "shape"),
            ((torch.zeros(2, 2), torch.ones(4)), "shape"),
            ((torch.zeros(4), torch.ones(4, dtype=torch.float64)), "dtype"),
            ((torch.zeros(4, device="meta"), torch.ones(4)), "no bytes"),
            ((torch.zeros(4), torch.ones(4, device="meta")), "no bytes"),
        ],
    )
    def test_before_the_first_byte(
        self, way: str, bad: tuple[torch.Tensor, torch.Tensor], match: str
    ) -> None:
        good = torch.zeros(3)
        with pytest.raises(ValueError, match=match):
            copy_pairs([(good, torch.ones(3)), bad], way)
        assert good.tolist() == [0.0] * 3


class TestChoice:
    def test_unknown_and_unavailable(self) -> None:
        cpu = torch.device("cpu")
        with pytest.raises(ValueError, match="cuda-graph"):
            backends.chosen("cuda-graph", cpu)
        with pytest.raises(ValueError, match="cuda-graph"):
            copy_pairs([], "cuda-graph")
        assert backends.chosen("auto", cpu) == "foreach"
        assert not backends.triton_works(cpu)
        with pytest.raises(ValueError, match="Triton"):
            backends.chosen("triton", cpu)

    def test_asking_for_triton_still_copies_what_lives_on_a_cpu(self) -> None:
        """A model on a GPU keeps scalars on the CPU: the choice is for the device, not for them."""
        to = torch.zeros(3)
        assert copy_pairs([(to, torch.ones(3))], "triton").foreach == 1
        assert to.tolist() == [1.0] * 3


class TestBenchmark:
    def test_without_a_gpu_it_says_so(self) -> None:
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, "benchmarks/kernel_copies.py"], cwd=root, capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert "No CUDA device: nothing was measured." in done.stdout
