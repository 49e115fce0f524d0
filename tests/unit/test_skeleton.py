# SPDX-License-Identifier: Apache-2.0
"""Skeletons: what the constructor made, without keeping its memory alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weightlife._engine import slots
from weightlife._engine.skeleton import SMALL_BYTES, Skeleton, Token, flat, storage_key, view_on

LARGE = SMALL_BYTES // 4 + 16  # float32 elements of a storage that is not cloned


class Special(nn.Parameter):
    """A parameter class of a framework, with state in `__dict__`."""


def skeleton(model: nn.Module, provisional: bool = False) -> Skeleton:
    return Skeleton(model, lambda obj: False, provisional)


def bag(**values: Any) -> nn.Module:
    module = nn.Module()
    for name, value in values.items():
        setattr(module, name, value)
    return module


def token(made: Skeleton, module: nn.Module, key: slots.Key) -> Token:
    value = made.states[id(module)][key]
    assert isinstance(value, Token)
    return value


class TestTensors:
    def test_geometry_class_and_attributes(self) -> None:
        param = Special(torch.zeros(4, 6).t(), requires_grad=False)
        param.weight_loader = loader = lambda *args: None  # type: ignore[attr-defined]
        module = bag(weight=param)
        made = skeleton(module)
        tensor = made.tensors[token(made, module, ("param", "weight")).index]
        assert (tensor.shape, tensor.stride, tensor.offset) == ((6, 4), (1, 6), 0)
        assert (tensor.dtype, tensor.cls, tensor.requires_grad) == (torch.float32, Special, False)
        assert tensor.attributes == {"weight_loader": loader}
        assert tensor.path == "weight"

    def test_a_tied_parameter_is_one_token(self) -> None:
        param = nn.Parameter(torch.zeros(3))
        a, b = bag(weight=param), bag(weight=param)
        made = skeleton(nn.Sequential(a, b))
        assert token(made, a, ("param", "weight")) == token(made, b, ("param", "weight"))
        assert len(made.storages) == 1
        assert made.storages[0].layers == {id(a), id(b)}

    def test_views_of_one_storage_share_its_number(self) -> None:
        base = torch.zeros(10)
        module = bag(whole=nn.Parameter(base), alias=base[2:], plain=base.view(2, 5), other=torch.zeros(10))
        module.register_buffer("buf", base[:3])
        made = skeleton(module)
        numbers = {t.path: t.storage for t in made.tensors}
        assert numbers["whole"] == numbers["alias"] == numbers["plain"] == numbers["buf"] != numbers["other"]
        assert len(made.storages) == 2
        assert sorted(made.tensors[i].offset for i in made.storages[numbers["whole"]].tensors) == [0, 0, 0, 2]

    def test_tensors_in_host_objects_belong_to_all_who_reach_them(self) -> None:
        shared = {"table": torch.zeros(3)}
        a, b = bag(config=shared), bag(config=[shared])
        made = skeleton(nn.Sequential(a, b))
        assert made.storages[0].layers == {id(a), id(b)}

    def test_storage_size_and_first_dtype(self) -> None:
        base = torch.zeros(8, dtype=torch.int8)
        module = bag(small=base[:2], wide=base.view(torch.int32))
        made = skeleton(module)
        assert len(made.storages) == 1
        storage = made.storages[0]
        assert (storage.nbytes, storage.numel, storage.dtype) == (8, 8, torch.int8)

    @pytest.mark.parametrize(
        "value",
        [
            nn.Parameter(torch.zeros(2, device="meta")),
            torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (3,)),
            nn.parameter.UninitializedParameter(),
        ],
        ids=["meta", "sparse", "lazy"],
    )
    def test_what_has_no_storage_is_named(self, value: torch.Tensor) -> None:
        made = skeleton(bag(weight=value))
        assert list(made.unsupported) == ["weight"]
        assert made.tensors == []

    def test_a_plain_attribute_on_the_meta_device_holds_nothing_to_restore(self) -> None:
        """A traced graph keeps such constants; refusing them refused every update of the model."""
        module = bag(weight=nn.Parameter(torch.zeros(2)), constant=torch.zeros(2, device="meta"))
        made = skeleton(module)
        assert not made.unsupported
        assert [tensor.path for tensor in made.tensors] == ["weight"]

    def test_zero_size_tensors(self) -> None:
        module = bag(empty=nn.Parameter(torch.zeros(0, 4)))
        made = skeleton(module)
        assert made.storages[0].nbytes == 0
        assert made.storages[0].numel == 0


class TestMemory:
    def test_no_tensor_is_kept_alive(self) -> None:
        module = bag(
            weight=nn.Parameter(torch.zeros(LARGE)), plain=torch.zeros(LARGE), items=[torch.zeros(LARGE)]
        )
        made = skeleton(module)
        refs = [weakref.ref(module.weight), weakref.ref(module.plain), weakref.ref(module.items[0])]
        del module.weight, module.plain
        module.items.clear()
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3
        assert made.table() == {}

    def test_a_tuple_of_tensors_is_not_kept_alive(self) -> None:
        module = bag(pair=(torch.zeros(LARGE), torch.zeros(LARGE)))
        made = skeleton(module)
        refs = [weakref.ref(value) for value in module.pair]
        module.pair = None
        gc.collect()
        assert [ref() for ref in refs] == [None, None]
        assert made.table() == {}

    def test_a_new_storage_at_a_freed_address_is_not_mistaken_for_the_old(self) -> None:
        module = bag(weight=nn.Parameter(torch.zeros(LARGE)))
        made = skeleton(module)
        key = storage_key(module.weight)
        module.weight = None
        for _ in range(50):
            fresh = torch.zeros(LARGE)
            assert made.table() == {}
            if storage_key(fresh) == key:
                break

    def test_table_knows_live_storages(self) -> None:
        module = bag(a=torch.zeros(3), b=torch.zeros(3))
        made = skeleton(module)
        assert made.table() == {
            storage_key(module.a): made.storage_of(module.a), storage_key(module.b): made.storage_of(module.b),
        }  # fmt: skip
        assert made.storage_of(torch.zeros(3)) is None


class TestConstructorValues:
    def flat_of(self, module: nn.Module, name: str) -> torch.Tensor:
        return flat(getattr(module, name).detach(), torch.float32)

    def test_small_storages_are_cloned_at_once(self) -> None:
        module = bag(scale=torch.tensor([-1.0, 2.0]))
        made = skeleton(module)
        module.scale.fill_(9)
        target = torch.zeros(2)
        assert made.fill_kept(0, target, None)
        assert target.tolist() == [-1.0, 2.0]

    @given(st.data())
    def test_sparse_values_come_back_where_nobody_wrote(self, data) -> None:
        holes = data.draw(st.sets(st.integers(0, LARGE - 1), max_size=20))
        values = torch.randn(LARGE, generator=torch.Generator().manual_seed(1))
        module = bag(weight=nn.Parameter(values.clone()))
        made = skeleton(module)
        written = np.ones(LARGE, dtype=bool)
        written[list(holes)] = False
        made.keep_unwritten(0, written)
        module.weight.data.fill_(0)
        target = torch.full((LARGE,), 5.0)
        assert made.fill_kept(0, target, ~written)
        want = torch.full((LARGE,), 5.0)
        want[torch.from_numpy(~written)] = values[torch.from_numpy(~written)]
        assert torch.equal(target, want)

    def test_sparse_values_cost_what_they_hold(self) -> None:
        made = skeleton(bag(weight=nn.Parameter(torch.zeros(LARGE))).requires_grad_(False))
        del made
        module = bag(weight=nn.Parameter(torch.zeros(LARGE)))
        made = skeleton(module)
        written = np.ones(LARGE, dtype=bool)
        written[:3] = False
        made.keep_unwritten(0, written)
        kept = made.storages[0].kept
        assert kept is not None
        assert kept.untyped_storage().nbytes() == 12

    def test_unknown_values_are_said_to_be_unknown(self) -> None:
        module = bag(weight=nn.Parameter(torch.zeros(LARGE)))
        made = skeleton(module)
        written = np.ones(LARGE, dtype=bool)
        written[:3] = False
        made.keep_unwritten(0, written)
        need = ~written
        need[10] = True
        assert not made.fill_kept(0, torch.zeros(LARGE), need)
        assert not made.fill_kept(0, torch.zeros(LARGE), None)

    def test_fully_covered_storages_store_nothing(self) -> None:
        module = bag(weight=nn.Parameter(torch.zeros(LARGE)))
        made = skeleton(module)
        assert made.storages[0].kept is None
        assert made.fill_kept(0, torch.zeros(LARGE), np.zeros(LARGE, dtype=bool))

    @pytest.mark.parametrize("value", [0.0, -1.0, float("inf")])
    def test_constant_storages_are_remembered_by_their_value_before_a_dummy_load(self, value: float) -> None:
        module = bag(weight=nn.Parameter(torch.full((LARGE,), value)))
        made = skeleton(module, provisional=True)
        module.weight.data.uniform_()
        target = torch.zeros(LARGE)
        assert made.fill_kept(0, target, None)
        assert (target == value).all()

    def test_a_storage_of_several_values_is_no_constant(self) -> None:
        made = skeleton(bag(weight=nn.Parameter(torch.arange(LARGE, dtype=torch.float32))), provisional=True)
        assert made.storages[0].constant is None
        assert not made.fill_kept(0, torch.zeros(LARGE), None)

    @pytest.mark.parametrize(
        "dtype", [torch.bfloat16, torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn]
    )
    def test_any_dtype(self, dtype: torch.dtype) -> None:
        module = bag(weight=torch.ones(8).to(dtype))
        made = skeleton(module)
        target = torch.zeros(8).to(dtype)
        assert made.fill_kept(0, target, None)
        assert torch.equal(target.float(), torch.ones(8))

    def test_values_of_a_view_are_those_of_the_whole_storage(self) -> None:
        base = torch.arange(6, dtype=torch.float32)
        made = skeleton(bag(part=base[2:4]))
        target = torch.zeros(6)
        made.fill_kept(0, target, None)
        assert torch.equal(target, base)


class TestViews:
    def test_flat_is_a_view_of_everything(self) -> None:
        base = torch.arange(6, dtype=torch.float32)
        out = flat(base[2:4].view(2, 1), torch.float32)
        out[0] = 9
        assert base[0] == 9
        assert out.shape == (6,)
        assert flat(base, torch.int16).shape == (12,)

    def test_view_on_has_the_geometry_asked_for(self) -> None:
        base = torch.arange(12, dtype=torch.float32)
        view = view_on(base.untyped_storage(), torch.float32, 2, (2, 3), (4, 1))
        assert torch.equal(view, base.as_strided((2, 3), (4, 1), 2))
        assert storage_key(view) == storage_key(base)
