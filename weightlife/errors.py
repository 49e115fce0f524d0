# SPDX-License-Identifier: Apache-2.0
"""The errors of weightlife: one tree, stable codes, readable in another process.

::

    WeightlifeError              WL000
    +-- ConfigError              WL001  (also a ValueError)
    +-- HostError                WL010
    |   +-- ReloadUnsupportedError WL015  (also a NotImplementedError)
    +-- NotInstalledError        WL011
    +-- ActiveSessionError       WL012
    +-- HandshakeError           WL013
    +-- RoutingError             WL014
    +-- SessionError             WL100
    |   +-- SessionConflictError WL101
    |   +-- SessionStateError    WL102
    |   +-- SessionFailedError   WL103
    |   +-- PoisonedModelError   WL104
    |   +-- EngineNotPausedError WL105
    +-- CompletenessError        WL200
    |   +-- MissingTensorError   WL201
    |   +-- SurplusTensorError   WL202
    |   +-- UnexpectedTensorError WL203
    |   +-- ShapeMismatchError   WL204
    |   +-- DtypeMismatchError   WL205
    |   +-- HalfTouchedLayerError WL206
    |   +-- BypassError          WL207
    |   +-- EmptyUpdateError     WL208
    |   +-- NonFiniteError       WL209
    |   +-- DigestMismatchError  WL210
    |   +-- LoaderChangedError   WL211
    |   +-- WrongPartError       WL212
    |   +-- SourceError          WL220
    |       +-- TruncatedSourceError WL221
    |       +-- SourceIndexError WL222
    |       +-- RepeatedSourceError WL223
    |       +-- ChangedSourceError WL224
    +-- StorageError             WL300
    |   +-- StorageMovedError    WL301
    |   +-- RefusedLayerError    WL302
    |   +-- BudgetError          WL303
    |   +-- NotAdoptableError    WL304
    |   +-- StaleDerivedError    WL305
    +-- ProcessingError          WL400
    |   +-- DoubleProcessingError WL401
    |   +-- EarlyProcessingError WL403
    |   +-- UnprocessedLayerError WL402
    +-- RankMismatchError        WL501

What a user writes::

    try:
        llm.collective_rpc("reload_weights")
    except Exception as error:
        problem = weightlife.errors.from_message(str(error))
        if isinstance(problem, weightlife.errors.CompletenessError):
            print("still serving the old weights;", problem.hint)

The text of an error is one line, whose format ``_errortext`` describes::

    [WL201] 2 tensors did not arrive (model=M, layer=layers.0, tensors=[a, b, +12 more], session=s1; next: resend)
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from weightlife import _errortext
from weightlife._errortext import TENSORS_SHOWN, clean, names, safe_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "CODES",
    "TENSORS_SHOWN",
    "ActiveSessionError",
    "BudgetError",
    "BypassError",
    "ChangedSourceError",
    "CompletenessError",
    "ConfigError",
    "DigestMismatchError",
    "DoubleProcessingError",
    "DtypeMismatchError",
    "EarlyProcessingError",
    "EmptyUpdateError",
    "EngineNotPausedError",
    "HalfTouchedLayerError",
    "HandshakeError",
    "HostError",
    "LoaderChangedError",
    "MissingTensorError",
    "NonFiniteError",
    "NotAdoptableError",
    "NotInstalledError",
    "PoisonedModelError",
    "ProcessingError",
    "RankMismatchError",
    "RefusedLayerError",
    "ReloadUnsupportedError",
    "RepeatedSourceError",
    "RoutingError",
    "SessionConflictError",
    "SessionError",
    "SessionFailedError",
    "SessionStateError",
    "ShapeMismatchError",
    "SourceError",
    "SourceIndexError",
    "StaleDerivedError",
    "StorageError",
    "StorageMovedError",
    "SurplusTensorError",
    "TruncatedSourceError",
    "UnexpectedTensorError",
    "UnprocessedLayerError",
    "WeightlifeError",
    "WrongPartError",
    "clean",
    "from_message",
    "names",
    "safe_text",
]

_REGISTRY: dict[str, type[WeightlifeError]] = {}


class WeightlifeError(Exception):
    """Base of all errors of weightlife.

    Context is plain text and may be filled in later, while the error travels up: ``model`` (class name),
    ``layer`` (module path), ``tensors`` (checkpoint names), ``session`` (id) and ``hint`` (the next step; each
    class has a default). ``omitted`` counts tensors that a text named only as "+12 more".

    Do not repeat tensor names in the message: the text adds them. Subclasses keep this signature, or an
    error could not be made again from its text.
    """

    code: ClassVar[str] = "WL000"
    default_hint: ClassVar[str] = "see the report of the session: weightlife.last_report(model)"

    def __init__(
        self,
        message: str = "",
        *,
        model: str = "",
        layer: str = "",
        tensors: Iterable[str] = (),
        session: str = "",
        hint: str = "",
    ) -> None:
        summary = (type(self).__doc__ or "").split("\n", 1)[0].rstrip(".")
        self.message = _errortext.prose(message, _errortext.MESSAGE_CHARS) or summary
        # args must rebuild the error through __init__, which is what copy and pickle do; the rest of the
        # context travels in __dict__.
        super().__init__(self.message)
        self.model = str(model)
        self.layer = str(layer)
        # A lone name is a common slip, and would otherwise become a list of its letters.
        self.tensors: tuple[str, ...] = (tensors,) if isinstance(tensors, str) else tuple(map(str, tensors))
        self.session = str(session)
        self.hint = _errortext.prose(hint, _errortext.HINT_CHARS) or self.default_hint
        self.omitted = 0

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            _register(cls)

    def __str__(self) -> str:
        return self.to_message()

    def to_message(self) -> str:
        """The error as one line of text, which ``from_message`` reads back."""
        fields = (("model", self.model), ("layer", self.layer), ("session", self.session))
        hint = _errortext.prose(self.hint, _errortext.HINT_CHARS) or self.default_hint
        return _errortext.render(self.code, self.message, fields, self.tensors, self.omitted, hint)


def _register(cls: type[WeightlifeError]) -> None:
    if not (len(cls.code) == 5 and cls.code[:2] == "WL" and cls.code[2:].isdecimal()):
        raise TypeError(f"{cls.__name__}.code must be WL and three digits, not {cls.code!r}")
    other = _REGISTRY.get(cls.code)
    # A module may be executed twice (reload); two different classes may not share a code.
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"{cls.__name__} and {other.__name__} both use the code {cls.code}")
    _REGISTRY[cls.code] = cls


_register(WeightlifeError)

CODES: Mapping[str, type[WeightlifeError]] = MappingProxyType(_REGISTRY)
"""Every code and its class. Codes are never reused or renumbered."""


class ConfigError(WeightlifeError, ValueError):
    """A setting, an environment variable or a stored file has a value that can't be used."""

    code = "WL001"
    default_hint = "correct the setting"


