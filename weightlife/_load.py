# SPDX-License-Identifier: Apache-2.0
"""`weightlife.load`: a checkpoint into a plain module, by name, for whoever has no loader of his own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from weightlife import _casts, errors
from weightlife._loader_calls import Call, Later
from weightlife._loaders import run
from weightlife._names import nearest, prefix_clause
from weightlife._safetensors import Checkpoint, read_safetensors

if TYPE_CHECKING:
    import torch

    from weightlife._declared import Header

__all__ = ["load"]

_NAME = "weightlife.load"
_HINT = "names are those of model.state_dict(); read_safetensors(path, keep=, rename=) changes them, loader= takes others"


def load(
    model: torch.nn.Module,
    source: str
    | os.PathLike[str]
    | Checkpoint
    | Mapping[str, torch.Tensor]
    | Iterable[tuple[str, torch.Tensor]],
    *,
    loader: Callable[[Any, Any], Any] | None = None,
    **settings: Any,
) -> None:
    """Load a whole checkpoint into a plain module: its first load, or an update that is complete or refused.

    What brings the tensors in is `loader`; else, of a model that was loaded before, what did it then; else the model's
    own `load_weights`; else they are copied by name into parameters and persistent buffers, of which none may be left
    out and no other may come, as `load_state_dict` has it; of a tied tensor one name is enough. Layers' hooks
    (`process_weights_after_loading`) run afterwards, once. Within `weightlife.session(model)` it is a part of that.

    Args:
        model: any module, as its constructor made it or as it serves. vLLM's models have reloads of their own.
        source: the path of a folder of safetensors files, of one such file or of an index; what `read_safetensors`
            returned; a state dict; or an iterable of (name, tensor).
        loader: `loader(model, weights)`, as for `wrap_loader`.
        settings: override the installed settings for a model that is met for the first time.

    Raises:
        SourceError and its kin, MissingTensorError, UnexpectedTensorError, ShapeMismatchError, DtypeMismatchError: the
        source is not what the model takes. Of files all of this is found before anything is touched. ConfigError: it is
        not known what loads this model, or it has no memory. Else what the loader and a session raise.
    """
    weights: Any = source
    if isinstance(source, (str, os.PathLike)):
        weights = read_safetensors(source)
    elif isinstance(source, Mapping):
        weights = source.items()
    call = Call(copy_by_name if loader is None else loader, (model, weights), {}, _NAME)
    if loader is None:
        call = _chosen(call, weights)
    run(call, settings)


def _chosen(call: Call, weights: Any) -> Call:
    """The call with the loader that is this model's."""
    from weightlife._engine import lifecycle

    model = call.model
    life = lifecycle.of(model)
    loaded = life is not None and life.first is None
    if life is not None and loaded and isinstance(life.loader, Later):
        return life.loader.call(model, weights, _NAME)
    if callable(getattr(model, "load_weights", None)):
        return Call(by_itself, (model, weights), {}, _NAME)
    if loaded:
        raise errors.ConfigError(
            "it is not known what loads this model: its first load was by a loader that got no stream of tensors",
            model=type(model).__name__,
            hint="give loader=, or give weightlife.read_safetensors(path) to the loader that you have",
        )
    if isinstance(weights, Checkpoint):
        _check(model, weights.headers)
        return call
    return Call(copy_by_name, (model, _whole(model, weights)), {}, _NAME)


def by_itself(model: Any, weights: Any) -> Any:
    """The loader of a model that has one."""
    return model.load_weights(weights)


def copy_by_name(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The loader of a model that has none. A tied tensor is written once, whichever of its names come.

    Raises:
        UnexpectedTensorError, ShapeMismatchError: a tensor has no place. SurplusTensorError: names of a tied tensor
        bring different values.
    """
    places = _places(model)
    tied = {ident: "" for ident, count in Counter(map(id, places.values())).items() if count > 1}
    for name, tensor in weights:
        place = places.get(name)
        if place is None:
            raise _unknown(model, [name], [name], places)
        if place.shape != tensor.shape:  # `copy_` would spread it
            raise _misshapen(model, name, tuple(tensor.shape), place)
        if id(place) in tied:
            first = tied[id(place)]
            if first:
                _equal(model, place, first, name, tensor)
                continue
            tied[id(place)] = name
        place.data.copy_(tensor)


def _equal(model: torch.nn.Module, place: torch.Tensor, first: str, name: str, tensor: torch.Tensor) -> None:
    """Whether a second name of a tied tensor brings what the first one brought."""
    import torch

    new = torch.empty_like(place.data)
    new.copy_(tensor)
    if not torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (new, place.data))):
        raise errors.SurplusTensorError(
            "the model ties these, and the source has different values for them",
            model=type(model).__name__, tensors=[first, name],
            hint="build the model without the tie, or leave one of them out: read_safetensors(path, keep=)",
        )  # fmt: skip


def _places(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Where each name of the state dict goes: a tied tensor under all of its names. What a hook of it made is no place."""
    own = {id(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    return {name: place for name, place in model.state_dict(keep_vars=True).items() if id(place) in own}


def _check(model: torch.nn.Module, headers: Mapping[str, Header]) -> None:
    """Whether headers are what a first load by name needs.

    Raises:
        as `load`, before anything was touched.
    """
    places = _places(model)
    unknown = [name for name in headers if name not in places]
    if unknown:
        raise _unknown(model, unknown, list(headers), places)
    _complete(model, headers, places)
    for name, header in headers.items():
        place = places[name]
        dtype = str(place.dtype).removeprefix("torch.")
        if header.shape is not None and header.shape != place.shape:
            raise _misshapen(model, name, header.shape, place)
        if header.dtype and not _casts.allowed(header.dtype, dtype):
            raise errors.DtypeMismatchError(
                f"the file has {header.dtype}, the model {dtype}: data of another kind",
                model=type(model).__name__, tensors=[name], hint="build the model for this checkpoint, or give loader=",
            )  # fmt: skip


def _whole(model: torch.nn.Module, weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream that must bring everything."""
    came = []
    for item in weights:
        came.append(item[0])
        yield item
    _complete(model, came, _places(model))


def _complete(model: torch.nn.Module, names: Iterable[str], places: Mapping[str, torch.Tensor]) -> None:
    if any(place.is_meta for place in places.values()):
        raise errors.ConfigError(
            "the model is on the meta device: it has no memory to load into", model=type(model).__name__,
            hint="model.to_empty(device=...) gives it some",
        )  # fmt: skip
    filled = {id(places[name]) for name in names if name in places}
    absent = [name for name, place in places.items() if id(place) not in filled]
    if absent:
        raise errors.MissingTensorError(
            f"{len(absent)} of {len(places)} parameters and buffers have no tensor in the source",
            model=type(model).__name__, tensors=absent, hint=_HINT,
        )  # fmt: skip


def _unknown(
    model: torch.nn.Module, unknown: list[str], names: list[str], places: Mapping[str, torch.Tensor]
) -> errors.UnexpectedTensorError:
    close = nearest(unknown[0], places)
    message = f"{len(unknown)} tensors have no parameter or buffer of their name"
    message += f"; the nearest is {close!r}" if close else ""
    return errors.UnexpectedTensorError(
        message + prefix_clause(names, places), model=type(model).__name__, tensors=unknown, hint=_HINT
    )


def _misshapen(
    model: torch.nn.Module, name: str, shape: tuple[int, ...], place: torch.Tensor
) -> errors.ShapeMismatchError:
    return errors.ShapeMismatchError(
        f"{list(shape)} came for {list(place.shape)}", model=type(model).__name__, tensors=[name]
    )
