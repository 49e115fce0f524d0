# SPDX-License-Identifier: Apache-2.0
"""Sessions and loaders of a user's own: `weightlife.session`, `weightlife.wrap_loader`, `weightlife.watch`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from weightlife import errors
from weightlife.config import Settings
from weightlife.hosts import runtime

if TYPE_CHECKING:
    import torch

    from weightlife._engine.lifecycle import Lifecycle
    from weightlife.hosts.protocol import Host
    from weightlife.report import LoadReport

Loader = TypeVar("Loader", bound=Callable[..., Any])


def _settings() -> Settings:
    return runtime.settings() if runtime.installed() else Settings.from_env(os.environ)


def watch(model: torch.nn.Module, host: Host | None = None, **settings: Any) -> None:
    """Remember what the constructor made of `model`: call it after construction and before the first load.

    Args:
        model: a plain module. vLLM's models are watched by `install()`.
        host: how to reach the framework around it; by default `weightlife.hosts.torch.TorchHost(model)`.
        settings: override the installed settings for this model.

    Raises:
        ConfigError: an unknown setting. SessionStateError: the model is watched already.
    """
    from weightlife._engine import lifecycle
    from weightlife.hosts.torch import TorchHost

    if lifecycle.of(model) is not None:
        raise errors.SessionStateError("the model is watched already", model=type(model).__name__)
    wanted = _settings().replace(**settings) if settings else _settings()
    life = lifecycle.Lifecycle(model, host or TorchHost(model), wanted, fill=runtime.fill())
    _guard_forward(model, life)


def _guard_forward(model: torch.nn.Module, life: Lifecycle) -> None:
    """A plain module is guarded by hooks on its forward; both are part of no graph that serves."""
    from contextlib import ExitStack

    from weightlife._engine import guard

    def enter(*_: Any) -> None:
        stack = ExitStack()
        stack.enter_context(guard.entering([life], guard.Pass.REAL))
        life.passes.append(stack)

    def leave(*_: Any) -> None:
        if life.passes:
            life.passes.pop().close()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


@overload
def wrap_loader(loader: Loader) -> Loader: ...


@overload
def wrap_loader(*, chunked: bool = False, **settings: Any) -> Callable[[Loader], Loader]: ...


def wrap_loader(loader: Any = None, *, chunked: bool = False, **settings: Any) -> Any:
    """Make a loader of your own, `loader(model, weights, ...)`, one session a call.

    The first call on a model is its first load: watched, then processed by the host's hooks (`TorchHost`: methods
    named `process_weights_after_loading`); do not call them yourself. Every later call is a reload: complete or
    refused, undone when it fails.

    Args:
        loader: the function; its first two arguments are the model and an iterable of (name, tensor).
        chunked: a call brings a part, and the next forward pass is the end.
        settings: override the installed settings for models that this loader meets first.
    """
    if loader is None:
        return functools.partial(_wrap_loader, chunked=chunked, settings=settings)
    return _wrap_loader(loader, chunked=chunked, settings=settings)


def _wrap_loader(loader: Any, chunked: bool, settings: dict[str, Any]) -> Any:
    @functools.wraps(loader)
    def load(model: Any, weights: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any) -> Any:
        from weightlife._engine import lifecycle, processing

        life = lifecycle.of(model)
        if life is None:
            watch(model, **settings)
            life = lifecycle.of(model)
            assert life is not None

        def call(stream: Any) -> Any:
            return loader(model, stream, *args, **kwargs)

        if life.first is not None:
            out = life.load_weights(call, weights)
            first = life.first
            if first is not None:
                host = life.host
                first.process(
                    lambda: processing.run(
                        model,
                        host,
                        lambda layer: True,
                        lambda layer: True,
                        lambda name: None,
                        lambda *layer: None,
                    )
                )
            return out
        if chunked or life.session is not None or life.is_inside():
            return life.load_weights(call, weights)
        with session(model, partial=life.settings.partial_disk, opened_by=loader.__name__) as opened:
            opened.engine_session.whole = True
            return life.load_weights(call, weights)

    return load


class SessionHandle:
    """An explicit session on one model: `prepare` (or `with`), chunks by the model's loader, `finish` or `abort`."""

    def __init__(self, life: Lifecycle, opened_by: str, partial: str | None, source: str) -> None:
        self._life = life
        self._opened_by = opened_by
        self._partial = partial or life.settings.partial_update
        self._source = source
        self._session: Any = None

    @property
    def engine_session(self) -> Any:
        """The engine's session while it is open."""
        return self._session

    @property
    def report(self) -> LoadReport | None:
        """The report, as far as it goes."""
        return None if self._session is None else self._session.report

    def prepare(self) -> SessionHandle:
        """Begin.

        Raises:
            SessionConflictError: another session is open. RefusedLayerError: an update must not begin now.
        """
        with self._life.owned(self._opened_by):
            self._session = self._life.open(self._opened_by, "update", True, self._partial, self._source)
        return self

    def finish(self) -> None:
        """Commit.

        Raises:
            CompletenessError and its kin: nothing was committed, the old weights serve.
        """
        self._mine()
        self._life.finish(self._opened_by)

    def abort(self, error: BaseException | None = None) -> None:
        """Back to the old weights. Does nothing after the end."""
        if self._life.session is self._session:
            self._life.abort(error)

    def _mine(self) -> None:
        if self._session is None or self._life.session is not self._session:
            raise errors.SessionStateError("the session is not open", model=self._life.name)

    def __enter__(self) -> SessionHandle:
        return self.prepare() if self._session is None else self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.abort(error)
        elif self._life.session is self._session:
            self.finish()
        elif self._session.state.value == "aborted":
            raise errors.SessionStateError(
                f"the session was aborted: {self._session.report.error}", model=self._life.name
            )


def session(
    target: Any, *, partial: str | None = None, source: str = "", opened_by: str = "weightlife.session"
) -> SessionHandle:
    """An explicit session on a model that is loaded: ``with weightlife.session(model): load(model, chunk) ...``.

    Args:
        target: a module, or an `LLM`, engine, worker or runner whose model lives in this process.
        partial: forbid (a complete load, or nothing), by_layer (the default), allow.
        source: where the weights come from, for the report.
        opened_by: who opens it, for the report and for conflicts.

    Raises:
        NotInstalledError: the model was built without weightlife.
    """
    from weightlife._engine import lifecycle
    from weightlife._models import find_model

    life = lifecycle.of(find_model(target))
    if life is None:
        raise errors.NotInstalledError("this model was not built under weightlife")
    if partial is not None:
        Settings().replace(partial_update=partial)  # validates
    return SessionHandle(life, opened_by, partial, source)
