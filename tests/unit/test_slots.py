# SPDX-License-Identifier: Apache-2.0
"""Slots: everything that an object can keep state in is read, compared and put back."""

from __future__ import annotations

import collections
import functools
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weightlife._engine import slots


class Plain:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("a", "b")


class SlottedChild(Slotted):
    __slots__ = "c"  # noqa: PLC0205 - a single name is legal


class SlottedWithDict(Slotted):
    """No `__slots__` of its own: has both."""


class PrivateSlots:
    __slots__ = ("__hidden", "_own")

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden

    def hidden(self) -> Any:
        return self.__hidden


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = 0


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    a: Any
    b: Any = 0


def closure(value: Any) -> Any:
    def inner() -> Any:
        return value

    return inner


def restore(obj: Any, target: slots.State) -> None:
    slots.write(obj, target, slots.differing(target, slots.read(obj)))


class TestRoundTrip:
    def test_plain_object(self) -> None:
        one, two = torch.ones(1), torch.zeros(1)
        obj = Plain(a=one, b=2, gone=3)
        before = slots.read(obj)
        obj.a, obj.b, obj.new = two, 5, 7
        del obj.gone
        assert set(slots.differing(before, slots.read(obj))) == {
            ("attr", "a"), ("attr", "b"), ("attr", "new"), ("attr", "gone"),
        }  # fmt: skip
        restore(obj, before)
        assert vars(obj) == {"a": one, "b": 2, "gone": 3}
        assert obj.a is one

    @pytest.mark.parametrize("cls", [Slotted, SlottedChild, SlottedWithDict])
    def test_slots_class(self, cls: type) -> None:
        obj: Any = cls()
        obj.a = one = torch.ones(1)
        before = slots.read(obj)
        assert before["slot", "a"] is one
        assert ("slot", "b") not in before
        obj.a, obj.b = torch.zeros(1), 1
        restore(obj, before)
        assert obj.a is one
        assert not hasattr(obj, "b")
        assert slots.read(obj) == before

    def test_single_slot_given_as_a_string(self) -> None:
        obj: Any = SlottedChild()
        obj.c = one = torch.ones(1)
        assert slots.read(obj)["slot", "c"] is one

    def test_private_slot_is_read_under_its_mangled_name(self) -> None:
        one = torch.ones(1)
        obj = PrivateSlots(one)
        before = slots.read(obj)
        assert any(value is one for value in before.values())
        object.__setattr__(obj, "_PrivateSlots__hidden", torch.zeros(1))
        restore(obj, before)
        assert obj.hidden() is one

    @pytest.mark.parametrize("cls", [Frozen, FrozenSlots])
    def test_frozen_dataclass(self, cls: Any) -> None:
        one = torch.ones(1)
        obj = cls(one)
        before = slots.read(obj)
        object.__setattr__(obj, "a", torch.zeros(1))
        restore(obj, before)
        assert obj.a is one

    def test_dict_keeps_values_and_order(self) -> None:
        one = torch.ones(1)
        obj: dict[Any, Any] = {"z": one, 1: 2, ("a", 3): 4}
        before = slots.read(obj)
        del obj["z"]
        obj["new"] = 5
        obj["z"] = torch.zeros(1)
        restore(obj, before)
        assert list(obj.items()) == [("z", one), (1, 2), (("a", 3), 4)]
        assert obj["z"] is one

    @given(st.lists(st.integers()), st.lists(st.integers()))
    def test_list_is_the_same_object_with_the_old_items(self, old: list[int], new: list[int]) -> None:
        obj = list(old)
        before = slots.read(obj)
        obj[:] = new
        restore(obj, before)
        assert obj == old

    @given(
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=6),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=6),
    )
    def test_any_change_of_attributes_is_undone(self, old: dict[str, int], new: dict[str, int]) -> None:
        obj = Plain()
        vars(obj).update(old)
        before = slots.read(obj)
        vars(obj).clear()
        vars(obj).update(new)
        restore(obj, before)
        assert vars(obj) == old
        assert slots.differing(before, slots.read(obj)) == []

    def test_closure_cell(self) -> None:
        one, two = torch.ones(1), torch.zeros(1)
        function = closure(one)
        before = slots.read(function)
        assert list(before.values()) == [one]
        function.__closure__[0].cell_contents = two
        restore(function, before)
        assert function() is one

    def test_cell_that_was_never_filled_is_no_slot(self) -> None:
        def outer() -> Any:
            def inner() -> Any:
                return later

            if inner is None:
                later = 1
            return inner

        assert slots.read(outer()) == {}

    def test_defaults_are_put_back(self) -> None:
        one, two = torch.ones(1), torch.zeros(1)

        def function(a: Any = one, *, b: Any = one) -> Any:
            return a, b

        before = slots.read(function)
        assert [value is one for value in before.values()] == [True, True]
        function.__defaults__, function.__kwdefaults__ = (two,), {"b": two}
        restore(function, before)
        assert function() == (one, one)
        assert function()[0] is one
        assert function()[1] is one

    def test_partial_and_bound_method_are_read(self) -> None:
        one = torch.ones(1)
        obj = Plain(a=one)
        partial = functools.partial(closure(one), one, key=one)
        assert sum(value is one for value in slots.read(partial).values()) == 2
        method = types_method(obj)
        assert slots.read(method)["bound", "__self__"] is obj

    def test_dict_and_list_subclasses_keep_their_attributes(self) -> None:
        class Table(dict):  # type: ignore[type-arg]
            pass

        one = torch.ones(1)
        obj: Any = Table(a=1)
        obj.tensor = one
        before = slots.read(obj)
        obj.tensor = torch.zeros(1)
        obj["a"] = 2
        restore(obj, before)
        assert obj == {"a": 1}
        assert obj.tensor is one


