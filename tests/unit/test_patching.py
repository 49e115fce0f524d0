# SPDX-License-Identifier: Apache-2.0
"""Seams: applied wherever a name is held, taken back to the identical object, inert afterwards."""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightlife.hosts import patching
from weightlife.hosts.patching import Patcher, Seam, SeamWrapper, sweep

_serial = itertools.count()

CORE = '''
"""The module that defines the targets."""
def function(x):
    return ("function", x)
def other(x):
    return ("other", x)
nothing = None
class Base:
    def method(self, x):
        return ("base", x)
    @classmethod
    def build(cls, x):
        return (cls.__name__, x)
    @staticmethod
    def plain(x):
        return ("plain", x)
class Child(Base):
    pass
class Overriding(Base):
    def method(self, x):
        return ("overriding", super().method(x))
'''
USER = "from .core import function, function as renamed\nfrom .core import Base\nclass Holder:\n    fn = staticmethod(function)\n"
LAZY = '''
"""A lazy module: touching an attribute imports the world."""
touched = []
def __getattr__(name):
    touched.append(name)
    raise AttributeError(name)
'''
RING = "def function(x):\n    return ('ring', x)\nfrom . import ring_user\n"
RING_USER = "from .ring import function as other\n"
SEALED = """
class Meta(type):
    def __setattr__(cls, name, value):
        raise TypeError("sealed")
class Sealed(metaclass=Meta):
    def method(self, x):
        return x
def f(x):
    return x
"""
CIRCULAR = "from . import installer\ndef function(x):\n    return ('circular', x)\n"


