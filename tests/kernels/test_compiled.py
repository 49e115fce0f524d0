# SPDX-License-Identifier: Apache-2.0
"""The kernel compiled for a Hopper GPU, on any machine: what its code looks like."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = {"copy": (1, 0, 0), "copy-digest": (1, 1, 0), "digest": (0, 1, 0), "copy-digest-finite": (1, 1, 1)}

CHILD = """
import json, os, re, subprocess, sys, tempfile, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weightlife.kernels import fused

signature = {"chunks": "*i64", "n_chunks": "i32", "chunk": "i32", "segments": "*i64", "key_table": "*i32", "kinds": "*i64",
             "totals": "*i64", "flags": "*i32"}
signature |= dict.fromkeys(("UNROLL", "COPY", "DIGEST", "FINITE"), "constexpr")
tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
found = {}
for name, flags in json.loads(sys.argv[1]).items():
    constants = dict(zip(("COPY", "DIGEST", "FINITE"), map(bool, flags)), UNROLL=fused.UNROLL)
    source = ASTSource(fused.one_pass, signature, constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fused.NUM_WARPS})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found[name] = {"ptx": kernel.asm["ptx"], "usage": usage, "shared": kernel.metadata.shared}
print("RESULT " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A child, since here the kernels are interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(VARIANTS)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    out: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return out


variant = pytest.mark.parametrize("variant", VARIANTS)


@variant
def test_whole_blocks_move_as_128_bit_vectors(compiled: dict[str, Any], variant: str) -> None:
    ptx = compiled[variant]["ptx"]
    assert re.search(r"\.target sm_90", ptx)
    loads = re.findall(r"ld\.global(?:\.\w+)*\.(?:v4\.b32|v2\.b64)", ptx)
    stores = re.findall(r"st\.global(?:\.\w+)*\.(?:v4\.b32|v2\.b64)", ptx)
    # 8 KiB a step, 128 threads, 16 bytes each: four loads
    assert len(loads) == 4
    assert len(stores) == (4 if VARIANTS[variant][0] else 0)


@variant
def test_nothing_is_spilled(compiled: dict[str, Any], variant: str) -> None:
    usage = compiled[variant]["usage"]
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    assert numbers["STACK"] == 0
    assert numbers["LOCAL"] == 0
    # 128 registers are four programs of 128 threads a multiprocessor, 32 KiB under way: five times what hides the latency
    assert 0 < numbers["REG"] <= 128


@variant
def test_addresses_are_64_bits_wide(compiled: dict[str, Any], variant: str) -> None:
    addresses = re.findall(r"(?:ld|st)\.global[.\w]*\s[^;]*\[\s*%(\w+?)\d+", compiled[variant]["ptx"])
    assert addresses
    assert set(addresses) == {"rd"}