def types_method(obj: Any) -> Any:
    import types

    return types.MethodType(lambda self: self, obj)


class TestModule:
    def module(self) -> nn.Module:
        module = nn.Module()
        module.b = nn.Parameter(torch.ones(1))
        module.a = nn.Parameter(torch.zeros(1))
        module.register_buffer("buf", torch.ones(2))
        module.register_buffer("temp", torch.ones(3), persistent=False)
        module.child = nn.Linear(1, 1)
        module.plain = 3
        return module

    def test_every_kind_of_slot_is_read(self) -> None:
        module = self.module()
        state = slots.read(module)
        kinds = {kind for kind, _ in state}
        assert kinds == {"param", "buffer", "module", "set", "attr"}
        assert state["param", "a"] is module.a
        assert state["set", "_non_persistent_buffers_set"] == {"temp"}

    def test_training_and_hooks_are_no_slots(self) -> None:
        module = self.module()
        before = slots.read(module)
        module.eval()
        module.register_forward_pre_hook(lambda *args: None)
        assert slots.differing(before, slots.read(module)) == []

    def test_names_come_back_in_the_constructors_order(self) -> None:
        module = self.module()
        before = slots.read(module)
        order = [name for name, _ in module.named_parameters()], list(module.state_dict())
        first = module.b
        del module.b
        module.packed = nn.Parameter(torch.zeros(4))
        del module.temp
        module.register_buffer("temp", torch.zeros(3), persistent=True)
        restore(module, before)
        assert ([name for name, _ in module.named_parameters()], list(module.state_dict())) == order
        assert module.b is first
        assert not hasattr(module, "packed")
        assert list(module.buffers(recurse=False)) == [module.buf, module.temp]

    def test_what_the_engine_bound_later_stays(self) -> None:
        module = self.module()
        before = slots.read(module)
        module.a = nn.Parameter(torch.ones(5))
        module.kv_cache = cache = torch.zeros(2)
        module.late = late = nn.Parameter(torch.zeros(1))
        slots.write(module, before, [("param", "a")])
        assert module.a is before["param", "a"]
        assert module.kv_cache is cache
        assert module.late is late

    def test_parameter_that_became_an_attribute(self) -> None:
        module = self.module()
        before = slots.read(module)
        kept = module.a
        del module.a
        module.a = torch.zeros(1)  # a plain tensor: lives in __dict__ now
        restore(module, before)
        assert module.a is kept
        assert dict(module.named_parameters())["a"] is kept
        assert "a" not in vars(module)

    def test_swapped_children(self) -> None:
        module = self.module()
        before = slots.read(module)
        child = module.child
        module.child = nn.ReLU()
        restore(module, before)
        assert module.child is child

    def test_our_own_attribute_is_no_slot(self) -> None:
        module = self.module()
        before = slots.read(module)
        vars(module)[slots.RESERVED_ATTRIBUTE] = object()
        assert slots.differing(before, slots.read(module)) == []


