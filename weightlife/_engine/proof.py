# SPDX-License-Identifier: Apache-2.0
"""Does a model hold what a cold load of a source would hold? Group by group, in bounded memory, without touching it."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from weightlife import errors
from weightlife._engine import groups as grouping
from weightlife._engine import memory, pages, runtime
from weightlife._engine.arena import Arena
from weightlife._engine.completeness import nearest_clause
from weightlife._engine.equal import unequal
from weightlife._engine.ground import Ground
from weightlife._engine.groups import Group
from weightlife._engine.pages import Place
from weightlife._engine.pairing import Pairing
from weightlife._engine.rehearsal import LinkedError, OddLoaderError, Rehearsal
from weightlife._engine.skeleton import storage_key
from weightlife._names import prefix_clause
from weightlife._verification import Difference, RankVerification, Untold

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle

Pairs = Iterable[tuple[str, torch.Tensor]]
Instead = Callable[[str], torch.Tensor | None]
Weights = Callable[[set[str], Instead], Pairs]
Progress = Callable[[int, int], None]
"""Told of bytes that were rebuilt, and of all that will be."""


# For rounding, and for what the constructor makes and no load writes.
_SLACK = 1 << 20
# Bytes of a batch: more saves nothing, as the walk is made once; less costs 10 ms for each batch.
_BATCH = 1 << 27
_LEAST = 1 << 20
# Of a kernel's answer: a larger one is kept as a digest.
_KEPT_BYTES = 1 << 20


class Files(Protocol):
    """A source of which single tensors can be read."""

    def names(self) -> Sequence[str]:
        """All of them, in the order in which a load brings them."""

    def place(self, name: str) -> Place | None:
        """Where a tensor is, if its elements are bytes of a file."""

    def read(self, names: set[str], instead: Instead) -> Iterator[tuple[str, torch.Tensor]]:
        """Some of them, in that order; of each what `instead` has, if that is something.

        Their memory may stand for the model's, and be written to: it is given to nobody else, and who asks again gets
        the source's values.
        """


class _AgainError(Exception):
    """Groups were found to belong together: begin again with what is known now."""


class _Answer(NamedTuple):
    """What a kernel answered, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: bytes


def _kept(answer: torch.Tensor | None) -> torch.Tensor | _Answer | None:
    """An answer to be compared with a later one.

    A copy: a kernel may write its next answer where it wrote this one. Of a large one (5 MiB for a head of 152,000
    rows, beside all that its hook made) a digest, 0.5 ms a MiB.
    """
    if answer is None or answer.nbytes < _KEPT_BYTES:
        return None if answer is None else answer.clone()
    memory = answer.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return _Answer(tuple(answer.shape), answer.dtype, hashlib.sha256(memory).digest())


