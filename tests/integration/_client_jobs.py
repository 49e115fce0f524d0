# SPDX-License-Identifier: Apache-2.0
"""How RL frameworks drive vLLM, one small driver each, and what a child process does with them.

A driver makes the calls that the framework's own worker or trainer code makes, in its order and on the objects
that it touches; nothing of the framework is needed. It is a generator that yields wherever the framework is between
two calls, so that the engine can be stepped there. Whatever a framework reuses (a bucket, a live parameter) is
overwritten as soon as its call returned.
"""

from __future__ import annotations

import gc
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weightlife.testing._source import names, read
from weightlife.testing.transfer import BACKEND, FolderTransferEngine
from weightlife.testing.worker_ext import TestWorkerExtension, spoil

HERE = Path(__file__).resolve().parent
EXTENSION = "_client_jobs.ClientExtension"
BUCKETS = 5


class ClientExtension(TestWorkerExtension):
    """Worker side of the frameworks that ship a worker extension, under the method names that they use.

    Their data come over IPC or NCCL; here each call reads its tensors from a checkpoint folder into memory of its
    own, which is overwritten when the call ends.
    """

    def update_weight(self, folder: str, name: str, empty_cache: bool = False) -> None:
        """OpenRLHF: one broadcast tensor, one `load_weights`; `empty_cache` marks the last, and is ignored."""
        ((_, tensor),) = read(Path(folder), [name])
        weight = tensor.clone()
        self.model_runner.model.load_weights(weights=[(name, weight)])
        spoil(weight)
        del weight

    def update_weights_from_ipc(self, folder: str, bucket_bytes: int) -> None:
        """verl: buckets through one reused buffer, model and drafter, then the module-level processing."""
        model = self.model_runner.model
        _verl_patch_moe_loaders(model)
        buffer = torch.empty(bucket_bytes, dtype=torch.uint8)
        for bucket in _packed(folder, buffer):
            for target in self._client_models():
                target.load_weights(bucket)
            spoil(buffer)
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        with set_current_vllm_config(self.vllm_config):
            for target in self._client_models():
                process_weights_after_loading(target, self.model_config, self.device)

    def skyrl_start_weight_update(self) -> None:
        """SkyRL: its own element counter in both modules that bind it, then vLLM's begin."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, layerwise, meta

        layerwise.get_numel_loaded = meta.get_numel_loaded = _skyrl_get_numel_loaded
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            initialize_layerwise_reload(self.model_runner.model)

    def update_weights_ipc(self, folder: str, wanted: list[str]) -> None:
        """SkyRL: one chunk, views of one packed buffer that is released afterwards."""
        weights = [(name, tensor.clone()) for name, tensor in read(Path(folder), wanted)]
        self.model_runner.model.load_weights(weights=weights)
        for _, tensor in weights:
            spoil(tensor)

    def skyrl_finish_weight_update(self) -> None:
        """SkyRL: vLLM's end."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            finalize_layerwise_reload(self.model_runner.model, self.model_config)

    def update_weights_via_ipc_zmq(self, folder: str, wanted: list[str], lifecycle: bool = True) -> bool:
        """NeMo-RL: batches, then (IPC, collective) the module-level processing twice; an error becomes False."""
        try:
            for part in _parts(wanted):
                weights = [(name, tensor.clone()) for name, tensor in read(Path(folder), part)]
                for target in self._client_models():
                    target.load_weights(weights=weights)
                for _, tensor in weights:
                    spoil(tensor)
            if lifecycle:
                self._nemo_process()
                self._nemo_process()  # once more, as with an fp8 KV cache
        except Exception:
            traceback.print_exc()
            return False
        gc.collect()
        return True

    def prepare_refit_info(self) -> list[str]:
        """NeMo-RL: cache the live parameters once; returns names whose live layout is the checkpoint's own."""
        self._nrl_named_parameters = dict(self.model_runner.model.named_parameters())
        for name, parameter in self._nrl_named_parameters.items():
            loader = getattr(parameter, "weight_loader", None)
            if name.endswith(("w13_weight", "w2_weight")) and getattr(loader, "__self__", None) is None:
                raise RuntimeError(f"could not inspect the expert weight loader of {name}")
        whole = ("embed_tokens.weight", "norm.weight", "layernorm.weight")
        return [name for name in self._nrl_named_parameters if name.endswith(whole)]

    def nccl_reshard_refit(self, folder: str, direct: list[str]) -> bool:
        """NeMo-RL: what fits is received into the cached live parameters, the rest loaded, then processed."""
        try:
            with torch.no_grad():
                for name, tensor in read(Path(folder), direct):
                    self._nrl_named_parameters[name].data.copy_(tensor)
            rest = [name for name in names(Path(folder)) if name not in set(direct)]
            self.model_runner.model.load_weights(weights=list(read(Path(folder), rest)))
            self._nemo_process()
        except Exception:
            traceback.print_exc()
            return False
        return True

    def _nemo_process(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        with set_current_vllm_config(self.vllm_config):
            process_weights_after_loading(self.model_runner.model, self.model_config, self.device)

    def _client_models(self) -> list[Any]:
        drafter = getattr(getattr(self.model_runner, "drafter", None), "model", None)
        return [self.model_runner.model, *([] if drafter is None else [drafter])]


class VerlDeltaEngine(FolderTransferEngine):
    """verl's delta engine: each dense flush is a layerwise reload of its own."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: Any) -> None:
        """One dense flush."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        super().receive_weights(update_info)
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing is rebuilt."""


def _verl_patch_moe_loaders(model: Any) -> None:
    """verl re-attaches the experts' loader to their parameters before each sync."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name in ("w13_weight", "w2_weight") and hasattr(module, "weight_loader"):
                parameter.weight_loader = module.weight_loader


def _skyrl_get_numel_loaded(weight_loader: Callable[..., Any], args: Any) -> tuple[int, Any]:
    """SkyRL's replacement of vLLM's counter: counts by the loaded tensor, not by the copies."""
    loaded = args.arguments.get("loaded_weight")
    out = weight_loader(*args.args, **args.kwargs)
    return (loaded.numel() if isinstance(loaded, torch.Tensor) else 0), out


def _packed(folder: str, buffer: torch.Tensor) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Buckets of views into `buffer`; each bucket is valid until the next is asked for."""
    bucket: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, tensor in read(Path(folder), names(Path(folder))):
        size = -(-tensor.numel() * tensor.element_size() // 64) * 64
        if bucket and used + size > buffer.numel():
            yield bucket
            bucket, used = [], 0
        view = buffer[used : used + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        bucket.append((name, view))
        used += size
    yield bucket


def _parts(wanted: list[str], count: int = BUCKETS) -> Iterator[list[str]]:
    size = -(-len(wanted) // count)
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]


def shuffled(folder: Path) -> list[str]:
    """All names of a checkpoint, so mixed that q, k, v and their biases come in different buckets."""
    found = names(folder)
    random.Random(7).shuffle(found)
    return found


# -- the harness ---------------------------------------------------------------------------------------------------


@dataclass
class Rig:
    """One engine of one family, with the cold fingerprints of A and B."""

    llm: Any
    a: Path
    b: Path
    want: dict[Path, Any]
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def worker(self) -> Any:
        """The worker, as TRL reaches it."""
        return self.llm.llm_engine.model_executor.driver_worker

    @property
    def model(self) -> Any:
        """The model, as TRL reaches it."""
        return self.worker.model_runner.model

    def require(self, condition: bool, message: str) -> None:
        """Note a problem unless `condition`."""
        if not condition:
            self.problems.append(message)

    def equal(self, folder: Path, when: str) -> None:
        """The engine must equal a cold load of `folder` exactly."""
        from weightlife.testing import oracle

        found = oracle.differences(oracle.fingerprint(self.llm), self.want[folder])
        if found:
            self.problems.append(f"{when}: {len(found)} differences from a cold load of {folder.name}: {found[:4]}")

    def answers(self, folder: Path, when: str) -> None:
        """Tokens and log-probabilities must equal those of a cold load; between passes the tree may show B."""
        from weightlife.testing import oracle

        got = {**oracle.fingerprint(self.llm), "ranks": self.want[folder]["ranks"]}
        found = oracle.differences(got, self.want[folder])
        if found:
            self.problems.append(f"{when}: {len(found)} differences from a cold load of {folder.name}: {found[:4]}")

    def rpc(self, method: str, *args: Any) -> Any:
        """`collective_rpc` to the one worker."""
        return self.llm.collective_rpc(method, args=args)[0]

    def report(self) -> Any:
        """The last report."""
        import weightlife

        return weightlife.last_report(self.llm)

    def life(self) -> Any:
        """The engine's record of the model: the guard's table is about its session and generation."""
        from weightlife._engine import lifecycle

        return lifecycle.of(self.worker.model_runner.get_model())

    def add(self, tag: str, max_tokens: int = 20) -> list[str]:
        """Add the oracle's two short prompts (below one block: no prefix is cached) as running requests."""
        from vllm import SamplingParams

        from weightlife.testing import oracle

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=20, ignore_eos=True)
        for index, prompt in enumerate(oracle.PROMPTS[:2]):
            self.llm.llm_engine.add_request(f"{tag}-{index}", {"prompt_token_ids": list(prompt)}, sampling)
        return [f"{tag}-{index}" for index in range(2)]

    def steps(self, count: int | None = None) -> dict[str, Any]:
        """Step the engine; outputs of requests that finished, as plain data."""
        engine = self.llm.llm_engine
        out: dict[str, Any] = {}
        while engine.has_unfinished_requests() and (count is None or count > 0):
            for done in engine.step():
                if done.finished:
                    completion = done.outputs[0]
                    out[done.request_id.partition("-")[2]] = (
                        list(completion.token_ids),
                        completion.finish_reason,
                        [
                            sorted((int(t), float(e.logprob).hex()) for t, e in p.items())
                            for p in completion.logprobs or ()
                        ],
                    )
            count = None if count is None else count - 1
        return out


