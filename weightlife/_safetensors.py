# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of safetensors files as a source of weights: `weightlife.read_safetensors`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightlife import errors, source_checks
from weightlife._declared import Header
from weightlife.report import format_bytes

if TYPE_CHECKING:
    import torch

    from weightlife._engine.pages import Place

__all__ = ["Checkpoint", "read_safetensors"]

Instead = Callable[[str], "torch.Tensor | None"]


def read_safetensors(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    keep: Callable[[str], bool] | None = None,
    rename: Callable[[str], str] | None = None,
) -> Checkpoint:
    """A checkpoint as a stream of (name, tensor), checked before its first byte is read.

    All headers are read now, and nothing else: a file that is cut off, an index that disagrees with its files, and a
    name in two files are refused here, before any model is touched. Give it to a loader, to `weightlife.load`, to
    `weightlife.verify`, or to a session as its `source` or as what is `expected`.

    Args:
        path: a local folder, one safetensors file, or an index (`*.json`) and the files beside it that it names. Of a
            folder with a `model.safetensors.index.json` the files that this names are read, else all of them.
        device: where tensors come out. On the CPU their memory is the file's, mapped privately: nothing is copied, and
            writing to one changes no file.
        keep: of a name in the files, whether its tensor is wanted. By default all are.
        rename: the model's name for a name in the files.

    Returns:
        an iterable, which may be gone through more than once. Files come in the order of their names, tensors in that
        of safetensors' own keys; a file is open while its tensors are read, and one tensor is read at a time.

    Raises:
        TruncatedSourceError, SourceIndexError, RepeatedSourceError: see there. SourceError: there is no such file or
        folder, it holds no safetensors files, or can't be read. ConfigError: an argument; `rename` gives one name twice.
        Going through it, ChangedSourceError: a file was exchanged or written to since. SourceError: it holds what this
        version of torch or safetensors can't read.
    """
    where = _device(device)
    root, text = Path(path), os.fspath(path)
    try:
        found = source_checks.read(root)
    except OSError as error:
        raise errors.SourceError(
            f"{text!r} can't be read: {error.strerror}",
            hint="give a local folder of safetensors files, or one such file; a model of a hub is fetched first",
        ) from error
    found.require()
    if not found.files:
        raise errors.SourceError(
            f"{text!r} holds no safetensors files",
            hint="other formats are not read: give an iterable of (name, tensor) of your own",
        )
    folder = root if root.is_dir() else root.parent
    taken = _names(found, keep, rename)
    files = [
        _File(folder / file, {taken[own]: own for own in held if own in taken}, found, where)
        for file, held in found.files.items()
    ]
    return Checkpoint([file for file in files if file.names], text)


def _device(device: Any) -> str:
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise errors.ConfigError(f"{device!r} is no device: {errors.safe_text(error)}") from error
    if found.type == "meta":
        raise errors.ConfigError("tensors on the meta device have no values to load")
    return str(found)


def _names(
    found: source_checks.Source, keep: Callable[[str], bool] | None, rename: Callable[[str], str] | None
) -> dict[str, str]:
    """Name in the files -> the model's, of what is wanted.

    Raises:
        ConfigError: two have one name in the model, or a name is none.
    """
    out: dict[str, str] = {}
    owner: dict[str, str] = {}
    for own in found.headers:
        if keep is not None and not keep(own):
            continue
        name = own if rename is None else rename(own)
        if not isinstance(name, str):
            raise errors.ConfigError(
                f"rename gives {type(name).__name__} for a name",
                tensors=[own],
                hint="leave names out by keep=",
            )
        first = owner.setdefault(name, own)
        if first != own:
            raise errors.ConfigError("rename gives two tensors one name", tensors=[first, own])
        out[own] = name
    return out


class _File:
    """One safetensors file, opened when a tensor of it is asked for.

    Args:
        path: where it is.
        names: the model's name of each tensor that is wanted -> its name in the file.
        found: what the headers said.
        device: where tensors come out.
    """

    def __init__(
        self, path: Path, names: Mapping[str, str], found: source_checks.Source, device: str = "cpu"
    ) -> None:
        self.path = path
        self.names = names
        self.found = found
        self.device = device
        self._opened: _Opened | None = None
        self._given: set[str] = set()

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, of a mapping of their own."""
        opened = self._open()
        for name in self._order(opened, self.names.keys()):
            yield name, opened.tensor(self.names[name])
        opened.check()  # the last one was taken as a view of the file, and copied since

    def read(self, names: set[str], instead: Instead) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of some tensors that are here, as `Checkpoint.read`."""
        mine = names & self.names.keys()
        if not mine:
            return
        if self._opened is None or mine & self._given:
            self._opened = self._open()
            self._given = set()
        opened = self._opened
        self._given |= mine
        for name in self._order(opened, mine):
            given = instead(name)
            yield name, opened.tensor(self.names[name]) if given is None else given

    def place(self, name: str) -> Place | None:
        """Where a tensor of this file is."""
        from weightlife._engine.pages import Place

        if self.device != "cpu":
            return None
        own, found = self.names[name], self.found
        return Place(str(self.path), found.stamps[self.path.name], found.places[own], found.headers[own])

    def check(self) -> None:
        """As `Checkpoint.check`."""
        if self._opened is not None:
            self._opened.check()

    def _open(self) -> _Opened:
        return _Opened(self.path, self.found, self.device)

    def _order(self, opened: _Opened, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: opened.places[self.names[name]])


