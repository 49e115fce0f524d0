# SPDX-License-Identifier: Apache-2.0
"""Stored runs: what every process appends below ``runs_dir``, and how it is read again.

Each process and rank has two files of JSON lines, named by start time, host and process::

    20261129T145731Z-host-4711-3f9a0c.rank0.sessions.jsonl    records of this package, with a schema version each
    20261129T145731Z-host-4711-3f9a0c.rank0.traces.jsonl      OTLP/JSON, as OpenTelemetry's file exporters write it

and for each model that it loads a manifest, ``....rank0.<class of the model>.manifest.json``.

A file that reaches ``MAX_FILE_BYTES`` is renamed to ``....old.jsonl`` (an older one of that name goes) and begun anew,
so a process and rank never takes more than four times that.

Records of ``sessions`` have a ``kind``: ``start`` when a session begins, so that one which never ended is seen, and
``session`` with its report when it ends. Within a schema version kinds and fields are only added.

Standard library and the tracing API only.
"""

from __future__ import annotations

__all__ = ["MANIFESTS", "MAX_FILE_BYTES", "MAX_LINE_BYTES", "SCHEMA_VERSION", "SESSIONS", "TRACES"]

SCHEMA_VERSION = 1
"""Of the records in ``*.sessions.jsonl``. The report inside has its own (``weightlife.report.SCHEMA_VERSION``)."""

SESSIONS = "sessions"
TRACES = "traces"
MANIFESTS = "manifest.json"

MAX_FILE_BYTES = 32 * 2**20
"""A report of 600 layers is 90 kB: a file holds some 350 of them before it is turned over."""
MAX_LINE_BYTES = 16 * 2**20
"""A longer record is written without the layers that do not fit; the record says how many."""
