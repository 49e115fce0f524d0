# SPDX-License-Identifier: Apache-2.0
"""Does a hot-swapped engine equal one that was loaded cold? Exactly, or not at all.

    want = oracle.cold(folder_b)                 # stock vLLM, another process, cached on disk
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder_b)})
    oracle.assert_equal(oracle.fingerprint(llm), want)

A fingerprint holds greedy tokens and top-20 log-probabilities of a few prompts, and for each rank a
digest of every tensor that the model reaches: parameters, buffers, plain attributes, kernel objects,
containers, closures. Cold against cold differs by nothing, so no tolerance is needed and none is given.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from weightlife.testing import _modal
from weightlife.testing._poison import POISON_VARIABLE, poison, poisoned

if TYPE_CHECKING:
    from vllm import LLM

__all__ = [
    "EXTENSION",
    "POISON_VARIABLE",
    "PROMPTS",
    "assert_equal",
    "cold",
    "differences",
    "engine_arguments",
    "fingerprint",
    "poison",
    "poisoned",
]

Fingerprint = dict[str, Any]

EXTENSION: Final = "weightlife.testing.worker_ext.TestWorkerExtension"
"""The `worker_extension_cls` that `fingerprint` needs."""

# Fixed token ids below the smallest vocabulary that `checkpoints` makes; lengths 3, 17 and 40: below,
# near and above one 32-token block.
PROMPTS: Final[tuple[tuple[int, ...], ...]] = tuple(
    tuple(3 + (seed * 37 + i * i * 11 + i * 5) % 480 for i in range(length))
    for seed, length in ((1, 3), (2, 17), (3, 40))
)

_LOGPROBS: Final = 20
_MAX_TOKENS: Final = 8
_SHOWN: Final = 8  # differences that a message lists


def engine_arguments(folder: Path | str, **more: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a small deterministic engine on a CPU; `more` overrides them."""
    base: dict[str, Any] = {
        "model": str(folder),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 256,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
        # A few requests' worth: vLLM's smallest cache on a CPU is a GiB, which takes half a second to zero.
        "num_gpu_blocks_override": 256,
        "worker_extension_cls": EXTENSION,
        # Always there, so that an engine with and one without a transfer have one compile key.
        "weight_transfer_config": {"backend": "weightlife_test_folder"},
        "disable_log_stats": True,
        "seed": 0,
    }
    question = _modal.asked(folder)
    if question is not None:  # what it reads goes through a processor, which wants a tokenizer
        base |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {question["kind"]: 1}}
    return {**base, **more}


def fingerprint(llm: LLM) -> Fingerprint:
    """What `llm` answers and holds, as plain data that survives JSON.

    The prefix cache is emptied first: old blocks would answer for old weights. A model of `checkpoints` that reads
    images or audio is asked about one, too. The prompts run before the tensors are hashed, so that an update which ends with the next batch has ended.

    Keys: `tokens` (per prompt), `logprobs` (per prompt and position, [token, hexadecimal float] by rank)
    and `ranks` (per rank, what `_walk.digests` returns).

    Raises:
        RuntimeError: the prefix cache could not be reset.
    """
    from vllm import SamplingParams

    if llm.reset_prefix_cache() is False:
        raise RuntimeError("the prefix cache could not be reset: are requests running?")
    sampling = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, logprobs=_LOGPROBS, ignore_eos=True)
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": list(p)} for p in PROMPTS]
    question = _modal.asked(_folder(llm))
    if question is not None:
        prompts = [*([] if question["alone"] else prompts), _modal.prompt(question)]
    outputs = llm.generate(cast("Any", prompts), sampling, use_tqdm=False)
    tokens: list[list[int]] = []
    logprobs: list[list[list[list[Any]]]] = []
    for output in outputs:
        completion = output.outputs[0]
        tokens.append([int(t) for t in completion.token_ids])
        logprobs.append([_ranked(position) for position in completion.logprobs or ()])
    ranks = llm.collective_rpc("weightlife_test_fingerprint")
    return {"tokens": tokens, "logprobs": logprobs, "ranks": ranks}


def _folder(llm: Any) -> str:
    return str(getattr(getattr(getattr(llm, "llm_engine", None), "model_config", None), "model", ""))


def _ranked(position: Mapping[int, Any]) -> list[list[Any]]:
    # Hexadecimal: exact, and NaN is equal to itself, so that a NaN is reported as one and not as a
    # difference from itself.
    pairs = [[int(token), float(entry.logprob).hex()] for token, entry in position.items()]
    return sorted(pairs, key=lambda pair: (-_number(pair[1]), pair[0]))


def _number(text: str) -> float:
    value = float.fromhex(text)
    return value if value == value else float("-inf")


