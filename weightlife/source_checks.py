# SPDX-License-Identifier: Apache-2.0
"""Is a checkpoint of safetensors files whole and of one piece? Answered from headers alone, in milliseconds.

    source = source_checks.read(folder)          # or a file, or an index; raises nothing for a bad checkpoint
    for error in source.problems: ...
    weightlife.manifest(llm).check(source.headers)

A header is untrusted input: its size, its nesting and its numbers are bounded, and no name in it or in an index is
ever opened as a path. Format: https://github.com/huggingface/safetensors#format (an 8-byte little-endian length,
that many bytes of JSON, then the tensors' bytes without gaps). Standard library only.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightlife import errors
from weightlife._declared import Header

__all__ = ["INDEX", "PATTERN", "Source", "Stamp", "changed", "header_of", "merged", "read", "stamp_of"]

PATTERN = "*.safetensors"
INDEX = "model.safetensors.index.json"
# The reference reader refuses longer headers as well.
MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 256_000_000
MAX_FILES = 100_000
MAX_DIMENSIONS = 32

# Format name -> (dtype without `torch.`, bits of an element).
_DTYPES = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E8M0": ("float8_e8m0fnu", 8), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "I16": ("int16", 16), "U16": ("uint16", 16), "F16": ("float16", 16),
    "BF16": ("bfloat16", 16), "I32": ("int32", 32), "U32": ("uint32", 32), "F32": ("float32", 32),
    "C64": ("complex64", 64), "F64": ("float64", 64), "I64": ("int64", 64), "U64": ("uint64", 64),
    # Packed: readers give them other shapes, and dtypes of their own.
    "F4": ("", 4), "F6_E2M3": ("", 6), "F6_E3M2": ("", 6),
}  # fmt: skip


Stamp = tuple[int, int, int, int]
"""Device, number, size and time of the last change of a file: another one is another file, or was written to."""


class _HeaderError(ValueError):
    """A header that can't be what its writer meant."""


@dataclass
class Source:
    """What the files of a checkpoint say that they hold.

    Attributes:
        folder: its last path component, for messages.
        files: file name -> names of its tensors, in the order of the file.
        headers: tensor name -> dtype and shape; of a name in two files the last.
        places: tensor name -> the byte of its file at which its elements begin.
        sizes: tensor name -> the bytes that its elements take there.
        stamps: file name -> which file it was when its header was read (`stamp_of`).
        problems: errors, not raised, in the order in which they were found.
    """

    folder: str
    files: dict[str, list[str]] = field(default_factory=dict)
    headers: dict[str, Header] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    stamps: dict[str, Stamp] = field(default_factory=dict)
    problems: list[errors.SourceError] = field(default_factory=list)

    def require(self) -> None:
        """Raise the first problem.

        Raises:
            TruncatedSourceError, SourceIndexError, RepeatedSourceError, SourceError.
        """
        if self.problems:
            raise self.problems[0]


def read(folder: str | os.PathLike[str], pattern: str = PATTERN, index: str = INDEX) -> Source:
    """Read the headers of a checkpoint: a folder, one safetensors file, or an index and the files beside it.

    Args:
        folder: a local folder, or a file: an index if its name ends with `.json`.
        pattern: which files in a folder are read.
        index: name of a folder's index. Where there is one, only the files that it names are read, as loaders do.

    Returns:
        what was found and what is wrong with it. A folder without matching files is empty and has no problem.

    Raises:
        OSError: there is no such file or folder, or it can't be listed.
    """
    root = Path(folder)
    named = root.suffix == ".json" and root.is_file()
    if named:
        root, index = root.parent, root.name
    elif root.is_file():  # a pipe is none, and would block
        out = Source(root.absolute().parent.name)
        _file(root, out)
        return out
    out = Source(root.name)
    # Links are followed, for a hub's cache is made of them; what is no file (a pipe) would block the reader.
    names = sorted(e.name for e in os.scandir(root) if Path(e.name).match(pattern) and e.is_file())
    if len(names) > MAX_FILES:
        out.problems.append(errors.SourceError(f"{len(names)} files in {out.folder!r}"))
        return out
    listed = _index(root / index, out) if names or named else None
    if named and listed is None:
        return out
    if listed is not None:
        absent = sorted(set(listed.values()) - set(names))
        if absent:
            _say(
                out,
                errors.SourceIndexError,
                f"the index names {len(absent)} files that are not there",
                absent,
            )
        wanted = set(listed.values())
        names = [name for name in names if name in wanted]
    for name in names:
        _file(root / name, out)
    _repeated(out)
    if listed is not None and not out.problems:
        _compare(listed, out)
    return out


