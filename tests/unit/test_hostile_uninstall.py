# SPDX-License-Identifier: Apache-2.0
"""What is left after `uninstall()`, what `observe` leaves alone, and a log that fails."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch

import weightlife
from tests.plainnet import INPUT, A, B, C, Net, copy_all, life_of, load, nets, outcome, push, served, serves
from weightlife import errors
from weightlife._engine import lifecycle

__all__ = ["nets"]

LOG = logging.getLogger("weightlife")


class TestUninstall:
    @pytest.mark.parametrize("mode", ["enforce", "observe"])
    def test_a_model_is_what_it_was(self, mode: str) -> None:
        plain = Net()
        attributes = set(vars(plain))
        weightlife.install(mode=mode)
        net = served()
        assert vars(net).keys() - attributes == {"_weightlife"}
        weightlife.uninstall()
        assert set(vars(net)) == attributes
        assert len(net._forward_pre_hooks) == len(net._forward_hooks) == 0
        assert len(net._forward_hooks_always_called) == 0
        assert lifecycle.of(net) is None
        assert serves(net) == "A"

    @pytest.mark.parametrize("mode", ["enforce", "observe"])
    def test_the_logger_is_what_it_was(self, mode: str) -> None:
        mine = logging.NullHandler()
        LOG.addHandler(mine)
        LOG.setLevel(logging.ERROR)
        try:
            weightlife.install(mode=mode, log_level="debug")
            assert LOG.level == logging.DEBUG
            weightlife.install(mode=mode, log_level="warning")
            LOG.addHandler(logging.NullHandler())  # the host's, shared
            weightlife.uninstall()
            assert LOG.level == logging.ERROR
            assert LOG.handlers == [mine]
        finally:
            LOG.removeHandler(mine)
            LOG.setLevel(logging.NOTSET)

    def test_a_poisoned_model_does_not_count_any_more(self) -> None:
        weightlife.install()
        net = served()
        life_of(net).poison("a test")
        weightlife.uninstall()
        assert lifecycle.OpenSessions.count == 0
        assert serves(net) == "A"

    def test_a_wrapped_loader_is_the_plain_one_for_models_that_it_loaded_before(self) -> None:
        """They are in kernel format: taking the next load for a first one would process them a second time."""
        weightlife.install()
        net = served()
        weightlife.uninstall()
        with pytest.raises(KeyError):  # the loader's own: the parameter is packed
            load(net, B)
        assert serves(net) == "A"
        load(net, B[4:])  # the loader's own, too: nobody holds it against anything
        assert torch.equal(net.n.weight, B[4][1])
        assert lifecycle.of(net) is None
        assert weightlife.wrap_loader(lambda model, weights: "mine")(net, []) == "mine"

    def test_a_model_that_was_never_loaded_has_its_first_load_before_it(self) -> None:
        weightlife.install()
        net = Net()
        weightlife.watch(net)
        weightlife.uninstall()
        load(net, A)
        load(net, B)
        assert serves(net) == "B"

    def test_memory_that_native_code_points_to_lives_as_long_as_the_model(self) -> None:
        weightlife.install()
        net = served()
        life = life_of(net)
        memory = torch.UntypedStorage(64)
        freed = []
        life.keep_alive.append((frozenset({id(net.a)}), memory))
        weakref.finalize(memory, freed.append, 1)
        weightlife.uninstall()
        del life, memory
        gc.collect()
        assert freed == []
        del net
        gc.collect()
        assert freed == [1]

    def test_the_hooks_of_somebody_else_stay(self) -> None:
        weightlife.install()
        net = Net()
        net.register_forward_pre_hook(lambda *_: None)
        load(net, A)
        net.register_forward_hook(lambda *_: None)
        weightlife.uninstall()
        assert len(net._forward_pre_hooks) == len(net._forward_hooks) == 1

    def test_wrapped_loaders_are_no_business_of_the_environment_variable(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WEIGHTLIFE", "0")
        weightlife.install()
        assert weightlife.status()["installed"] is False
        net = served()
        load(net, B)
        assert serves(net) == "B"


class TestObserve:
    def loads_as_the_host_does(self, net: Any) -> None:
        """A half load, which weightlife would refuse, changes half of the model, as without it."""
        load(net, B[5:])
        assert torch.equal(net.n.bias, B[5][1])
        assert torch.equal(net.n.weight, A[4][1])
        assert outcome(net) == "observed"

    def test_a_loader_that_asks_for_it(self) -> None:
        net = Net()
        weightlife.wrap_loader(mode="observe")(copy_all)(net, A)
        assert serves(net) == "A"
        self.loads_as_the_host_does(net)

    def test_the_installed_mode_may_change(self) -> None:
        weightlife.install()
        net = served()
        weightlife.observe()
        self.loads_as_the_host_does(net)
        weightlife.observe(False)
        with pytest.raises(errors.MissingTensorError):
            load(net, C[5:])
        load(net, C)
        assert serves(net) == "C"

    def test_a_model_built_while_observing_is_enforced_afterwards(self) -> None:
        weightlife.install(mode="observe")
        net = served()
        self.loads_as_the_host_does(net)
        weightlife.observe(False)
        load(net, C)
        assert (serves(net), outcome(net)) == ("C", "committed")

    def test_a_mode_of_its_own_stays(self) -> None:
        weightlife.install()
        net = Net()
        weightlife.wrap_loader(mode="observe")(copy_all)(net, A)
        self.loads_as_the_host_does(net)

    def test_chunks(self) -> None:
        net = Net()
        weightlife.wrap_loader(mode="observe", chunked=True)(copy_all)(net, A)
        assert serves(net) == "A"
        push(net, B[5:])
        assert outcome(net) == "observed"
        assert life_of(net).session is None


class TestLog:
    @pytest.mark.parametrize("how", ["filter", "handler"])
    def test_a_log_that_raises_undoes_nothing(self, how: str) -> None:
        def fails(*_: Any) -> bool:
            raise ValueError("a filter")

        handler = logging.Handler()
        handler.handle = fails  # type: ignore[method-assign]
        net = served()
        LOG.setLevel("INFO")
        LOG.addFilter(fails) if how == "filter" else LOG.addHandler(handler)
        try:
            load(net, B)
            assert life_of(net).session is None
            with pytest.raises(errors.MissingTensorError):
                load(net, C[:3])
            assert life_of(net).session is None
        finally:
            LOG.removeFilter(fails)
            LOG.removeHandler(handler)
            LOG.setLevel(logging.NOTSET)
        assert serves(net) == "B"
        load(net, A)
        assert serves(net) == "A"

    def test_nor_does_one_that_fails_at_a_note(self) -> None:
        """A pass that meets half an update says so in the log."""

        def fails(*_: Any) -> bool:
            raise ValueError("a filter")

        net = served()
        push(net, B[:1])
        LOG.addFilter(fails)
        try:
            assert serves(net) == "A"
            life_of(net).poison("a test")
        finally:
            LOG.removeFilter(fails)
        with pytest.raises(errors.PoisonedModelError):
            net(INPUT)