@dataclass
class _Proof:
    """One verification under way."""

    life: Lifecycle
    load: Callable[[Any], Any]
    found: RankVerification
    progress: Progress
    groups: list[Group]
    arena: Arena
    total: int = 0
    large: int = 0  # bytes of a batch above which nothing of it may be kept for the next one
    done: int = 0
    covered: set[Any] = field(default_factory=set)
    generation: int = 0
    ground: Ground | None = None
    files: pages.Files = field(default_factory=pages.Files)
    place: Callable[[str], Place | None] = lambda name: None
    lend: bool = True  # memory of a source that can be read again may stand for a copy of it
    own: bool = False  # all memory is PyTorch's own

    # -- one batch ---------------------------------------------------------------------------------------------

    def batch(self, groups: list[Group], weights: Weights, again: bool) -> None:
        """Rebuild and compare some groups.

        Args:
            groups: which.
            weights: gives their tensors, also a second time.
            again: the source can be read from the beginning.

        Raises:
            _AgainError: other groups belong to them. What loading or processing raises.
        """
        try:
            try:
                self._one(grouping.merged(groups), weights, lend=again and self.lend)
            except OddLoaderError:
                self.lend = False
                self._one(grouping.merged(groups), weights, lend=False)
            except (errors.WeightlifeError, OSError):
                raise
            except RuntimeError:  # what PyTorch and its kernels raise
                # A hook may need memory of PyTorch's own: it can be resized, and begins at a multiple of 64 bytes.
                if self.own:
                    raise
                self.own, self.lend, self.arena = True, False, Arena(0)
                self._one(grouping.merged(groups), weights, lend=False)
        except LinkedError as link:
            layer = link.layer
            if layer is None and len(groups) > 1:
                for group in groups:  # one at a time tells which it is
                    self.batch([group], weights, again)
                return
            mine = layer if layer is not None else next(iter(groups[0].layers))
            self.life.links.append((mine, link.other))
            if again:
                raise _AgainError from None
            path = self.life.layer_path(link.other)
            for group in groups:
                self._leave_out(
                    group, f"it needs {path}, which went by earlier; a second verification keeps both"
                )
                self.found.left_out += len(group.layers)
        for group in groups:
            self.done += group.nbytes
        self.progress(self.done, self.total)

    def _one(self, group: Group, weights: Weights, lend: bool) -> None:
        life = self.life
        with life.owned("verify"):
            quiet(life)
            if life.generation != self.generation:
                raise errors.SessionStateError(
                    "an update was committed while verify ran: what it had compared is of other weights",
                    model=life.name, hint="run it again when no update comes",
                )  # fmt: skip
            while True:
                rehearsal = Rehearsal(
                    life, group, life.host.has_model_hook(), self.arena, self._stood_upon(), lend,
                    self.place, self.files,
                )  # fmt: skip
                with rehearsal.opened():
                    if self._resized(rehearsal, group):
                        continue
                    self._rehearse(rehearsal, weights)
                if group.nbytes > self.large:
                    memory.trim()
                return

    def _stood_upon(self) -> Ground:
        """Generation A; looked at anew where anybody else had the model's turn, or a batch failed."""
        if self.ground is None or not self.ground.stands():
            self.let_go()
            started = time.perf_counter()
            with self.life.entered():
                self.ground = Ground(self.life)
            memory.trim()  # of headers and walks: 2 MiB that would stand beside the largest group
            self._spent("walk", started)
        return self.ground

    def let_go(self) -> None:
        """Hold nothing of the model any more."""
        if self.ground is not None:
            self.ground.drop()
        self.ground = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that serves, by path."""
        life = self.life
        ground = self.ground
        walked = None if ground is None or not ground.before else (ground.holders, ground.before)
        return runtime.tensors(
            life.model, life.host.skip, life.host.transient, life.addresses.declared.values(), walked
        )

    def _spent(self, phase: str, since: float) -> None:
        self.found.phases[phase] = self.found.phases.get(phase, 0.0) + time.perf_counter() - since

    def _resized(self, rehearsal: Rehearsal, group: Group) -> bool:
        """Whether a storage was exchanged for one of another size: its layers are left out, and named."""
        with self.life.entered():
            track = rehearsal.show().resized(group.numbers)
        if track is None or track.number is None:
            return False
        self.found.differ([Difference(track.path, "size", f"{track.nbytes} bytes serve")])
        owners = self.life.skeleton.storages[track.number].layers
        gone = {n for n in group.numbers if self.life.skeleton.storages[n].layers & owners}
        group.layers -= owners
        group.numbers -= gone
        written = self.life.manifest.names
        group.names = [n for n in group.names if not any(number in gone for number, _ in written[n].writes)]
        return True

    def _rehearse(self, rehearsal: Rehearsal, weights: Weights) -> None:
        life, group, found = self.life, rehearsal.group, self.found
        started = time.perf_counter()
        rehearsal.rebuild(
            self.load, self._counted(weights(set(group.names), rehearsal.pieces.instead)), trusted=True
        )
        rehearsal.phase(None)
        compared = time.perf_counter()
        with life.entered(), torch.no_grad():
            pairing = Pairing(rehearsal)
            pairing.compare()
            natives = self._natives(rehearsal, pairing)
        for record in rehearsal.report.phases:
            found.phases[record.name] = found.phases.get(record.name, 0.0) + record.seconds
        found.phases["rebuild"] = found.phases.get("rebuild", 0.0) + compared - started
        self._spent("compare", compared)
        found.differ([*(d for d in pairing.differences if not self._blind(d, group)), *natives])
        for untold in pairing.untold:
            found.tell(untold)
        found.tensors += pairing.tensors
        found.bytes += pairing.nbytes
        found.layers_compared += len(group.layers)
        self.covered |= pairing.covered

    def _blind(self, difference: Difference, group: Group) -> bool:
        if not group.blind:
            return False
        self.found.tell(Untold(difference.path, "a loader or a hook changes it, and which is not known"))
        return True

    def _counted(self, weights: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        size = self.done
        for name, tensor in weights:
            yield name, tensor
            size += tensor.numel() * tensor.element_size()
            self.progress(min(size, self.total), self.total)

    def _natives(self, rehearsal: Rehearsal, pairing: Pairing) -> list[Difference]:
        """Memory that no tensor owns, by what its kernels answer: B's first, then what serves."""
        life = self.life
        layers: dict[int, str] = {}
        for path, owners in pairing.natives.items():
            mine = owners & rehearsal.group.layers
            for ident in mine:
                layers.setdefault(ident, path)
            if not mine:
                self.found.tell(Untold(path, "native memory"))
        made: dict[int, torch.Tensor | _Answer | None] = {}
        for ident, path in layers.items():
            made[ident] = _kept(self._probe(ident, path))
        assert rehearsal.stage is not None
        rehearsal.stage.show_a()
        out = []
        for ident, path in layers.items():
            b = made.pop(ident)
            a = None if b is None else self._probe(ident, path)
            if a is None or b is None:
                continue
            self.found.probed += 1
            self.found.tell(Untold(path, "native memory, compared by its kernel's answers to 16 rows only"))
            if isinstance(b, _Answer):
                if b == _kept(a):
                    continue
                a = a.clone()
                rehearsal.stage.show_b()
                b = self._probe(ident, path)
                rehearsal.stage.show_a()
                if b is None:
                    continue
            differ = None if a.shape != b.shape or a.dtype != b.dtype else unequal(a, b)
            if a.shape != b.shape or a.dtype != b.dtype or differ is not None:
                count = differ.count if differ is not None else a.numel()
                name = life.layer_path(ident)
                out.append(
                    Difference(path, "native", f"the kernel of {name} gives other answers", count, a.numel())
                )
        return out

    def _probe(self, ident: int, path: str) -> torch.Tensor | None:
        layer = self.life.skeleton.holders[ident].obj
        try:
            answer = self.life.host.probe(layer)
        except Exception as error:  # noqa: BLE001 - said in the report; the comparison of everything else goes on
            why = f"native memory, and its kernel could not be asked ({errors.safe_text(error)})"
            self.found.tell(Untold(path, why))
            return None
        if answer is None:
            self.found.tell(Untold(path, "native memory"))
        return None if answer is None else answer.detach()

    def _leave_out(self, group: Group, why: str) -> None:
        for ident in group.layers:
            self.found.tell(Untold(self.life.layer_path(ident), why))


