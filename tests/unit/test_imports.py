# SPDX-License-Identifier: Apache-2.0
"""What imports what: the package is cheap to import, arrows point down, and public names stay what they are."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weightlife

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "weightlife"
HEAVY = ("torch", "vllm", "triton", "opentelemetry.sdk", "numpy", "transformers")

PURE = (
    "weightlife._casts", "weightlife._declared", "weightlife._finders", "weightlife._manifest", "weightlife._names",
    "weightlife.source_checks",
)  # fmt: skip
"""What the engine, hosts and trainers share: plain data and questions to it."""

# Child modules that need what is no dependency of ours.
NEEDS = {
    "weightlife.testing.worker_ext": "vllm",
    "weightlife.testing.transfer": "vllm",
    "weightlife.otel.instrumentor": "opentelemetry.instrumentation",
}


def submodules() -> list[str]:
    return sorted(
        name
        for _, name, _ in pkgutil.walk_packages([str(PACKAGE)], "weightlife.", onerror=lambda name: None)
        if not name.startswith("weightlife.cli.")
    )


def sources(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions and by name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def child(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


class TestCheap:
    @pytest.mark.parametrize(
        "code",
        [
            "import weightlife",
            "import weightlife; weightlife.errors.CODES, dir(weightlife)",
            "import weightlife; weightlife.install, weightlife.uninstall, weightlife.status, weightlife.observe",
            "import weightlife; weightlife.install(); weightlife.status(); weightlife.uninstall()",
            "import weightlife.hosts.vllm.plugin as p; p.register()",
            "import weightlife.config, weightlife.errors, weightlife.report, weightlife._engine.events",
        ],
    )
    def test_loads_neither_torch_nor_the_host_nor_the_sdk(self, code: str) -> None:
        loaded = child(f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))")
        roots = {
            name for name in loaded if name in HEAVY or name.startswith(tuple(f"{heavy}." for heavy in HEAVY))
        }
        assert roots == set()

    def test_a_senders_side_loads_neither_host_nor_engine_nor_compiler(self) -> None:
        loaded = child("import sys, json, weightlife.digests\nprint(json.dumps(sorted(sys.modules)))")
        foreign = (
            "vllm",
            "triton",
            "numba",
            "transformers",
            "opentelemetry",
            "weightlife._engine",
            "weightlife.hosts",
        )
        assert [name for name in loaded if name in foreign] == []

    def test_the_bare_import_loads_a_handful_of_its_own_modules(self) -> None:
        loaded = child("import sys, json, weightlife\nprint(json.dumps(sorted(sys.modules)))")
        assert [name for name in loaded if name.startswith("weightlife")] == [
            "weightlife", "weightlife._errortext", "weightlife._version", "weightlife.errors",
        ]  # fmt: skip

    def test_a_first_load_does_without_what_only_updates_need(self) -> None:
        loaded = child(
            "import sys, json, weightlife.hosts.vllm.seams\nprint(json.dumps(sorted(sys.modules)))"
        )
        assert "weightlife._engine.first_load" in loaded
        engine = (
            "session",
            "stage",
            "storage",
            "streaming",
            "seal",
            "trust",
            "routing",
            "announce",
            "export",
        )
        late = {
            *(f"weightlife._engine.{name}" for name in engine),
            "weightlife.digests",
            "weightlife._manifest",
        }
        assert sorted(late.intersection(loaded)) == []


class TestSubmodules:
    @pytest.mark.parametrize("name", submodules())
    def test_imports(self, name: str) -> None:
        if name in NEEDS:
            assert (PACKAGE / name.removeprefix("weightlife.").replace(".", "/")).with_suffix(".py").exists()
            return
        assert importlib.import_module(name).__name__ == name

    def test_importing_them_all_does_not_import_the_host(self) -> None:
        names = [name for name in submodules() if name not in NEEDS]
        code = f"import sys, json, importlib\nfor n in {names!r}: importlib.import_module(n)\n"
        loaded = child(code + "print(json.dumps([n for n in sys.modules if n.partition('.')[0] == 'vllm']))")
        assert loaded == []


class TestPublicNames:
    def test_all_is_what_dir_shows_sorted_and_without_doubles(self) -> None:
        assert dir(weightlife) == sorted(weightlife.__all__)
        assert len(set(weightlife.__all__)) == len(weightlife.__all__)

    @pytest.mark.parametrize("name", weightlife.__all__)
    def test_is_the_same_object_at_every_access_whatever_was_imported(self, name: str) -> None:
        first = getattr(weightlife, name)
        for module in submodules():
            if module not in NEEDS:
                importlib.import_module(module)
        assert getattr(weightlife, name) is first
        assert getattr(weightlife, name) is first

    @pytest.mark.parametrize("name", weightlife.__all__)
    def test_never_equals_a_submodule_unless_it_is_that_submodule(self, name: str) -> None:
        public = getattr(weightlife, name)
        if f"weightlife.{name}" in submodules():
            assert isinstance(public, ModuleType)
            assert public is importlib.import_module(f"weightlife.{name}")
        else:
            assert not isinstance(public, ModuleType)

    def test_names_and_types_agree_with_what_a_checker_sees(self) -> None:
        """The block for type checkers imports exactly the lazy names, from where they are."""
        tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
        typed: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                for item in node.body:
                    if isinstance(item, ast.ImportFrom):
                        typed.update({alias.name: str(item.module) for alias in item.names})
        assert typed == weightlife._LAZY
        assert set(weightlife._LAZY) | {"__version__", "errors"} == set(weightlife.__all__)

    def test_an_unknown_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="instal"):
            _ = weightlife.instal  # type: ignore[attr-defined]

    def test_star_import(self) -> None:
        names: dict[str, Any] = {}
        exec("from weightlife import *", names)
        assert set(weightlife.__all__) <= names.keys()


class TestArrows:
    @pytest.mark.parametrize("path", sources("_engine"), ids=lambda path: path.name)
    def test_the_engine_knows_neither_the_host_nor_who_listens(self, path: Path) -> None:
        allowed = ("weightlife._engine", "weightlife.hosts.protocol", "weightlife.report", "weightlife.errors",
                   "weightlife.config", "weightlife.digests", "weightlife.kernels", "weightlife._verification", *PURE)  # fmt: skip
        for name in imports(path):
            assert name.partition(".")[0] not in (
                "vllm",
                "triton",
                "opentelemetry",
                "transformers",
                "wrapt",
            ), name
            if name.startswith("weightlife.") and name != "weightlife.errors":
                assert name.startswith(allowed), f"{path.name} imports {name}"

    @pytest.mark.parametrize("name", PURE)
    def test_pure_modules_need_the_standard_library_only(self, name: str) -> None:
        path = PACKAGE / f"{name.removeprefix('weightlife.')}.py"
        for other in imports(path):
            root = other.partition(".")[0]
            allowed = ("weightlife.errors", *PURE)
            if other == "weightlife":
                continue  # `from weightlife import errors`: its parts follow
            assert root in sys.stdlib_module_names or other.startswith(allowed), other

    def test_ledger_is_pure(self) -> None:
        found = set(imports(PACKAGE / "_engine" / "ledger.py"))
        assert not {name for name in found if name.partition(".")[0] in ("torch", "weightlife")}

    @pytest.mark.parametrize("name", ["events", "slots", "ledger", "skeleton", "contexts"])
    def test_lower_modules_of_the_engine_do_not_import_upper_ones(self, name: str) -> None:
        upper = {"lifecycle", "session", "first_load", "guard", "manifest", "storage", "stage", "processing"}
        found = {
            i.removeprefix("weightlife._engine.").partition(".")[0]
            for i in imports(PACKAGE / "_engine" / f"{name}.py")
        }
        assert not found & upper

    @pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: path.name)
    def test_kernels_import_torch_and_compilers_only(self, path: Path) -> None:
        foreign = {
            root
            for root in (name.partition(".")[0] for name in imports(path))
            if root not in sys.stdlib_module_names and root not in ("torch", "triton", "numba", "numpy")
        }
        own = {name for name in imports(path) if name.startswith("weightlife")}
        assert foreign <= {"weightlife"}
        assert {name for name in own if not name.startswith("weightlife.kernels")} == set()

    def test_what_the_engine_imports_loads_no_compiler(self) -> None:
        code = "import sys, json, weightlife._engine.lifecycle\n"
        loaded = child(
            code + "print(json.dumps([n for n in ('triton', 'numba', 'llvmlite') if n in sys.modules]))"
        )
        assert loaded == []

    @pytest.mark.parametrize("path", sorted((ROOT / "otel").rglob("*.py")), ids=lambda path: path.name)
    def test_otel_listens_and_reaches_neither_host_nor_torch(self, path: Path) -> None:
        for name in imports(path):
            assert name.partition(".")[0] not in ("vllm", "torch", "triton"), name
            assert not name.startswith("weightlife.hosts"), name

    @pytest.mark.parametrize(
        "path", [p for p in sources("") if "hosts/vllm" not in p.as_posix() and "/testing/" not in p.as_posix()],
        ids=lambda path: path.relative_to(PACKAGE).as_posix(),
    )  # fmt: skip
    def test_only_the_hosts_folder_imports_the_host(self, path: Path) -> None:
        assert [name for name in imports(path) if name.partition(".")[0] == "vllm"] == []