class TestSame:
    @pytest.mark.parametrize(
        "value", [1, 1.5, "x", b"x", True, None, 2j, torch.float32, torch.Size([1]), float("nan")]
    )
    def test_equal_plain_data(self, value: Any) -> None:
        import copy

        assert slots.same(value, copy.copy(value))
        assert slots.same((value, (value,)), (value, (value,)))

    @pytest.mark.parametrize(("a", "b"), [(1, True), (1, 1.0), (0.0, None), ("1", 1), ((1,), [1])])
    def test_types_count(self, a: Any, b: Any) -> None:
        assert not slots.same(a, b)

    def test_nan_from_different_places(self) -> None:
        assert slots.same(float("nan"), float("inf") - float("inf"))

    def test_equal_tensors_are_not_the_same(self) -> None:
        assert not slots.same(torch.ones(1), torch.ones(1))

    def test_equal_lists_are_not_the_same_object(self) -> None:
        assert not slots.same([1], [1])

    def test_bound_methods_are_made_anew_by_each_access(self) -> None:
        a, b = Plain(), Plain()
        assert slots.same(slots_method(a), slots_method(a))
        assert not slots.same(slots_method(a), slots_method(b))


class HasMethod:
    def method(self) -> None: ...


def slots_method(key: Any, _cache: dict[int, HasMethod] = {}) -> Any:  # noqa: B006 - one object a key
    return _cache.setdefault(id(key), HasMethod()).method


