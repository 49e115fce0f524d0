# SPDX-License-Identifier: Apache-2.0
"""What the shell blocks of the documentation say, held against what there is: programs, options, files, variables."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import tomllib
import yaml

from tests.docblocks import ROOT, Block
from weightlife.config import Settings

# Programs of others that are shown as a place for our variables; nothing of theirs is installed here.
FOREIGN = (["ray", "job", "submit"], ["python3", "-m", "verl.trainer.main_ppo"])
# Variables of weightlife's that are no settings; docs/settings.md has a table of them.
OTHER = frozenset({"WEIGHTLIFE", "WEIGHTLIFE_OTEL", "WEIGHTLIFE_POISON", "WEIGHTLIFE_TESTING_CACHE"})


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command behind a prompt; a line that ends in a backslash goes on in the next."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.startswith("$ "):
            yield shlex.split(line[2:], comments=True)


def complaints(block: Block) -> list[str]:
    """What a shell block names that is not there."""
    found = list(commands(block.text))
    if not found:
        return [f"{block.where}: no command"]
    return [
        f"{block.where}: {' '.join(words)}: {problem}" for words in found for problem in of_command(words)
    ]


def of_command(words: list[str]) -> list[str]:
    """What is wrong with one command."""
    while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
        if problem := of_variable(words.pop(0)):
            return [problem]
    for start in FOREIGN:
        if words[: len(start)] == start:
            return of_foreign(words[len(start) :])
    check = {
        "export": lambda rest: [p for word in rest if (p := of_variable(word))],
        "pip": of_pip,
        "weightlife": of_weightlife,
        "make": of_make,
        "docker": of_docker,
        "vllm": of_vllm,
        "python": of_python,
        ".venv/bin/python": of_python,
        "opentelemetry-instrument": of_command,
    }.get(words[0])
    return [f"nothing here knows {words[0]!r}"] if check is None else check(words[1:])


def of_variable(assignment: str) -> str:
    """The complaint about `NAME=value`, or nothing."""
    name, _, value = assignment.partition("=")
    settings = {f"WEIGHTLIFE_{item.name.upper()}": item.name for item in fields(Settings)}
    if name in settings:
        Settings.from_env({name: value.replace("$PWD", "/somewhere")})
        return ""
    known = {
        "WEIGHTLIFE": lambda: name in OTHER,
        "VLLM": lambda: f'"{name}"' in _source_of("vllm", "envs.py"),
        "OTEL": lambda: (
            name in _source_of("opentelemetry.sdk", "environment_variables/__init__.py")
            or name in _source_of("opentelemetry.instrumentation", "environment_variables.py")
            or name in _source_of("opentelemetry.environment_variables", "__init__.py")
        ),
    }.get(name.partition("_")[0])
    return "" if known is not None and known() else f"there is no variable {name}"


def _source_of(module: str, file: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    (folder,) = list(spec.submodule_search_locations or [])[:1]
    return (Path(folder) / file).read_text(encoding="utf-8")


def of_pip(words: list[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if words[0] != "install":
        return [f"pip {words[0]}"]
    found = re.fullmatch(r"weightlife(?:\[([\w,-]+)\])?", words[1])
    if found is None:
        return [f"not a requirement of ours: {words[1]}"]
    extras = set(filter(None, (found[1] or "").split(",")))
    return [f"no extra {name}" for name in extras - set(project["optional-dependencies"])]


def of_weightlife(words: list[str]) -> list[str]:
    """Parsed by the application itself, not run."""
    import click
    import typer.main

    from weightlife.cli.app import app

    command: Any = typer.main.get_command(app)
    name, rest = "weightlife", [word for word in words if word != "..."]
    if rest == ["--help"]:
        return []
    while hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            return [f"{name} has no command {rest[:1]}"]
        name, command = rest[0], command.commands[rest[0]]
        rest = rest[1:]
    try:
        command.make_context(name, list(rest))
    except Exception as error:  # noqa: BLE001 - click's own classes, or typer's copies of them: the message is the point
        if isinstance(error, click.exceptions.Exit):
            return []
        said = getattr(error, "format_message", None)
        return [said() if said is not None else f"{type(error).__name__}: {error}"]
    return []


def of_make(words: list[str]) -> list[str]:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    return [f"no target {word}" for word in words if "=" not in word and word not in targets]


def of_docker(words: list[str]) -> list[str]:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    profiles = {name for service in compose["services"].values() for name in service.get("profiles", [])}
    if words[0] != "compose":
        return [f"docker {words[0]}"]
    asked = {words[i + 1] for i, word in enumerate(words) if word == "--profile"}
    legal = {"compose", "--profile", *profiles, "up", "down", "-d", "--wait", "--volumes"}
    return [f"no profile {name}" for name in asked - profiles] + [
        f"unknown: {w}" for w in words if w not in legal
    ]


def of_vllm(words: list[str]) -> list[str]:
    """Options by their names in vLLM's source: its own `--help` takes ten seconds."""
    if words[0] != "serve":
        return [f"vllm {words[0]}"]
    files = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
    source = "".join(_source_of("vllm", file) for file in files)
    return [
        f"vllm serve has no {word}"
        for word in words[1:]
        if word.startswith("--")
        and word not in source
        and not re.search(rf"\b{word[2:].replace('-', '_')}\b", source)
    ]


def of_python(words: list[str]) -> list[str]:
    if words[0] == "-m":
        return [] if importlib.util.find_spec(words[1]) else [f"no module {words[1]}"]
    script = ROOT / words[0]
    if not script.is_file():
        return [f"no file {words[0]}"]
    text = script.read_text(encoding="utf-8")
    return [
        f"{words[0]} has no {word}" for word in words[1:] if word.startswith("--") and f'"{word}"' not in text
    ]


def of_foreign(words: list[str]) -> list[str]:
    """Our variables inside of another program's options."""
    assignments: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if before == "--runtime-env-json":
            assignments += [f"{name}={value}" for name, value in json.loads(word)["env_vars"].items()]
        elif found := re.search(r'env_vars\.([A-Z_]+)="(.*)"', word):
            assignments.append(f"{found[1]}={found[2]}")
    if not assignments:
        return ["no variable in it"]
    return [problem for assignment in assignments if (problem := of_variable(assignment))]