Driver = Callable[[Rig, Path], Iterator[None]]


# -- drivers -------------------------------------------------------------------------------------------------------


def trl_colocate(rig: Rig, folder: Path) -> Iterator[None]:
    """TRL: `param.data` of a float32 trainer, one call each, and `reset_prefix_cache` at the end."""
    for name, tensor in read(folder, names(folder)):
        trained = tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone()
        rig.worker.model_runner.model.load_weights([(name, trained)])
        spoil(trained)  # the next optimiser step
        yield
    rig.llm.reset_prefix_cache()


def trl_server(rig: Rig, folder: Path) -> Iterator[None]:
    """TRL server: start, one request for all tensors, finish, reset."""
    rig.rpc("start_weight_update")
    yield
    rig.rpc("update_weights", {"folder": str(folder), "names": shuffled(folder)})
    yield
    rig.rpc("finish_weight_update")
    rig.llm.reset_prefix_cache()


def trl_async_grpo(rig: Rig, folder: Path) -> Iterator[None]:
    """TRL AsyncGRPO, NeMo-RL dynamo: pause (which clears the caches), start, updates, finish, resume; no reset."""
    core = rig.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="keep")
    rig.rpc("start_weight_update")
    for part in _parts(shuffled(folder)):
        rig.rpc("update_weights", {"folder": str(folder), "names": part})
        yield
    rig.rpc("finish_weight_update")
    core.resume_scheduler()


