# SPDX-License-Identifier: Apache-2.0
"""Stored runs for tests of what reads them: written by the real writer, from events with made-up times."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weightlife._engine import events
from weightlife._engine.events import Event
from weightlife.report import LayerRecord, LoadReport, PhaseRecord, Violation
from weightlife.runs.writer import RunWriter

START = 1_795_960_800_000_000_000  # 2026-11-29T14:00:00Z, nanoseconds
PHASES = {
    "prepare": 0.4, "receive": 9.0, "validate": 0.3, "process_quant": 3.1, "process_attention": 0.2,
    "process_model": 0.05, "copy_back": 1.2,
}  # fmt: skip
HOSTILE = [
    "<script>alert(1)</script>", "</script><script>document.title='owned'</script>", "<img src=x onerror=alert(1)>",
    "\u202egnp.eltit\u202c", "\x1b[31mred\x1b[0m\x07", "a." * 3000, "lone \ud800", "two\nlines", "{{ 7*7 }}",
    "\" onload=\"alert(1)", "'; drop", "\u05e9\u05dc\u05d5\u05dd.weight", "&lt;b&gt;", "\u2028\u2029",
]  # fmt: skip


class Maker:
    """Writes sessions one after the other, `gap` seconds apart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer = RunWriter(folder)
        self.now = START
        self.count = 0

    def done(self) -> Path:
        """Everything is on disk."""
        assert self.writer.flush(30)
        assert self.writer.dropped == 0, self.writer.error
        self.writer.close()
        return self.folder

    def load(
        self,
        *,
        ranks: int = 1,
        phases: Mapping[str, float] = MappingProxyType(PHASES),
        layers: list[LayerRecord] | None = None,
        violations: list[Violation] | None = None,
        skew: float = 0.02,
        ended: bool = True,
        **report: Any,
    ) -> None:
        """One load on each rank; rank r takes 1 + r/10 times as long."""
        self.count += 1
        longest = 0.0
        for rank in range(ranks):
            ident = f"{self.count:06x}{rank:06x}"
            slow = 1 + rank / 10
            begin = self.now + int(rank * skew * 1e9)
            seconds = sum(phases.values()) * slow
            longest = max(longest, seconds)
            given: dict[str, Any] = {
                "session_id": ident, "model": "MixtralForCausalLM", "operation": "reload", "source": "ckpt/step-200",
                "opened_by": "reload_weights", "rank": rank, "world_size": ranks, "generation": self.count,
                "isolation": "staged", "isolation_why": "the setting", "storage": "pinned",
                "storage_why": "the default: addresses stay valid", "outcome": "committed", "seconds": seconds,
                "started_at": datetime.fromtimestamp(begin / 1e9, timezone.utc).isoformat(),
                "phases": [PhaseRecord(name, s * slow) for name, s in phases.items()],
                "layers": layers if layers is not None else some_layers(24), "violations": violations or [],
                "tensors_received": 291, "bytes_received": 14_000_000_000 // ranks, "layers_touched": 20,
                "layers_untouched": 4, "layers_by_strategy": {"direct": 6, "rebuild": 18},
                "versions": {"weightlife": "0.1.0", "torch": "2.13.0", "vllm": "0.32.0"},
            }  # fmt: skip
            self._session(LoadReport(**{**given, **report}), begin, slow, phases, ended)
        self.now += int((longest + 5) * 1e9)

    def _session(
        self, report: LoadReport, begin: int, slow: float, phases: Mapping[str, float], ended: bool
    ) -> None:
        def tell(name: str, at: int, **data: Any) -> None:
            self.writer(Event(name, report.session_id, at, at, MappingProxyType(data)))

        tell(events.SESSION_START, begin, report=report)
        at = begin
        for name, seconds in phases.items():
            tell(events.PHASE_START, at, phase=name)
            for layer in report.layers[:5] if name == "process_quant" else ():
                tell(events.LAYER_PROCESSED, at, layer=layer.name, hook="H", seconds=seconds / 7)
            at += int(seconds * slow * 1e9)
            tell(events.PHASE_END, at, phase=name)
        for violation in report.violations:
            tell(events.VIOLATION, at, code=violation.code, layer=violation.layer, message=violation.message)
        if ended:
            tell(events.SESSION_END, at, report=report, outcome=report.outcome, error=report.error or "")
        assert self.writer.flush(30)


def some_layers(count: int) -> list[LayerRecord]:
    """Layers as a real model has them: most rebuilt, some direct, some untouched."""
    out = []
    for i in range(count):
        block, kind = divmod(i, 6)
        name = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "input_layernorm", "rotary_emb"][kind]
        direct = kind >= 4
        out.append(
            LayerRecord(
                f"model.layers.{block}.{name}",
                "direct" if direct else "rebuild",
                "processing changed nothing" if direct else "weight replaced",
                kind != 5,
            )
        )
    return out


MISSING = Violation(
    "WL201", "1 of 291 tensors of a complete load did not arrive", "model.layers.3.self_attn.qkv_proj",
    ["model.layers.3.self_attn.v_proj.weight"],
)  # fmt: skip
ERROR = (
    "MissingTensorError: [WL201] 1 of 291 tensors of a complete load did not arrive (model=MixtralForCausalLM, "
    "layer=model.layers.3.self_attn.qkv_proj, tensors=[model.layers.3.self_attn.v_proj.weight], session=6f45d151b69c; "
    "next: send the missing tensors, or open the session with the names that you mean to send)"
)


def usual(folder: Path) -> Path:
    """A first load, a good update on two ranks, and one that failed."""
    maker = Maker(folder)
    maker.load(operation="first_load", opened_by="load_model", phases={"receive": 14.0, "process": 4.0})
    maker.load(
        ranks=2,
        contract_changes=[
            {"path": "model.embed_tokens.cpu_linear", "kind": "opaque", "detail": "replaced whole"}
        ],
        notes=["caches of the old weights are reset after reload_weights"],
    )
    maker.load(
        phases={"prepare": 0.4, "receive": 6.0, "validate": 0.2, "abort": 0.1},
        violations=[MISSING], outcome="aborted", error=ERROR,
    )  # fmt: skip
    return maker.done()


def hostile(folder: Path) -> Path:
    """Names out of a checkpoint that wants to harm whoever looks at the report."""
    maker = Maker(folder)
    for name in HOSTILE:
        maker.load(
            model=name, source=name, opened_by=name, storage_why=name, error=name, outcome="aborted",
            layers=[LayerRecord(name, name, name, True), LayerRecord("model.plain", "direct", "", True)],
            violations=[Violation("WL201", name, name, [name]), Violation(name, name)], notes=[name],
            contract_changes=[{"path": name, name: name}], versions={name: name}, layers_by_strategy={name: 1},
            phases={name: 1.0, "receive": 2.0},
        )  # fmt: skip
    return maker.done()


def large(folder: Path, count: int = 100_000) -> Path:
    """More layers than any model has today; the record is cut where a line would be too long."""
    maker = Maker(folder)
    layers = [
        LayerRecord(
            f"m.{i // 100}.e.{i % 100}.w",
            "rebuild" if i % 3 else "direct",
            "weight" if i % 3 else "",
            i % 7 > 0,
        )
        for i in range(count)
    ]
    maker.load(layers=layers)
    return maker.done()