def merged(sources: Iterable[tuple[str, Source]]) -> Source:
    """Several sources of one load, each with the prefix that its names get."""
    out = Source("")
    for prefix, source in sources:
        out.folder = out.folder or source.folder
        out.problems += source.problems
        out.headers.update({prefix + name: header for name, header in source.headers.items()})
        out.files.update({f: [prefix + name for name in names] for f, names in source.files.items()})
    return out


def _say(out: Source, kind: type[errors.SourceError], message: str, tensors: Iterable[str] = ()) -> None:
    # File and tensor names are hostile text: the message escapes them.
    out.problems.append(kind(f"{out.folder!r}: {message}", tensors=tensors))


def _file(path: Path, out: Source) -> None:
    try:
        header, stamp, begin = _header(path)
        tensors = list(_tensors(header, stamp[2] - begin))
    except _HeaderError as error:
        _say(out, errors.TruncatedSourceError, f"{path.name!r}: {error}")
        return
    except OSError as error:
        _say(out, errors.SourceError, f"{path.name!r} can't be read: {error.strerror}")
        return
    out.files[path.name] = [name for name, _ in tensors]
    out.headers.update(tensors)
    for name, _ in tensors:
        start, end = header[name]["data_offsets"]
        out.places[name], out.sizes[name] = begin + start, end - start
    out.stamps[path.name] = stamp


def header_of(path: str | os.PathLike[str]) -> dict[str, Header]:
    """The tensors of one file.

    Raises:
        TruncatedSourceError: it is shorter than its header says, or has none. OSError: it can't be opened.
    """
    try:
        header, stamp, begin = _header(Path(path))
        return dict(_tensors(header, stamp[2] - begin))
    except _HeaderError as error:
        raise errors.TruncatedSourceError(f"{Path(path).name!r}: {error}") from None


