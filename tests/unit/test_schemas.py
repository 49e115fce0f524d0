# SPDX-License-Identifier: Apache-2.0
"""Files for Docker, Prometheus and Grafana against the schemas that their makers publish, and against tables elsewhere.

Published and installable: the compose specification (check-jsonschema carries it), Prometheus' configuration
(SchemaStore), Grafana's dashboards (Grafana's own SDK) and PromQL (a parser). The collector and Jaeger publish schemas
of single components in their sources, in no package: a table names each key that is used here, and where it is read.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pickletools
import re
import sqlite3
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OTEL = ROOT / "otel"
Path_ = tuple[str | int, ...]


def shipped(package: str, file: str) -> Path:
    """A file of an installed package, which is not imported."""
    return Path(str(metadata.distribution(package).locate_file(file))).resolve()


def load(path: Path) -> Any:
    """A JSON or YAML file; a key that is there twice is an error, and so is what YAML would take for a date."""
    return yaml.load(path.read_text(encoding="utf-8"), _Strict)


class _Strict(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"twice in {node.start_mark}"
        return super().construct_mapping(node, deep)


def keys_of(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The paths of all keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            yield from keys_of(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from keys_of(item, (*path, index))


def misspelt(value: Any, path: Path_) -> Any:
    """A copy with one key misspelt."""
    value = copy.deepcopy(value)
    at = value
    for part in path[:-1]:
        at = at[part]
    at[f"{path[-1]}x"] = at.pop(path[-1])
    return value


# -- the compose specification ---------------------------------------------------------------------------------------


@pytest.fixture(name="compose", scope="module")
def _compose() -> Any:
    return load(ROOT / "docker-compose.yml")


@pytest.fixture(name="specification", scope="module")
def _specification() -> jsonschema.protocols.Validator:
    file = shipped("check-jsonschema", "check_jsonschema/builtin_schemas/vendor/compose-spec.json")
    schema = json.loads(file.read_text(encoding="utf-8"))
    return jsonschema.validators.validator_for(schema)(schema)


def test_compose_file(compose: Any, specification: jsonschema.protocols.Validator) -> None:
    specification.validate(compose)


def test_every_misspelt_key_of_the_compose_file_is_seen(
    compose: Any, specification: jsonschema.protocols.Validator
) -> None:
    named = {
        ("services",): 2,
        ("volumes",): 2,
        ("services", "*", "depends_on"): 4,
        ("services", "*", "environment"): 4,
    }
    for path in keys_of(compose):
        inside = tuple("*" if i == 1 else part for i, part in enumerate(path[:-1]))
        if named.get(inside) == len(path) or str(path[0]).startswith("x-"):
            continue  # a name of ours
        assert not specification.is_valid(misspelt(compose, path)), path


# -- Prometheus and PromQL -------------------------------------------------------------------------------------------


@pytest.fixture(name="prometheus", scope="module")
def _prometheus() -> jsonschema.protocols.Validator:
    """SchemaStore's, out of the answers that its package keeps: each a pickle, of which only constants are read."""
    file = shipped("schemastore", "schemastore/cache.sqlite")
    wanted = b'"$id": "https://json.schemastore.org/prometheus.json"'
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
        (row,) = database.execute("select value from responses where instr(value, ?)", (wanted,)).fetchall()
    (text,) = (
        part for _, part, _ in pickletools.genops(row[0]) if isinstance(part, bytes) and wanted in part
    )
    schema = json.loads(text)
    return jsonschema.validators.validator_for(schema)(schema)


def test_prometheus_configuration(prometheus: jsonschema.protocols.Validator) -> None:
    config = load(OTEL / "prometheus.yaml")
    prometheus.validate(config)
    unseen = [path for path in keys_of(config) if prometheus.is_valid(misspelt(config, path))]
    # The schema admits any key there; test_compose.py reads this one.
    assert unseen == [("scrape_configs", 0, "static_configs", 0, "targets")]


@pytest.fixture(name="board", scope="module")
def _board() -> Any:
    return json.loads((OTEL / "grafana" / "weightlife.json").read_text(encoding="utf-8"))


def test_expressions_of_the_dashboard_are_promql(board: Any) -> None:
    import promql_parser

    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m")  # Grafana's
            promql_parser.parse(expression)
            with pytest.raises(ValueError, match="parenthesis"):
                promql_parser.parse(expression + "(")