def quiet(life: Lifecycle) -> None:
    """Whether the model is in a state that can be compared.

    Raises:
        SessionStateError: an update is open, weights are asleep, or no complete load was seen. PoisonedModelError: it
        must not serve.
    """
    context: dict[str, Any] = {"model": life.name}
    if life.observed is not None:
        raise errors.SessionStateError(f"verify: this model is left to its host ({life.observed})", **context)
    if life.first is not None or life.manifest.provisional:
        raise errors.SessionStateError(
            "verify: no complete load of this model was seen, so nothing says what belongs to it", **context,
            hint="load it once from a real checkpoint (a dummy start is none)",
        )  # fmt: skip
    if life.poisoned:
        raise errors.PoisonedModelError(life.poisoned, **context)
    if life.session is not None:
        raise errors.SessionStateError(
            "verify while an update is open",
            session=life.session.id,
            hint="finish or abort it first",
            **context,
        )
    why = life.host.refuse_reason("verify")
    if why is not None:
        raise errors.SessionStateError(f"verify: {why}", **context)


def _chosen(groups: list[Group], share: float, seed: int) -> list[Group]:
    """A share of the groups, at least one, by seed; in their order."""
    if share >= 1:
        return groups
    count = max(1, round(share * len(groups)))
    picked = set(random.Random(seed).sample(range(len(groups)), count))
    return [group for index, group in enumerate(groups) if index in picked]


def prove(
    life: Lifecycle,
    source: Any,
    load: Callable[[Any], Any],
    *,
    what: str,
    share: float,
    seed: int,
    progress: Progress,
) -> RankVerification:
    """Compare.

    Args:
        life: the model's lifecycle.
        source: `Files`, or an iterable of (name, tensor), or a callable that gives one.
        load: the model's loader; takes an iterable.
        what: the source in words.
        share: of the groups.
        seed: chooses them.
        progress: see `Progress`.

    Raises:
        as `quiet`. MissingTensorError, UnexpectedTensorError: the source has other names than a complete load. What a
        loader, a hook or the source raises. In every case the model is as it was.
    """
    started = time.perf_counter()
    quiet(life)
    files = source if hasattr(source, "read") and hasattr(source, "names") else None
    limit = len(life.plan.layers) + 1
    while True:
        proof = _begin(life, load, what, share, seed, progress, files is not None)
        try:
            if files is not None:
                _names(life, files.names())
                proof.place = files.place
                # The largest first: what allocators keep of small ones for later would stand beside them.
                size = proof.large = _limit(proof)
                order = sorted(proof.groups, key=lambda g: (g.blind, -g.nbytes if g.nbytes > size else 0))
                for batch in grouping.batches(order, size):
                    proof.batch(batch, files.read, again=True)
            else:
                _stream(proof, source)
            _rest(proof)
        except _AgainError:
            limit -= 1
            if limit:
                continue
            raise errors.SessionStateError("verify: its groups never came to rest", model=life.name) from None
        finally:
            proof.let_go()
            proof.files.close()
            memory.trim()
        break
    proof.found.seconds = time.perf_counter() - started
    return proof.found


