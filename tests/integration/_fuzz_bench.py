# SPDX-License-Identifier: Apache-2.0
"""An engine under fuzz: how a random stream is sent to it, and how what serves afterwards is judged."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class Interrupted(Exception):
    """Raised by a source; must come out unchanged."""


class Wrong(Exception):
    """A stream after which something else serves than may."""


Tensors = Mapping[str, Mapping[str, Any]]  # by side, then by name


def changed(value: Any, change: str) -> Any:
    """A tensor, changed as an item says."""
    import torch

    if change in ("float32", "float64"):
        return value.to(getattr(torch, change))
    if change == "as_float":
        return value.to(torch.float32)
    if change == "int8":
        return (value * 100).to(torch.int8)
    if change == "float8":
        return value.to(torch.float8_e4m3fn)
    if change == "transpose":
        return value.transpose(-1, -2).contiguous()
    if change == "short":
        longest = max(range(value.ndim), key=lambda d: value.shape[d])
        return value.narrow(longest, 0, value.shape[longest] - 1).contiguous()
    if change == "longer":
        longest = max(range(value.ndim), key=lambda d: value.shape[d])
        return torch.cat([value, value.narrow(longest, 0, 1)], longest)
    if change == "half_row":
        return value[..., : value.shape[-1] // 2].contiguous()
    if change == "one":
        return value.flatten()[:1].reshape([1] * value.ndim)
    if change == "scalar":
        return value.flatten()[0].clone()
    if change == "flat":
        return value.flatten()
    if change == "lead":
        return value.unsqueeze(0)
    return value


def source(tensors: Tensors, items: Sequence[Any], stop: int) -> Iterator[tuple[str, Any]]:
    """The items; a sender overwrites each tensor when the next one is asked for."""
    from weightlife.testing.worker_ext import spoil

    for place, item in enumerate(items):
        if place == stop:
            raise Interrupted("the trainer went away")
        tensor = changed(tensors[item.side][item.name].clone(), item.change)
        yield item.under, tensor
        spoil(tensor)
    if stop == len(items):
        raise Interrupted("the trainer went away")


class Bench:
    """An engine in this process, what serves on it, and how to send it anything."""

    def __init__(self, llm: Any, folders: Any, want: dict[str, Any], isolation: str) -> None:
        from weightlife.testing import checkpoints

        self.llm, self.folders, self.want = llm, folders, want
        self.staged = isolation == "staged"
        self.lean = False  # no undo: a failure poisons
        self.tensors = {side: checkpoints.tensors(Path(getattr(folders, side))) for side in ("a", "b")}
        self.facts: dict[str, Any] = {}
        self.serving: dict[str, str] = {}
        self.now: Any = None  # fingerprint of what serves
        self.references = 0
        self.poisonings = 0
        self.reach()

    # -- the engine --------------------------------------------------------------------------------------------

    def reach(self) -> None:
        """Find the model."""
        from weightlife._engine import lifecycle

        self.model = self.llm.collective_rpc(lambda worker: worker.model_runner)[0].get_model()
        self.life: Any = lifecycle.of(self.model)

    def state(self) -> dict[str, Any]:
        """Where weightlife stands."""
        life = self.life
        return {
            "generation": life.generation, "must": life.must_complete, "open": life.session is not None,
            "poisoned": bool(life.poisoned),
        }  # fmt: skip

    def abort(self) -> None:
        """Drop what is open."""
        self.life.abort()

    def forgive(self) -> None:
        """Forget what the client's next call would raise."""
        self.life.failed = None

    def start(self) -> None:
        self.llm.collective_rpc("weightlife_test_layerwise_start")

    def finish(self) -> None:
        self.llm.collective_rpc("weightlife_test_layerwise_finish")

    def chunk(self, items: Sequence[Any], stop: int) -> None:
        """One bare `load_weights`."""
        self.model.load_weights(source(self.tensors, items, stop))

    def by_iterator(self, items: Sequence[Any], stop: int) -> None:
        weights = source(self.tensors, items, stop)
        self.llm.collective_rpc(lambda worker: worker.model_runner.reload_weights(weights_iterator=weights))

    def by_path(self, folder: Path) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})

    def by_session(self, stream: Any) -> None:
        import weightlife

        with weightlife.session(self.model, partial="forbid"):
            self.calls(stream)

    def interrupted(self, error: BaseException | None) -> bool:
        """Whether the source's exception came out as it was."""
        return isinstance(error, Interrupted)

    # -- what is known -----------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Facts of the checkpoint's tensors, from the files and the manifest."""
        import weightlife

        manifest = weightlife.manifest(self.llm)
        groups = {name: i for i, group in enumerate(manifest.atomic_groups()) for name in group}
        shared = _shared(manifest)
        bound = self._bound(manifest)
        from fuzz_streams import Fact

        self.facts = {
            name: Fact(
                tuple(tensor.shape), tensor.is_floating_point() and tensor.element_size() > 1,
                8 * tensor.element_size(), bool(manifest.tensors[name].writes), groups.get(name, -1 - position),
                name in shared, bound.get(name, -1),
            )
            for position, (name, tensor) in enumerate(self.tensors["a"].items())
        }  # fmt: skip

    def routing(self, dummy: bool) -> str:
        """What is wrong with where headers said that names would go, or nothing."""
        import weightlife

        told = weightlife.manifest(self.llm, checkpoint=self.folders.b)
        differs = weightlife.manifest(self.llm).diff(told)
        if differs:
            return f"routed otherwise than loaded: {str(differs)[:300]}"
        if dummy:
            notes = " ".join(weightlife.last_report(self.llm).notes)
            if "it is what the headers had told" not in notes:
                return f"the first real load after a dummy start: {notes[:300]}"
        return ""

    def _bound(self, manifest: Any) -> dict[str, int]:
        """Names that are one value: large tensors that are equal, and what the model ties."""
        import torch

        out: dict[str, int] = {}
        large = [
            n for n, t in self.tensors["a"].items() if t.ndim == 2 and t.is_floating_point() and len(t) >= 256
        ]
        for i, one in enumerate(large):
            for other in large[i + 1 :]:
                x, y = self.tensors["a"][one], self.tensors["a"][other]
                if x.shape == y.shape and torch.equal(x, y):
                    out[other] = out.setdefault(one, i)
        for number, pair in enumerate(manifest.ties.items(), len(large)):
            if all(name in self.tensors["a"] for name in pair):
                out.update(dict.fromkeys(pair, number))
        # A head of its own beside embeddings may leave or enter a tie with its values: both from one side.
        if any(n.endswith("lm_head.weight") for n in large):
            rows = len(self.tensors["a"][next(n for n in large if n.endswith("lm_head.weight"))])
            same = [n for n in large if len(self.tensors["a"][n]) == rows]
            config = self.llm.llm_engine.model_config.hf_config
            if getattr(config, "tie_word_embeddings", False):
                out.update(dict.fromkeys(same, 10_000))
        return out

    # -- sending -----------------------------------------------------------------------------------------------

    def send(self, stream: Any) -> None:
        """Send a stream the way that it says."""
        if stream.entry == "iterator":
            self.by_iterator(stream.items, stream.stop)
        elif stream.entry == "path":
            with tempfile.TemporaryDirectory() as scratch:
                self.by_path(self.write(stream, Path(scratch) / "checkpoint"))
        elif stream.entry == "layerwise":
            self.start()
            self.calls(stream)
            self.finish()
        elif stream.entry == "session":
            self.by_session(stream)
        else:
            self.calls(stream)

    def calls(self, stream: Any) -> None:
        """One `load_weights` a call, a batch before one of them."""
        sent = 0
        for number, items in enumerate(stream.calls()):
            if number == stream.peek:
                self.peek()
            last = number == len(stream.cuts)
            stop = stream.stop - sent if 0 <= stream.stop - sent < len(items) + last else -1
            self.chunk(items, stop)
            sent += len(items)

    def peek(self) -> None:
        """A batch in an open session must be answered by what served before.

        Raises:
            Wrong: it was not.
        """
        from weightlife.testing import oracle

        got = oracle.fingerprint(self.llm)
        found = oracle.differences({**got, "ranks": []}, {**self.now, "ranks": []})
        if found:
            raise Wrong(f"a batch inside the session: {'; '.join(found[:3])}")

    def write(self, stream: Any, folder: Path) -> Path:
        """A checkpoint of the stream's tensors in as many shards as it has calls; repeats go to one of their own."""
        from safetensors.torch import save_file

        shutil.copytree(getattr(self.folders, stream.target), folder)
        for old in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
            old.unlink()
        shards: list[dict[str, Any]] = [{}]
        for item in stream.items:
            name = item.under
            place = next((i for i, shard in enumerate(shards) if name not in shard), len(shards))
            if place == len(shards):
                shards.append({})
            tensor = changed(self.tensors[item.side][item.name].clone(), item.change)
            shards[place][name] = tensor.contiguous()
        for number, shard in enumerate(shards):
            save_file(shard, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
        return folder

    # -- judging -----------------------------------------------------------------------------------------------

    def fingerprint(self) -> Any:
        from weightlife.testing import oracle

        return oracle.fingerprint(self.llm)

    def expected(self, serving: dict[str, str]) -> Any:
        """The fingerprint of a cold load; of a mixture, that of a complete reload, which is exact for A and B."""
        taken = {serving[name] for name, fact in self.facts.items() if fact.taken}
        if len(taken) == 1:
            return self.want[taken.pop()]
        from fuzz_streams import Item

        self.references += 1
        # What nothing takes follows the tensor that it is tied to.
        sides = {f.bound: serving[n] for n, f in self.facts.items() if f.taken and f.bound >= 0}
        items = [
            Item(
                name,
                serving[name] if self.facts[name].taken else sides.get(self.facts[name].bound, serving[name]),
            )
            for name in self.tensors["a"]
        ]
        self.by_iterator(items, -1)
        return self.fingerprint()

    def run(self, stream: Any) -> dict[str, Any]:
        """Send a stream, and its retry, and hold what serves against what may.

        Raises:
            Wrong: it does not.
        """
        from fuzz_streams import ACCEPT, REFUSE, Item, Stream, after, judge

        at = self.state()
        may = judge(stream, self.facts, must=at["must"])
        before = at["generation"]
        raised = _raised(lambda: self.send(stream))
        if isinstance(raised, Wrong):
            raise raised
        plain = not any(item.change or item.sent for item in stream.items)
        if stream.stop >= 0 and (raised is None or (plain and not self.interrupted(raised))):
            raise Wrong(f"the source's exception came out as {type(raised).__name__}: {str(raised)[:300]}")
        if stream.retry and stream.entry != "bare":
            outcome = ACCEPT if self.state()["generation"] > before else REFUSE
            if outcome not in may or (outcome == ACCEPT) is (raised is not None):
                raise Wrong(
                    f"outcome {outcome} before the retry, it must be {' or '.join(sorted(may))} ({raised!r})"
                )
        if stream.retry:
            if stream.entry == "bare" and raised is None and self.state()["open"]:
                may = may | {REFUSE}  # it may be dropped, or be overwritten in one session with the retry
            full = Stream(
                stream.retry, tuple(Item(name, stream.target) for name in self.tensors["a"]), stream.target
            )
            again = _raised(lambda: self.send(full))
            if again is not None:
                raise Wrong(f"the retry ({stream.retry}) raised {type(again).__name__}: {str(again)[:400]}")
            serving = dict.fromkeys(self.facts, stream.target)
            got = self.fingerprint()
            self.compare(got, self.want[stream.target], "after the retry")
            self.now, self.serving = got, serving
            return {"outcome": "retried", "raised": type(raised).__name__ if raised else ""}
        got = self.fingerprint()
        if self.state()["open"]:
            # An implicit update that is not whole. In place no batch runs; else it is answered by what served.
            if self.staged:
                self.compare({**got, "ranks": []}, {**self.now, "ranks": []}, "while an update is not whole")
            self.abort()
            got = self.fingerprint()
        now = self.state()
        outcome = ACCEPT if now["generation"] > before else REFUSE
        if raised is not None and outcome == ACCEPT:
            raise Wrong(f"committed and raised {type(raised).__name__}: {str(raised)[:300]}")
        if raised is None and outcome == REFUSE and stream.entry != "bare":
            raise Wrong("neither committed nor raised")
        if outcome not in may:
            said = f"{type(raised).__name__}: {str(raised)[:400]}" if raised else "nothing was raised"
            raise Wrong(f"outcome {outcome}, it must be {' or '.join(sorted(may))} ({said})")
        if now["poisoned"]:
            if outcome == ACCEPT or not self.lean:
                raise Wrong(f"poisoned after {outcome} ({raised!r})")
            self.heal(got, stream)
        elif outcome == REFUSE:
            self.compare(got, self.now, f"after a refusal ({type(raised).__name__ if raised else 'silent'})")
        else:
            self.serving = after(stream, self.facts, self.serving)
            want = self.expected(self.serving)
            self.compare(got, want, "after a commit")
            self.now = want
        self.forgive()
        return {
            "outcome": outcome,
            "raised": type(raised).__name__ if raised else "",
            "doubtful": len(may) > 1,
            "poisoned": now["poisoned"],
        }

    def heal(self, got: Any, stream: Any) -> None:
        """A model that a failure poisoned answers nothing; only a complete update makes it serve again.

        Raises:
            Wrong: it answered, took a partial update, or was not exact afterwards.
        """
        from fuzz_streams import Item, Stream

        self.poisonings += 1
        if any(got["tokens"]):
            raise Wrong("a poisoned model answered a batch")
        names = list(self.tensors["a"])
        part = Stream(
            "layerwise", tuple(Item(n, stream.target) for n in names[: len(names) // 2]), stream.target
        )
        if _raised(lambda: self.send(part)) is None or any(self.fingerprint()["tokens"]):
            raise Wrong("a poisoned model took a part of an update")
        entry = ("iterator", "layerwise", "bare")[self.poisonings % 3]
        full = Stream(entry, tuple(Item(name, stream.target) for name in names), stream.target)
        again = _raised(lambda: self.send(full))
        if again is not None:
            raise Wrong(
                f"a complete update ({entry}) did not heal: {type(again).__name__}: {str(again)[:400]}"
            )
        healed = self.fingerprint()
        if self.state()["poisoned"]:
            raise Wrong(f"still poisoned after a complete update ({entry})")
        self.compare(healed, self.want[stream.target], "after healing")
        self.now, self.serving = healed, dict.fromkeys(self.facts, stream.target)

    def compare(self, got: Any, want: Any, context: str) -> None:
        from weightlife.testing import oracle

        found = oracle.differences(got, want)
        if found:
            raise Wrong(f"{context}: {len(found)} differences: {'; '.join(found[:4])}")

    def reset(self) -> None:
        """Back to A.

        Raises:
            Wrong: A does not serve then.
        """
        self.abort()
        self.forgive()
        self.llm.collective_rpc("weightlife_test_zero_kv_cache")
        from fuzz_streams import Item

        self.by_iterator([Item(name, "a") for name in self.tensors["a"]], -1)
        self.now = self.fingerprint()
        self.compare(self.now, self.want["a"], "after a reset")
        self.serving = dict.fromkeys(self.facts, "a")


def _raised(call: Any) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what was raised is part of the verdict
        return error
    return None


def _shared(manifest: Any) -> set[str]:
    """Names some of whose elements are written by another name as well."""
    from weightlife._engine import ledger

    out: set[str] = set()
    by_storage: dict[int, list[tuple[str, Any]]] = {}
    for name, entry in manifest.tensors.items():
        for write in entry.writes:
            by_storage.setdefault(write.storage, []).append((name, ledger.Region(*write[1:])))
    for number, writes in by_storage.items():
        numel = manifest.storages[number].elements
        # A loader may write an element of its own twice (and transform it in place): each name counts once.
        once = {(name, part) for name, part in writes}
        masks = {name: ledger.counts(numel, [p for n, p in once if n == name]) > 0 for name, _ in once}
        total = sum(mask.astype(int) for mask in masks.values())
        out |= {name for name, mask in masks.items() if (total[mask] > 1).any()}
    return out
