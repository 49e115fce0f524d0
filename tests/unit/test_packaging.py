# SPDX-License-Identifier: Apache-2.0
"""The layout with linked folders holds: in the tree, in the metadata, and in the wheel and sdist that we would ship."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
import torch

import weightlife
from weightlife.kernels.copy_reference import copy_many

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("kernels", "otel")


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


class TestTree:
    @pytest.mark.parametrize("folder", LINKED)
    def test_folder_is_linked_into_the_package_by_a_relative_link(self, folder):
        link = ROOT / "weightlife" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("..", folder)
        assert link.resolve() == ROOT / folder
        assert (ROOT / folder).is_dir()

    @pytest.mark.parametrize("folder", LINKED)
    def test_folder_has_no_init_so_that_it_shadows_no_distribution(self, folder):
        assert not (ROOT / folder / "__init__.py").exists()

    def test_kernels_is_no_regular_package_of_ours(self):
        spec = importlib.util.find_spec("kernels")
        # None, a namespace (no origin), or Hugging Face's distribution of that name: all are fine.
        if spec is not None and spec.origin is not None:
            assert ROOT not in Path(spec.origin).resolve().parents

    def test_linked_modules_are_imported_under_the_packages_name(self):
        assert copy_many.__module__ == "weightlife.kernels.copy_reference"

    def test_no_module_imports_a_linked_folder_as_a_top_level_package(self):
        paths = [path for top in ("weightlife", *LINKED) for path in (ROOT / top).rglob("*.py")]
        offenders = []
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module or ""]
                else:
                    continue
                offenders += [f"{path}: {name}" for name in names if name.split(".")[0] in LINKED]
        assert paths
        assert offenders == []

    def test_every_source_file_names_its_licence_first(self):
        bare = [
            str(path.relative_to(ROOT))
            for top in ("weightlife", *LINKED, "tests", "examples", "benchmarks", "scripts")
            for path in (ROOT / top).rglob("*.py")
            if "# SPDX-License-Identifier: Apache-2.0"
            not in path.read_text(encoding="utf-8").splitlines()[:2]
        ]
        assert bare == []


class TestMetadata:
    def test_version_is_the_packages(self):
        assert metadata.version("weightlife") == weightlife.__version__

    def test_entry_point_of_the_host_is_registered(self):
        points = [
            point
            for point in metadata.entry_points(group="vllm.general_plugins")
            if point.name == "weightlife"
        ]
        assert [point.value for point in points] == ["weightlife.hosts.vllm.plugin:register"]

    def test_entry_point_loads(self):
        (point,) = (p for p in metadata.entry_points(group="vllm.general_plugins") if p.name == "weightlife")
        assert callable(point.load())

    def test_entry_point_of_auto_instrumentation_names_what_exists(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        module, _, name = project["entry-points"]["opentelemetry_instrumentor"]["weightlife"].partition(":")
        source = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        assert f"class {name}(BaseInstrumentor)" in source
        assert any("opentelemetry-instrumentation" in r for r in project["optional-dependencies"]["otel"])

    def test_licence_is_an_expression(self):
        assert metadata.metadata("weightlife")["License-Expression"] == "Apache-2.0"

    def test_core_dependencies_are_the_four_that_the_core_imports(self):
        core = [r for r in metadata.requires("weightlife") or [] if "extra ==" not in r]
        assert {_name(r) for r in core} == {"wrapt", "numpy", "opentelemetry-api", "safetensors", "torch"}
        assert all(">=" in r for r in core)

    def test_floor_of_each_core_dependency_is_in_the_list_that_is_tested(self):
        floors = dict(
            line.split("==")
            for line in (ROOT / "scripts" / "floor-constraints.txt").read_text(encoding="utf-8").splitlines()
            if "==" in line
        )
        for requirement in (r for r in metadata.requires("weightlife") or [] if "extra ==" not in r):
            floor = re.search(r">=([\d.]+)", requirement)
            assert floor is not None
            tested = floors[_name(requirement)]
            assert tested.removesuffix(".0") == floor[1].removesuffix(".0")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of the tree and a wheel built from that sdist.

    Built from a copy: setuptools leaves build/ behind, and what lies there would end up in the next wheel.
    """
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("weightlife", *LINKED):
        shutil.copytree(ROOT / name, tree / name, symlinks=True)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def _sources(folder: str) -> set[str]:
    """Files under ``folder`` that belong in the wheel, by their path there."""
    return {
        f"weightlife/{path.relative_to(ROOT)}"
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".yaml", ".json"} and "__pycache__" not in path.parts
    }


