# SPDX-License-Identifier: Apache-2.0
"""``weightlife manifest``: look at what a complete load is, compare two, and hold a checkpoint against one, offline.

Needs neither torch nor a GPU nor the model: manifests are JSON, and of checkpoints only headers are read.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from weightlife import source_checks
from weightlife._manifest import Manifest
from weightlife._manifest_rows import STRATEGIES
from weightlife.cli.output import BAD, GOOD, doing, emit_json, stderr, stdout, text
from weightlife.errors import ConfigError, WeightlifeError, clean
from weightlife.report import format_bytes
from weightlife.runs import MANIFESTS

__all__ = ["app", "read_manifests"]

app = typer.Typer(
    help="What a complete load of a model is: show, compare, check a checkpoint.", no_args_is_help=True
)

SHOWN = 12
"""Names of a list that the text shows; ``--json`` has all."""
MAX_FILES = 1000
_BITS = re.compile(r"[a-z]+(\d{1,3})(_|$)")

Where = Annotated[
    Path, typer.Argument(metavar="FILE|RUN", help="A manifest, or a directory that runs_dir named.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON with a schema_version instead of text.")]
Rank = Annotated[int, typer.Option(min=0, help="The rank, where a run holds several.")]


class Partial(str, Enum):
    """What may be left out."""

    forbid = "forbid"
    by_layer = "by_layer"
    allow = "allow"


class Unexpected(str, Enum):
    """What becomes of names that a complete load does not have."""

    refuse = "refuse"
    ignore = "ignore"


def read_manifests(path: Path) -> list[tuple[Path, Manifest]]:
    """The manifest of a file, or the last one of every model and rank of a run.

    Raises:
        ConfigError: it can't be read, or a run has none.
    """
    try:
        if not path.is_dir():
            return [(path, Manifest.load(path))]
        # Names begin with the time at which the process started.
        files = sorted(
            p for p in path.iterdir() if p.name.endswith(f".{MANIFESTS}") and not p.name.startswith(".")
        )
        found: dict[tuple[str, int], tuple[Path, Manifest]] = {}
        for file in files[-MAX_FILES:]:
            made = Manifest.load(file)
            found[made.model, made.rank] = (file, made)
    except OSError as error:
        raise ConfigError(
            f"{clean(path, 500)}: {error.strerror}",
            hint="name a file that Manifest.save wrote, or a directory",
        ) from None
    if not found:
        raise ConfigError(
            f"{clean(path, 500)} holds no manifest",
            hint="set runs_dir before the engine starts, or keep one: weightlife.manifest(llm).save(path)",
        )  # fmt: skip
    return sorted(found.values(), key=lambda pair: (pair[1].model, pair[1].rank))


def _one(path: Path, rank: int) -> Manifest:
    found = [made for _, made in read_manifests(path)]
    if len(found) == 1:
        return found[0]
    mine = [made for made in found if made.rank == rank]
    if len(mine) != 1:
        there = ", ".join(f"{clean(made.model)} rank {made.rank}" for made in found[:SHOWN])
        raise ConfigError(
            f"{clean(path, 500)} holds {len(found)} manifests: {there}",
            hint="name the file, or choose with --rank",
        )
    return mine[0]


def _bytes(shape: Iterable[int], dtype: str) -> int:
    """Of a tensor; what has no width in its name (bool) takes a byte. A manifest may claim any shape."""
    width = _BITS.match(dtype)
    return min(math.prod(shape) * int(width[1] if width else 8) // 8, 1 << 62)


# -- show ------------------------------------------------------------------------------------------------------------


@app.command()
def show(
    path: Where,
    names: Annotated[
        str,
        typer.Option("--names", metavar="PATTERN", help="List tensors whose name matches, as in *.norm.*"),
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Show what a complete load brings, writes and leaves alone.

    Exit code: 0 shown; 1 one is provisional, since no real load was seen; 2 it can't be read.
    """
    with doing("reading"):
        found = read_manifests(path)
    code = BAD if any(made.provisional for _, made in found) else GOOD
    if as_json:
        emit_json({"schema_version": 1, "manifests": [made.to_dict() for _, made in found]})
        raise typer.Exit(code)
    for position, (file, made) in enumerate(found):
        if position:
            stdout().print()
        _print(file, made, names)
    raise typer.Exit(code)


