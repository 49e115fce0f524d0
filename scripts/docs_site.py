# SPDX-License-Identifier: Apache-2.0
"""MkDocs hooks: what the site needs beyond the pages in docs/, which stay readable where they lie.

- The README, the changelog, the examples' README and the benchmarks' results are pages too. They are read from where
  they are.
- Links to files of the repository get a copy of that file in the site.
- Mermaid diagrams are exchanged for the drawing that scripts/generate_docs.py made, since Mermaid itself would have to
  be fetched.
- Entries of the navigation whose page is not there are left out, where OPTIONAL says that this may be.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "benchmarks/RESULTS.md": "performance.md",
}
OPTIONAL = {"kernel-authors.md", "verify.md"}
_LINK = re.compile(r"(?<!!)\]\(([^)\s]+)\)")
_MERMAID = re.compile(r"^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Leave optional pages that are not there out of the navigation."""
    missing = {name for name in OPTIONAL if not (Path(config.docs_dir) / name).exists()}
    config.nav = _without(config.nav, missing)
    return config


def _without(nav: list[Any], missing: set[str]) -> list[Any]:
    out: list[Any] = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            out.append({title: _without(target, missing)})
        elif target not in missing:
            out.append(entry)
    return out


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere, and every file of the repository that a page links to."""
    for source, page in OUTSIDE.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    wanted = set()
    for file in files.documentation_pages():
        for target in _LINK.findall(_FENCE.sub("", file.content_string)):
            name = _repository_path(target.partition("#")[0], file.src_uri)
            if name is None or name in OUTSIDE or name.startswith("docs/"):
                continue
            if (ROOT / name).is_file():
                wanted.add(name)
    for name in sorted(wanted):
        copy = File.generated(config, f"source/{name}", abs_src_path=str(ROOT / name))
        copy.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links and diagrams as the site has them."""
    parts = _FENCE.split(_MERMAID.sub(_drawing(page.file.src_uri), markdown))
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda m: f"]({_in_site(m[1], page.file)})", part)
        for part in parts
    )


def _drawing(page: str) -> str:
    return f"![States of a session]({posixpath.relpath('assets/session-states.svg', posixpath.dirname(page) or '.')})"


def _repository_path(target: str, page: str) -> str | None:
    """Path in the repository of what a page links to; None for anything that is not in it, or is a page of docs/."""
    if not target or "://" in target or target.startswith(("mailto:", "/")):
        return None
    origin = next((source for source, name in OUTSIDE.items() if name == page), f"docs/{page}")
    name = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    return None if name.startswith("..") else name


def _in_site(target: str, file: File) -> str:
    path, mark, anchor = target.partition("#")
    name = _repository_path(path, file.src_uri)
    if name is None:
        return target
    if name in OUTSIDE:
        where = OUTSIDE[name]
    elif name.startswith("docs/"):
        where = name.removeprefix("docs/")
    else:
        where = f"source/{name}"
    return posixpath.relpath(where, posixpath.dirname(file.src_uri) or ".") + mark + anchor