class HostError(WeightlifeError):
    """The host, its version or one of its seams is not supported."""

    code = "WL010"
    default_hint = "weightlife.status() tells which seams were found; mode='observe' changes nothing"


class ReloadUnsupportedError(HostError, NotImplementedError):
    """The loader that the engine was started with can't read a checkpoint again; nothing was touched."""

    code = "WL015"
    default_hint = (
        "send the tensors: reload_weights(weights_iterator=...), a weight transfer or load_weights;"
        " or start the engine with a load_format that can (auto)"
    )


class NotInstalledError(WeightlifeError):
    """The call needs weightlife to be installed in this process, and it is not."""

    code = "WL011"
    default_hint = "call weightlife.install() first, or set WEIGHTLIFE=1"


class ActiveSessionError(WeightlifeError):
    """Installing or uninstalling while a session is open would leave its model between two states."""

    code = "WL012"
    default_hint = "finish or abort the session, then try again"


class HandshakeError(WeightlifeError):
    """A worker runs without weightlife, with another version or with other settings."""

    code = "WL013"
    default_hint = (
        "call weightlife.install() before the engine starts, and pass WEIGHTLIFE_* on to its workers"
    )


class RoutingError(WeightlifeError):
    """Where a checkpoint's tensors would go can't be told from its headers; nothing was touched."""

    code = "WL014"
    default_hint = "load the checkpoint once: the manifest of a load needs no headers"