class _Opened:
    """A file that is mapped: the one whose header was read, as it was then.

    Args:
        path: where it is.
        found: what the headers said.
        device: where tensors come out.

    Raises:
        SourceError: it is another one now, or can't be read.
    """

    def __init__(self, path: Path, found: source_checks.Source, device: str) -> None:
        from safetensors import safe_open

        self._name, self._found = path.name, found
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            self.check()
            # By its descriptor: a path may lead elsewhere at the next look.
            held = f"/proc/self/fd/{self._descriptor}"
            reader: Any = safe_open(held if Path(held).exists() else path, framework="pt", device=device)
            self.check()
        except errors.SourceError:
            raise
        except Exception as error:
            raise self._problem(error) from error
        self._reader = reader
        self.places = {name: place for place, name in enumerate(reader.keys())}

    def check(self) -> None:
        """Whether nobody has written to it.

        Raises:
            ChangedSourceError: somebody has.
        """
        # By size and time alone: some file systems in user space number a file anew each time that it is looked up.
        if source_checks.stamp_of(self._descriptor)[2:] != self._found.stamps[self._name][2:]:
            raise errors.ChangedSourceError(
                f"{self._found.folder!r}: {self._name!r} was exchanged or written to after its header was read"
            )

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, by its name in the file."""
        self.check()  # past the end of a file that was cut off meanwhile is a signal, not an exception
        try:
            found: torch.Tensor = self._reader.get_tensor(name)
        except Exception as error:
            raise self._problem(error, [name]) from error
        return found

    def _problem(self, error: Exception, tensors: Iterable[str] = ()) -> errors.SourceError:
        said = (isinstance(error, OSError) and error.strerror) or errors.safe_text(error)
        return errors.SourceError(
            f"{self._found.folder!r}: {self._name!r} can't be read: {said}", tensors=tensors,
            hint="look at what the reader says: a file that is gone, a dtype that torch lacks, a device, memory",
        )  # fmt: skip


class Checkpoint:
    """A stream of (name, tensor) out of safetensors files, of which single tensors can be read, too.

    Attributes:
        path: what it was read from, as it was given: what reports call the source.
        headers: name -> dtype and shape.
        nbytes: of all tensors.
    """

    def __init__(self, files: list[_File], path: str) -> None:
        self._files = files
        self.path = path
        self.headers: dict[str, Header] = {}
        self.nbytes = 0
        for file in files:
            self.headers.update({name: file.found.headers[own] for name, own in file.names.items()})
            self.nbytes += sum(file.found.sizes[own] for own in file.names.values())

    @classmethod
    def of_parts(cls, parts: Iterable[tuple[str, Path, source_checks.Source]], path: str) -> Checkpoint:
        """Several folders of one load: the prefix that names get, where it is, and its headers.

        Raises:
            SourceError: a file is truncated, an index disagrees, a name is in two files.
        """
        files = []
        for prefix, folder, found in parts:
            found.require()
            files += [
                _File(folder / file, {f"{prefix}{own}": own for own in held}, found)
                for file, held in found.files.items()
            ]
        return cls(files, path)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self._files:
            yield from file.stream()

    def __len__(self) -> int:
        return len(self.headers)

    def __repr__(self) -> str:
        size = format_bytes(self.nbytes)
        return f"<{errors.clean(self.path, 300)}: {len(self)} tensors, {size}, in {len(self._files)} files>"

    def fresh(self) -> Checkpoint:
        """The same with no file open, for somebody who keeps them open while he reads."""
        files = [_File(file.path, file.names, file.found, file.device) for file in self._files]
        return Checkpoint(files, self.path)

    def source(self) -> source_checks.Source:
        """Its headers as sessions check them. They have been held against the files already."""
        return source_checks.Source(Path(self.path).name, headers=dict(self.headers))

    def names(self) -> list[str]:
        """All names."""
        return [name for file in self._files for name in file.names]

    def check(self) -> None:
        """Whether nobody has written to a file that is open: a verdict about it would be about two checkpoints.

        Raises:
            ChangedSourceError: somebody has.
        """
        for file in self._files:
            file.check()

    def place(self, name: str) -> Place | None:
        """Where a tensor is; None where it is not asked for on the CPU."""
        return next((file.place(name) for file in self._files if name in file.names), None)

    def read(self, names: set[str], instead: Instead) -> Iterator[tuple[str, torch.Tensor]]:
        """Some tensors, or what there is instead of them.

        A tensor that is asked for again comes from another mapping, so that nobody gets what somebody wrote.
        """
        for file in self._files:
            yield from file.read(names, instead)
