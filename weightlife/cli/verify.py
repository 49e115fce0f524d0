# SPDX-License-Identifier: Apache-2.0
"""``weightlife verify``: start an engine, and hold what it serves against a checkpoint.

A running server is asked from inside its process (``weightlife.verify``); from outside there is nothing to ask.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from weightlife.cli.output import BAD, FAILED, GOOD, emit_json, stderr, stdout, text

__all__ = ["register", "verify"]


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def _arguments(words: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for word in words:
        name, found, value = word.partition("=")
        if not found or not name.isidentifier():
            raise typer.BadParameter(f"{word!r} is not NAME=VALUE", param_hint="--engine")
        out[name] = _value(value)
    return out


def verify(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            exists=True,
            file_okay=False,
            help="A folder of safetensors files: what should be served.",
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="What the engine is started on; by default CHECKPOINT itself."),
    ] = None,
    layers: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of layers to compare, at random.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Chooses the layers; the report has it.")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An argument of vllm.LLM, as JSON or text; repeat it."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with a schema_version instead of text.")
    ] = False,
) -> None:
    """Start a vLLM engine and compare what it holds, bit by bit, with what a cold load of a checkpoint would hold.

    Exit code: 0 equal; 1 something differs, or nothing was compared; 2 the engine does not start, or the checkpoint
    does not fit it.
    """
    import weightlife
    from weightlife.errors import WeightlifeError, safe_text

    more = _arguments(engine or [])
    if "tensor_parallel_size" not in more:
        os.environ.setdefault(
            "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
        )  # a bar can be shown, and it starts faster
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        weightlife.install()
        with _quiet_stdout():
            from weightlife.hosts.vllm.start import start

            llm = start(str(model or checkpoint), **more)
            report = weightlife.verify(llm, checkpoint, layers=layers, seed=seed)
    except WeightlifeError:
        raise  # the command line says it, with its next step
    except ImportError as error:
        stderr().print(text(f"weightlife: vLLM can't be imported here: {safe_text(error)}", "red", 1000))
        raise typer.Exit(FAILED) from None
    except Exception as error:  # noqa: BLE001 - whatever an engine raises when it does not start
        stderr().print(text(f"weightlife: {type(error).__name__}: {safe_text(error)}", "red", 2000))
        raise typer.Exit(FAILED) from None
    code = GOOD if report.ok else BAD
    if as_json:
        emit_json({**report.to_dict(), "exit_code": code})
    else:
        out = stdout()
        for line in str(report).splitlines():
            out.print(text(line, limit=1000), soft_wrap=True)
    raise typer.Exit(code)


class _quiet_stdout:  # noqa: N801 - used like a function
    """What an engine prints goes to stderr: stdout is for the result."""

    def __enter__(self) -> None:
        self._kept = os.dup(1)
        os.dup2(2, 1)

    def __exit__(self, *error: object) -> None:
        os.dup2(self._kept, 1)
        os.close(self._kept)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(verify)