class TestWalk:
    def found(self, model: nn.Module, **kwargs: Any) -> set[int]:
        _, states = slots.walk(model, **kwargs)
        return {id(v) for state in states.values() for v in state.values() if isinstance(v, torch.Tensor)}

    def holder(self, value: Any) -> nn.Module:
        module = nn.Module()
        module.value = value
        return module

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda t: t,
            lambda t: Plain(x=t),
            lambda t: [t],
            lambda t: (t,),
            lambda t: {"k": t},
            lambda t: collections.OrderedDict(k=t),
            lambda t: collections.defaultdict(list, k=[t]),
            lambda t: collections.deque([t]),
            lambda t: Frozen(t),
            lambda t: FrozenSlots(t),
            lambda t: closure(t),
            lambda t: functools.partial(print, t),
            lambda t: functools.partial(print, key=t),
            lambda t: types_method(Plain(x=t)),
            lambda t: Plain(a=Frozen([{"k": (t,)}])),
        ],
        ids=[
            "tensor", "object", "list", "tuple", "dict", "OrderedDict", "defaultdict", "deque", "frozen", "frozen slots",
            "closure", "partial", "partial keyword", "bound method", "nested",
        ],
    )  # fmt: skip
    def test_reaches_a_tensor(self, wrap: Any) -> None:
        tensor = torch.ones(1)
        assert id(tensor) in self.found(self.holder(wrap(tensor)))

    def test_depth_is_limited(self) -> None:
        tensor = torch.ones(1)
        value: Any = tensor
        for _ in range(slots.MAX_DEPTH):
            value = Plain(x=value)
        assert id(tensor) in self.found(self.holder(value))
        assert id(tensor) not in self.found(self.holder(Plain(x=value)))

    @pytest.mark.parametrize("deep_first", [True, False])
    def test_the_shortest_way_to_an_object_counts(self, deep_first: bool) -> None:
        tensor = torch.ones(1)
        near = Plain(x=Plain(y=tensor))
        far: Any = near
        for _ in range(slots.MAX_DEPTH - 1):
            far = Plain(x=far)
        module = nn.Module()
        for name in ("far", "near") if deep_first else ("near", "far"):
            setattr(module, name, {"far": far, "near": near}[name])
        assert id(tensor) in self.found(module)

    def test_cycles_end(self) -> None:
        a, b = Plain(), Plain()
        a.other, b.other, a.itself = b, a, a
        items: list[Any] = [a]
        items.append(items)
        holders, _ = slots.walk(self.holder(items))
        assert {id(a), id(b), id(items)} <= holders.keys()

    def test_a_module_that_refers_to_its_parent(self) -> None:
        parent, child = nn.Module(), nn.Module()
        parent.child = child
        object.__setattr__(child, "parent", parent)
        child.keep = [parent]
        holders, _ = slots.walk(parent)
        assert holders[id(parent)].owners == {id(parent)}

    def test_a_shared_object_has_all_its_owners(self) -> None:
        shared = Plain(inner=Plain(x=torch.ones(1)))
        model = nn.Module()
        model.a, model.b = self.holder(shared), self.holder([shared])
        model.c = nn.Module()
        holders, _ = slots.walk(model)
        assert holders[id(shared)].owners == {id(model.a), id(model.b)}
        assert holders[id(shared.inner)].owners == {id(model.a), id(model.b)}

    def test_modules_come_first_in_module_order(self) -> None:
        model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
        model.extra = Plain()
        holders, _ = slots.walk(model)
        wanted = [module for _, module in model.named_modules()]
        assert [holder.obj for holder in holders.values()][: len(wanted)] == wanted

    def test_skipped_objects_are_not_entered(self) -> None:
        tensor = torch.ones(1)
        foreign = Plain(x=tensor)
        assert id(tensor) not in self.found(self.holder(foreign), skip=lambda obj: obj is foreign)

    @pytest.mark.parametrize(
        "value", [weakref.ref(Plain), Plain, torch.float32, "text", torch.relu, len, int]
    )
    def test_leaves(self, value: Any) -> None:
        holders, _ = slots.walk(self.holder(value))
        assert len(holders) == 1

    def test_a_table_is_no_structure(self) -> None:
        holders, _ = slots.walk(self.holder(list(range(slots.MAX_ITEMS + 1))))
        assert len(holders) == 1

    def test_a_module_held_outside_the_tree_is_not_a_holder_of_its_own(self) -> None:
        # It has no place in named_modules(): a quant method that is a module is met by its attribute only.
        inner = nn.Linear(1, 1)
        model = self.holder([inner])
        holders, _ = slots.walk(model)
        assert id(model.value) in holders

    def test_paths_are_what_a_person_would_write(self) -> None:
        model = nn.Module()
        model.layer = self.holder(Plain(kernel=[{"w": Plain(x=1)}]))
        holders, _ = slots.walk(model)
        paths = {holder.path for holder in holders.values()}
        assert "layer.value.kernel[0]['w']" in paths


class TestOpaque:
    def test_only_a_finaliser_makes_an_owner(self) -> None:
        class Owner:
            def __del__(self) -> None: ...

        class Child(Owner): ...

        assert slots.is_opaque(Owner())
        assert slots.is_opaque(Child())
        assert not slots.is_opaque(Plain())
        assert not slots.is_opaque(nn.Linear(1, 1))
        assert not slots.is_opaque([])