def stamp_of(descriptor: int) -> Stamp:
    """Which file an open one is."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def changed(folder: str | os.PathLike[str], source: Source) -> errors.ChangedSourceError | None:
    """Whether files were written or exchanged since their headers were read, as an error that is not raised.

    By size and time alone: file systems over a network may give a file another number each time that it is opened. A
    file that was removed is read as it was by whoever has it open.
    """
    gone = []
    for name, (_, _, size, time) in source.stamps.items():
        try:
            found = os.stat(Path(folder) / name)  # noqa: PTH116 - the same, twice as fast
        except OSError:
            continue
        if (found.st_size, found.st_mtime_ns) != (size, time):
            gone.append(name)
    if not gone:
        return None
    names = [name for file in gone for name in source.files.get(file, ())]
    return errors.ChangedSourceError(
        f"{source.folder!r}: {len(gone)} files changed while they were read, first {gone[0]!r}", tensors=names
    )


def _header(path: Path) -> tuple[Mapping[str, Any], Stamp, int]:
    """The parsed header, which file it is of, and the byte behind it."""
    with path.open("rb") as file:
        stamp = stamp_of(file.fileno())
        size = stamp[2]
        start = file.read(8)
        if len(start) < 8:
            raise _HeaderError(f"{size} bytes are no safetensors file")
        length = int.from_bytes(start, "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise _HeaderError(f"a header of {length} bytes in a file of {size}")
        raw = file.read(length)
    if len(raw) < length:
        raise _HeaderError(f"a header of {length} bytes, of which {len(raw)} are there")
    header = _json(raw, "header")
    if not isinstance(header, dict):
        raise _HeaderError("its header is no JSON object")
    return header, stamp, 8 + length


def _json(raw: bytes, what: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise _HeaderError(f"its {what} has a key twice")
        return found

    try:
        return json.loads(raw, object_pairs_hook=pairs)
    except _HeaderError:
        raise
    except RecursionError:
        raise _HeaderError(f"its {what} is nested too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise _HeaderError(f"its {what} is no JSON ({type(error).__name__})") from None


def _tensors(header: Mapping[str, Any], behind: int) -> Iterator[tuple[str, Header]]:
    """Each tensor of a header.

    Raises:
        _HeaderError: a record is malformed, or offsets, shapes and the file's size don't agree.
    """
    spans: list[tuple[int, int]] = []
    for name, record in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(record, dict):
            raise _HeaderError("a tensor's record is no object")
        shape, span = _naturals(record.get("shape")), _naturals(record.get("data_offsets"))
        if len(shape) > MAX_DIMENSIONS or len(span) != 2:
            raise _HeaderError("a shape or an offset has too many numbers")
        code = record.get("dtype")
        dtype, bits = _DTYPES.get(code, (str(code).lower(), 0)) if isinstance(code, str) else ("", 0)
        start, end = span
        if bits and (end - start) * 8 != math.prod(shape) * bits:
            raise _HeaderError(f"a tensor of {code} and shape {shape} in {end - start} bytes")
        spans.append((start, end))
        yield name, Header(dtype, tuple(shape) if bits >= 8 else None)
    reach = 0
    for start, end in sorted(spans):
        if start != reach or end < start:
            raise _HeaderError(f"a gap or an overlap of tensors at byte {min(start, reach)}")
        reach = end
    if reach != behind:
        word = "are missing" if reach > behind else "are too many"
        raise _HeaderError(f"its tensors take {reach} bytes, it has {behind}: {abs(reach - behind)} {word}")


def _naturals(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 1 << 63 for item in value):
        raise _HeaderError("a shape or an offset is no list of natural numbers")
    return value


def _index(path: Path, out: Source) -> dict[str, str] | None:
    """The index's tensor name -> file name, or None where there is no index or it can't be used."""
    if not path.is_file():
        return None
    try:
        return _weight_map(path)
    except _HeaderError as error:
        _say(out, errors.SourceIndexError, f"{path.name!r}: {error}")
    except OSError as error:
        _say(out, errors.SourceError, f"{path.name!r} can't be read: {error.strerror}")
    return None


def _weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise _HeaderError(f"it has {path.stat().st_size} bytes")
    content = _json(path.read_bytes(), "index")
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise _HeaderError("it has no weight_map of names to files")
    return found


def _repeated(out: Source) -> None:
    seen: dict[str, str] = {}
    twice: list[str] = []
    where = ""
    for file, names in out.files.items():
        for name in names:
            first = seen.setdefault(name, file)
            if first != file:
                twice.append(name)
                where = where or f"first in {first!r} and {file!r}"
    if twice:
        _say(out, errors.RepeatedSourceError, f"{len(twice)} tensors are in two files, {where}", twice)


def _compare(listed: Mapping[str, str], out: Source) -> None:
    there = {name: file for file, names in out.files.items() for name in names}
    absent = [name for name in listed if name not in there]
    if absent:
        _say(out, errors.SourceIndexError, f"{len(absent)} tensors of the index are in no file", absent)
    moved = [name for name, file in listed.items() if name in there and there[name] != file]
    if moved:
        first = moved[0]
        message = (
            f"{len(moved)} tensors are in another file than the index says, first in {there[first]!r} and not"
            f" {listed[first]!r}"
        )
        _say(out, errors.SourceIndexError, message, moved)
    unlisted = [name for name in there if name not in listed]
    if unlisted:
        _say(out, errors.SourceIndexError, f"{len(unlisted)} tensors are not in the index", unlisted)
