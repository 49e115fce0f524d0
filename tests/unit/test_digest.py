# SPDX-License-Identifier: Apache-2.0
"""The digest's definition: every implementation gives its value, and it finds what it promises to find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightlife.kernels import digest

MASK = digest.MASK
LENGTHS = (0, 1, 3, 4, 5, 4095, 4096, 4097, 8192, 3 * 4096 + 2, 70_001)


def by_the_book(data: bytes) -> int:
    """The formula of the module's docstring in Python integers, byte by byte."""
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    total = 0
    for b in range(-(-len(words) // 1024)):
        s = 0
        for j, w in enumerate(words[1024 * b : 1024 * (b + 1)]):
            w ^= w >> 8
            w ^= w >> 16
            k = (digest.mix((j + 1) * 0x9E3779B97F4A7C15 & MASK) >> 32) | 1
            s += w * k
        total += digest.mix((s + (b + 1) * 0x9E3779B97F4A7C15) & MASK)
    return digest.mix((total + (len(data) + 1) * 0xD1B54A32D192ED03) & MASK)


def some(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def padded(data: np.ndarray) -> np.ndarray:
    whole = np.zeros(-(-data.size // 4096) * 4096, dtype=np.uint8)
    whole[: data.size] = data
    return whole.view("<u4")


class TestDefinition:
    def test_known_values(self) -> None:
        """Digests travel between versions and machines: these numbers never change."""
        assert digest.digest_bytes(b"") == 0x8209B480FAED1B10
        assert digest.digest_bytes(b"weightlife") == by_the_book(b"weightlife")
        assert f"{digest.digest_bytes(bytes(range(256)) * 40):016x}" == KNOWN

    @pytest.mark.parametrize("length", LENGTHS)
    def test_every_implementation_gives_it(self, length: int) -> None:
        data = some(length)
        want = by_the_book(data.tobytes())
        numba = pytest.importorskip("weightlife.kernels.digest_numba")
        assert digest.finish(digest.numpy_total(padded(data), 0), length) == want
        assert digest.finish(numba.total(padded(data), 0), length) == want
        assert digest.finish(int(digest.torch_total(torch.from_numpy(data))), length) == want
        assert digest.digest_bytes(data) == want
        assert digest.digests([torch.from_numpy(data)]) == [want]

    def test_numba_is_what_a_cpu_uses_here(self) -> None:
        assert digest.words_total().__module__ == "weightlife.kernels.digest_numba"

    def test_without_numba_numpy_takes_its_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import sys

        data = some(9000)
        want = digest.digest_bytes(data)
        monkeypatch.setitem(sys.modules, "weightlife.kernels.digest_numba", None)
        digest.words_total.cache_clear()
        try:
            assert digest.words_total() is digest.numpy_total
            assert digest.digest_bytes(data) == want
        finally:
            digest.words_total.cache_clear()

    @pytest.mark.parametrize("offset", [1, 2, 3, 4, 7])
    def test_an_odd_address_changes_nothing(self, offset: int) -> None:
        data = some(20_000 + offset)
        want = by_the_book(data[offset:].tobytes())
        assert digest.digest_bytes(data[offset:]) == want
        assert digest.finish(int(digest.torch_total(torch.from_numpy(data)[offset:])), 20_000) == want

    def test_keys_are_odd_and_all_different(self) -> None:
        """What the promises about single words and exchanged words rest on."""
        found = digest.keys().tolist()
        assert len(set(found)) == 1024
        assert all(key % 2 for key in found)

    def test_g_is_a_bijection(self) -> None:
        """Undone step by step: the shifts are of half a byte pattern, so each is its own short series."""
        w = some(4 * 4096).view("<u4")
        x = w ^ (w >> np.uint32(8))
        x ^= x >> np.uint32(16)
        y = x ^ (x >> np.uint32(16))
        y = y ^ (y >> np.uint32(8)) ^ (y >> np.uint32(16)) ^ (y >> np.uint32(24))
        assert (y == w).all()


class TestTiling:
    @given(st.lists(st.integers(0, 9000), max_size=8), st.integers(0, 2**32))
    def test_a_stream_in_pieces_is_the_whole(self, pieces: list[int], seed: int) -> None:
        data = some(sum(pieces), seed)
        stream, at = digest.Digester(), 0
        for length in pieces:
            stream.update(data[at : at + length])
            at += length
            assert stream.value() == digest.digest_bytes(data[:at])
        assert stream.nbytes == data.size

    def test_a_stream_takes_tensors(self) -> None:
        values = torch.arange(5000, dtype=torch.float32)
        stream = digest.Digester()
        stream.update(values[:3333])
        stream.update(values[3333:])
        assert [stream.value()] == digest.digests([values])

    @given(st.permutations(range(6)))
    def test_parts_add_up_in_any_order(self, order: list[int]) -> None:
        data = some(6 * 8192 - 5)
        parts = {b: data[b * 8192 : (b + 1) * 8192] for b in range(6)}
        total = sum(digest.total_of(parts[b], b * 2) for b in order)
        assert digest.finish(total, data.size) == digest.digest_bytes(data)

    def test_block_numbers_go_beyond_32_bits(self) -> None:
        data, far = some(8192), 5 << 33
        totals = {digest.numpy_total(data.view("<u4"), far), digest.total_of(data, far)}
        totals.add(int(digest.torch_total(torch.from_numpy(data), far)) & MASK)
        assert len(totals) == 1
        assert totals != {digest.total_of(data, far & 0xFFFFFFFF)}


class TestFinds:
    @given(st.integers(0, 3 * 4096 + 100), st.integers(0, 7), st.integers(0, 2**32))
    def test_one_flipped_bit(self, place: int, bit: int, seed: int) -> None:
        data = some(3 * 4096 + 101, seed)
        other = data.copy()
        other[place] ^= 1 << bit
        assert digest.digest_bytes(data) != digest.digest_bytes(other)

    @given(st.integers(0, 1023), st.integers(0, 1023), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
    def test_two_words_exchanged(self, i: int, j: int, a: int, b: int) -> None:
        words = np.zeros(1024, dtype=np.uint32)
        words[i], words[j] = a, b
        other = words.copy()
        other[[i, j]] = other[[j, i]]
        same = bool((words == other).all())
        assert (digest.digest_bytes(words) == digest.digest_bytes(other)) == same

    @pytest.mark.parametrize("size", [4, 16, 256, 4096, 65_536])
    def test_two_blocks_exchanged_and_back_elsewhere(self, size: int) -> None:
        """A sum of word times position would not see the second exchange undo the first."""
        data = np.tile(some(2 * size), 8).reshape(-1, size)
        once, twice = data.copy(), data.copy()
        once[[0, 1]] = once[[1, 0]]
        twice[[0, 1, 6, 7]] = twice[[1, 0, 7, 6]]
        back = data.copy()
        back[[0, 1]] = back[[1, 0]]
        back[[2, 3, 4, 5]] = back[[4, 5, 2, 3]]
        found = [digest.digest_bytes(np.ascontiguousarray(x)) for x in (data, once, twice)]
        assert len(set(found)) == 3
        assert digest.digest_bytes(back) == found[1]  # equal rows exchanged: the bytes are the same

    def test_shifts_transposes_and_other_parts(self) -> None:
        data = some(64 * 256).reshape(64, 256)
        wide = data.view("<u4")
        variants = [
            data, data.T, np.roll(data, 1), np.roll(data, 4), np.roll(data, 4096), data[::-1], data[:, ::-1],
            np.roll(wide, 1, axis=1), wide.T, data[:32], data[32:], np.flip(wide),
        ]  # fmt: skip
        assert len({digest.digest_bytes(np.ascontiguousarray(x)) for x in variants}) == len(variants)

    def test_zeros_are_not_nothing(self) -> None:
        lengths = [0, 1, 2, 4, 8, 4095, 4096, 4097, 8192, 1 << 20]
        assert len({digest.digest_bytes(bytes(n)) for n in lengths}) == len(lengths)

    def test_signs_flipped_everywhere(self) -> None:
        """The worst pattern: the highest bit of words, and nothing else."""
        data = some(64 * 4096).view("<u4")
        rng = np.random.default_rng(1)
        seen = {digest.digest_bytes(data)}
        for _ in range(500):
            seen.add(
                digest.digest_bytes(data ^ (rng.integers(0, 2, data.size, dtype=np.uint32) << np.uint32(31)))
            )
        assert len(seen) == 501


DTYPES = [
    getattr(torch, name)
    for name in (
        "uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64", "complex64",
        "float8_e4m3fn", "float8_e5m2", "uint16", "uint32",
    )
]  # fmt: skip


class TestTensors:
    def test_four_bit_floats_that_are_not_contiguous(self) -> None:
        """torch can't copy them as what they are."""
        raw = torch.from_numpy(some(64)).view(8, 8)
        four = raw.t().view(torch.float4_e2m1fn_x2)
        assert digest.digests([four]) == digest.digests([raw.t().contiguous()])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_counts_as_its_bytes(self, dtype: torch.dtype) -> None:
        raw = torch.from_numpy(some(1001 * dtype.itemsize) & 1)
        tensor = raw.view(dtype)
        assert digest.digests([tensor]) == [by_the_book(raw.numpy().tobytes())]

    def test_a_view_counts_as_its_contiguous_form(self) -> None:
        whole = torch.arange(600, dtype=torch.float32).view(20, 30)
        views = [
            whole.t(),
            whole[3:7, 2:9],
            whole[:, :1],
            whole[::2],
            whole[:0],
            whole[2, 3],
            whole[:1].expand(4, 30),
        ]
        assert digest.digests(views) == digest.digests([view.clone() for view in views])

    def test_parameters_lazy_conjugates_and_inference_tensors(self) -> None:
        z = torch.complex(torch.arange(5.0), torch.ones(5))
        with torch.inference_mode():
            inference = torch.arange(5.0)
        lazy = [torch.nn.Parameter(torch.arange(5.0)), z.conj(), z.conj().imag, inference]
        plain = [torch.arange(5.0), z.conj().resolve_conj(), (-z.imag).clone(), torch.arange(5.0)]
        assert digest.digests(lazy) == digest.digests(plain)

    def test_what_has_no_bytes_is_refused(self) -> None:
        for tensor in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
            with pytest.raises(ValueError, match="no bytes"):
                digest.digests([tensor])


KNOWN = "6ad95e5860afbf46"
