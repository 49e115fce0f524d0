# SPDX-License-Identifier: Apache-2.0
"""Verification of layers whose tensors come in pieces: they stand in their storage by pages of their file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import weightlife
from tests.toyhost import Layer, Served, faults, one, parameter, unchanged
from weightlife import errors, source_checks
from weightlife._engine import lifecycle, pages
from weightlife._engine.pages import Assembled

ROWS, COLUMNS, EXPERTS = 32, 512, 3  # 64 KiB a piece: the least that is mapped
KINDS = ("fresh", "in place", "none")


class Wide(Layer):
    """Experts of two pieces each; `hook` is what becomes of them."""

    hook = "fresh"
    how = "right"
    met: ClassVar[list[int]] = []  # bytes past a multiple of 64 at which the memory began

    def __init__(self) -> None:
        super().__init__()
        self.w13 = parameter(EXPERTS, 2 * ROWS, COLUMNS, loader=self.copy)

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {f"{e}-{w}": (ROWS, COLUMNS) for e in range(EXPERTS) for w in (1, 3)}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        expert, shard = (int(part) for part in name.split("-"))
        faults.tick("write")
        if self.how == "astray" and expert == EXPERTS - 1:
            expert = 0
        value = tensor * 2 if self.how == "twice" else tensor
        self.w13.data[expert].narrow(0, (shard - 1) // 2 * ROWS, ROWS).copy_(value)

    def process(self) -> None:
        faults.tick("hook")
        if self.hook == "fresh":
            self.w13 = nn.Parameter(self.w13.data.transpose(1, 2).contiguous(), requires_grad=False)
        elif self.hook == "in place":
            self.w13.data.mul_(2)
        elif self.hook == "resize":
            old, self.w13 = self.w13.data, nn.Parameter(self.w13.data * 2, requires_grad=False)
            old.untyped_storage().resize_(0)
        elif self.hook == "align":
            self.met.append(self.w13.data_ptr() % 64)
            if self.met[-1]:
                raise RuntimeError("unaligned memory")  # as kernels do
            self.w13 = nn.Parameter(self.w13.data * 2, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w13.sum() + x


def _served() -> Served:
    def build() -> nn.Module:
        model = one(Wide)()
        model.__class__ = type("One", (type(model),), {"process": None})
        return model

    return Served(build)


def _written(weights: dict[str, torch.Tensor], folder: Path, note: str = "") -> Path:
    """Two files, whose headers are not of one length: the last expert lies otherwise within its pages."""
    folder.mkdir()
    names = sorted(weights, key=lambda name: ("special" not in name, name))
    save_file({name: weights[name] for name in names[:4]}, folder / "a.safetensors", {"note": note})
    save_file({name: weights[name] for name in names[4:]}, folder / "b.safetensors", {"note": "x" * 1000})
    return folder


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    faults.clear()
    Served.close_all()
    assert lifecycle.OpenSessions.count == 0


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each piece that was put somewhere, whether pages of a file stand for it."""
    told: list[bool] = []
    mapped = Assembled._mapped

    def seen(first: int, last: int, opened: int, offset: int) -> bool:
        told.append(mapped(first, last, opened, offset))
        return told[-1]

    monkeypatch.setattr(Assembled, "_mapped", staticmethod(seen))
    return told


