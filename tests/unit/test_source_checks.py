# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors folders: what is whole passes, what is not is named, and nothing hostile gets through."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from weightlife import errors, source_checks
from weightlife._declared import Header

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def write(folder: Path, shards: dict[str, dict[str, torch.Tensor]], index: Any = True) -> Path:
    folder.mkdir(exist_ok=True)
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    if index is True:
        index = {name: shard for shard, tensors in shards.items() for name in tensors}
    if index is not None:
        (folder / source_checks.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


@pytest.fixture
def shards() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model-1.safetensors": {"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)},
        "model-2.safetensors": {"c": torch.zeros((), dtype=torch.int64), "d": torch.zeros(0, 7)},
    }


def only(source: source_checks.Source, kind: type[errors.SourceError]) -> errors.SourceError:
    assert [type(p) for p in source.problems] == [kind], source.problems
    with pytest.raises(kind):
        source.require()
    return source.problems[0]


class TestWhole:
    def test_every_tensor_with_dtype_and_shape(self, tmp_path: Path, shards: Any) -> None:
        source = source_checks.read(write(tmp_path, shards))
        assert source.problems == []
        assert source.headers == {
            "a": Header("float32", (2, 3)), "b": Header("bfloat16", (4,)), "c": Header("int64", ()),
            "d": Header("float32", (0, 7)),
        }  # fmt: skip
        assert {file: set(names) for file, names in source.files.items()} == {
            f: set(t) for f, t in shards.items()
        }

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype(self, tmp_path: Path, dtype: torch.dtype) -> None:
        source = source_checks.read(write(tmp_path, {"m.safetensors": {"x": torch.zeros(3).to(dtype)}}, None))
        assert source.headers == {"x": Header(str(dtype).removeprefix("torch."), (3,))}

    def test_without_an_index_every_file_counts(self, tmp_path: Path, shards: Any) -> None:
        assert set(source_checks.read(write(tmp_path, shards, None)).headers) == set("abcd")

    def test_files_that_the_index_does_not_name_are_not_read(self, tmp_path: Path, shards: Any) -> None:
        write(tmp_path, shards)
        (tmp_path / "consolidated.safetensors").write_bytes(b"no safetensors")
        assert source_checks.read(tmp_path).problems == []

    def test_links_are_followed(self, tmp_path: Path, shards: Any) -> None:
        blobs = write(tmp_path / "blobs", shards)
        snapshot = tmp_path / "snapshot"
        snapshot.mkdir()
        for path in blobs.iterdir():
            (snapshot / path.name).symlink_to(path)
        assert set(source_checks.read(snapshot).headers) == set("abcd")

    def test_one_file(self, tmp_path: Path, shards: Any) -> None:
        source = source_checks.read(write(tmp_path, shards) / "model-2.safetensors")
        assert source.problems == [] and list(source.files) == ["model-2.safetensors"]
        assert set(source.headers) == set("cd") == set(source.places)
        assert source.sizes == {"c": 8, "d": 0}
        path = tmp_path / "model-1.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        assert path.name in str(only(source_checks.read(path), errors.TruncatedSourceError))

    def test_an_index_and_the_files_beside_it(self, tmp_path: Path, shards: Any) -> None:
        index = write(tmp_path, shards) / source_checks.INDEX
        other = index.rename(tmp_path / "other.json")
        (tmp_path / "stray.safetensors").write_bytes(b"no safetensors")
        assert set(source_checks.read(other).headers) == set("abcd")
        other.write_text(json.dumps({"weight_map": {"a": "/etc/passwd", "b": "../model-1.safetensors"}}))
        source = source_checks.read(other)
        assert (
            "2 files that are not there" in str(only(source, errors.SourceIndexError)) and not source.headers
        )
        for content in ("{", "[]", '{"weight_map": {"a": 1}}'):
            other.write_text(content)
            source = source_checks.read(other)
            only(source, errors.SourceIndexError)
            assert source.files == {}

    def test_a_folder_without_files_is_empty(self, tmp_path: Path) -> None:
        assert source_checks.read(tmp_path) == source_checks.Source(tmp_path.name)

    def test_prefixes_of_several_sources(self, tmp_path: Path, shards: Any) -> None:
        source = source_checks.read(write(tmp_path, shards))
        both = source_checks.merged([("", source), ("draft.", source)])
        assert set(both.headers) == {*"abcd", *(f"draft.{n}" for n in "abcd")}