@pytest.mark.slow
class TestDistributions:
    def test_wheels_only_top_level_is_the_package(self, dist):
        (wheel,) = dist.glob("*.whl")
        tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
        assert tops == {"weightlife", f"weightlife-{weightlife.__version__}.dist-info"}

    def test_wheel_contains_every_source_file_and_no_cache(self, dist):
        (wheel,) = dist.glob("*.whl")
        names = set(zipfile.ZipFile(wheel).namelist())
        own = {
            str(path.relative_to(ROOT))
            for path in (ROOT / "weightlife").rglob("*.py")
            if not any(part in path.relative_to(ROOT / "weightlife").parts[:1] for part in LINKED)
        }
        own |= {f"weightlife/cli/templates/report.{kind}" for kind in ("html", "css", "js")}
        expected = own | _sources("kernels") | _sources("otel") | {"weightlife/py.typed"}
        assert expected - names == set()
        assert [name for name in names if "__pycache__" in name] == []

    def test_sdist_holds_the_linked_folders_as_files(self, dist):
        (sdist,) = dist.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            members = {member.name.split("/", 1)[-1]: member for member in archive.getmembers()}
        for name in _sources("kernels") | _sources("otel"):
            assert members[name].isfile(), name

    def test_wheel_works_where_it_is_installed(self, dist, tmp_path):
        (wheel,) = dist.glob("*.whl")
        site = tmp_path / "site"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(site),
            str(wheel),
        ]
        subprocess.run(pip, check=True, capture_output=True)
        code = (
            "import weightlife, weightlife.kernels.copy_reference as m, importlib.resources as r\n"
            "print(weightlife.__file__)\nprint(m.__file__)\n"
            "print(r.files('weightlife.otel').joinpath('jaeger.yaml').is_file())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(site)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        package, module, has_yaml = done.stdout.split()
        assert Path(package) == site / "weightlife" / "__init__.py"
        assert Path(module) == site / "weightlife" / "kernels" / "copy_reference.py"
        assert has_yaml == "True"


class TestCopyMany:
    def test_copies_every_pair_whatever_its_strides(self):
        dst = [torch.zeros(2, 3), torch.zeros(4, 2).t(), torch.nn.Parameter(torch.zeros(2))]
        src = [torch.rand(2, 3), torch.rand(2, 4), torch.rand(2)]
        copy_many(dst, src)
        assert all(torch.equal(to, of) for to, of in zip(dst, src, strict=True))

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (torch.ones(1), r"pair 1: destination shape \(2,\), source shape \(1,\)"),
            (torch.ones(2, dtype=torch.float64), "pair 1: destination dtype torch.float32, source dtype"),
        ],
        ids=["shape that would broadcast", "dtype that would convert"],
    )
    def test_refuses_an_unequal_pair_before_writing_any(self, bad, message):
        dst = [torch.zeros(2), torch.zeros(2)]
        with pytest.raises(ValueError, match=message):
            copy_many(dst, [torch.ones(2), bad])
        assert all(torch.equal(to, torch.zeros(2)) for to in dst)

    def test_refuses_unequal_lengths(self):
        with pytest.raises(ValueError, match="got 1 destination tensors but 2 source tensors"):
            copy_many([torch.zeros(1)], [torch.ones(1), torch.ones(1)])