def openrlhf(rig: Rig, folder: Path) -> Iterator[None]:
    """OpenRLHF: the cache is reset *before* the first tensor; one RPC each; the last says `empty_cache`."""
    rig.llm.reset_prefix_cache()
    order = names(folder)
    for name in order:
        rig.rpc("update_weight", str(folder), name, name == order[-1])
        yield


def verl_ipc(rig: Rig, folder: Path) -> Iterator[None]:
    """verl: all buckets and the processing inside one worker method, then three cache resets."""
    largest = max(t.numel() * t.element_size() for _, t in read(folder, names(folder)))
    yield
    rig.rpc("update_weights_from_ipc", str(folder), largest + 4096)
    rig.llm.reset_prefix_cache(reset_connector=True)
    rig.llm.reset_mm_cache()
    rig.llm.llm_engine.reset_encoder_cache()
    yield


def verl_delta_dense(rig: Rig, folder: Path) -> Iterator[None]:
    """verl delta, dense: a registered engine whose flush opens and closes a layerwise reload itself."""
    worker = rig.worker.worker
    worker.weight_transfer_engine.__class__ = VerlDeltaEngine
    try:
        rig.rpc("start_weight_update")
        yield
        rig.rpc("update_weights", {"folder": str(folder), "names": shuffled(folder)})
        rig.rpc("finish_weight_update")
    finally:
        worker.weight_transfer_engine.__class__ = FolderTransferEngine
    rig.llm.reset_prefix_cache()


def skyrl_ipc(rig: Rig, folder: Path) -> Iterator[None]:
    """SkyRL: its own bracket round chunks, then `reset_prefix_cache(reset_running_requests=True)`."""
    rig.rpc("skyrl_start_weight_update")
    yield
    for part in _parts(shuffled(folder)):
        rig.rpc("update_weights_ipc", str(folder), part)
        yield
    rig.rpc("skyrl_finish_weight_update")
    rig.llm.reset_prefix_cache(reset_running_requests=True)


def nemo_ipc(rig: Rig, folder: Path) -> Iterator[None]:
    """NeMo-RL IPC and collective: reset first, one worker method, which says whether it worked."""
    rig.llm.reset_prefix_cache()
    yield
    if not rig.rpc("update_weights_via_ipc_zmq", str(folder), names(folder)):
        raise RuntimeError("the refit returned False")


def nemo_checkpoint_engine(rig: Rig, folder: Path) -> Iterator[None]:
    """NeMo-RL checkpoint engine: cached parameters are inspected; batches; no processing and no end at all."""
    rig.rpc("prepare_refit_info")
    yield
    if not rig.rpc("update_weights_via_ipc_zmq", str(folder), shuffled(folder), False):
        raise RuntimeError("the refit returned False")


