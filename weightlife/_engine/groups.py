# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model have to be rebuilt together, and in which order groups of them fit into bounded memory.

Together are layers that share memory which a load writes or a hook makes (ties, views), that one source tensor writes,
that a late hook reads (a module below an attention layer), or that the host ties again before any hook. What can't be
read from the model, a hook that looks at another layer, is seen when it happens, and kept as a link.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightlife._engine import fill

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle


@dataclass
class Group:
    """Layers that are rebuilt together.

    Attributes:
        layers: ids of their modules.
        numbers: the constructor's storages that a complete load writes for them.
        names: source tensors that they need, in the order of the last complete load.
        nbytes: of those storages.
        path: of the first layer, for people.
        blind: layers that some hook changes, and nothing says which.
    """

    layers: set[int] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    nbytes: int = 0
    path: str = ""
    blind: bool = False


class _Sets:
    """Disjoint sets of module ids."""

    def __init__(self, items: Iterable[int]) -> None:
        self.parent = {item: item for item in items}

    def root(self, item: int) -> int:
        while self.parent[item] != item:
            self.parent[item] = self.parent[self.parent[item]]
            item = self.parent[item]
        return item

    def join(self, items: Iterable[int]) -> None:
        known = [self.root(item) for item in items if item in self.parent]
        for other in known[1:]:
            self.parent[self.root(other)] = self.root(known[0])


def of(life: Lifecycle) -> list[Group]:
    """The groups of a model after its first complete load: by source order, those that nothing is sent for last."""
    skeleton, manifest, host, plan = life.skeleton, life.manifest, life.host, life.plan
    layers = {ident for ident, layer in plan.layers.items() if layer.strategy != "refuse"}
    sets = _Sets(layers)
    for number, storage in enumerate(skeleton.storages):
        if number in manifest.expected or number in plan.rebuilt_storages:
            sets.join(storage.layers)
    for entry in manifest.names.values():
        sets.join(layer for number, _ in entry.writes for layer in skeleton.storages[number].layers)
    blind = set()
    together: list[int] = []
    late = host.ties_late()
    for ident in layers:
        module = skeleton.holders[ident].obj
        if host.is_deferred(module):
            sets.join([ident, *(id(child) for child in module.modules())])
        if late and host.layer_hook(module) is not None and not host.may_process_early(module):
            together.append(ident)
        if ident in plan.rebuild and not fill.has_hook(life, ident):
            above = fill._nearest_hooked(life, ident)
            if above in layers:
                sets.join([above, ident])
            else:
                blind.add(ident)
    sets.join(together)
    for link in life.links:
        sets.join(link)
    if host.has_model_hook():  # it may look at everything
        sets.join(layers)
    return _made(life, sets, layers, blind)


def _made(life: Lifecycle, sets: _Sets, layers: set[int], blind: set[int]) -> list[Group]:
    skeleton, manifest = life.skeleton, life.manifest
    found: dict[int, Group] = {}
    for entry_name, entry in manifest.names.items():
        owner = next(
            (o for number, _ in entry.writes for o in skeleton.storages[number].layers if o in layers), None
        )
        if owner is None:
            continue
        found.setdefault(sets.root(owner), Group()).names.append(entry_name)
    for ident in layers:
        group = found.setdefault(sets.root(ident), Group())
        group.layers.add(ident)
        group.path = group.path or life.layer_path(ident)
    for alias, canonical in life.aliases.items():
        # A tied partner writes nothing, and is held against what it is tied to.
        entry_ = manifest.names.get(alias)
        storage = skeleton.tensors[skeleton.named(canonical)].storage
        owner = next((o for o in skeleton.storages[storage].layers if o in layers), None)
        if entry_ is not None and not entry_.writes and owner is not None:
            found[sets.root(owner)].names.append(alias)
    for group in found.values():
        group.numbers = {
            number for number in manifest.expected if skeleton.storages[number].layers & group.layers
        }
        group.nbytes = sum(skeleton.storages[number].nbytes for number in group.numbers)
        hooked = any(fill.has_hook(life, ident) for ident in group.layers)
        group.blind = bool(blind & group.layers) and not hooked
    out = [group for group in found.values() if group.layers]
    # Those whose hook is not known come last: until then the hook of another layer may have shown that it is theirs.
    return sorted(out, key=lambda group: group.blind)


def merged(groups: Sequence[Group]) -> Group:
    """Several groups as one."""
    out = Group(path=groups[0].path, blind=all(group.blind for group in groups))
    for group in groups:
        out.layers |= group.layers
        out.numbers |= group.numbers
        out.names += group.names
        out.nbytes += group.nbytes
    return out


def batches(groups: Sequence[Group], limit: int) -> list[list[Group]]:
    """Groups in their order, as many at a time as stay below `limit` bytes; one alone may be above it.

    A batch costs a walk over the whole model (10 ms for 24 layers), whatever is in it.
    """
    out: list[list[Group]] = []
    size = 0
    for group in groups:
        if not out or group.blind != out[-1][-1].blind or size + group.nbytes > limit:
            out.append([])
            size = 0
        out[-1].append(group)
        size += group.nbytes
    return out


__all__ = ["Group", "batches", "merged", "of"]
