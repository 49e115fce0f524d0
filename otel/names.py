# SPDX-License-Identifier: Apache-2.0
"""Names of attributes, span groups and events. Generated from registry/weightlife.yaml; do not edit."""

from __future__ import annotations

ERROR_TYPE = "error.type"
"""Class of the error that ended the operation."""
CALL_COUNT = "weightlife.call.count"
"""How many runs of the phase the span stands for."""
CALL_DURATION = "weightlife.call.duration"
"""Seconds spent in the phase, over all runs that the span stands for."""
LAYER_STRATEGY = "weightlife.layer.strategy"
"""Layers by reload strategy, the strategy being the key."""
LAYER_TOUCHED = "weightlife.layer.touched"
"""Layers that were written."""
LAYER_UNTOUCHED = "weightlife.layer.untouched"
"""Layers that were left as they were."""
MEMORY_PEAK = "weightlife.memory.peak"
"""Highest memory in use during the session, in bytes."""
MESSAGE = "weightlife.message"
"""What an event says, for people."""
MODEL_CLASS = "weightlife.model.class"
"""Class of the model."""
PHASE = "weightlife.phase"
"""Phase of a session."""
RANK = "weightlife.rank"
"""Rank of this process."""
SESSION_ID = "weightlife.session.id"
"""Session, unique within its process; equal on all ranks of one update where the caller allows it."""
SESSION_ISOLATION = "weightlife.session.isolation"
"""How the new weights are kept from the old ones."""
SESSION_OPENED_BY = "weightlife.session.opened_by"
"""The entry point that opened the session."""
SESSION_OPERATION = "weightlife.session.operation"
"""What kind of load the session is."""
SESSION_OUTCOME = "weightlife.session.outcome"
"""How the session ended."""
SESSION_SOURCE = "weightlife.session.source"
"""Where the tensors came from."""
SESSION_STORAGE = "weightlife.session.storage"
"""What happens to runtime storage."""
SESSION_SUPPRESSED_EVENT_COUNT = "weightlife.session.suppressed_event.count"
"""Events that were left out of the span, since a span holds a limited number."""
TENSOR_COUNT = "weightlife.tensor.count"
"""Tensors received."""
TENSOR_SIZE = "weightlife.tensor.size"
"""Bytes received."""
VIOLATION_COUNT = "weightlife.violation.count"
"""Violations in the session."""
VIOLATION_KIND = "weightlife.violation.kind"
"""Stable code of the error."""
VIOLATION_LAYER = "weightlife.violation.layer"
"""Layer that the violation concerns."""
VIOLATION_TENSOR_COUNT = "weightlife.violation.tensor.count"
"""Tensors that the violation concerns."""
VIOLATION_TENSORS = "weightlife.violation.tensors"
"""Some of the tensors that the violation concerns, at most eight."""
WEIGHT_GENERATION = "weightlife.weight.generation"
"""Number of the weights that serve after the session."""
WORLD_SIZE = "weightlife.world_size"
"""Number of ranks that take part."""
EVENT_VIOLATION = "weightlife.violation"
"""Something was not as it must be."""
EVENT_NOTE = "weightlife.note"
"""A decision or fallback that is worth knowing."""

TYPES: dict[str, str] = {
    ERROR_TYPE: "string",
    CALL_COUNT: "int",
    CALL_DURATION: "double",
    LAYER_STRATEGY: "template[int]",
    LAYER_TOUCHED: "int",
    LAYER_UNTOUCHED: "int",
    MEMORY_PEAK: "int",
    MESSAGE: "string",
    MODEL_CLASS: "string",
    PHASE: "string",
    RANK: "int",
    SESSION_ID: "string",
    SESSION_ISOLATION: "string",
    SESSION_OPENED_BY: "string",
    SESSION_OPERATION: "string",
    SESSION_OUTCOME: "string",
    SESSION_SOURCE: "string",
    SESSION_STORAGE: "string",
    SESSION_SUPPRESSED_EVENT_COUNT: "int",
    TENSOR_COUNT: "int",
    TENSOR_SIZE: "int",
    VIOLATION_COUNT: "int",
    VIOLATION_KIND: "string",
    VIOLATION_LAYER: "string",
    VIOLATION_TENSOR_COUNT: "int",
    VIOLATION_TENSORS: "string[]",
    WEIGHT_GENERATION: "int",
    WORLD_SIZE: "int",
}
"""Type of each attribute's value; of a template, the type of the values under its prefix."""