@pytest.mark.parametrize("hook", KINDS)
def test_pieces_are_pages_of_their_file_and_no_file_is_written(
    hook: str, tmp_path: Path, put: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wide, "hook", hook)
    served = _served()
    a, b = _written(served.weights, tmp_path / "a"), _written(served.checkpoint(5), tmp_path / "b")
    before = [path.read_bytes() for path in sorted(a.iterdir())]
    for _ in range(2):
        report = weightlife.verify(served.model, a)
        assert (report.ok, report.differences) == (True, [])
    if sys.platform == "linux":
        assert put == [True] * 4 + [False] * 2 + [True] * 4 + [False] * 2
    assert not weightlife.verify(served.model, b).ok
    served.update(served.checkpoint(5))
    assert weightlife.verify(served.model, b).ok
    assert [path.read_bytes() for path in sorted(a.iterdir())] == before
    weight = next(p for p in served.model.parameters() if p.ndim == 3)
    bits = weight.data.view(torch.int32)
    for place in (0, bits.numel() // 2, bits.numel() - 1):
        bits.view(-1)[place] ^= 1
        (difference,) = weightlife.verify(served.model, b).differences
        assert (difference.what, difference.elements) == ("value", 1)
        bits.view(-1)[place] ^= 1


@pytest.mark.parametrize("files", [True, False])
def test_a_hook_that_frees_what_it_has_read(
    files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold load gives it PyTorch's own memory, so what stands by pages of a file, or in one range, may not fail it."""
    monkeypatch.setattr(Wide, "hook", "resize")
    served = _served()
    wrong = {name: value + 1 if "2-3" in name else value for name, value in served.weights.items()}
    for weights, ok in ((served.weights, True), (wrong, False)):
        source = _written(weights, tmp_path / str(ok)) if files else list(weights.items())
        assert weightlife.verify(served.model, source).ok is ok


def test_a_hook_that_needs_aligned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where a file's header leaves its tensors between multiples of 64 bytes."""
    monkeypatch.setattr(Wide, "hook", "align")
    served = _served()
    Wide.met.clear()
    for length in range(0, 64, 8):  # headers end at multiples of eight
        folder = _written(served.weights, tmp_path / str(length), "x" * length)
        assert weightlife.verify(served.model, folder).ok
    assert any(Wide.met)
    assert Wide.met.count(0) >= 8


def test_a_hook_that_fails_in_any_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = _served()
    folder = _written(served.weights, tmp_path / "a")
    before = {name: value.clone() for name, value in served.model.state_dict().items()}

    def process(self: Wide) -> None:
        self.w13.data.zero_()
        raise ValueError("no such shape")

    monkeypatch.setattr(Wide, "process", process)
    with pytest.raises(ValueError, match="no such shape"):
        weightlife.verify(served.model, folder)
    assert all(torch.equal(value, before[name]) for name, value in served.model.state_dict().items())
    monkeypatch.undo()
    assert weightlife.verify(served.model, folder).ok


def test_a_loader_that_goes_astray_among_the_pieces(
    tmp_path: Path, put: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = _served()
    folder = _written(served.weights, tmp_path / "a")
    monkeypatch.setattr(Wide, "how", "astray")
    before = {name: value.clone() for name, value in served.model.state_dict().items()}
    with pytest.raises(errors.LoaderChangedError):
        weightlife.verify(served.model, folder)
    assert all(torch.equal(value, before[name]) for name, value in served.model.state_dict().items())
    assert served.life.poisoned
    assert put or sys.platform != "linux"


def test_a_loader_that_does_not_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wide, "how", "twice")
    served = _served()
    folder = _written(served.weights, tmp_path / "a")
    for _ in range(2):
        assert weightlife.verify(served.model, folder).ok
    assert not weightlife.verify(served.model, _written(served.checkpoint(5), tmp_path / "b")).ok


@pytest.mark.parametrize("where", [1, 2, 3])
def test_a_file_that_was_exchanged(
    where: int, tmp_path: Path, put: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another size or time it is refused; of another number alone (file systems number anew) its reader reads it."""
    served = _served()
    folder = _written(served.weights, tmp_path / "a")
    read = source_checks.read

    def older(*args: Any) -> Any:
        found = read(*args)
        for name, stamp in found.stamps.items():
            found.stamps[name] = tuple(part - (place == where) for place, part in enumerate(stamp))
        return found

    monkeypatch.setattr(source_checks, "read", older)
    if where == 1:
        assert weightlife.verify(served.model, folder).ok
    else:
        with unchanged(served.model), pytest.raises(errors.SourceError, match="exchanged or written to"):
            weightlife.verify(served.model, folder)
    assert put == []


def test_what_is_read_is_what_the_file_has(tmp_path: Path) -> None:
    """Every place of a piece in its file and in its storage, also where no page can be mapped."""
    content = torch.randint(0, 256, (40 * pages.PAGE,), dtype=torch.uint8)
    path = tmp_path / "file"
    path.write_bytes(content.numpy().tobytes())
    files = pages.Files()
    with path.open("rb") as opened:
        stamp = source_checks.stamp_of(opened.fileno())
    for size in (8, pages.PAGE, 16 * pages.PAGE, 16 * pages.PAGE + 24):
        for offset in (0, 8, pages.PAGE - 8, pages.PAGE + 520):
            for begin in (0, 8, 520):
                for at in (0, 520, pages.PAGE):
                    place = pages.Place(str(path), stamp, offset, source_checks.Header("uint8", (size,)))
                    whole = Assembled(at + size + 64, begin, files)
                    whole.put(at, size, place)
                    made = torch.empty(0, dtype=torch.uint8).set_(whole.storage)  # type: ignore[call-overload]
                    assert torch.equal(made[at : at + size], content[offset : offset + size])
                    assert not made[:at].any() and not made[at + size :].any()
    assert path.read_bytes() == content.numpy().tobytes()
    with pytest.raises(OSError, match="ends early"):
        Assembled(pages.PAGE, 0, files).put(0, 64, place._replace(offset=content.numel() - 8))
    files.close()
