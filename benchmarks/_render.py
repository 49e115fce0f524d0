# SPDX-License-Identifier: Apache-2.0
"""Results for people: a text table for the terminal, Markdown for RESULTS.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import models
from _cases import GOALS, SOURCES, WHOLE, Row
from _pair import SAMPLE_SECONDS, SIDES
from _stats import NOISY, Paired, Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD: Final = (
    "case",
    "stock",
    "weightlife",
    "ratio (quartiles)",
    "goal",
    "peak memory: stock",
    "weightlife",
    "exact",
)
QUIET: Final = 0.05
"""Share of CPU time of other processes above which a run is not worth publishing."""
_TITLES: Final = {"startup": "engine start-up", "load": "load phase", "reload": "reload"}


def paired(row: Row) -> Paired | None:
    """The seconds of a row, or None where nothing was measured."""
    values = {side: row.values(side, "seconds") for side in SIDES}
    return (
        Paired.of(values["stock"], values["weightlife"]) if all(values.values()) and not row.error else None
    )


def peak(row: Row, side: str) -> float | None:
    """Peak of private memory over the level before, in bytes: of the round that released memory first, or median."""
    if row.memory:
        return row.memory[side]
    values = row.values(side, "peak_bytes")
    return Spread.of(values).median if values else None


def leanest(rows: Sequence[Row]) -> set[int]:
    """By model and source, the leanest exact reload mode: ids of its row.

    Peaks within five per cent of the smallest are equally lean; the fastest of those counts.
    """
    out = set()
    for model in {row.model for row in rows}:
        for source in SOURCES:
            found = []
            for row in rows:
                mine = row.case == "reload" and row.model == model and row.variant.startswith(source)
                at, pair = peak(row, "weightlife"), paired(row)
                if mine and row.exact.get("weightlife") and at is not None and pair is not None:
                    found.append((at, pair.ratio.median, id(row)))
            if found:
                lean = [entry for entry in found if entry[0] <= min(found)[0] * 1.05]
                out.add(min(lean, key=lambda entry: entry[1])[2])
    return out


def goal(row: Row, lean: set[int]) -> float | None:
    """The goal that a row is held against, if it has one: only models of a real size have."""
    if row.variant == WHOLE:
        return None  # the strict row is the one without
    if row.model not in ("dense", "moe") or (row.case == "load" and row.model != "dense"):
        return None
    if row.case == "reload":
        return GOALS["reload"] if id(row) in lean else None
    return GOALS[row.case]


def table(rows: Sequence[Row], lean: set[int]) -> list[tuple[str, ...]]:
    """Rows of text under `HEAD`."""
    out = []
    for row in rows:
        title = f"{_TITLES[row.case]}{f' ({row.variant})' if row.variant else ''}"
        title += " [leanest]" if id(row) in lean else ""
        found = paired(row)
        if found is None:
            out.append((title, f"failed: {row.error or 'no samples'}"[:160], *[""] * (len(HEAD) - 2)))
            continue
        at = goal(row, lean)
        mark = " ~" if found.noisy else ""
        ratio = f"{found.ratio.median:.2f}x ({found.ratio.low:.2f} to {found.ratio.high:.2f}){mark}"
        verdict = "" if at is None else f"<= {at:.2f}x: {found.verdict(at)}"
        memory = [_mib(peak(row, side)) for side in SIDES]
        seconds = [_seconds(found.stock.median), _seconds(found.ours.median)]
        out.append((title, *seconds, ratio, verdict, *memory, _exact(row)))
    return out


def _exact(row: Row) -> str:
    if not row.exact:
        return ""
    ours, stock = row.exact["weightlife"], row.exact["stock"]
    if ours:
        return "yes" if stock else "yes; stock WRONG"
    return "WRONG" if stock else "both WRONG"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value / 2**20:.0f} MiB"


def phases(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Where weightlife's seconds go, from its own report (reload) or by part, against stock's (load)."""
    out = []
    for row in rows:
        ours = row.samples["weightlife"]
        if row.error or not ours:
            continue
        if row.case == "reload":
            spent = _medians([sample["phases"] for sample in ours])
            out.append(
                (row.variant, ", ".join(f"{n} {_seconds(s)}" for n, s in spent.items() if s >= 0.0005))
            )
        elif row.case == "load":
            stock, spent = (_medians([s["parts"] for s in row.samples[side]]) for side in SIDES)
            parts = ", ".join(f"{n} {_seconds(s)} (stock {_seconds(stock[n])})" for n, s in spent.items())
            out.append((f"load, {row.variant}", parts))
    return out