class Host:
    """A package on disk under a name of its own: wrapt keeps post-import hooks for ever."""

    def __init__(self, folder: Path) -> None:
        self.name = f"fakehost_{next(_serial)}"
        package = folder / self.name
        package.mkdir()
        files = {
            "__init__": "",
            "core": CORE,
            "user": USER,
            "late": USER,
            "lazy": LAZY,
            "circular": CIRCULAR,
            "sealed": SEALED,
            "ring": RING,
            "ring_user": RING_USER,
        }
        for name, text in files.items():
            (package / f"{name}.py").write_text(text, encoding="utf-8")
        self.calls: list[Any] = []

    def load(self, module: str) -> Any:
        return importlib.import_module(f"{self.name}.{module}")

    def loaded(self, module: str) -> bool:
        return f"{self.name}.{module}" in sys.modules

    def wrapper(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self.calls.append((wrapped.__name__, instance, args, kwargs))
        return ("wrapped", wrapped(*args, **kwargs))

    def seam(self, attribute: str, module: str = "core", **more: Any) -> Seam:
        return Seam(f"{module}:{attribute}", f"{self.name}.{module}", attribute, self.wrapper, **more)

    def patcher(self, *attributes: str) -> Patcher:
        return Patcher([self.seam(attribute) for attribute in attributes])


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.syspath_prepend(str(tmp_path))
    fake = Host(tmp_path)
    yield fake
    for name in [name for name in sys.modules if name.startswith(fake.name)]:
        del sys.modules[name]


def snapshot(*owners: Any) -> dict[tuple[str, str], Any]:
    """Every attribute of modules and of the classes in them."""
    out: dict[tuple[str, str], Any] = {}
    for owner in owners:
        for name, value in vars(owner).items():
            out[owner.__name__, name] = value
            if isinstance(value, type) and value.__module__.startswith("fakehost"):
                out.update({(value.__qualname__, key): item for key, item in vars(value).items()})
    return out


def assert_identical(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> None:
    assert before.keys() == after.keys()
    assert [key for key, value in before.items() if after[key] is not value] == []


ALL = ("function", "Base.method", "Base.build", "Base.plain", "Child.method", "Overriding.method")


class TestUndo:
    def test_every_attribute_is_identical(self, host: Host) -> None:
        modules = [host.load(name) for name in ("core", "user")]
        before = snapshot(*modules)
        patcher = host.patcher(*ALL)
        for _ in range(3):
            patcher.apply()
            assert vars(modules[0])["function"] is not before[modules[0].__name__, "function"]
            patcher.undo()
            assert_identical(before, snapshot(*modules))

    def test_a_wrapper_of_an_inherited_method_is_deleted_not_assigned(self, host: Host) -> None:
        core = host.load("core")
        patcher = host.patcher("Child.method")
        patcher.apply()
        assert "method" in vars(core.Child)
        assert "method" in vars(core.Base)
        assert not isinstance(vars(core.Base)["method"], SeamWrapper)
        patcher.undo()
        assert "method" not in vars(core.Child)
        assert core.Child().method(1) == ("base", 1)

    def test_names_taken_before_and_after(self, host: Host) -> None:
        core, user = host.load("core"), host.load("user")
        originals = {"f": core.function}
        patcher = host.patcher("function")
        patcher.apply()
        late = host.load("late")
        assert user.function(1) == user.renamed(1) == late.function(1) == late.renamed(1) == (
            "wrapped", ("function", 1),
        )  # fmt: skip
        patcher.undo()
        for module in (core, user, late):
            assert module.function is originals["f"]
        assert user.renamed is late.renamed is originals["f"]

    def test_modules_imported_after_undo_get_the_original(self, host: Host) -> None:
        patcher = host.patcher("function", "Base.method")
        patcher.apply()
        patcher.undo()
        core = host.load("core")
        assert isinstance(core.function, types.FunctionType)
        assert core.function(1) == ("function", 1)
        assert core.Base().method(1) == ("base", 1)
        assert host.calls == []

    def test_a_second_install_wraps_again_once(self, host: Host) -> None:
        first, second = host.patcher("function"), host.patcher("function")
        first.apply()
        first.undo()
        second.apply()
        core = host.load("core")
        assert core.function(1) == ("wrapped", ("function", 1))
        assert len(host.calls) == 1
        second.undo()
        assert isinstance(core.function, types.FunctionType)

    def test_what_somebody_else_put_there_since_is_left_alone(self, host: Host) -> None:
        core = host.load("core")
        patcher = host.patcher("function")
        patcher.apply()
        ours = core.function
        core.function = theirs = lambda x: ours(x)
        patcher.undo()
        assert core.function is theirs

    def test_without_apply_nothing_happens(self, host: Host) -> None:
        core = host.load("core")
        before = snapshot(core)
        host.patcher(*ALL).undo()
        assert_identical(before, snapshot(core))

    def test_class_met_at_run_time(self, host: Host) -> None:
        core = host.load("core")
        before = snapshot(core)
        patcher = host.patcher("function")
        patcher.apply()
        for cls in (core.Child, core.Child, core.Overriding, core.Base):
            patcher.wrap_class(cls, "method", host.wrapper)
        assert core.Child().method(1) == ("wrapped", ("base", 1))
        assert core.Base().method(1) == ("wrapped", ("base", 1))
        # Overriding calls super(): both are wrapped, each once.
        assert core.Overriding().method(1) == ("wrapped", ("overriding", ("wrapped", ("base", 1))))
        patcher.undo()
        assert_identical(before, snapshot(core))

    def test_class_met_at_run_time_when_not_active_is_left_alone(self, host: Host) -> None:
        core = host.load("core")
        before = snapshot(core)
        patcher = host.patcher("function")
        patcher.wrap_class(core.Base, "method", host.wrapper)
        patcher.apply()
        patcher.undo()
        patcher.wrap_class(core.Base, "method", host.wrapper)
        patcher.wrap_class(core.Base, "absent", host.wrapper)
        assert_identical(before, snapshot(core))

    @pytest.mark.parametrize("order", [("Base", "Child"), ("Child", "Base")])
    def test_child_of_a_wrapped_class_is_wrapped_once_in_any_order(
        self, host: Host, order: tuple[str, str]
    ) -> None:
        core = host.load("core")
        before = snapshot(core)
        patcher = host.patcher()
        patcher.apply()
        for name in order:
            patcher.wrap_class(getattr(core, name), "method", host.wrapper)
        assert core.Child().method(1) == ("wrapped", ("base", 1))
        assert len(host.calls) == 1
        patcher.undo()
        assert_identical(before, snapshot(core))

    def test_a_table_with_a_class_and_its_child_wraps_each_call_once(self, host: Host) -> None:
        core = host.load("core")
        patcher = host.patcher("Base.method", "Child.method")
        patcher.apply()
        assert core.Child().method(1) == ("wrapped", ("base", 1))
        patcher.undo()


class TestApply:
    def test_twice_is_once(self, host: Host) -> None:
        core = host.load("core")
        patcher = host.patcher(*ALL)
        patcher.apply()
        first = snapshot(core)
        patcher.apply()
        assert_identical(first, snapshot(core))
        assert core.function(1) == ("wrapped", ("function", 1))
        patcher.undo()

    def test_before_the_module_is_imported(self, host: Host) -> None:
        patcher = host.patcher("function", "Base.method", "Base.build", "Base.plain")
        patcher.apply()
        assert not host.loaded("core")
        core, user = host.load("core"), host.load("user")
        assert user.function(2) == ("wrapped", ("function", 2))
        assert core.Base().method(3) == ("wrapped", ("base", 3))
        assert core.Child.build(4) == ("wrapped", ("Child", 4))
        assert core.Base.plain(5) == ("wrapped", ("plain", 5))
        patcher.undo()
        assert core.Child.build(4) == ("Child", 4)
        assert core.Base.plain(5) == ("plain", 5)

    def test_the_wrapper_sees_the_instance_and_the_arguments(self, host: Host) -> None:
        core = host.load("core")
        patcher = host.patcher("Base.method")
        patcher.apply()
        base = core.Base()
        base.method(x=1)
        core.Base.method(base, 2)
        assert [(call[1], call[2], call[3]) for call in host.calls] == [
            (base, (), {"x": 1}),
            (base, (2,), {}),
        ]
        patcher.undo()

    def test_a_module_that_took_the_name_while_it_was_being_imported(self, host: Host) -> None:
        """It began after the wrapped module and ended before it."""
        patcher = Patcher([host.seam("function", "ring")])
        patcher.apply()
        host.load("ring")
        user = sys.modules[f"{host.name}.ring_user"]
        assert user.other(1) == ("wrapped", ("ring", 1))
        patcher.undo()
        assert user.other(1) == ("ring", 1)

    def test_install_in_the_middle_of_an_import(self, host: Host) -> None:
        """A plugin may install while the host's own module is half way through its imports."""
        patcher = Patcher([host.seam("function", "circular")])
        installer = types.ModuleType(f"{host.name}.installer")
        sys.modules[installer.__name__] = installer
        package = importlib.import_module(host.name)
        package.installer = installer  # type: ignore[attr-defined]

        class Finder:
            """Importing `installer` from the half-made module runs `apply`."""

            @staticmethod
            def find_spec(name: str, *_: Any) -> Any:
                if name == f"{host.name}.installer":
                    patcher.apply()
                    return importlib.machinery.ModuleSpec(name, Loader())  # type: ignore[arg-type]
                return None

        class Loader:
            @staticmethod
            def create_module(_: Any) -> Any:
                return None

            @staticmethod
            def exec_module(module: Any) -> None: ...

        del sys.modules[installer.__name__]
        del package.installer
        sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
        try:
            circular = host.load("circular")
        finally:
            sys.meta_path.remove(Finder)  # type: ignore[arg-type]
        patcher.apply()  # what was not there yet is found by the next call
        assert circular.function(1) == ("wrapped", ("circular", 1))
        assert patcher.failures == {}
        patcher.undo()

    def test_lazy_modules_are_not_touched(self, host: Host) -> None:
        host.load("core")
        lazy = host.load("lazy")
        patcher = host.patcher("function", "Base.method")
        patcher.apply()
        patcher.undo()
        assert lazy.touched == []

    @pytest.mark.parametrize("attribute", ["absent", "Absent.method", "Base.absent", "nothing"])
    def test_what_is_absent_is_said_and_does_not_raise(self, host: Host, attribute: str) -> None:
        core = host.load("core")
        before = snapshot(core)
        patcher = host.patcher(attribute, "function")
        patcher.apply()
        assert list(patcher.failures) == [f"core:{attribute}"]
        assert core.function(1) == ("wrapped", ("function", 1))
        patcher.undo()
        assert_identical(before, snapshot(core))

    def test_a_module_that_does_not_exist_waits(self, host: Host) -> None:
        patcher = Patcher([host.seam("function", "never")])
        patcher.apply()
        assert patcher.failures == {}
        patcher.undo()

    def test_added_attribute(self, host: Host) -> None:
        core = host.load("core")
        before = snapshot(core)

        def added(instance: Any, x: Any) -> Any:
            return ("added", x)

        patcher = Patcher([Seam("new", core.__name__, "Base._private", added, adds=True)])
        patcher.apply()
        patcher.apply()
        assert core.Child()._private(1) == ("added", 1)
        patcher.undo()
        assert_identical(before, snapshot(core))


class TestMissing:
    def test_required_and_absent(self, host: Host) -> None:
        host.load("core")
        patcher = Patcher([
            host.seam("function", required=True), host.seam("absent", required=True), host.seam("gone"),
            host.seam("nothing", required=True), host.seam("function", "late", required=True),
        ])  # fmt: skip
        patcher.apply()
        assert patcher.missing().keys() == {"core:absent", "core:nothing"}
        patcher.undo()
        assert patcher.missing() == {}

    def test_a_module_that_is_not_imported_is_decided_when_it_is(self, host: Host) -> None:
        patcher = Patcher([host.seam("absent", "late", required=True)])
        patcher.apply()
        assert patcher.missing(absent=True) == {}
        host.load("late")
        assert patcher.missing().keys() == {"late:absent"}
        patcher.undo()

    def test_a_module_that_is_half_way_through_its_import_is_not(self, host: Host) -> None:
        core = host.load("core")
        patcher = Patcher([host.seam("later", required=True)])
        core.__spec__._initializing = True
        patcher.apply()
        assert patcher.missing() == {}
        core.later, core.__spec__._initializing = core.function, False
        assert patcher.missing() == {}
        assert isinstance(core.later, SeamWrapper)
        patcher.undo()

    @pytest.mark.parametrize("module", ["never", "never.deeper"])
    def test_a_module_that_is_nowhere(self, host: Host, module: str) -> None:
        patcher = Patcher([host.seam("function", module, required=True)])
        patcher.apply()
        assert patcher.missing(absent=True) == {}  # nor is its package imported: who knows
        host.load("core")
        assert patcher.missing() == {}
        assert patcher.missing(absent=True).keys() == {f"{module}:function"}
        assert patcher.status()[0]["state"] == "module absent in this version"
        patcher.undo()

    @pytest.mark.parametrize("early", [True, False])
    def test_a_wrapping_that_fails_is_said_and_not_raised_into_the_import(
        self, host: Host, early: bool
    ) -> None:
        patcher = Patcher([host.seam("Sealed.method", "sealed", required=True), host.seam("f", "sealed")])
        if early:
            patcher.apply()
        sealed = host.load("sealed")
        patcher.apply()
        assert "TypeError" in patcher.missing()["sealed:Sealed.method"]
        assert patcher.status()[0]["state"].startswith("wrapping failed")
        assert sealed.f(1) == ("wrapped", 1)
        patcher.undo()
        assert sealed.Sealed().method(1) == 1
        assert type(sealed.f) is types.FunctionType

    def test_what_is_no_function_is_not_wrapped(self, host: Host) -> None:
        core = host.load("core")
        core.function = {"a": "table"}
        patcher = Patcher([host.seam("function", required=True), host.seam("function.x", required=True)])
        patcher.apply()
        assert patcher.missing()["core:function"].startswith("not callable")
        assert core.function == {"a": "table"}
        patcher.undo()


class TestStatus:
    def test_a_row_a_seam(self, host: Host) -> None:
        patcher = Patcher([
            host.seam("function", required=True, why="because"), host.seam("absent"), host.seam("function", "late"),
            host.seam("function", "never"),
        ])  # fmt: skip

        def states() -> list[str]:
            return [row["state"].split(":")[0] for row in patcher.status()]

        assert states()[:2] == ["waiting for import"] * 2
        importlib.import_module(host.name)
        host.load("core")
        patcher.apply()
        assert states() == [
            "wrapped", "absent in this version", "waiting for import", "module absent in this version",
        ]  # fmt: skip
        assert patcher.status()[0] == {
            "seam": "core:function", "target": f"{host.name}.core:function", "state": "wrapped", "required": True,
            "why": "because",
        }  # fmt: skip
        patcher.undo()
        assert states()[0] == "not applied"


class TestWrapper:
    def test_copies_and_pickles_as_what_it_wraps(self, host: Host) -> None:
        core = host.load("core")
        original = {"f": core.function}
        patcher = host.patcher("function", "Base.method")
        patcher.apply()
        assert copy.copy(core.function) is original["f"]
        assert copy.deepcopy([core.function])[0] is original["f"]
        assert core.function.__reduce_ex__(2) == "function"
        assert copy.deepcopy(core.Base()).method(1) == ("wrapped", ("base", 1))
        patcher.undo()

    def test_name_signature_and_documentation_are_the_hosts(self, host: Host) -> None:
        import inspect

        core = host.load("core")
        want = (core.function.__name__, core.function.__module__, str(inspect.signature(core.function)))
        patcher = host.patcher("function")
        patcher.apply()
        function = core.function
        assert (function.__name__, function.__module__, str(inspect.signature(function))) == want
        assert inspect.isfunction(function) or callable(function)
        patcher.undo()

    def test_the_hosts_exception_passes_unchanged(self, host: Host) -> None:
        core = host.load("core")
        patcher = host.patcher("function")
        patcher.apply()
        with pytest.raises(TypeError, match="positional argument"):
            core.function()
        patcher.undo()


def test_modules_of_others_are_looked_through_where_somebody_still_holds_the_original(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, looked = host.load("core"), []

    def noting(exchange: dict[int, Any], modules: Any = None) -> Any:
        looked.append((len(exchange), modules))
        return sweep(exchange, modules)

    monkeypatch.setattr(patching, "sweep", noting)
    user = types.ModuleType("somebody_elses")
    for held in (False, True):
        if held:
            vars(user)["mine"] = core.function
        monkeypatch.setitem(sys.modules, user.__name__, user)
        patcher = host.patcher("function")
        patcher.apply()
        near, everywhere = looked
        assert near[0] == 1
        assert core in near[1]
        assert user not in near[1]
        assert everywhere == (int(held), None)
        assert vars(user).get("mine") is (core.function if held else None)
        patcher.undo()
        looked.clear()
    assert vars(user)["mine"] is core.function
    assert type(core.function) is types.FunctionType


def test_sweep_replaces_and_tells_where() -> None:
    module = types.ModuleType("fakehost_sweep")
    old, new = object(), object()
    vars(module).update(a=old, b=old, c=1, __wrapped_old=old)
    sys.modules[module.__name__] = module
    try:
        assert sweep({id(old): (old, new)}) == {id(old): [(module, "a"), (module, "b")]}
        assert (vars(module)["a"], vars(module)["__wrapped_old"]) == (new, old)
    finally:
        del sys.modules[module.__name__]