def nemo_nccl_reshard(rig: Rig, folder: Path) -> Iterator[None]:
    """NeMo-RL nccl reshard: straight into live parameters where their layout allows, then processing."""
    direct = [name for name in rig.rpc("prepare_refit_info") if name in set(names(folder))]
    yield
    if not rig.rpc("nccl_reshard_refit", str(folder), direct):
        raise RuntimeError("the refit returned False")


DRIVERS: dict[str, Driver] = {
    driver.__name__: driver
    for driver in (
        trl_colocate,
        trl_server,
        trl_async_grpo,
        openrlhf,
        verl_ipc,
        verl_delta_dense,
        skyrl_ipc,
        nemo_ipc,
        nemo_checkpoint_engine,
        nemo_nccl_reshard,
    )
}


# -- jobs ----------------------------------------------------------------------------------------------------------


def execute(
    family: str,
    scenarios: list[str],
    root: str,
    settings: dict[str, Any] | None,
    before: str = "",
    engine: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run scenarios one after the other on one engine of `family`; name -> problems and facts.

    Args:
        settings: arguments of `weightlife.install`; None runs stock vLLM (to check the drivers themselves).
        before: a scenario module function that runs before the engine is made (patches of a client).
        engine: more arguments of `LLM`.
    """
    import _client_scenarios as table

    from weightlife.testing import _cold, checkpoints, oracle

    a, b = checkpoints.pair(family, Path(root))
    want = {folder: oracle.cold(folder) for folder in (a, b)}
    os.environ[oracle.POISON_VARIABLE] = "1"
    oracle.poison()
    if settings is not None:
        import weightlife

        weightlife.install(**settings)
    if before:
        getattr(table, before)()
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    arguments = oracle.engine_arguments(a, worker_extension_cls=EXTENSION, **(engine or {}))
    llm = LLM(**arguments, weight_transfer_config=WeightTransferConfig(backend=BACKEND))
    _cold.KEEP.append(llm)
    rig = Rig(llm, a, b, want)
    out: dict[str, Any] = {}
    for name in scenarios:
        out[name] = {"problems": ["the process ended here"], "facts": {}}
        _note(out)
        rig.problems, rig.facts = [], {}
        started = time.monotonic()
        try:
            _back_to_a(rig, out)
            table.SCENARIOS[name](rig)
        except Exception as error:
            traceback.print_exc()
            rig.problems.append(f"raised {type(error).__name__}: {str(error)[:600]}")
            rig.problems.append(traceback.format_exc()[-1500:])
        rig.facts["seconds"] = round(time.monotonic() - started, 2)
        out[name] = {"problems": rig.problems, "facts": rig.facts}
        _note(out)
    return out


def _back_to_a(rig: Rig, out: dict[str, Any]) -> None:
    """What an earlier scenario left behind is none of this one's business."""
    engine = rig.llm.llm_engine
    engine.engine_core.engine_core.resume_scheduler()
    if engine.has_unfinished_requests():
        engine.abort_request([f"{tag}-{i}" for tag in ("one", "two", "ref", "fly") for i in range(2)])
        rig.steps(4)
    if len(out) > 1:
        for cache in rig.worker.model_runner.kv_caches:  # a NaN there would outlive the weights that made it
            cache.zero_()
        rig.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(rig.a)})


def _note(out: dict[str, Any]) -> None:
    import json

    scratch = os.environ.get("WEIGHTLIFE_TEST_SCRATCH")
    if scratch:
        (Path(scratch) / "progress").write_text(json.dumps(out))


def run(
    family: str,
    scenarios: list[str],
    root: Path,
    settings: dict[str, Any] | None,
    before: str = "",
    engine: dict[str, Any] | None = None,
    timeout: float = 180.0,
) -> dict[str, Any]:
    """`execute` in a child; when it crashes, the scenarios after the crash get another child."""
    from weightlife.testing import _cold, checkpoints, oracle

    for folder in checkpoints.pair(family, root):
        oracle.cold(folder)
    left, out = list(scenarios), {}
    while left:
        order = {
            "call": "_client_jobs:execute",
            "path": [str(HERE)],
            "arguments": {
                "family": family,
                "scenarios": left,
                "root": str(root),
                "settings": settings,
                "before": before,
                "engine": engine or {},
            },
            "environment": {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "WEIGHTLIFE_TESTING_CACHE": os.environ.get("WEIGHTLIFE_TESTING_CACHE", ""),
                "WEIGHTLIFE_POISON": "1",
                **({"WEIGHTLIFE": "0"} if settings is None else {}),
            },
        }
        try:
            out.update(_cold.run(order, timeout=timeout))
            break
        except _cold.JobError as error:
            reached = error.progress or {left[0]: {"problems": [], "facts": {}}}
            last = next(reversed(reached))
            reached[last]["problems"] = [f"the process ended with {error.how}", error.output[-2000:]]
            out.update(reached)
            left = [name for name in left if name not in out]
    return out