# -- Grafana ---------------------------------------------------------------------------------------------------------


def lost(ours: Any, theirs: Any, path: Path_ = ()) -> list[Path_]:
    """What of ours is not in theirs, or is another value there."""
    if isinstance(ours, dict):
        known = theirs if isinstance(theirs, dict) else {}
        return [
            place
            for key, value in ours.items()
            for place in (lost(value, known[key], (*path, key)) if key in known else [(*path, key)])
        ]
    if isinstance(ours, list):
        if not isinstance(theirs, list) or len(ours) != len(theirs):
            return [path]
        return [
            place
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
            for place in lost(a, b, (*path, i))
        ]
    return [] if ours == theirs and type(ours) is type(theirs) else [path]


@pytest.fixture(name="read_by_grafana", scope="module")
def _read_by_grafana() -> Callable[[Any], Any]:
    """Into the classes that Grafana generates from its schemas, panels by type, and out again."""
    from grafana_foundation_sdk.cog import encoder, plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    return lambda data: json.loads(
        json.dumps(Dashboard.from_json(copy.deepcopy(data)), cls=encoder.JSONEncoder)
    )


def test_dashboard(board: Any, read_by_grafana: Callable[[Any], Any]) -> None:
    assert lost(board, read_by_grafana(board)) == []


def test_every_misspelt_key_of_the_dashboard_is_seen(
    board: Any, read_by_grafana: Callable[[Any], Any]
) -> None:
    for path in keys_of(board):
        wrong = misspelt(board, path)
        with contextlib.suppress(KeyError):  # one that it needs
            assert lost(wrong, read_by_grafana(wrong)), path


# -- the collector, Jaeger, and provisioning: no package has their schemas -------------------------------------------

VERSIONS = {
    "jaegertracing/jaeger": "2.20.0",
    "otel/opentelemetry-collector-contrib": "0.128.0",
    "prom/prometheus": "v3.4.1",
    "grafana/grafana": "12.0.1",
}
"""What the tables below were made for: whoever moves an image looks at the keys again."""


