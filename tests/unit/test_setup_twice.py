# SPDX-License-Identifier: Apache-2.0
"""`make setup` a second time installs nothing; what the environment is made from makes it anew.

The Makefile and its script are the real ones, in a checkout of their own; the interpreter is one that notes its calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("Makefile", "pyproject.toml", "scripts/make_venv.sh", "scripts/floor-constraints.txt")

# Virtual environments are folders with a copy of itself, pip is a line in a file, and vLLM imports.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *"-m venv --clear"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"
    echo "VIRTUAL_ENV=$PWD/${@: -1}" > "${@: -1}/bin/activate"; echo "venv ${@: -1}" >> "$CALLS" ;;
  *"-m pip --version"*) ;;
  *"-m pip install"*) echo "$*" >> "$CALLS"; [ -z "${PIP_FAILS:-}" ] ;;
  *"-m pip"*) echo "$*" >> "$CALLS" ;;
  *"from vllm import"*|*"importlib.metadata"*) ;;
  *) exec REAL "$@" ;;
esac
"""


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "checkout", folder / "calls"
        self.python = folder / "python"
        for name in NEEDED:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        self.python.write_text(PYTHON.replace("REAL", sys.executable), encoding="utf-8")
        self.python.chmod(0o755)

    def make(self, target: str, **environ: str) -> tuple[int, str, list[str]]:
        """The exit status, what was printed, and the calls that made or installed something."""
        self.log.write_text("", encoding="utf-8")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTHON"))}
        done = subprocess.run(
            ["make", target, f"PYTHON={self.python}"],
            cwd=self.folder, capture_output=True, text=True, timeout=60, check=False,
            env={**env, "CALLS": str(self.log), **environ},
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr, self.log.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_second_setup_installs_nothing(checkout: Checkout) -> None:
    code, said, calls = checkout.make("setup")
    assert code == 0, said
    assert calls[0] == "venv .venv"
    assert any(call.endswith("--editable .[host-cpu,dev,otel,cli,triton,docs]") for call in calls)
    assert checkout.make("setup") == (0, "[.venv] up to date\n", [])


@pytest.mark.parametrize("name", ["pyproject.toml", "scripts/make_venv.sh"])
def test_what_it_is_made_from_installs_again(checkout: Checkout, name: str) -> None:
    checkout.make("setup-plain")
    with (checkout.folder / name).open("a", encoding="utf-8") as file:
        file.write("\n# changed\n")
    code, said, calls = checkout.make("setup-plain")
    assert code == 0, said
    assert any("--editable .[test]" in call for call in calls)
    assert "venv .venv-plain" not in calls  # into the environment that is there
    assert checkout.make("setup-plain")[2] == []


def test_one_that_failed_is_not_taken_for_done(checkout: Checkout) -> None:
    code, _, calls = checkout.make("setup-plain", PIP_FAILS="1")
    assert code != 0
    assert calls
    code, said, calls = checkout.make("setup-plain")
    assert code == 0, said
    assert calls


def test_a_checkout_that_was_moved_needs_a_new_one(checkout: Checkout) -> None:
    checkout.make("setup-plain")
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    code, said, calls = checkout.make("setup-plain")
    assert code == 0, said
    assert calls[0] == "venv .venv-plain"  # its programs name an interpreter that is not there any more