def _medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: Spread.of([sample.get(name, 0.0) for sample in samples]).median for name in names}


def cpu(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Ratios of CPU seconds and page faults, which another process on the machine disturbs less than wall time."""
    out = []
    for row in rows:
        if paired(row) is None or not row.values("stock", "cpu_seconds"):
            continue
        keys = ("cpu_seconds", "faults")
        spent, faults = (Paired.of(row.values("stock", key), row.values("weightlife", key)) for key in keys)
        title = f"{_TITLES[row.case]}{f', {row.variant}' if row.variant else ''}"
        ratio = f"CPU {spent.ratio.median:.2f}x"
        out.append((title, f"{ratio}, page faults {faults.stock.median:.0f} to {faults.ours.median:.0f}"))
    return out


def losses_and_gains(rows: Sequence[Row], lean: set[int]) -> list[str]:
    """What failed, is wrong, missed its goal, is slower or takes more memory; then what is better. Losses first."""
    kinds: dict[str, dict[str, list[str]]] = {}

    def say(kind: str, row: Row, text: str) -> None:
        first, _, rest = row.variant.partition(", ")
        what = f"{row.model}, {_TITLES[row.case]}{f' by {first}' if rest else ''}"
        mode = rest.replace(", ", "/") or first
        kinds.setdefault(kind, {}).setdefault(what, []).append(f"{text}{f' ({mode})' if mode else ''}")

    for row in rows:
        found = paired(row)
        if found is None:
            say("failed", row, row.error or "no samples")
            continue
        ratio = f"{found.ratio.median:.2f}x"
        at = goal(row, lean)
        if row.exact and not row.exact["weightlife"]:
            say("WRONG answers", row, "not those of a cold load")
        if at is not None and not found.verdict(at).startswith("met"):
            say("goal missed or unclear", row, f"{ratio} for {at:.2f}x, {found.verdict(at)}")
        if found.ratio.low > 1:
            say("slower", row, ratio)
        elif found.ratio.high < 1:
            say("faster", row, ratio)
        stock, ours = peak(row, "stock"), peak(row, "weightlife")
        if stock is not None and ours is not None and abs(ours - stock) > 16 * 2**20:
            say(
                "more memory" if ours > stock else "less memory",
                row,
                f"{_mib(ours)} for stock's {_mib(stock)}",
            )
        if row.exact.get("weightlife") and not row.exact["stock"]:
            say("exact where stock is wrong", row, "yes")
    order = ("failed", "WRONG answers", "goal missed or unclear", "slower", "more memory")
    ranked = sorted(kinds, key=lambda kind: order.index(kind) if kind in order else len(order))
    return [f"{kind}: {what}: {'; '.join(texts)}" for kind in ranked for what, texts in kinds[kind].items()]


def noise_line(rows: Sequence[Row], others: float | None) -> str:
    """How far the figures can be trusted."""
    found = [p for row in rows if (p := paired(row)) is not None]
    noisy = sum(1 for p in found if p.noisy)
    text = (
        f"{noisy} of {len(found)} rows are noisy (marked ~: a spread above {NOISY * 100:.0f} % of the median)"
    )
    if others is None:
        return f"{text}."
    text += f"; other processes used {others * 100:.0f} % of the machine's CPU time."
    if others > QUIET:
        text += " THE MACHINE WAS NOT QUIET: trust the ratios of CPU seconds more than those of wall time, or run again."
    return text


def as_text(rows: Sequence[Row], machine: dict[str, Any], others: float | None) -> str:
    """The whole result for a terminal."""
    lean = leanest(rows)
    lines = [machine_line(machine), noise_line(rows, others)]
    for name in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == name]
        lines += ["", models.MODELS[name].title, *_columns([HEAD, *table(own, lean)])]
        lines += ["", "  where the time goes", *(f"    {title}: {text}" for title, text in phases(own))]
        lines += ["", "  processor", *(f"    {title}: {text}" for title, text in cpu(own))]
    return "\n".join(
        [*lines, "", "losses, then gains", *(f"  {line}" for line in losses_and_gains(rows, lean))]
    )


def _columns(cells: Sequence[Sequence[str]]) -> list[str]:
    whole = [row for row in cells if not (len(row) > 2 and row[1].startswith("failed"))]
    widths = [max(len(row[i]) for row in whole) for i in range(len(HEAD))]
    lines = [
        "  " + "  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in cells
    ]
    return [lines[0], "  " + "-" * (len(lines[0]) - 2), *lines[1:]]


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in words, without its name."""
    return (
        f"{machine['date']}: {machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']:.0f} GiB, "
        f"Python {machine['python']}, torch {machine['torch']}, vLLM {machine['vllm']}, "
        f"weightlife {machine['weightlife']}; {machine['threads']} threads, {machine['rounds']} alternations"
    )


_PREAMBLE: Final = """\
# Benchmarks against stock vLLM

Written by `make bench` through `benchmarks/run.py --write`; do not edit. Stock and weightlife run in one go, in
two processes that take turns (stock, weightlife, stock, weightlife, ...). Seconds are medians. A ratio is the median
of the ratios of pairs, weightlife over stock, with its quartiles; `~` marks a spread above {noise} % of the median.

- **engine start-up**: the wall time of `LLM(...)` in a fresh process (weightlife: `install()` included; eager,
  no tokenizer, which keeps everything else short and the ratio strict). A second row adds the start of the process
  and the host's imports, as whoever waits for a server does. Two full garbage collections of the host's fall into a
  first load; under weightlife one pass comes before it, and these two look at what the load made alone.
- **load phase**: inside the loader's `load_weights` and `process_weights_after_loading`, for a first load.
- **reload**: one `reload_weights`, by path (a checkpoint in the page cache) or from tensors in memory, by isolation
  and storage. `[leanest]` is the exact mode with the smallest peak, of those within five per cent of it the fastest:
  the one that the goal is for.
- **peak memory**: the highest private memory of the process (resident, without pages of mapped files) during the
  work over the level before it, after handing back what the allocator keeps; sampled every {sample} ms from outside.
  For the load phase it includes the new model itself.
- **exact**: greedy tokens and top-20 log-probabilities after each step equal those of stock's cold load. Stock's
  reload of the mixture of experts skips work: it never packs the experts again, and its answers are wrong. It is
  timed all the same.
"""


def as_markdown(rows: Sequence[Row], machine: dict[str, Any], others: float | None) -> str:
    """The whole result as RESULTS.md."""
    lean = leanest(rows)
    lines = [
        _PREAMBLE.format(noise=int(NOISY * 100), sample=round(SAMPLE_SECONDS * 1e3)),
        f"## {machine['date']}",
        "",
        machine_line(machine) + ".",
        "",
    ]
    lines += [noise_line(rows, others), ""]
    for name in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == name]
        lines += [
            f"### {models.MODELS[name].title}",
            "",
            "| " + " | ".join(HEAD) + " |",
            "|" + "---|" * len(HEAD),
        ]
        lines += ["| " + " | ".join(cells) + " |" for cells in table(own, lean)]
        lines += ["", "Where weightlife's time goes:", ""]
        lines += [f"- {title}: {text}" for title, text in phases(own)]
        lines += ["", "CPU seconds (weightlife over stock) and page faults (stock to weightlife):", ""]
        lines += [f"- {title}: {text}" for title, text in cpu(own)]
        lines += [""]
    lines += ["### Losses, then gains", "", *(f"- {line}" for line in losses_and_gains(rows, lean)), ""]
    return "\n".join(lines)
