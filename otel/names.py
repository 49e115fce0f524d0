# SPDX-License-Identifier: Apache-2.0
"""Names of attributes, events and metrics. Generated from registry/weightlife.yaml; do not edit."""

from __future__ import annotations

ERROR_TYPE = "error.type"
"""Class of the error that ended the operation."""
ACTIVITY_DURATION = "weightlife.activity.duration"
"""Seconds across phases, by what was done; the keys are those of weightlife.activity.name."""
ACTIVITY_NAME = "weightlife.activity.name"
"""What time was spent on, across phases."""
CALL_COUNT = "weightlife.call.count"
"""How many runs of the phase the span stands for."""
CALL_DURATION = "weightlife.call.duration"
"""Seconds spent in the phase, over all runs that the span stands for."""
COPY_RATE = "weightlife.copy.rate"
"""Gigabytes (10^9 bytes) copied a second, counted over the phase copy_back."""
COPY_SIZE = "weightlife.copy.size"
"""Bytes copied into the memory that serves."""
COPY_TENSOR_COUNT = "weightlife.copy.tensor.count"
"""Tensors copied into the memory that serves."""
LAYER_HOOK = "weightlife.layer.hook"
"""Class that has the layer's processing hook."""
LAYER_NAME = "weightlife.layer.name"
"""Path of a layer in the module tree."""
LAYER_SLOWEST_DURATIONS = "weightlife.layer.slowest.durations"
"""Seconds of those layers, in the same order."""
LAYER_SLOWEST_NAMES = "weightlife.layer.slowest.names"
"""Layers whose processing took longest, at most five, slowest first."""
LAYER_STRATEGY = "weightlife.layer.strategy"
"""Layers by reload strategy, the strategy being the key."""
LAYER_TOUCHED = "weightlife.layer.touched"
"""Layers that were written."""
LAYER_UNTOUCHED = "weightlife.layer.untouched"
"""Layers that were left as they were."""
LINK_KIND = "weightlife.link.kind"
"""What a linked span is to the session."""
MEMORY_PEAK = "weightlife.memory.peak"
"""Highest memory in use during the session, in bytes."""
MESSAGE = "weightlife.message"
"""What an event says, for people."""
MODEL_CLASS = "weightlife.model.class"
"""Class of the model."""
PHASE = "weightlife.phase"
"""Phase of a session."""
PROCESSING_DURATION = "weightlife.processing.duration"
"""Seconds in the host's processing hooks, by the class that has the hook, which is the key."""
RANK = "weightlife.rank"
"""Rank of this process."""
RECEIVE_RATE = "weightlife.receive.rate"
"""Gigabytes (10^9 bytes) received a second, counted over the time in load calls."""
RPC_METHOD = "weightlife.rpc.method"
"""Method of the workers that the front end called."""
SESSION_ID = "weightlife.session.id"
"""Session of one rank."""
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
TENSOR_NOT_SENT = "weightlife.tensor.not_sent"
"""Tensors of a complete load that an update left out, and that keep their old values."""
TENSOR_SIZE = "weightlife.tensor.size"
"""Bytes received."""
UPDATE_ID = "weightlife.update.id"
"""One for all ranks of an update: the session of the lowest rank. With one rank the session's own."""
VERSION = "weightlife.version"
"""Version of a component, its name being the key."""
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
METRIC_SESSION_DURATION = "weightlife.session.duration"
"""Duration of sessions. histogram, s."""
METRIC_PHASE_DURATION = "weightlife.phase.duration"
"""Duration of phases, summed over the runs within a session. histogram, s."""
METRIC_ACTIVITY_TIME = "weightlife.activity.time"
"""Time by what it was spent on, across phases. counter, s."""
METRIC_TENSOR_RECEIVED = "weightlife.tensor.received"
"""Tensors received. counter, {tensor}."""
METRIC_RECEIVE_IO = "weightlife.receive.io"
"""Bytes received. counter, By."""
METRIC_TENSOR_COPIED = "weightlife.tensor.copied"
"""Tensors copied into the memory that serves. counter, {tensor}."""
METRIC_COPY_IO = "weightlife.copy.io"
"""Bytes copied into the memory that serves. counter, By."""
METRIC_VIOLATION = "weightlife.violation"
"""Violations, by the code of the error. counter, {violation}."""
METRIC_TELEMETRY_DROPPED = "weightlife.telemetry.dropped"
"""Sessions whose spans were given up, since an exporter did not keep up. counter, {session}."""
EVENT_VIOLATION = "weightlife.violation"
"""Something was not as it must be."""
EVENT_NOTE = "weightlife.note"
"""A decision or fallback that is worth knowing."""

UNITS: dict[str, str] = {
    METRIC_SESSION_DURATION: "s",
    METRIC_PHASE_DURATION: "s",
    METRIC_ACTIVITY_TIME: "s",
    METRIC_TENSOR_RECEIVED: "{tensor}",
    METRIC_RECEIVE_IO: "By",
    METRIC_TENSOR_COPIED: "{tensor}",
    METRIC_COPY_IO: "By",
    METRIC_VIOLATION: "{violation}",
    METRIC_TELEMETRY_DROPPED: "{session}",
}
"""Unit of each metric."""

TYPES: dict[str, str] = {
    ERROR_TYPE: "string",
    ACTIVITY_DURATION: "template[double]",
    ACTIVITY_NAME: "string",
    CALL_COUNT: "int",
    CALL_DURATION: "double",
    COPY_RATE: "double",
    COPY_SIZE: "int",
    COPY_TENSOR_COUNT: "int",
    LAYER_HOOK: "string",
    LAYER_NAME: "string",
    LAYER_SLOWEST_DURATIONS: "double[]",
    LAYER_SLOWEST_NAMES: "string[]",
    LAYER_STRATEGY: "template[int]",
    LAYER_TOUCHED: "int",
    LAYER_UNTOUCHED: "int",
    LINK_KIND: "string",
    MEMORY_PEAK: "int",
    MESSAGE: "string",
    MODEL_CLASS: "string",
    PHASE: "string",
    PROCESSING_DURATION: "template[double]",
    RANK: "int",
    RECEIVE_RATE: "double",
    RPC_METHOD: "string",
    SESSION_ID: "string",
    SESSION_ISOLATION: "string",
    SESSION_OPENED_BY: "string",
    SESSION_OPERATION: "string",
    SESSION_OUTCOME: "string",
    SESSION_SOURCE: "string",
    SESSION_STORAGE: "string",
    SESSION_SUPPRESSED_EVENT_COUNT: "int",
    TENSOR_COUNT: "int",
    TENSOR_NOT_SENT: "int",
    TENSOR_SIZE: "int",
    UPDATE_ID: "string",
    VERSION: "template[string]",
    VIOLATION_COUNT: "int",
    VIOLATION_KIND: "string",
    VIOLATION_LAYER: "string",
    VIOLATION_TENSOR_COUNT: "int",
    VIOLATION_TENSORS: "string[]",
    WEIGHT_GENERATION: "int",
    WORLD_SIZE: "int",
}
"""Type of each attribute's value; of a template, the type of the values under its prefix."""