def matching(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def one_of(*legal: Any) -> Callable[[Any], bool]:
    return lambda value: type(value) in {type(x) for x in legal} and value in legal


def positive(value: Any) -> bool:
    return type(value) is int and value > 0


def percent(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 100


def flag(value: Any) -> bool:
    return type(value) is bool


def empty(value: Any) -> bool:
    return value == {}


text = matching(r"[ -~]+")
file = matching(r"/[\w./-]+")
address = matching(r"[\w.-]+:\d{1,5}")
url = matching(r"https?://[\w.:-]+(/[ -~]*)?")
# Go's time.ParseDuration, and more than nothing: each that is used here must be
duration = matching(r"(?=.*[1-9])(\d+(\.\d+)?(ns|us|ms|s|m|h))+")

SERVER = "confighttp.ServerConfig"
PIPELINE = "service/pipelines PipelineConfig, of which processors may be missing"
SAMPLING = "processor/tailsamplingprocessor config.go, config.schema.yaml: "
BADGER = "jaeger internal/storage/v1/badger Config: "

POLICY = {
    "name": (text, SAMPLING + "PolicyCfg and AndSubPolicyCfg"),
    "type": (
        one_of("status_code", "string_attribute", "latency", "probabilistic", "and"),
        SAMPLING + "PolicyType",
    ),
    "status_code::status_codes[]": (one_of("ERROR", "OK", "UNSET"), SAMPLING + "StatusCodeCfg"),
    "string_attribute::key": (text, SAMPLING + "StringAttributeCfg"),
    "string_attribute::values[]": (text, SAMPLING + "StringAttributeCfg"),
    "string_attribute::enabled_regex_matching": (flag, SAMPLING + "StringAttributeCfg"),
    "latency::threshold_ms": (positive, SAMPLING + "LatencyCfg"),
    "probabilistic::sampling_percentage": (percent, SAMPLING + "ProbabilisticCfg"),
}
POLICIES = "processors::tail_sampling::policies[]::"
OTLP = {
    "receivers::otlp::protocols::grpc::endpoint": (
        address,
        "receiver/otlpreceiver Protocols; confignet.AddrConfig",
    ),
    "receivers::otlp::protocols::http::endpoint": (address, "receiver/otlpreceiver Protocols; " + SERVER),
    "processors::batch": (empty, "processor/batchprocessor Config: all have defaults"),
    **{
        f"service::pipelines::*::{kind}[]": (text, PIPELINE)
        for kind in ("receivers", "processors", "exporters")
    },
}
TABLES: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "collector.yaml": {
        **OTLP,
        "processors::memory_limiter::check_interval": (duration, "internal/memorylimiter Config; Validate: above zero"),
        "processors::memory_limiter::limit_mib": (positive, "internal/memorylimiter Config; Validate: above zero"),
        "processors::tail_sampling::decision_wait": (duration, SAMPLING + "Config"),
        **{POLICIES + key: row for key, row in POLICY.items()},
        **{POLICIES + "and::and_sub_policy[]::" + key: row for key, row in POLICY.items()},
        "connectors::spanmetrics::histogram::explicit::buckets[]": (
            duration, "connector/spanmetricsconnector HistogramConfig, ExplicitHistogramConfig",
        ),
        "exporters::otlp::endpoint": (address, "exporter/otlpexporter Config; Validate: host and port"),
        "exporters::otlp::tls::insecure": (flag, "configgrpc.ClientConfig, configtls.ClientConfig"),
        "exporters::prometheus::endpoint": (address, "exporter/prometheusexporter Config; " + SERVER),
    },
    "jaeger.yaml": {
        **OTLP,
        "service::extensions[]": (text, "service Config"),
        "service::telemetry::resource::service.name": (text, "service/telemetry/otelconftelemetry Config.Resource"),
        "extensions::jaeger_storage::backends::*::badger::directories::keys": (file, BADGER + "Directories"),
        "extensions::jaeger_storage::backends::*::badger::directories::values": (file, BADGER + "Directories"),
        "extensions::jaeger_storage::backends::*::badger::ephemeral": (flag, BADGER + "Ephemeral"),
        "extensions::jaeger_storage::backends::*::badger::ttl::spans": (duration, BADGER + "TTL; Validate: above zero"),
        "extensions::jaeger_query::storage::traces": (text, "jaegerquery config.schema.yaml, Storage"),
        "extensions::jaeger_query::http::endpoint": (address, "jaegerquery/internal QueryOptions; " + SERVER),
        "extensions::jaeger_query::ui::config_file": (file, "jaegerquery/internal UIConfig"),
        "extensions::healthcheckv2::use_v2": (one_of(True), "internal/healthcheck Config; Validate: then a protocol"),
        "extensions::healthcheckv2::http::endpoint": (address, "internal/healthcheck HTTPConfig; " + SERVER),
        "exporters::jaeger_storage_exporter::trace_storage": (text, "jaeger storageexporter Config, required"),
    },
    "grafana/datasources.yaml": {
        "apiVersion": (one_of(1), "Grafana, Provision data sources"),
        "datasources[]::name": (text, "Grafana, Provision data sources"),
        "datasources[]::uid": (matching(r"[\w-]{1,40}"), "Grafana, Provision data sources; a uid has 40 characters"),
        "datasources[]::type": (one_of("prometheus", "jaeger"), "ids of plugins that Grafana brings"),
        "datasources[]::access": (one_of("proxy"), "Grafana, Provision data sources"),
        "datasources[]::url": (url, "Grafana, Provision data sources"),
        "datasources[]::isDefault": (flag, "Grafana, Provision data sources"),
    },
    "grafana/dashboards.yaml": {
        "apiVersion": (one_of(1), "Grafana, Provision dashboards"),
        "providers[]::name": (text, "Grafana, Provision dashboards"),
        "providers[]::type": (one_of("file"), "Grafana, Provision dashboards"),
        "providers[]::options::path": (file, "Grafana, Provision dashboards"),
    },
    "jaeger-ui.json": {
        "themes::enabled": (flag, "jaeger-ui types/config.ts Config"),
        "criticalPathEnabled": (flag, "jaeger-ui types/config.ts Config"),
        "topTagPrefixes[]": (text, "jaeger-ui types/config.ts Config"),
        "linkPatterns[]::type": (one_of("tags", "traces"), "jaeger-ui types/config.ts LinkPatternsConfig"),
        "linkPatterns[]::key": (text, "jaeger-ui types/config.ts LinkPatternsConfig"),
        "linkPatterns[]::url": (matching(r"(/|http://127\.0\.0\.1:)[ -~]+"), "jaeger-ui LinkPatternsConfig"),
        "linkPatterns[]::text": (text, "jaeger-ui types/config.ts LinkPatternsConfig"),
    },
}  # fmt: skip


def rows(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf as the tables spell its path: without names of our own."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            part = key
            if path in ("receivers", "processors", "exporters", "connectors", "extensions"):
                part = key.partition("/")[0]  # type/name
            elif path == "service::pipelines" or path.endswith("::backends"):
                part = "*"
            yield from rows(item, f"{path}::{part}" if path else part)
    elif isinstance(value, list) and value:
        for item in value:
            yield from rows(item, f"{path}[]")
    else:
        yield path, value


def wrong(name: str, config: Any) -> list[str]:
    """Keys that the table lacks, values that it does not allow, and rows that nothing uses."""
    table, used, bad = TABLES[name], set(), []
    for path, value in rows(config):
        used.add(path)
        if path not in table or not table[path][0](value):
            bad.append(f"{path}: {value!r}")
    needed = {path for path in table if "_sub_policy" not in path}
    return bad + sorted(needed - used - {POLICIES + "probabilistic::sampling_percentage"})


@pytest.mark.parametrize("name", TABLES)
def test_keys_and_values(name: str) -> None:
    config = load(OTEL / name)
    assert wrong(name, config) == []
    for path in keys_of(config):
        inside = "::".join(str(part) for part in path[:-1])
        ours = inside == "service::pipelines" or inside.endswith("::backends") or "/" in str(path[-1])
        if not ours:
            assert wrong(name, misspelt(config, path)), path


def test_tables_were_made_for_the_images_that_run(compose: Any) -> None:
    images = {service["image"] for service in compose["services"].values()}
    assert images == {f"{name}:{version}" for name, version in VERSIONS.items()}


@pytest.mark.parametrize("name", ["collector.yaml", "jaeger.yaml"])
def test_the_collectors_own_rules(name: str) -> None:
    """What `Validate` refuses beyond single values: sections, pipelines with ends, everything named is declared."""
    config = load(OTEL / name)
    kinds = {"receivers", "processors", "exporters", "connectors", "extensions"}
    assert set(config) <= kinds | {"service"}
    declared = {kind: set(config.get(kind, {})) for kind in kinds}
    for kind in kinds:
        assert all(re.fullmatch(r"[a-zA-Z][0-9a-zA-Z_]*(/[^\s/]+)?", ident) for ident in declared[kind])
    assert not declared["connectors"] & (declared["receivers"] | declared["exporters"])
    assert set(config["service"]) <= {"extensions", "pipelines", "telemetry"}
    assert set(config["service"].get("extensions", [])) == declared["extensions"]
    for ident, pipeline in config["service"]["pipelines"].items():
        assert re.fullmatch(r"(traces|metrics|logs|profiles)(/[^\s/]+)?", ident)
        assert {"receivers", "exporters"} <= set(pipeline) <= {"receivers", "processors", "exporters"}
        for kind in set(pipeline):
            assert pipeline[kind]
            assert len(pipeline[kind]) == len(set(pipeline[kind]))
            ends = declared["connectors"] if kind != "processors" else set()
            assert set(pipeline[kind]) <= declared[kind] | ends


def test_policies_and_buckets_of_the_collector() -> None:
    config = load(OTEL / "collector.yaml")
    policies = config["processors"]["tail_sampling"]["policies"]
    every = [*policies, *(sub for p in policies for sub in p.get("and", {}).get("and_sub_policy", []))]
    assert len({policy["name"] for policy in every}) == len(every)
    for policy in every:
        assert set(policy) == {"name", "type", policy["type"]}
        for pattern in policy.get("string_attribute", {}).get("values", []):
            re.compile(pattern)
    assert not any("and" in sub for p in policies for sub in p.get("and", {}).get("and_sub_policy", []))
    limiter = config["processors"]["memory_limiter"]
    assert limiter["limit_mib"] > limiter.get("spike_limit_mib", 0)


def test_link_patterns_of_tags_alone_have_a_key() -> None:
    for pattern in load(OTEL / "jaeger-ui.json")["linkPatterns"]:
        assert set(pattern) == {"type", "url", "text"} | ({"key"} if pattern["type"] != "traces" else set())
