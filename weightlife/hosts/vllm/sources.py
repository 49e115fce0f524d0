# SPDX-License-Identifier: Apache-2.0
"""What vLLM's sources say beforehand: headers of checkpoint folders, and the update info of a weight transfer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weightlife import errors, source_checks
from weightlife._declared import Header
from weightlife._engine import announce
from weightlife._engine.session import WeightLoadSession
from weightlife.hosts.vllm.adapter import VllmHost

# Formats whose reader takes every tensor of a folder of safetensors files.
_FORMATS = frozenset({"auto", "hf", "safetensors", "mistral", "fastsafetensors", "instanttensor"})
_CONSOLIDATED = ("consolidated*.safetensors", "consolidated.safetensors.index.json")


def of(host: Any, path: Any, dummy: str = "") -> source_checks.Source | None:
    """Headers of everything that a reload by path would read, or None where that can't be told beforehand.

    Args:
        host: the model's host.
        path: the path that the caller gave; None: the one that is configured.
        dummy: the format that counts where the engine was started on dummy weights, whose loader reads no files.
    """
    found = parts(host, path, dummy)
    return None if found is None else merged(found)


def merged(found: list[tuple[str, Path, source_checks.Source]]) -> source_checks.Source:
    """What `parts` found, as one."""
    return source_checks.merged([(prefix, source) for prefix, _, source in found])


def changed(found: list[tuple[str, Path, source_checks.Source]] | None) -> errors.SourceError | None:
    """Whether files of `parts` are others than when their headers were read, as an error that is not raised."""
    told = (source_checks.changed(folder, source) for _, folder, source in found or ())
    return next((error for error in told if error is not None), None)


def parts(host: Any, path: Any, dummy: str = "") -> list[tuple[str, Path, source_checks.Source]] | None:
    """The folders that a reload by path would read: the prefix that names get, where they are, and their headers.

    Args:
        host: as for `of`.
        path: as for `of`.
        dummy: as for `of`.
    """
    if not isinstance(host, VllmHost):
        return None
    load_format = str(getattr(host.vllm_config.load_config, "load_format", ""))
    load_format = dummy if dummy and load_format == "dummy" else load_format
    if load_format not in _FORMATS or getattr(host.model, "allow_patterns_overrides", None) is not None:
        return None
    folder = path if path is not None else getattr(host.model_config, "model", None)
    out = []
    for prefix, below in [("", folder), *_more(host)]:
        source = _read(below, load_format)
        if below is None or source is None:
            return None
        out.append((prefix, Path(below), source))
    return out


def _more(host: VllmHost) -> Iterator[tuple[str, Path]]:
    for more in getattr(host.model, "secondary_weights", ()):
        yield more.prefix, Path(more.model_or_path) / (more.subfolder or "")


def _read(folder: Any, load_format: str) -> source_checks.Source | None:
    """The headers of one local folder; None for a hub's name, and for a folder without safetensors files."""
    if not isinstance(folder, (str, os.PathLike)) or not Path(folder).is_dir():
        return None
    pattern, index = source_checks.PATTERN, source_checks.INDEX
    if load_format in ("auto", "mistral"):
        found = source_checks.read(folder, *_CONSOLIDATED)
        if found.files or found.problems or load_format == "mistral":
            return found if found.files or found.problems else None
    found = source_checks.read(folder, pattern, index)
    return found if found.files or found.problems else None


def check_update(session: WeightLoadSession, info: Any, worker: Any) -> None:
    """Hold what a chunk of a weight transfer announces against a complete load, before it is received.

    Raises:
        CompletenessError: by policy.
    """
    policy = session.settings.announced
    if policy == "off":
        return
    if isinstance(info, list):  # one a rank
        parallel = worker.vllm_config.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + worker.rank
        info = info[place] if place < len(info) else None
    names = _get(info, "names")
    if not isinstance(names, (list, tuple)):
        return
    known = session.life.manifest.names
    twice = [n for n, times in Counter(names).items() if times > 1 and n in known and known[n].writes]
    if twice and not session.life.manifest.provisional:
        message = f"{len(twice)} names are announced more than once in one call"
        error = errors.SurplusTensorError(message, model=session.life.name, tensors=twice, session=session.id)
        session.problem(error, announce.weaker(policy, session.settings.surplus))
    announce.check(session, dict(_announced(names, info)), False, policy)


def _announced(names: Any, info: Any) -> Iterator[tuple[str, Header]]:
    dtypes, shapes = _get(info, "dtype_names"), _get(info, "shapes")
    told = all(isinstance(part, (list, tuple)) and len(part) == len(names) for part in (dtypes, shapes))
    for position, name in enumerate(names):
        if told and isinstance(shapes[position], (list, tuple)):
            shape = tuple(int(size) for size in shapes[position])
            yield str(name), Header(str(dtypes[position]).removeprefix("torch."), shape)
        else:
            yield str(name), Header()


def _get(info: Any, name: str) -> Any:
    return info.get(name) if isinstance(info, Mapping) else getattr(info, name, None)