def _print(file: Path, made: Manifest, names: str) -> None:
    out = stdout()
    out.print(text(f"{made.model}, rank {made.rank} of {made.world_size}", "bold"))
    taken = [entry for entry in made.tensors.values() if entry.writes]
    sizes = sum(_bytes(entry.shape, entry.dtype) for entry in made.tensors.values())
    groups = made.atomic_groups()
    strategies = Counter(layer.strategy for layer in made.layers)
    dtypes = Counter(entry.dtype for entry in made.tensors.values())
    rows = {
        "file": file.name,
        "known from": "headers, or nothing: no real load was seen" if made.provisional else "a complete load",
        "tensors": f"{len(made.tensors)}, of which {len(taken)} are taken; {format_bytes(sizes)}",
        "dtypes": ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common()),
        "layers": ", ".join(f"{strategies[s]} {s}" for s in STRATEGIES if strategies[s]),
        "smallest updates": f"{len(groups)}, of 1 to {max(map(len, groups), default=1)} tensors",
        "versions": ", ".join(f"{name} {version}" for name, version in made.versions.items()),
    }
    for name, value in rows.items():
        if value:
            out.print(text(f"  {name:<17}", limit=40).append_text(text(value, limit=400)), soft_wrap=True)
    for layer in [layer for layer in made.layers if layer.strategy == "refuse"][:SHOWN]:
        out.print(text(f"  refused          {layer.path}: {layer.reason}", "red", 400), soft_wrap=True)
    for item in made.left_out[:SHOWN]:
        part = f" ({item.elements} of {item.of} elements)" if item.what == "tensor" else ""
        out.print(text(f"  not loaded       {item.name}{part}: {item.why}", limit=400), soft_wrap=True)
    if len(made.left_out) > SHOWN:
        out.print(text(f"  not loaded       {len(made.left_out) - SHOWN} more; --json has all"))
    if names:
        _print_tensors(made, names)


def _print_tensors(made: Manifest, pattern: str) -> None:
    table = Table("tensor", "dtype", "shape", "goes to", box=None, padding=(0, 2, 0, 0))
    for name, entry in made.tensors.items():
        if fnmatch.fnmatchcase(name, pattern):
            into = dict.fromkeys(
                made.storages[w.storage].tensors[0] for w in entry.writes if _held(made, w.storage)
            )
            where = ", ".join(into) if entry.writes else "nothing takes it"
            table.add_row(
                text(name, limit=200), text(entry.dtype), text(str(list(entry.shape))), text(where, limit=200)
            )
    stdout().print(table)


def _held(made: Manifest, number: int) -> bool:
    return bool(made.storages[number].tensors)


# -- diff ------------------------------------------------------------------------------------------------------------


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A manifest or a run, as what was before.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another one, as what is now.")],
    rank: Rank = 0,
    as_json: JsonFlag = False,
) -> None:
    """Show how two manifests differ: names, shapes, dtypes, where tensors go, and how layers are reloaded.

    Exit code: 0 no difference; 1 they differ; 2 one can't be read.
    """
    with doing("reading"):
        one, other = _one(before, rank), _one(after, rank)
    found = one.diff(other)
    code = BAD if found else GOOD
    if as_json:
        emit_json(
            {
                "schema_version": 1,
                "exit_code": code,
                "before": one.model,
                "after": other.model,
                **asdict(found),
            }
        )
        raise typer.Exit(code)
    out = stdout()
    if one.model != other.model:
        out.print(text(f"{one.model} before, {other.model} now", "yellow"))
    sections = {
        "only before": found.removed, "only after": found.added, "shape": found.shapes, "dtype": found.dtypes,
        "strategy": found.layers, "goes to other elements": found.moved,
    }  # fmt: skip
    for title, rows in sections.items():
        if not rows:
            continue
        out.print(text(f"{title}: {len(rows)}", "bold"))
        for row in rows[:SHOWN]:
            line = row if isinstance(row, str) else f"{row[0]}: {row[1]}, now {row[2]}"
            out.print(text(f"  {line}", limit=400), soft_wrap=True)
        if len(rows) > SHOWN:
            out.print(text(f"  {len(rows) - SHOWN} more; --json has all"))
    if not found:
        out.print(text("no difference", "green"))
    raise typer.Exit(code)