def differences(
    got: Fingerprint, want: Fingerprint, *, names: tuple[str, str] = ("got", "want")
) -> list[str]:
    """Every difference as a line; the most telling come first. Empty means equal and free of NaN."""
    out: list[str] = []
    nan = sum(v == "nan" for p in got["logprobs"] for position in p for _, v in position)
    if nan:
        out.append(f"{nan} log-probabilities are NaN")
    for prompt, (a, b) in enumerate(zip(got["tokens"], want["tokens"], strict=True)):
        step = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if step is not None:
            out.append(f"prompt {prompt} token {step}: {names[0]} {a[step]}, {names[1]} {b[step]}")
        elif len(a) != len(b):
            out.append(f"prompt {prompt}: {len(a)} tokens, {names[1]} {len(b)}")
    out += _logprob_differences(got["logprobs"], want["logprobs"], names)
    if len(got["ranks"]) != len(want["ranks"]):
        return [*out, f"{len(got['ranks'])} ranks, {names[1]} {len(want['ranks'])}"]
    for rank, (mine, theirs) in enumerate(zip(got["ranks"], want["ranks"], strict=True)):
        where = f"rank {rank} " if len(got["ranks"]) > 1 else ""
        out += _mapping_differences(f"{where}tensor", mine["tensors"], theirs["tensors"], names)
        out += _mapping_differences(f"{where}shared storage", mine["aliases"], theirs["aliases"], names)
        out += [f"{where}NaN in {p}" for p in mine["nan"] if p not in set(theirs["nan"])]
    return out


def _logprob_differences(got: Sequence[Any], want: Sequence[Any], names: tuple[str, str]) -> list[str]:
    for prompt, (mine, theirs) in enumerate(zip(got, want, strict=False)):
        for step, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            for place, (x, y) in enumerate(zip(a, b, strict=False)):
                if x != y:
                    left, right = float.fromhex(x[1]), float.fromhex(y[1])
                    mine_is, theirs_is = f"{left!r} (token {x[0]})", f"{right!r} (token {y[0]})"
                    where = f"prompt {prompt} step {step} logprob {place}"
                    return [f"{where}: {names[0]} {mine_is}, {names[1]} {theirs_is}"]
            if len(a) != len(b):
                return [f"prompt {prompt} step {step}: {len(a)} log-probabilities, {names[1]} {len(b)}"]
    return []


def _mapping_differences(
    what: str, got: Mapping[str, str], want: Mapping[str, str], names: tuple[str, str]
) -> list[str]:
    out = [
        f"{what} {path}: {names[0]} {got[path]}, {names[1]} {want[path]}"
        for path in got
        if _differs(path, got, want)
    ]
    out += [f"{what} {path}: missing" for path in want if path not in got]
    out += [f"{what} {path}: only in {names[0]}" for path in got if path not in want]
    return out


def _differs(path: str, got: Mapping[str, str], want: Mapping[str, str]) -> bool:
    return path in want and got[path] != want[path]


def assert_equal(got: Fingerprint, want: Fingerprint, context: str = "") -> None:
    """Fail unless the fingerprints are equal in every token, log-probability and tensor.

    Raises:
        AssertionError: with the first differing tokens, log-probabilities and paths.
    """
    found = differences(got, want)
    if found:
        raise AssertionError(summary(found, context))


def summary(found: Sequence[str], context: str = "", shown: int = _SHOWN) -> str:
    """A message of the first differences and how many there are."""
    head = f"{context}: " if context else ""
    more = [f"  ... and {len(found) - shown} more"] if len(found) > shown else []
    return "\n".join(
        [f"{head}{len(found)} differences from a cold load", *(f"  {f}" for f in found[:shown]), *more]
    )


def cold(
    folder: Path | str,
    *,
    environment: Mapping[str, str] | None = None,
    serve_as: Path | None = None,
    **engine_kwargs: Any,
) -> Fingerprint:
    """The fingerprint of a cold load of `folder` by stock vLLM, in a process of its own.

    weightlife is off there (`WEIGHTLIFE=0`) and uninitialised memory is poisoned, as it is in the engine
    under test. The answer is kept on disk by content of the folder, arguments and host version, below
    `$WEIGHTLIFE_TESTING_CACHE`.

    Args:
        folder: the checkpoint.
        environment: variables of the process.
        serve_as: a symbolic link to make and to load through. vLLM's compile cache is keyed by the path of
            the model: checkpoints that are served under one path share compiled code.
        engine_kwargs: arguments of `vllm.LLM`, over those of `engine_arguments`.

    Raises:
        RuntimeError: the process failed; its output is in the message.
    """
    from weightlife.testing import _cold

    return _cold.fingerprint_of(Path(folder), dict(engine_kwargs), dict(environment or {}), serve_as)


def cache_folder() -> Path:
    """Where cold fingerprints are kept: `$WEIGHTLIFE_TESTING_CACHE`, else below the user's cache folder."""
    chosen = os.environ.get("WEIGHTLIFE_TESTING_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "weightlife" / "testing"


def content_hash(folder: Path) -> str:
    """A hash of every file of a checkpoint folder: names and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(json.dumps([str(path.relative_to(folder)), path.stat().st_size]).encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
