# SPDX-License-Identifier: Apache-2.0
"""Sessions and loaders of a user's own: `weightlife.session`, `weightlife.wrap_loader`, `weightlife.watch`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from weightlife import errors
from weightlife._safetensors import Checkpoint
from weightlife.config import Settings
from weightlife.hosts import runtime

if TYPE_CHECKING:
    import torch

    from weightlife._engine.lifecycle import Lifecycle
    from weightlife._engine.session import WeightLoadSession
    from weightlife.hosts.protocol import Host
    from weightlife.report import LoadReport


def _settings() -> Settings:
    return runtime.settings() if runtime.installed() else Settings.from_env(os.environ)


def watch(model: torch.nn.Module, host: Host | None = None, **settings: Any) -> None:
    """Remember what the constructor made of `model`: call it after construction and before the first load.

    Args:
        model: a plain module. vLLM's models are watched by `install()`.
        host: how to reach the framework around it; by default `weightlife.hosts.torch.TorchHost(model)`.
        settings: override the installed settings for this model.

    Raises:
        ConfigError: an unknown setting. SessionStateError: the model is watched already, or is a part of one that is.
        HostError: a scripted module, which takes no hooks.
    """
    import torch

    from weightlife import _api
    from weightlife._engine import lifecycle
    from weightlife.hosts import forward
    from weightlife.hosts.torch import TorchHost

    _refuse_to_watch(model)
    wanted = _settings().replace(**settings) if settings else _settings()
    if isinstance(model, torch.jit.ScriptModule):
        raise errors.HostError(
            "a scripted module takes no hooks on its forward", model=type(model).__name__,
            hint="load the module first, and script it then",
        )  # fmt: skip
    _api.ensure_listening(wanted)
    life = lifecycle.Lifecycle(model, host or TorchHost(model), wanted, fill=runtime.fill())
    if wanted.runs_dir is not None:
        from weightlife import _api

        _api.keep_runs(wanted.runs_dir)
    life.own_mode = settings.get("mode")
    forward.guard(model, life)


def _refuse_to_watch(model: torch.nn.Module) -> None:
    """One lifecycle for one tree: what two of them own, neither could restore."""
    from weightlife._engine import lifecycle

    name = type(model).__name__
    if lifecycle.of(model) is not None:
        raise errors.SessionStateError("the model is watched already", model=name)
    owner = lifecycle.owner_of(model)
    if owner is not None and any(part is model for part in owner.model.modules()):
        raise errors.SessionStateError(
            f"{name} is a part of {owner.name}, which is watched", model=owner.name,
            hint="load it through the whole model: its updates are sessions of that",
        )  # fmt: skip
    for path, part in model.named_modules():
        if lifecycle.of(part) is not None:
            raise errors.SessionStateError(
                f"a part of it, {path}, is watched already", model=name, layer=path,
                hint="watch the whole model before any of its parts is loaded",
            )  # fmt: skip


class SessionHandle:
    """An explicit session on one model: `prepare` (or `with`), chunks by the model's loader, `finish` or `abort`."""

    def __init__(
        self,
        life: Lifecycle,
        opened_by: str,
        partial: str | None,
        source: str | Checkpoint,
        expected: Any = None,
        settings: Settings | None = None,
    ) -> None:
        self._expected = expected
        self._settings = settings
        self._life = life
        self._opened_by = opened_by
        self._partial = partial or life.settings.partial_update
        self._files = source.source() if isinstance(source, Checkpoint) else None
        self._source = source.path if isinstance(source, Checkpoint) else source
        self._session: Any = None
        self.given_up = False

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
            CompletenessError: what is expected, or what the files of its source hold, cannot be a legal update. Nothing
            was touched.
        """
        from weightlife._engine import announce

        files, expected, table = self._files, self._expected, None
        if _is_table(expected):
            table, expected = expected, None

        def before(opened: WeightLoadSession) -> None:
            if files is not None:
                announce.check_source(opened, files)
            if expected is not None:
                announce.expect(opened, expected)

        with self._life.owned(self._opened_by):
            self._life.refuse_from_source(self._opened_by)
            self._life.end_implicit()
            self._session = self._life.open(
                self._opened_by,
                "update",
                True,
                self._partial,
                self._source,
                settings=self._settings,
                before=before,
                expected=table,
            )
        return self

    def finish(self) -> None:
        """Commit.

        Raises:
            CompletenessError and its kin: nothing was committed, the old weights serve.
        """
        self._mine()
        self._life.refuse_from_source(self._opened_by)
        self._life.finish(self._opened_by)

    def abort(self, error: BaseException | None = None) -> None:
        """Back to the old weights. Does nothing after the end.

        Raises:
            SessionConflictError: a load call is inside now, in another thread or as the caller of this one.
        """
        if self._session is not None and self._life.session is self._session:
            with self._life.owned(f"{self._opened_by}, abort"):
                self._life.refuse_from_source(f"{self._opened_by}, abort")
                self.given_up = True
                self._life.abort(error)

    def _mine(self) -> None:
        if self._session is None or self._life.session is not self._session:
            raise errors.SessionStateError("the session is not open", model=self._life.name)

    def __enter__(self) -> SessionHandle:
        if self._session is None:
            return self.prepare()
        self._mine()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not self.given_up and not self._session.voted:
            # Other ranks are on their way to the vote: without this one they would wait for it, and every later vote
            # of theirs would meet an earlier one of this rank.
            self._life.vote(False, self._session)
        if self._life.session is self._session:
            if error is not None:
                self.abort(error)
            else:
                self.finish()
            return
        tail = self._life.session
        if tail is not None and not tail.explicit:
            self._life.abort(error)  # what came after this session died is no update of its own
        if error is None and not self.given_up and self._session.state.value == "aborted":
            raise errors.SessionStateError(
                f"the session was aborted: {self._session.report.error}", model=self._life.name
            )


PER_SESSION = ("unexpected", "surplus", "shapes", "casts", "empty", "nonfinite", "announced")
"""Settings that a session may override."""


def _is_table(expected: Any) -> bool:
    """Whether what a session is to expect is a table of digests, and no mapping of names."""
    return isinstance(expected, dict) and {"schema_version", "algorithm"} <= expected.keys()


def session(
    target: Any,
    *,
    partial: str | None = None,
    expected: Any = None,
    source: str | Checkpoint = "",
    opened_by: str = "weightlife.session",
    **settings: Any,
) -> SessionHandle:
    """An explicit session on a model that is loaded: ``with weightlife.session(model): load(model, chunk) ...``.

    Args:
        target: a module, or an `LLM`, engine, worker or runner whose model lives in this process.
        partial: forbid (a complete load, or nothing), by_layer (the default), allow.
        expected: everything that will come: names -> (dtype, shape) or tensors, names alone, a manifest, or
            what `read_safetensors` returned. It is checked before anything is touched (complete by `partial`, shapes, dtypes), each tensor is checked when it
            comes, and all of it must have come at the end. Or the sender's table of digests
            (`weightlife.digests.digest_table`): nothing is committed unless all that it names arrives, nothing else
            does, and every byte is what the sender had (`DigestMismatchError`).
        source: where the weights come from, for the report. What `read_safetensors` returned is named by its path, and
            its headers are held against a complete load before anything is touched.
        opened_by: who opens it, for the report and for conflicts.
        settings: for this session, any of unexpected, surplus, shapes, casts, empty, nonfinite, announced.

    Raises:
        NotInstalledError: the model was built without weightlife. ConfigError: a setting that a session can't have,
            or a table of digests that this version can't read.
    """
    from weightlife._engine import lifecycle
    from weightlife._models import find_model

    life = lifecycle.of(find_model(target))
    if life is None:
        raise errors.NotInstalledError("this model was not built under weightlife")
    if partial is not None:
        Settings().replace(partial_update=partial)  # validates
    strange = [name for name in settings if name not in PER_SESSION]
    if strange:
        raise errors.ConfigError(
            f"a session has no setting {errors.clean(strange[0])!r}",
            hint=f"those of a session are {', '.join(PER_SESSION)}; the others are given to install()",
        )
    if _is_table(expected):
        from weightlife.digests import check_table

        expected = check_table(expected)
    chosen = life.settings.replace(**settings) if settings else None
    return SessionHandle(life, opened_by, partial, source, expected, chosen)


def abort(target: Any, reason: str = "") -> bool:
    """End the open update of a model without committing it, whoever began it: the old weights serve.

    For a client that died between two calls and left its session open, or a handle that was lost. The report says
    that it was aborted on request, and why.

    Args:
        target: as for `session`; of an `LLM` or engine with workers in other processes every rank is asked.
        reason: for the report.

    Returns:
        Whether an update was open (on any rank).

    Raises:
        SessionConflictError: a load call is inside now, in another thread or as the caller of this one; it can't be
        stopped from outside. NotInstalledError: the model was built without weightlife. HandshakeError: a worker runs
        without it.
    """
    import torch

    from weightlife._engine import lifecycle
    from weightlife._models import find_model

    if not isinstance(target, torch.nn.Module):
        from weightlife.hosts.vllm import remote

        if remote.engine_of(target) is not None:
            return any(remote.ask(target, "abort", {"reason": reason}))
    life = lifecycle.of(find_model(target))
    if life is None:
        raise errors.NotInstalledError("this model was not built under weightlife")
    return life.abort_on_request(reason)
