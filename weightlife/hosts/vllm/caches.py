# SPDX-License-Identifier: Apache-2.0
"""What old weights computed is forgotten in the engine core, where scheduler and workers can forget it together.

Two caches outlive an update in vLLM 0.32. Blocks of keys and values, by the hash of their tokens: `reload_weights` and
`finish_weight_update` leave them. Outputs of encoders (images, audio), by the hash of the input: `finish_weight_update`
leaves them, so that the same image keeps its old embedding; `reload_weights` drops the workers' half alone, and the next
request for an image that the scheduler believes to be there kills the engine ("Encoder cache miss"; not after a reload
from another path, which is part of the hash).
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from weightlife.hosts import runtime
from weightlife.hosts.vllm import remote
from weightlife.hosts.vllm.calls import Args, Kwargs, argument

_COMMITTING = frozenset({"reload_weights", "finish_weight_update"})

# Engine core -> the generation of each rank's weights that encoder outputs in the caches are of.
_encoded_by: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
# Engine cores whose workers were asked for something that may have changed weights.
_to_ask: weakref.WeakSet[Any] = weakref.WeakSet()


def engine_rpc(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """A question to the workers: after an update, cached blocks and encoder outputs are of the old weights."""
    if not runtime.installed() or runtime.mode() != "enforce":
        return wrapped(*args, **kwargs)
    method = remote.method_of(argument(args, kwargs, 0, "method"), argument(args, kwargs, 2, "args"))
    if method != remote.METHOD and _encodes(instance):
        if instance not in _encoded_by:
            _encoded_by[instance], _ = _generations(instance)
        _to_ask.add(instance)
    out = wrapped(*args, **kwargs)
    if method in _COMMITTING:
        if _encodes(instance):
            forget_if_new(instance, anyway=True)  # the workers' half may be gone, whatever the weights did
        if not instance.reset_prefix_cache():
            logging.getLogger("weightlife").warning(
                "the prefix cache could not be reset after a weight update: requests are running on blocks of the old"
                " weights; call reset_prefix_cache() when they are done"
            )
    return out


def reset_prefix_cache(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """No block is in use any more: the moment to clear what a NaN episode left behind.

    Clients that push weights without an end call this when they are done, so encoder outputs go with it, if they are of
    other weights.
    """
    done = wrapped(*args, **kwargs)
    if done and runtime.installed() and runtime.mode() == "enforce":
        try:
            instance.model_executor.collective_rpc(remote.METHOD, args=("scrub", None))
        except Exception:
            logging.getLogger("weightlife").exception("the key-value caches could not be looked through")
        if instance in _to_ask:
            forget_if_new(instance)
    return done


def forget_if_new(core: Any, *, anyway: bool = False) -> None:
    """Forget encoder outputs if the weights changed since they were made.

    While an update without an end is open, each time: the batch that comes may be the one before which it commits.
    """
    now, is_open = _generations(core)
    if anyway or is_open or now != _encoded_by.get(core):
        _forget_encoded(core)
        _encoded_by[core] = now
    if not is_open:
        _to_ask.discard(core)


def before_step(core: Any) -> None:
    """A batch is about to be scheduled."""
    if core in _to_ask and core.scheduler.has_requests():
        forget_if_new(core)


def generations(worker: Any) -> list[int]:
    """What a worker answers: the sum of its models' generations, and whether an update is open."""
    from weightlife.hosts.vllm import seams

    lives = seams.worker_lives(worker)
    return [sum(life.generation for life in lives), int(any(life.session is not None for life in lives))]


def _generations(core: Any) -> tuple[list[int], bool]:
    try:
        answers = core.model_executor.collective_rpc(remote.METHOD, args=("generations", None))
    except Exception:
        # A worker without weightlife, where the handshake was switched off: no reason to end the engine.
        logging.getLogger("weightlife").exception(
            "the workers' weights could not be asked for: encoder outputs may be of old ones"
        )
        return [], False
    return [number for number, _ in answers], any(is_open for _, is_open in answers)


def _encodes(core: Any) -> bool:
    """Whether inputs of this engine are encoded by a part of the model, and the results kept."""
    return bool(getattr(core.vllm_config.model_config, "is_multimodal_model", False)) and hasattr(
        core.scheduler, "reset_encoder_cache"
    )


def _forget_encoded(core: Any) -> None:
    """Both halves. Requests that run are encoded again where they still need it.

    Not by `EngineCore.reset_encoder_cache`, which is the same and warns of requests that run.
    """
    core.scheduler.reset_encoder_cache()
    core.model_executor.reset_encoder_cache()