# -- check -----------------------------------------------------------------------------------------------------------


@app.command()
def check(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A folder of safetensors files, one such file, or an index."
        ),
    ],
    manifest: Annotated[
        Path,
        typer.Option("--manifest", metavar="FILE|RUN", help="The manifest of the model that is to take it."),
    ],
    partial: Annotated[
        Partial, typer.Option(metavar="POLICY", help="What may be left out: forbid, by_layer or allow.")
    ] = Partial.forbid,
    unexpected: Annotated[
        Unexpected,
        typer.Option(metavar="POLICY", help="Names that a complete load has not: refuse or ignore."),
    ] = Unexpected.refuse,
    rank: Rank = 0,
    as_json: JsonFlag = False,
) -> None:
    """Tell from headers alone, without the model, whether a checkpoint would load into it.

    Exit code: 0 nothing speaks against it; 1 it would be refused; 2 checkpoint or manifest can't be read.
    """
    with doing("reading headers"):
        known = _one(manifest, rank)
        if not known.tensors:
            raise ConfigError(
                "the manifest has no names: no load was seen, and no headers could be had",
                hint="take it after the first real load, or with weightlife.manifest(llm, checkpoint=...)",
            )  # fmt: skip
        source = _source(checkpoint)
    errors: list[WeightlifeError] = list(source.problems)
    errors += known.check(source.headers, partial=partial.value, unexpected=unexpected.value)
    code = BAD if errors else GOOD
    strange = sum(name not in known.tensors for name in source.headers)
    if as_json:
        emit_json({
            "schema_version": 1, "exit_code": code, "model": known.model, "provisional": known.provisional,
            "checkpoint": source.folder, "files": len(source.files), "tensors": len(source.headers), "unknown": strange,
            "problems": [_problem(error) for error in errors],
        })  # fmt: skip
        raise typer.Exit(code)
    out = stdout()
    counted = f"{len(source.headers)} tensors in {len(source.files)} files, {len(known.tensors)} known of {known.model}"
    out.print(text(counted, limit=300))
    if known.provisional:
        stderr().print(text("the manifest is provisional: no real load was seen", "yellow"))
    for error in errors:
        out.print(text(f"{error.code} {error.message}", "red", 1000), soft_wrap=True)
        for name in error.tensors[:SHOWN]:
            out.print(text(f"  {name}", limit=300), soft_wrap=True)
        if len(error.tensors) > SHOWN:
            out.print(text(f"  {len(error.tensors) - SHOWN} more; --json has all"))
        out.print(text(f"  next: {error.hint}", limit=500), soft_wrap=True)
    if strange and not errors:
        out.print(
            text(f"{strange} names are not known: what they hold is judged when they are loaded", "yellow")
        )
    out.print(
        text("It would be refused." if errors else "Nothing speaks against it.", "red" if errors else "green")
    )
    raise typer.Exit(code)


def _problem(error: WeightlifeError) -> dict[str, Any]:
    return {
        "code": error.code, "error": type(error).__name__, "message": clean(error.message, 4000),
        "tensors": [clean(name, 4096) for name in error.tensors], "next": error.hint,
    }  # fmt: skip


def _source(path: Path) -> source_checks.Source:
    """The headers of a folder or a file.

    Raises:
        ConfigError: there are none.
    """
    try:
        found = source_checks.read(path)
    except OSError as error:
        raise ConfigError(
            f"{clean(path, 500)}: {error.strerror}", hint="name a folder of safetensors files"
        ) from None
    if not found.files and not found.problems:
        raise ConfigError(
            f"{clean(path, 500)} holds no safetensors files", hint="other formats have no headers to go by"
        )
    return found
