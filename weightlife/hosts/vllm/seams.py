# SPDX-License-Identifier: Apache-2.0
"""What each wrapper of vLLM does: a few lines that hand over to the lifecycle. The table is in `table.py`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import wrapt

from weightlife import errors
from weightlife._engine import guard, lifecycle, memory, registry
from weightlife._engine.lifecycle import Lifecycle
from weightlife.hosts import runtime
from weightlife.hosts.vllm import caches, reloadable, remote, taking
from weightlife.hosts.vllm.adapter import VllmHost
from weightlife.hosts.vllm.calls import Args, Kwargs, argument

if TYPE_CHECKING:
    from weightlife._engine.session import WeightLoadSession

# What only updates and captures need is imported with them (`lifecycle.py` says why).


def _known(model: Any) -> Lifecycle | None:
    """The lifecycle of a model, or None where there is none or weightlife is not installed any more."""
    return lifecycle.of(model) if runtime.installed() else None


def _ready(model: Any) -> Lifecycle | None:
    """The lifecycle of a model that weightlife manages now, or None (observe mode, unknown)."""
    life = _known(model)
    if life is None or life.status == "observed" or _left(life):
        return None
    return life


def _left(life: Lifecycle) -> bool:
    """Whether this load of a model is left to the host, and recorded: the mode in force.

    Not in the middle of something, should a missing seam show itself late: the first load, an open update and the
    healing of a model that must not serve end as they began.
    """
    busy = life.first is not None or life.session is not None or bool(life.poisoned)
    return not busy and runtime.mode() == "observe"


def _observe(life: Lifecycle | None, what: str, wrapped: Any, args: Args, kwargs: Kwargs) -> Any:
    """A load that is left to the host; recorded where the model is known."""
    if life is None:
        return wrapped(*args, **kwargs)
    return life.observe(what, wrapped, args, kwargs, told=runtime.unproven())


# -- construction and first load -------------------------------------------------------------------------------


def initialize_model(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """After construction: remember what the constructor made."""
    if not runtime.installed():
        return wrapped(*args, **kwargs)
    _share_log()
    runtime.unproven(decide=True)
    model = wrapped(*args, **kwargs)
    vllm_config = argument(args, kwargs, 0, "vllm_config")
    model_config = kwargs.get("model_config") or getattr(vllm_config, "model_config", None)
    taking.watch(model, vllm_config, model_config, load_weights, process_layer)
    return model


def process_layer(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """A quant hook. Outside of a session, on a layer that is in kernel format, it would process it twice."""
    layer = argument(args, kwargs, 0, "layer")
    life = lifecycle.owner_of(layer) if isinstance(layer, torch.nn.Module) else None
    if life is not None and life.first is not None:
        return life.first.hook(layer, type(instance).__name__, lambda: wrapped(*args, **kwargs))
    if life is None or life.status != "ready" or life.is_inside() or _left(life):
        return wrapped(*args, **kwargs)
    if life.session is None and life.contract_changed(layer) is None:
        life.note(f"{type(instance).__name__} was asked to process a layer of {life.name} twice: not done")
        return None
    return wrapped(*args, **kwargs)


def _share_log() -> None:
    """Our one line a session goes where vLLM's lines go, unless somebody configured our logger."""
    ours, theirs = logging.getLogger("weightlife"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        for handler in theirs.handlers:
            ours.addHandler(handler)


def load_weights(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Every call of a model's `load_weights`, from the host or from a client."""
    owner = _known(instance)
    if (
        owner is not None and owner.is_inside()
    ):  # of a session, or of `verify`, which also runs in observe mode
        owner.refuse_from_source("load_weights")
        return wrapped(*args, **kwargs)
    life = _ready(instance)
    if life is None:
        return _observe(_known(instance), "load_weights", wrapped, args, kwargs)
    if args:
        return life.load_weights(call_of(wrapped, args[1:], kwargs), args[0])
    name = "weights" if "weights" in kwargs else next(iter(kwargs), "weights")
    others = {key: value for key, value in kwargs.items() if key != name}
    return life.load_weights(lambda stream: wrapped(**{name: stream}, **others), kwargs.get(name, ()))


def call_of(wrapped: Any, rest: Args, kwargs: Kwargs) -> Callable[[Any], Any]:
    """A call of a model's `load_weights` but for its source: rules know loaders by what such a call is made of."""
    return lambda stream: wrapped(stream, *rest, **kwargs)


def loader_of(model: Any) -> Callable[[Any], Any] | None:
    """A vLLM model's loader as reloads call it, so that what is known of those holds for it; None for other models."""
    own: Any = getattr(model, "load_weights", None)
    return call_of(own.__wrapped__, (), {}) if isinstance(own, wrapt.BoundFunctionWrapper) else None


def process_weights_after_loading(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The whole-model pass: the end of a first load; later an end mark, never a second processing."""
    life = _ready(argument(args, kwargs, 0, "model"))
    if life is None or life.is_inside():
        return wrapped(*args, **kwargs) if life is None else None
    if life.first is not None:
        return life.first.process(lambda: wrapped(*args, **kwargs))
    if life.session is None and life.contract_changed() is not None:
        return wrapped(*args, **kwargs)  # a client that re-created parameters processes them itself
    if life.session is not None and not life.session.explicit:
        # A client may have written live parameters itself: what is made from them is made again.
        life.session.refresh = True
        life.finish("process_weights_after_loading")
    return None


def check_skipped_aliases(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """VLLM asks after every call whether a tied tensor's partner came. In an update it may come in another bucket."""
    if registry.routing.get() is not None:
        return None  # a part of a checkpoint may be routed
    session = lifecycle.current.get() if runtime.installed() else None
    if session is None or session.life.session is not session:
        return wrapped(*args, **kwargs)
    return None  # asked at the end of the session: completeness.py


def load_model(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """A loader's collections look at what it made; one that forgot the processing gets it done."""
    enforced = runtime.installed() and runtime.mode() == "enforce"
    with memory.set_aside() if enforced else nullcontext():
        model = wrapped(*args, **kwargs)
    if runtime.installed() and isinstance(model, torch.nn.Module) and lifecycle.of(model) is None:
        if runtime.unproven() and not lifecycle.released(model):  # where it was constructed could not be seen
            _share_log()
            config = argument(args, kwargs, 0, "vllm_config"), argument(args, kwargs, 1, "model_config")
            taking.take(model, *config, load_weights, process_layer)
    life = _ready(model)
    if life is not None and life.first is not None and isinstance(life.host, VllmHost):
        from vllm.model_executor.model_loader import utils

        life.note(f"{type(instance).__name__} returned a model that was not processed: processing it now")
        with life.entered():
            utils.process_weights_after_loading(model, life.host.model_config, life.host.device)
        model.eval()
    return model


def get_model_loader(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Loaders that override `load_model`, third-party ones included, are wrapped when they are first used."""
    if not runtime.installed():
        return wrapped(*args, **kwargs)
    loader = wrapped(*args, **kwargs)
    runtime.patcher().wrap_class(type(loader), "load_model", load_model)
    return loader


# -- reload ----------------------------------------------------------------------------------------------------

_CONFIG_FIELDS = ("model", "model_weights", "revision")


def reload_weights(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """A runner's reload: one session round the whole call."""
    life = _ready(instance.get_model())
    if life is None:
        return _observe(_known(instance.get_model()), "reload_weights", wrapped, args, kwargs)
    if life.first is not None:
        return wrapped(*args, **kwargs)
    with life.owned("reload_weights"):
        life.refuse_from_source("reload_weights")
        if life.session is not None and life.session.whole:
            return wrapped(*args, **kwargs)  # one runner's reload that calls another's
        return _reload(life, wrapped, args, kwargs)


def _reload(life: Lifecycle, wrapped: Any, args: Args, kwargs: Kwargs) -> Any:
    from weightlife._engine import announce
    from weightlife.hosts.vllm import sources

    kernel_format = not argument(args, kwargs, 2, "is_checkpoint_format", True)
    path = argument(args, kwargs, 1, "weights_path")
    iterator = argument(args, kwargs, 0, "weights_iterator")
    config = getattr(life.host, "model_config", None)
    saved = {name: getattr(config, name) for name in _CONFIG_FIELDS if hasattr(config, name)}
    source = "iterator" if iterator is not None else str(path or saved.get("model", "disk"))
    if kernel_format and life.plan.rebuild:
        first = next(layer for layer in life.plan.layers.values() if layer.strategy == "rebuild")
        raise errors.RefusedLayerError(
            "weights in kernel format cannot be loaded: processing keeps state that they do not carry "
            f"({first.reason})", model=life.name, layer=first.path,
            hint="reload in checkpoint format (is_checkpoint_format=True)",
        )  # fmt: skip
    life.end_implicit()
    operation = "kernel_format" if kernel_format else "reload"

    read: list[Any] = []

    def check(session: WeightLoadSession) -> None:
        if iterator is None:
            reloadable.require_path(life)
        files = None if iterator is not None or kernel_format else sources.parts(life.host, path)
        if files is not None:
            read.extend(files)
            announce.check_source(session, sources.merged(files))

    session = life.open("reload_weights", operation, True, life.settings.partial_disk, source, before=check)
    session.whole = True
    assert session.receiver is not None
    session.receiver.trusted = iterator is None
    try:
        if kernel_format:
            with session.inside(), torch.no_grad():
                out = session.write_directly(lambda: wrapped(*args, **kwargs))
        else:
            out = wrapped(*args, **kwargs)
        announce.source_held(session, sources.changed(read))
    except BaseException as error:
        if not session.voted:
            life.vote(False, session)
        life.abort(error)
        _restore(config, saved)
        raise
    try:
        life.finish("reload_weights")
    except BaseException:
        _restore(config, saved)
        raise
    return out


def _restore(config: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        setattr(config, name, value)


def initialize_layerwise_reload(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The host's own begin, called by transfer engines and by clients: prepare."""
    life = _ready(argument(args, kwargs, 0, "model"))
    if life is None or life.first is not None:
        return wrapped(*args, **kwargs)
    with life.owned("initialize_layerwise_reload"):
        life.refuse_from_source("initialize_layerwise_reload")
        if life.is_inside() or (life.session is not None and life.session.whole):
            return None  # by a loader: vLLM's decorator of `load_weights` for TorchAO begins and ends inside of it
        life.end_implicit()
        life.open("initialize_layerwise_reload", "update", True, life.settings.partial_update)
    return None


def finalize_layerwise_reload(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The host's own end: finish."""
    life = _ready(argument(args, kwargs, 0, "model"))
    if life is None or life.first is not None:
        return wrapped(*args, **kwargs)
    with life.owned("finalize_layerwise_reload"):
        life.refuse_from_source("finalize_layerwise_reload")
        if life.session is not None and (life.is_inside() or life.session.whole):
            life.session.ends_with_call = not life.session.explicit
            return None
        life.finish_explicit("finalize_layerwise_reload")
    return None


# -- the worker ------------------------------------------------------------------------------------------------


def worker_lives(worker: Any) -> list[Lifecycle]:
    """The models of a worker that weightlife manages."""
    runner = getattr(worker, "model_runner", None)
    return [] if runner is None else _lives(runner, worker)


def _lives(runner: Any, worker: Any = None) -> list[Lifecycle]:
    found = []
    for name in ("get_model", "get_draft_model"):
        getter = getattr(runner, name, None) or getattr(worker, name, None)
        try:
            life = lifecycle.of(getter()) if getter is not None else None
        except (AttributeError, RuntimeError, ValueError, NotImplementedError):
            life = None  # no model yet, or a runner without a drafter
        if life is not None and life.status == "ready":
            found.append(life)
    return found


def update_weights(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """What a chunk announces is checked before it is received. A failed chunk ends the update: A serves."""
    from weightlife.hosts.vllm import sources

    try:
        for life in worker_lives(instance):
            if life.session is not None and life.session.explicit:
                sources.check_update(life.session, argument(args, kwargs, 0, "update_info"), instance)
        return wrapped(*args, **kwargs)
    except BaseException as error:
        for life in worker_lives(instance):
            life.abort(error)
        _end_update(instance)
        raise


def finish_weight_update(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """A refused finish must not leave the worker believing that an update is still running."""
    try:
        return wrapped(*args, **kwargs)
    except BaseException as error:
        for life in worker_lives(instance):
            life.abort(error)
        _end_update(instance)
        raise


def _end_update(worker: Any) -> None:
    if getattr(worker, "_weight_update_active", False):
        worker._weight_update_active = False
        engine = getattr(worker, "weight_transfer_engine", None)
        reset = getattr(engine, "reset_weight_update_target", None)
        if reset is not None:
            reset()


def abort_update(worker: Any, reason: str) -> bool:
    """What `weightlife.abort` means for a worker: no model of it has an update open, and it knows that.

    Raises:
        SessionConflictError: a load call is inside now.
    """
    was_open = [life.abort_on_request(reason) for life in worker_lives(worker)]
    _end_update(worker)
    return any(was_open)


def sleep(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Level 2 drops the weights: there is no A until a complete update commits."""
    level = argument(args, kwargs, 0, "level")
    for life in worker_lives(instance):
        life.addresses.due()  # while everything is there to be looked at
    out = wrapped(*args, **kwargs)
    for life in worker_lives(instance):
        weights_sleep(life, 1 if level is None else int(level))
    return out


def weights_sleep(life: Lifecycle, level: int) -> None:
    """What a sleep means for one model."""
    if isinstance(life.host, VllmHost):
        life.host.asleep = True
    if level >= 2:
        why = reloadable.no_path(getattr(getattr(life.host, "vllm_config", None), "load_config", None))
        life.lost(f"a level-2 sleep dropped the weights{why and f', and {why}: send all tensors'}")


def wake_up(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Awake again, if the weights are among what wakes."""
    tags = argument(args, kwargs, 0, "tags")
    out = wrapped(*args, **kwargs)
    if not tags or "weights" in tags:
        for life in worker_lives(instance):
            if isinstance(life.host, VllmHost):
                life.host.asleep = False
                life.addresses.mirrors.after_wake()
    return out


def ray_variables(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Ray copies variables by name: ours too, and where workers are to set up telemetry what they need for it."""
    prefixes = ("WEIGHTLIFE", "OTEL_") if os.environ.get("WEIGHTLIFE_OTEL") == "1" else ("WEIGHTLIFE",)
    return wrapped(*args, **kwargs) | {name for name in os.environ if name.startswith(prefixes)}


def engine_step(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """A batch that the guard refused ends its requests with an error; the engine lives on."""
    caches.before_step(instance)
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        refusal = error if isinstance(error, errors.WeightlifeError) else errors.from_message(str(error))
        if not isinstance(refusal, (errors.PoisonedModelError, errors.EngineNotPausedError)):
            raise
        logging.getLogger("weightlife").error("requests were refused: %s", refusal)
        return fail_requests(instance), False


def fail_requests(core: Any) -> dict[int, Any]:
    """End every request of an engine core with finish reason `error`. Returns its outputs by client."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    queue = getattr(core, "batch_queue", None)
    if queue:
        queue.clear()
    outputs: dict[int, Any] = {}
    requests = list(core.scheduler.requests.values())
    ids = [request.request_id for request in requests]
    core.scheduler.finish_requests(ids, RequestStatus.FINISHED_ERROR)
    for request in requests:
        outputs.setdefault(request.client_index, []).append(
            EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
            )
        )
    return {client: EngineCoreOutputs(outputs=items) for client, items in outputs.items()}


def execute_model(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """A batch: the guard decides what it sees."""
    if lifecycle.OpenSessions.count == 0:
        return wrapped(*args, **kwargs)
    batch = argument(args, kwargs, 0, "scheduler_output")
    tokens = getattr(batch, "total_num_scheduled_tokens", 1)
    kind = guard.Pass.REAL if tokens > 0 else guard.Pass.DUMMY
    return guard.guarded(worker_lives(instance), kind, lambda: wrapped(*args, **kwargs))


def capture_model(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Graphs were captured: they read the present addresses as long as they live."""
    out = wrapped(*args, **kwargs)
    if runtime.installed() and not kwargs.get("profile_only"):
        for life in _lives(instance):
            why = life.host.adoptable() or ("graphs were captured" if out else None)
            if why is not None:
                from weightlife._engine import seal

                seal.sealed(life, why)
    return out


def run_on_a(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """A pass that changes nothing (dummy batch, warm-up) or the second half of one (sampling): runs on A."""
    if lifecycle.OpenSessions.count == 0:
        return wrapped(*args, **kwargs)
    return guard.guarded(worker_lives(instance), guard.Pass.DUMMY, lambda: wrapped(*args, **kwargs))


# -- the handshake ---------------------------------------------------------------------------------------------


def after_engine(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """An engine stands, or its core (an asynchronous front end can't ask from its constructor): do its workers run it?"""
    if not runtime.installed():
        return wrapped(*args, **kwargs)
    runtime.unproven(decide=True)
    out = wrapped(*args, **kwargs)
    remote.shake_hands(instance, runtime.settings().handshake)
    return out