def _begin(
    life: Lifecycle, load: Any, what: str, share: float, seed: int, progress: Progress, random_access: bool
) -> _Proof:
    every = grouping.of(life)
    chosen = _chosen(every, share, seed)
    rank, world = life.host.rank()
    found = RankVerification(
        life.name, rank, world, life.generation, what, random_access, len(life.plan.layers), share=share, seed=seed,
        groups=len(chosen), largest_bytes=max((group.nbytes for group in chosen), default=0),
    )  # fmt: skip
    total = sum(group.nbytes for group in chosen)
    arena = Arena(found.largest_bytes + _SLACK)
    return _Proof(life, load, found, progress, chosen, arena, total, generation=life.generation)


def _limit(proof: _Proof) -> int:
    """Bytes of the groups of one batch: what is loaded and what hooks make of it stay below the largest group."""
    return max(min(proof.found.largest_bytes // 2, _BATCH), _LEAST)


def _names(life: Lifecycle, names: Sequence[str]) -> None:
    known, there = life.manifest.names, set(names)
    strange = [name for name in names if name not in known]
    if strange:
        raise errors.UnexpectedTensorError(
            f"{len(strange)} tensors of the source are in no complete load of this model"
            f"{nearest_clause(strange[0], known)}{prefix_clause(dict.fromkeys(names), known)}",
            model=life.name, tensors=strange, hint="verify against the format that the model was loaded from",
        )  # fmt: skip
    lacking = [name for name, entry in known.items() if entry.writes and name not in there]
    if lacking:
        raise errors.MissingTensorError(
            f"{len(lacking)} of {len(known)} tensors of a complete load are not in the source",
            model=life.name, tensors=lacking, hint="give the whole checkpoint",
        )  # fmt: skip


def _stream(proof: _Proof, source: Any) -> None:
    """A source that passes by once: what comes waits until its group is whole."""
    life = proof.life
    owner = {name: group for group in proof.groups for name in group.names}
    needed = {name for name, group in owner.items() if life.manifest.names[name].writes}
    waiting: dict[int, list[tuple[str, torch.Tensor]]] = {id(group): [] for group in proof.groups}
    lacking = {id(group): {n for n in group.names if n in needed} for group in proof.groups}
    seen: set[str] = set()
    ready: list[Group] = []
    held = 0

    def flush() -> None:
        nonlocal held
        if not ready:
            return
        tensors = [pair for group in ready for pair in waiting.pop(id(group))]
        proof.batch(list(ready), lambda names, _: [pair for pair in tensors if pair[0] in names], again=False)
        held -= sum(tensor.nbytes for _, tensor in tensors)
        ready.clear()

    for name, tensor in source() if callable(source) else source:
        if name not in life.manifest.names:
            _names(life, [name, *life.manifest.names])
        seen.add(name)
        group = owner.get(name)
        if group is None:
            continue
        if id(group) not in waiting:
            raise errors.SurplusTensorError(
                "a tensor came again after all of its layer had come and was compared",
                model=life.name, tensors=[name], hint="send each tensor once, and a tied partner before it",
            )  # fmt: skip
        waiting[id(group)].append((name, tensor.detach().clone()))  # the sender may use its buffer again
        held += tensor.nbytes
        proof.found.waiting_bytes = max(proof.found.waiting_bytes, held)
        lacking[id(group)].discard(name)
        if not lacking[id(group)] and group not in ready and all(n in seen for n in group.names):
            if sum(g.nbytes for g in ready) + group.nbytes > _limit(proof):
                flush()
            ready.append(group)
    _names(life, list(seen))
    ready += [group for group in proof.groups if id(group) in waiting and group not in ready]
    for batch in grouping.batches(list(ready), _limit(proof)):
        ready[:] = batch
        flush()


def _rest(proof: _Proof) -> None:
    """Name what was not compared."""
    life, found = proof.life, proof.found
    for layer in life.plan.refused:
        found.tell(Untold(layer.path, f"it can't be rebuilt: {layer.reason}"))
    compared = {ident for group in proof.groups for ident in group.layers}
    others = {life.layer_path(ident) for ident in life.plan.layers if ident not in compared}
    for path, tensor in proof.tensors():
        key = storage_key(tensor)
        view = (key, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        if key in proof.covered or view in proof.covered or tensor.numel() == 0:
            continue
        if any(path.startswith(f"{other}.") for other in others if other):
            continue  # counted by `layers` and `layers_compared`
        found.tell(
            Untold(
                path, "no load writes it and no hook makes it: it is as the constructor or a request left it"
            )
        )


__all__ = ["Files", "prove", "quiet"]
