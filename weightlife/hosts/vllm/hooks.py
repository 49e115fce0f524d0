# SPDX-License-Identifier: Apache-2.0
"""Which classes of the installed vLLM have post-load processing of their own: read from its source, importing nothing."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib import util
from pathlib import Path

HOOK = "process_weights_after_loading"


@dataclass(frozen=True)
class Found:
    """One implementation in vLLM's source. `reads` is what its text says, which is no proof."""

    name: str  # module:Class
    line: int
    kind: str  # layer (of a module), method, scheme, kernel, impl, parameter, model
    reads: str  # nothing, abstract, delegates, writes


def implementations() -> list[Found]:
    """Every class of vLLM with a hook of its own, from its source: nothing is imported."""
    spec = util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations)))
    out = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if f"def {HOOK}" not in text:
            continue
        module = ".".join(("vllm", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                hook = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == HOOK), None)
                if hook is not None:
                    out.append(Found(f"{module}:{node.name}", hook.lineno, _kind(module, node), _reads(hook)))
    return out


def _kind(module: str, node: ast.ClassDef) -> str:
    bases = " ".join(ast.unparse(base) for base in node.bases) + " " + node.name
    if ".kernels." in module or ".experts." in module or "Experts" in bases:
        return "kernel"
    if "Parameter" in bases:
        return "parameter"
    if "Impl" in bases:
        return "attention impl"
    if "Scheme" in bases:
        return "scheme"
    if "Method" in bases or ".quantization." in module:
        return "method"
    return "model" if module.startswith(("vllm.models.", "vllm.model_executor.models.")) else "layer"


def _reads(hook: ast.FunctionDef) -> str:
    body = [n for n in hook.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    if any("abstractmethod" in ast.unparse(d) for d in hook.decorator_list) or (
        len(body) == 1 and isinstance(body[0], ast.Raise)
    ):
        return "abstract"
    if all(
        isinstance(n, ast.Pass) or (isinstance(n, ast.Return) and (n.value is None or _constant(n)))
        for n in body
    ):
        return "nothing"
    if len(body) == 1 and HOOK in ast.unparse(body[0]):
        return "delegates"
    return "writes"


def _constant(node: ast.Return) -> bool:
    return isinstance(node.value, ast.Constant)