class SessionError(WeightlifeError):
    """A session can't do what was asked of it."""

    code = "WL100"


class SessionConflictError(SessionError):
    """Two owners want to load weights into one model at the same time."""

    code = "WL101"
    default_hint = "let the first owner finish or abort; one session a model"


class SessionStateError(SessionError):
    """The call does not fit the state that the session is in."""

    code = "WL102"
    default_hint = "the order is prepare, receive, finish (or abort)"


class SessionFailedError(SessionError):
    """An implicit session failed earlier, outside any call of the client; the old weights still serve."""

    code = "WL103"
    default_hint = "send the complete update again"


class PoisonedModelError(SessionError):
    """A failed update left weights that must not serve."""

    code = "WL104"
    default_hint = "send a complete update, or reload from disk; the model serves again when that commits"


class EngineNotPausedError(SessionError):
    """A forward pass met an update that is written in place."""

    code = "WL105"
    default_hint = "pause the engine round the update, or use isolation='staged'"


class CompletenessError(WeightlifeError):
    """What arrived is not what the model needs; nothing was committed."""

    code = "WL200"
    default_hint = "compare the sender's names with those of the last complete load"


class MissingTensorError(CompletenessError):
    """Tensors that a complete load writes did not arrive."""

    code = "WL201"
    default_hint = "send the missing tensors, or open the session with the names that you mean to send"


class SurplusTensorError(CompletenessError):
    """Tensors arrived more often than a complete load writes them."""

    code = "WL202"
    default_hint = "look for a bucket or shard that is sent twice"


class UnexpectedTensorError(CompletenessError):
    """Tensors arrived that no parameter of the model takes, or that were not announced."""

    code = "WL203"
    default_hint = "check the sender's prefix and name mapping"


class ShapeMismatchError(CompletenessError):
    """A tensor has another shape than its parameter."""

    code = "WL204"
    default_hint = (
        "check that sender and model have the same configuration and parallel layout; or shapes='warn'"
    )


class DtypeMismatchError(CompletenessError):
    """A tensor has another dtype than its parameter."""

    code = "WL205"
    default_hint = "send the checkpoint's dtype, or set casts='warn'"


class HalfTouchedLayerError(CompletenessError):
    """A layer received some of its tensors and not the others."""

    code = "WL206"
    default_hint = "send whole layers within one session"


class BypassError(CompletenessError):
    """A weight was written round its loader and can't be attributed."""

    code = "WL207"
    default_hint = "write through param.weight_loader or model.load_weights"


class EmptyUpdateError(CompletenessError):
    """A session ended without having received any tensor."""

    code = "WL208"
    default_hint = "check that the sender's iterator is not exhausted; set empty='off' if this is meant"


class NonFiniteError(CompletenessError):
    """A received tensor holds NaN or infinity."""

    code = "WL209"
    default_hint = "check the trainer's step before sending, or set nonfinite='off'"


class DigestMismatchError(CompletenessError):
    """A received tensor is not, byte for byte, what the sender had."""

    code = "WL210"
    default_hint = "look at the transport between sender and receiver, then send again"


class LoaderChangedError(CompletenessError):
    """A loader did not write what it wrote in the first load, while it was not observed; a complete update heals."""

    code = "WL211"
    default_hint = "send a complete update: all of it will be observed; watch_writes='all' if the loader does so by itself"


