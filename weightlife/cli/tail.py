# SPDX-License-Identifier: Apache-2.0
"""Follows the files of a run while they grow: whole lines only, new files as they appear, files that are turned over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from weightlife.errors import ConfigError
from weightlife.runs.reader import StoredSession, parse_record, run_files

__all__ = ["Follower"]

_CHUNK = 2**20
_HEAD = 512


@dataclass
class _Position:
    offset: int = 0
    number: int = 0
    rest: bytes = b""


@dataclass
class Follower:
    """Sessions of a directory as they come. ``poll()`` gives what is new; ``problems`` collects damaged lines."""

    path: Path
    problems: list[str] = field(default_factory=list)
    _positions: dict[bytes, _Position] = field(default_factory=dict)

    def poll(self) -> Iterator[StoredSession]:
        """What was added since the last call, file by file.

        Raises:
            ConfigError: a record of a schema that this version does not read.
        """
        try:
            files = run_files(self.path)
        except ConfigError:
            return  # the directory is made with the first session
        for file in files:
            try:
                with file.open("rb") as stream:
                    # By its beginning, which holds a time: a file that is turned over keeps its place under its new
                    # name. Numbers of inodes are used again at once.
                    head = stream.read(_HEAD)
                    if len(head) < _HEAD and b"\n" not in head:
                        continue
                    place = self._positions.setdefault(head.split(b"\n")[0], _Position())
                    stream.seek(place.offset)
                    while chunk := stream.read(_CHUNK):
                        place.offset += len(chunk)
                        *lines, place.rest = (place.rest + chunk).split(b"\n")
                        yield from self._sessions(file, place, lines)
            except OSError:
                continue  # turned over between two steps; the next poll finds it

    def _sessions(self, file: Path, place: _Position, lines: list[bytes]) -> Iterator[StoredSession]:
        for line in lines:
            place.number += 1
            if not line.strip():
                continue
            try:
                session = parse_record(line, f"{file.name}, line {place.number}")
            except ConfigError:
                raise
            except ValueError:
                self.problems.append(f"{file.name}, line {place.number}: not a record, and skipped")
                continue
            if session is not None:
                session.file = file.name
                yield session
