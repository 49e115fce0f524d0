# SPDX-License-Identifier: Apache-2.0
"""`weightlife.verify`: does a model hold what a cold load of a source would hold?"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightlife import errors
from weightlife._models import find_here
from weightlife._safetensors import Checkpoint, read_safetensors
from weightlife._verification import RankVerification, VerifyReport

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle

__all__ = ["verify"]


def verify(
    target: Any,
    source: Any = None,
    *,
    layers: float = 1.0,
    seed: int | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    loader: Callable[[Any, Any], Any] | None = None,
) -> VerifyReport:
    """Rebuild what a cold load of `source` would hold, and compare it bit by bit with what serves.

    Group after group of layers is loaded and processed beside the ones that serve, by the model's own loader and hooks,
    compared, and dropped: the most that it needs is the largest group (tied embeddings and head, as a rule). Nothing of
    the serving model is changed, also where this raises.

    Args:
        target: a model that was loaded under weightlife, or an `LLM`, engine, worker or runner; with workers in other
            processes each compares its own shard.
        source: a folder of safetensors files (for a plain module also one file, or an index); for a vLLM model None is
            the checkpoint that it was loaded from. For a model in this process also what `read_safetensors` returned,
            an iterable of (name, tensor), or a callable that gives one: the last two have no random access, so all of
            it passes by and what comes waits until its group is whole.
        layers: the share of groups to compare, above 0 and at most 1; at least one group.
        seed: chooses them; by default at random. The report has it.
        progress: None: a bar on stderr if that is a terminal; False: nothing; for a model in this process also a
            function of the bytes done and of all.
        loader: for a plain module whose loader was not wrapped and that has no `load_weights`:
            `loader(model, weights)`.

    Returns:
        what differs, by path, and what could not be compared, one record a rank.

    Raises:
        NotInstalledError: the model was built without weightlife. SessionStateError: an update is open, or no complete
        load was seen. ConfigError: an argument. UnexpectedTensorError, MissingTensorError, SourceError: the source is
        not what a complete load brings. ChangedSourceError: its files were written meanwhile. Else what the loader, a hook or the source raises.
    """
    if isinstance(layers, bool) or not 0 < layers <= 1:
        raise errors.ConfigError(f"layers is a share above 0 and at most 1, not {layers!r}")
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else int(seed)
    if isinstance(source, (str, os.PathLike)):
        source = str(Path(source).absolute())
    model = find_here(target)
    if model is not None:
        return VerifyReport([local_verify(model, source, float(layers), seed, progress, loader)])
    from weightlife.hosts.vllm import remote

    if not isinstance(source, (str, type(None))) or callable(progress) or loader is not None:
        raise errors.ConfigError(
            "the engine runs in other processes: the source is a folder, and progress no function",
            hint="give the path of a checkpoint that the workers can read",
        )
    payload = {"source": source, "share": float(layers), "seed": seed, "progress": progress}
    return VerifyReport([RankVerification.from_dict(item) for item in remote.ask(target, "verify", payload)])


def local_verify(
    model: Any, source: Any, share: float, seed: int, progress: Any = None, loader: Any = None
) -> RankVerification:
    """`verify` of a model in this process."""
    from weightlife._engine import lifecycle, proof

    life = lifecycle.of(model)
    if life is None:
        raise errors.NotInstalledError("this model was not built under weightlife")
    proof.quiet(life)
    load = _loader(life, model, loader)
    what, files = _source(life, source)
    bar = _Bar(life, progress)
    try:
        found = proof.prove(life, files, load, what=what, share=share, seed=seed, progress=bar)
        if isinstance(files, Checkpoint):
            files.check()
        return found
    finally:
        bar.close()


def _loader(life: Lifecycle, model: Any, loader: Any) -> Callable[[Any], Any]:
    if loader is not None:
        return lambda stream: loader(model, stream)
    from weightlife.hosts.vllm import seams

    own = getattr(model, "load_weights", None)
    # A cold load of the host's model is the host's loader's, whoever else brought weights since.
    found = seams.loader_of(model) or life.loader or (own if callable(own) else None)
    if found is None:
        raise errors.ConfigError(
            "nothing is known that loads this model",
            model=life.name,
            hint="give verify(..., loader=function)",
        )
    return found


def _source(life: Lifecycle, source: Any) -> tuple[str, Any]:
    """The source in words, and something to read from."""
    from weightlife.hosts.vllm import sources
    from weightlife.hosts.vllm.adapter import VllmHost

    if isinstance(source, Checkpoint):
        return source.path, source.fresh()
    if source is not None and not isinstance(source, (str, os.PathLike)):
        return "an iterable", source
    hosted = isinstance(life.host, VllmHost)
    if not hosted:
        if source is None:
            raise errors.ConfigError(
                "a plain module has no checkpoint of its own: give a source", model=life.name
            )
        try:
            checkpoint = read_safetensors(source)
        except errors.SourceError as error:
            error.model = life.name
            raise
        return checkpoint.path, checkpoint
    where = source if source is not None else life.host.model_config.model  # type: ignore[attr-defined]
    try:
        parts = sources.parts(life.host, where, "auto")
    except OSError as error:
        raise errors.SourceError(
            f"{Path(where).name!r} can't be read: {error.strerror}", model=life.name
        ) from error
    if parts is None or not any(found.headers for _, _, found in parts):
        if parts:
            for _, _, found in parts:
                found.require()
        raise errors.SourceError(
            f"{str(where)!r} is no local folder of safetensors files that this model's loader reads",
            model=life.name, hint="give the folder of a checkpoint, or an iterable of names and tensors",
        )  # fmt: skip
    return str(where), Checkpoint.of_parts(parts, str(where))


class _Bar:
    """One progress line on stderr, if that is a terminal and this is the first rank; or the caller's own function."""

    def __init__(self, life: Lifecycle, wanted: Any) -> None:
        self._call = wanted if callable(wanted) else None
        tty = sys.stderr is not None and sys.stderr.isatty()
        self._on = self._call is None and wanted is not False and tty and life.host.rank()[0] == 0
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        if self._call is not None:
            self._call(done, total)
        elif self._on and total:
            percent = min(100, done * 100 // total)
            if percent != self._shown:
                self._shown = percent
                sys.stderr.write(f"\rverify {percent:3d} %")
                sys.stderr.flush()

    def close(self) -> None:
        """Leave the line empty."""
        if self._shown >= 0:
            sys.stderr.write("\r" + " " * 14 + "\r")
            sys.stderr.flush()