class WrongPartError(CompletenessError):
    """A loader takes another part of a tensor than the last complete load did: of another rank, or dimension."""

    code = "WL212"
    default_hint = "look for a loader that cuts by the wrong rank, dimension or order, then send again; shapes='warn' lets it pass"


class SourceError(CompletenessError):
    """Files of a checkpoint can't be what their writer meant; nothing was touched."""

    code = "WL220"
    default_hint = "write or fetch the checkpoint again; source='warn' loads it as it is"


class TruncatedSourceError(SourceError):
    """A safetensors file is shorter than its header says, or its header can't be read."""

    code = "WL221"
    default_hint = "copy the file again: its writer or its transfer was interrupted"


class SourceIndexError(SourceError):
    """The index of a checkpoint and its files disagree."""

    code = "WL222"
    default_hint = "index and files are of different checkpoints: copy all of them again"


class RepeatedSourceError(SourceError):
    """Two files of a checkpoint hold a tensor of the same name."""

    code = "WL223"
    default_hint = "remove the stale file; which copy wins depends on the order of files"


class ChangedSourceError(SourceError):
    """Files of a checkpoint were written or exchanged while they were read: what came may be of two of them."""

    code = "WL224"
    default_hint = (
        "load again when its writer is done; writers should put a finished file in the old one's place, or use a new"
        " folder"
    )


class StorageError(WeightlifeError):
    """The memory that the running model reads can't be kept as it is."""

    code = "WL300"


class StorageMovedError(StorageError):
    """Runtime storage was replaced: captured graphs and kernel objects would read stale memory."""

    code = "WL301"
    default_hint = "restart the engine or report the layer; the attribute path tells what moved"


class RefusedLayerError(StorageError):
    """A layer can't be restored safely, so the update was refused before anything was touched."""

    code = "WL302"
    default_hint = "restart the engine with the new checkpoint, or leave this layer out of the update"


class BudgetError(StorageError):
    """The update does not fit the memory that it may use."""

    code = "WL303"
    default_hint = "use isolation='in_place', or raise undo_budget_bytes"


class NotAdoptableError(StorageError):
    """Storage can't be adopted, since something outside may hold its address."""

    code = "WL304"
    default_hint = "use storage='auto' or storage='pinned'"


class StaleDerivedError(StorageError):
    """A number or tensor that was derived from weights is not of the weights that are to serve."""

    code = "WL305"
    default_hint = (
        "the layer's processing must make it again from the new weights; contract='warn' lets it pass"
    )


class ProcessingError(WeightlifeError):
    """Post-load processing did not run exactly once."""

    code = "WL400"


class DoubleProcessingError(ProcessingError):
    """A layer that is already in kernel format was to be processed again."""

    code = "WL401"
    default_hint = "leave process_weights_after_loading to the session"


class UnprocessedLayerError(ProcessingError):
    """A layer received weights and was never processed."""

    code = "WL402"
    default_hint = "look for a loader that replaces the layer or its quant method while it loads"


class EarlyProcessingError(ProcessingError):
    """A layer that was processed as soon as it was complete turned out to be needed in its raw form."""

    code = "WL403"
    default_hint = "send the update again: this layer is processed at the finish from now on"


class RankMismatchError(WeightlifeError):
    """Ranks received, did or hold different things in one update."""

    code = "WL501"
    default_hint = "send the same update to every rank, then load again"


def from_message(text: str) -> WeightlifeError | None:
    """The typed error that ``text`` carries, or None.

    ``text`` may be anything that holds an error's line: another error's message, a quoted string, a log, a
    formatted traceback (of a chain the last exception counts, as in Python; else the first in the text). Of a
    text that was cut, what is whole is returned. Never raises.
    """
    parsed = _errortext.find(text, _REGISTRY)
    if parsed is None:
        return None
    error = _REGISTRY[parsed.code](parsed.message, tensors=parsed.tensors, hint=parsed.hint, **parsed.fields)
    error.omitted = parsed.omitted
    return error