class TestBroken:
    @pytest.mark.parametrize("left", [0, 4, 8, 40, -1, -13])
    def test_a_truncated_file(self, tmp_path: Path, shards: Any, left: int) -> None:
        path = write(tmp_path, shards) / "model-1.safetensors"
        path.write_bytes(path.read_bytes()[:left])
        found = only(source_checks.read(tmp_path), errors.TruncatedSourceError)
        assert "model-1.safetensors" in str(found)
        with pytest.raises(errors.TruncatedSourceError):
            source_checks.header_of(path)

    def test_bytes_too_many(self, tmp_path: Path, shards: Any) -> None:
        path = write(tmp_path, shards) / "model-1.safetensors"
        path.write_bytes(path.read_bytes() + b"\0")
        assert "1 are too many" in str(only(source_checks.read(tmp_path), errors.TruncatedSourceError))

    def test_one_name_in_two_files(self, tmp_path: Path, shards: Any) -> None:
        shards["model-2.safetensors"]["a"] = torch.ones(2, 3)
        found = only(source_checks.read(write(tmp_path, shards)), errors.RepeatedSourceError)
        assert found.tensors == ("a",)
        assert "'model-1.safetensors' and 'model-2.safetensors'" in found.message

    def test_the_index_names_a_tensor_that_is_nowhere(self, tmp_path: Path, shards: Any) -> None:
        index = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors",
                 "d": "model-2.safetensors", "gone": "model-2.safetensors"}  # fmt: skip
        found = only(source_checks.read(write(tmp_path, shards, index)), errors.SourceIndexError)
        assert found.tensors == ("gone",)

    def test_the_index_has_a_tensor_in_another_file(self, tmp_path: Path, shards: Any) -> None:
        index = {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors",
                 "d": "model-2.safetensors"}  # fmt: skip
        assert only(source_checks.read(write(tmp_path, shards, index)), errors.SourceIndexError).tensors == (
            "a",
        )

    def test_the_index_forgets_a_tensor(self, tmp_path: Path, shards: Any) -> None:
        index = {"a": "model-1.safetensors", "c": "model-2.safetensors", "d": "model-2.safetensors"}
        assert only(source_checks.read(write(tmp_path, shards, index)), errors.SourceIndexError).tensors == (
            "b",
        )

    def test_the_index_names_a_file_that_is_not_there(self, tmp_path: Path, shards: Any) -> None:
        index = {
            "a": "model-1.safetensors",
            "b": "model-1.safetensors",
            "c": "../../secret",
            "d": "/etc/passwd",
        }
        source = source_checks.read(write(tmp_path, shards, index))
        assert [type(p) for p in source.problems] == [errors.SourceIndexError]
        assert set(source.files) == {"model-1.safetensors"}  # a path in an index is never opened

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "[" * 100_000]
    )
    def test_an_index_that_is_none(self, tmp_path: Path, shards: Any, text: str) -> None:
        write(tmp_path, shards, None)
        (tmp_path / source_checks.INDEX).write_text(text)
        only(source_checks.read(tmp_path), errors.SourceIndexError)

    def test_a_pipe_in_the_folder_does_not_block(self, tmp_path: Path, shards: Any) -> None:
        write(tmp_path, shards, None)
        os.mkfifo(tmp_path / "z.safetensors")
        assert source_checks.read(tmp_path).problems == []


def raw(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def tensor(shape: Any = (2,), span: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


HOSTILE = {
    "length": struct.pack("<Q", 1 << 63) + b"{}",
    "length beyond the file": struct.pack("<Q", 4096) + b"{}",
    "no json": raw(b"not json"),
    "no utf-8": raw(b'{"\xff": 1}'),
    "a list": raw([]),
    "deep": raw(b"[" * 200_000),
    "deep record": raw(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "key twice": raw(b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8),
    "record": raw({"a": 3}),
    "no shape": raw({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, b"\0" * 8),
    "negative": raw({"a": tensor(shape=[-2])}, b"\0" * 8),
    "bool": raw({"a": tensor(shape=[True, 2])}, b"\0" * 8),
    "float": raw({"a": tensor(shape=[2.0])}, b"\0" * 8),
    "huge": raw({"a": tensor(shape=[1 << 62] * 20)}, b"\0" * 8),
    "digits": raw(b'{"a": {"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,8]}}', b"\0" * 8),
    "dimensions": raw({"a": tensor(shape=[1] * 1000)}, b"\0" * 8),
    "size": raw({"a": tensor(shape=[3])}, b"\0" * 8),
    "overlap": raw({"a": tensor(), "b": tensor(span=[4, 12])}, b"\0" * 12),
    "gap": raw({"a": tensor(), "b": tensor(span=[12, 20])}, b"\0" * 20),
    "backwards": raw({"a": tensor(span=[8, 0])}, b"\0" * 8),
    "three offsets": raw({"a": tensor(span=[0, 4, 8])}, b"\0" * 8),
}  # fmt: skip


class TestHostile:
    @pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
    def test_is_named_and_nothing_else_happens(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "m.safetensors").write_bytes(content)
        only(source_checks.read(tmp_path), errors.TruncatedSourceError)

    def test_an_unknown_dtype_is_no_fault(self, tmp_path: Path) -> None:
        (tmp_path / "m.safetensors").write_bytes(raw({"a": tensor(dtype="Q3_NEW")}, b"\0" * 8))
        source = source_checks.read(tmp_path)
        assert (source.problems, source.headers["a"].shape) == ([], None)

    def test_names_are_escaped(self, tmp_path: Path) -> None:
        name = "\x1b[31mred\x1b[0m"
        (tmp_path / "1.safetensors").write_bytes(raw({name: tensor()}, b"\0" * 8))
        (tmp_path / "2.safetensors").write_bytes(raw({name: tensor()}, b"\0" * 8))
        assert "\x1b" not in str(only(source_checks.read(tmp_path), errors.RepeatedSourceError))

    @given(st.binary(max_size=200))
    def test_random_bytes(self, content: bytes) -> None:
        check_bytes(content)

    @given(st.integers(0, 400), st.integers(0, 255), st.integers(0, 400))
    def test_a_byte_that_flipped_or_an_end_that_is_gone(self, place: int, value: int, end: int) -> None:
        content = bytearray(save({"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.int8)}))
        if place < len(content):
            content[place] = value
        check_bytes(bytes(content[: max(end, 1)]))


def check_bytes(content: bytes) -> None:
    """Either what the reference reader finds, or an error of ours; never another exception."""
    import tempfile

    from safetensors import safe_open

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        path.write_bytes(content)
        try:
            mine = source_checks.header_of(path)
        except errors.TruncatedSourceError:
            return
        try:
            with safe_open(path, framework="pt") as file:
                theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except Exception:  # noqa: BLE001  the reference refuses what it does not know (dtypes): that is its business
            return
        assert {
            name: header.shape or () for name, header in mine.items() if header.shape is not None
        } == theirs
