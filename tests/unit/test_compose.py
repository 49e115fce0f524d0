# SPDX-License-Identifier: Apache-2.0
"""The files for Docker agree with each other and with what is emitted; test_schemas.py holds each to its schema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def jaeger(compose: dict[str, Any]) -> dict[str, Any]:
    return compose["services"]["jaeger"]


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "otel" / "jaeger.yaml").read_text(encoding="utf-8"))


def _published(service: dict[str, Any]) -> dict[int, tuple[str, int]]:
    """Container port -> (host address, host port)."""
    published = {}
    for entry in service["ports"]:
        address, host_port, container_port = entry.split(":")
        published[int(container_port)] = (address, int(host_port))
    return published


def _mounts(service: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Target in the container -> (source, mode)."""
    mounts = {}
    for entry in service["volumes"]:
        source, target, *mode = entry.split(":")
        mounts[target] = (source, mode[0] if mode else "rw")
    return mounts


def _port(endpoint: str) -> int:
    return int(endpoint.rsplit(":", 1)[1])


def test_no_obsolete_version_key(compose):
    assert "version" not in compose


def test_every_image_is_pinned_to_a_release(compose):
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[a-z-]+/[a-z-]+:v?\d+\.\d+\.\d+", service["image"]), name
    for name in ("jaeger", "jaeger-volume"):
        assert compose["services"][name]["image"].startswith("jaegertracing/jaeger:2.")


def test_ports_are_bound_to_loopback_only(compose):
    published = {
        name: _published(service) for name, service in compose["services"].items() if "ports" in service
    }
    assert published.pop("jaeger") == {port: ("127.0.0.1", port) for port in (16686, 4317, 4318)}
    assert {address for ports in published.values() for address, _ in ports.values()} == {"127.0.0.1"}
    every = [port for ports in published.values() for _, port in ports.values()]
    assert len(set(every) | {16686, 4317, 4318}) == len(every) + 3


def test_jaeger_alone_comes_up_unless_metrics_are_asked_for(compose):
    profiles = {name: service.get("profiles", []) for name, service in compose["services"].items()}
    assert {name for name, chosen in profiles.items() if not chosen} == {"jaeger", "jaeger-volume"}
    assert {tuple(chosen) for chosen in profiles.values() if chosen} == {("metrics",)}


def test_every_service_that_can_be_asked_has_a_health_check_and_whoever_waits_waits_for_it(compose):
    services = compose["services"]
    checked = {name for name, service in services.items() if "healthcheck" in service}
    # The collector's image has nothing to ask with.
    assert checked == {name for name, service in services.items() if "ports" in service} - {"collector"}
    for service in services.values():
        for name, how in service.get("depends_on", {}).items():
            assert how["condition"] == (
                "service_healthy" if name in checked else "service_completed_successfully"
            )


def test_every_file_that_is_mounted_is_there_and_read_only(compose):
    for service in compose["services"].values():
        for source, mode in _mounts(service).values():
            if source.startswith("."):
                assert (ROOT / source).is_file(), source
                assert mode == "ro"


def test_every_named_volume_is_declared_and_used(compose):
    named = {
        source
        for service in compose["services"].values()
        for source, _ in _mounts(service).values()
        if not source.startswith((".", "/"))
    }
    assert named == set(compose["volumes"])


def test_configuration_file_is_mounted_read_only_where_jaeger_is_told_to_look(jaeger):
    flag, path = jaeger["command"]
    source, mode = _mounts(jaeger)[path]
    assert flag == "--config"
    assert mode == "ro"
    assert (ROOT / source).resolve() == ROOT / "otel" / "jaeger.yaml"


def test_volume_is_handed_to_jaegers_user_before_jaeger_starts(compose, jaeger):
    assert jaeger["depends_on"] == {"jaeger-volume": {"condition": "service_completed_successfully"}}
    assert "user" not in jaeger  # Jaeger itself does not run as root
    helper = compose["services"]["jaeger-volume"]
    assert helper["restart"] == "no"
    assert helper["user"] == "0:0"
    assert "chown -R 10001:10001 /badger" in helper["command"][0]


def test_badger_keeps_its_files_on_the_volume(compose, jaeger, config):
    (backend,) = config["extensions"]["jaeger_storage"]["backends"].values()
    badger = backend["badger"]
    assert badger["ephemeral"] is False
    for service in (jaeger, compose["services"]["jaeger-volume"]):
        assert _mounts(service)["/badger"] == ("jaeger-data", "rw")
    for directory in badger["directories"].values():
        assert Path(directory).parent == Path("/badger")
        assert directory in compose["services"]["jaeger-volume"]["command"][0]


def test_health_check_asks_the_endpoint_that_the_configuration_opens(jaeger, config):
    probe = jaeger["healthcheck"]["test"]
    extension = config["extensions"]["healthcheckv2"]
    assert probe[:2] == ["CMD", "wget"]
    assert extension["use_v2"] is True
    assert urlsplit(probe[-1]).port == _port(extension["http"]["endpoint"])
    assert "healthcheckv2" in config["service"]["extensions"]


def test_published_ports_listen_outside_the_containers_loopback(jaeger, config):
    protocols = config["receivers"]["otlp"]["protocols"]
    endpoints = [
        protocols["grpc"]["endpoint"],
        protocols["http"]["endpoint"],
        config["extensions"]["jaeger_query"]["http"]["endpoint"],
    ]
    assert all(endpoint.startswith("0.0.0.0:") for endpoint in endpoints)
    assert {_port(endpoint) for endpoint in endpoints} == set(_published(jaeger))


def test_pipelines_and_extensions_name_only_what_is_declared(config):
    assert set(config["service"]["extensions"]) == set(config["extensions"])
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(config[kind])


def test_reader_and_writer_name_the_same_storage(config):
    (storage,) = config["extensions"]["jaeger_storage"]["backends"]
    assert config["extensions"]["jaeger_query"]["storage"]["traces"] == storage
    assert config["exporters"]["jaeger_storage_exporter"]["trace_storage"] == storage


def _yaml(*parts: str) -> dict[str, Any]:
    return yaml.safe_load(ROOT.joinpath("otel", *parts).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def collector() -> dict[str, Any]:
    return _yaml("collector.yaml")


class TestMetrics:
    """The collector, Prometheus and Grafana agree with each other, with Jaeger, and with the names that we emit."""

    def test_the_collector_listens_where_its_ports_are_published(self, compose, collector):
        protocols = collector["receivers"]["otlp"]["protocols"]
        endpoints = [protocols["grpc"]["endpoint"], protocols["http"]["endpoint"]]
        assert all(endpoint.startswith("0.0.0.0:") for endpoint in endpoints)
        assert {_port(endpoint) for endpoint in endpoints} == set(
            _published(compose["services"]["collector"])
        )

    def test_pipelines_name_only_what_is_declared_and_all_of_it(self, collector):
        declared = {
            kind: set(collector[kind]) for kind in ("receivers", "processors", "exporters", "connectors")
        }
        used: dict[str, set[str]] = {kind: set() for kind in ("receivers", "processors", "exporters")}
        for pipeline in collector["service"]["pipelines"].values():
            for kind in used:
                used[kind] |= set(pipeline[kind])
            assert pipeline["processors"][0] == "memory_limiter"
        assert used["receivers"] == declared["receivers"] | declared["connectors"]
        assert used["exporters"] == declared["exporters"] | declared["connectors"]
        assert used["processors"] == declared["processors"]
        # a connector ends one pipeline and begins another
        assert "spanmetrics" in collector["service"]["pipelines"]["traces/all"]["exporters"]
        assert "spanmetrics" in collector["service"]["pipelines"]["metrics"]["receivers"]

    def test_metrics_are_made_of_all_spans_and_jaeger_gets_a_choice(self, collector):
        pipelines = collector["service"]["pipelines"]
        assert pipelines["traces"]["exporters"] == ["otlp/jaeger"]
        assert "tail_sampling" in pipelines["traces"]["processors"]
        # batches come after: the processor puts spans together anew
        assert pipelines["traces"]["processors"][-1] == "batch"
        assert "tail_sampling" not in pipelines["traces/all"]["processors"]

    def test_traces_go_to_jaeger(self, compose, collector, config):
        host, port = collector["exporters"]["otlp/jaeger"]["endpoint"].split(":")
        assert host in compose["services"]
        assert int(port) == _port(config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"])
        assert "jaeger" in compose["services"]["collector"]["depends_on"]

    def test_buckets_are_those_of_our_own_histograms(self, collector):
        from weightlife.otel.metrics import BOUNDARIES

        given = collector["connectors"]["spanmetrics"]["histogram"]["explicit"]["buckets"]
        seconds = [float(b[:-2]) / 1e3 if b.endswith("ms") else float(b[:-1]) for b in given]
        assert seconds == pytest.approx(BOUNDARIES, rel=0.05)

    def test_prometheus_reads_the_collector(self, compose, collector):
        (job,) = _yaml("prometheus.yaml")["scrape_configs"]
        (target,) = job["static_configs"][0]["targets"]
        host, port = target.split(":")
        assert host == "collector"
        assert int(port) == _port(collector["exporters"]["prometheus"]["endpoint"])
        assert job["honor_labels"] is True
        service = compose["services"]["prometheus"]
        assert _mounts(service)["/etc/prometheus/prometheus.yml"] == ("./otel/prometheus.yaml", "ro")
        assert "--config.file=/etc/prometheus/prometheus.yml" in service["command"]
        assert "--storage.tsdb.path=/prometheus" in service["command"]
        assert _mounts(service)["/prometheus"] == ("prometheus-data", "rw")

    def test_grafana_finds_its_sources_and_the_dashboard(self, compose):
        service = compose["services"]["grafana"]
        for source in _yaml("grafana", "datasources.yaml")["datasources"]:
            url = urlsplit(source["url"])
            assert url.port in _published(compose["services"][url.hostname])
        (provider,) = _yaml("grafana", "dashboards.yaml")["providers"]
        assert f"{provider['options']['path']}/weightlife.json" in _mounts(service)

    def test_the_dashboard_asks_for_metrics_and_labels_that_are_emitted(self):
        from weightlife.otel import generate_names

        groups = [g for g in generate_names.load_registry() if g["type"] == "metric"]
        legal: dict[str, set[str]] = {}
        for group in groups:
            # as the collector's Prometheus exporter spells them
            name = group["metric_name"].replace(".", "_") + {"s": "_seconds", "By": "_bytes"}.get(
                group["unit"], ""
            )
            labels = {a["ref"].replace(".", "_") for a in group["attributes"]}
            if group["instrument"] == "histogram":
                legal.update({f"{name}_{part}": labels | {"le"} for part in ("bucket", "sum", "count")})
            else:
                legal[f"{name}_total"] = labels
        board = json.loads((ROOT / "otel" / "grafana" / "weightlife.json").read_text(encoding="utf-8"))
        sources = {s["uid"] for s in _yaml("grafana", "datasources.yaml")["datasources"]}
        asked: set[str] = set()
        for panel in board["panels"]:
            assert panel["description"]
            assert panel["datasource"]["uid"] in sources
            for target in panel["targets"]:
                expression = target["expr"]
                names = set(re.findall(r"\b(weightlife_\w+)\[", expression))
                assert names
                assert names <= set(legal), names - set(legal)
                asked |= names
                by = {
                    x.strip() for found in re.findall(r"by \(([^)]*)\)", expression) for x in found.split(",")
                }
                assert by <= set.union(*(legal[name] for name in names))
                assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= by
        boxes = [tuple(panel["gridPos"][k] for k in "xywh") for panel in board["panels"]]
        assert len({box[:2] for box in boxes}) == len(boxes)
        covered = {name.removesuffix("_total") for name in asked}
        missing = [
            g["metric_name"]
            for g in groups
            if not any(c.startswith(g["metric_name"].replace(".", "_")) for c in covered)
        ]
        assert set(missing) == {"weightlife.tensor.received", "weightlife.tensor.copied"}


class TestUserInterface:
    """Jaeger's own, which is told where attributes and traces lead."""

    @pytest.fixture(name="ui", scope="class")
    @staticmethod
    def _ui() -> dict[str, Any]:
        return json.loads((ROOT / "otel" / "jaeger-ui.json").read_text(encoding="utf-8"))

    def test_the_file_is_mounted_where_jaeger_is_told_to_look(self, jaeger, config):
        path = config["extensions"]["jaeger_query"]["ui"]["config_file"]
        assert _mounts(jaeger)[path] == ("./otel/jaeger-ui.json", "ro")

    def test_link_patterns_are_about_what_is_emitted(self, ui):
        from weightlife.otel import names

        of_a_trace = {"traceID", "traceName", "duration", "startTime", "endTime"}
        for pattern in ui["linkPatterns"]:
            filled = re.findall(r"#{([^}]+)}", pattern["url"] + pattern["text"])
            assert filled
            if pattern["type"] == "traces":
                for parameter in filled:
                    name, *functions = (part.strip() for part in parameter.split("|"))
                    assert name in of_a_trace
                    assert all(re.fullmatch(r"add -?\d+|epoch_micros_to_date_iso", f) for f in functions)
                continue
            assert pattern["key"] in names.TYPES
            for parameter in filled:
                # formatting functions are known for whole traces only
                assert parameter == pattern["key"] or parameter.removeprefix("trace.") in of_a_trace
            assert pattern["url"].startswith("/trace/#{trace.traceID}")
        for prefix in ui["topTagPrefixes"]:
            assert any(name.startswith(prefix) for name in names.TYPES), prefix

    def test_the_dashboard_is_where_a_trace_leads(self, compose, ui):
        (pattern,) = (p for p in ui["linkPatterns"] if p["type"] == "traces")
        target = urlsplit(pattern["url"].partition("?")[0])
        board = json.loads((ROOT / "otel" / "grafana" / "weightlife.json").read_text(encoding="utf-8"))
        assert target.path == f"/d/{board['uid']}"
        assert (target.hostname, target.port) == _published(compose["services"]["grafana"])[3000]


def kept(policy: dict[str, Any], trace: list[dict[str, Any]]) -> bool:
    """Whether a policy of the collector's tail sampling keeps a trace, as its documentation describes them."""
    kind = policy["type"]
    how = policy[kind]
    if kind == "status_code":
        return any(span["status"] in how["status_codes"] for span in trace)
    if kind == "latency":
        lasted = max(span["end"] for span in trace) - min(span["start"] for span in trace)
        return lasted * 1000 > how["threshold_ms"]
    if kind == "string_attribute":
        found = [span["attributes"].get(how["key"]) for span in trace]
        if how.get("enabled_regex_matching"):
            return any(value is not None and re.search(p, value) for value in found for p in how["values"])
        return any(value in how["values"] for value in found)
    if kind == "probabilistic":
        return how["sampling_percentage"] >= 100
    assert kind == "and", kind
    return all(kept(sub, trace) for sub in how["and_sub_policy"])


class TestTailSampling:
    """Every load stays, and whatever failed or was slow; requests are thinned out."""

    @pytest.fixture(name="sampling", scope="class")
    @staticmethod
    def _sampling(collector: dict[str, Any]) -> dict[str, Any]:
        return collector["processors"]["tail_sampling"]

    def policies(self, sampling: dict[str, Any]) -> list[dict[str, Any]]:
        top = sampling["policies"]
        return [*top, *(sub for policy in top for sub in policy.get("and", {}).get("and_sub_policy", []))]

    def test_attributes_and_values_are_those_that_are_emitted(self, sampling):
        from weightlife.otel import generate_names

        declared = {
            a["id"]: a["type"] for g in generate_names.load_registry() for a in g["attributes"] if "id" in a
        }
        for policy in self.policies(sampling):
            if policy["type"] != "string_attribute":
                continue
            how = policy["string_attribute"]
            kind = declared[how["key"]]
            if not how.get("enabled_regex_matching"):
                assert set(how["values"]) <= {member["value"] for member in kind["members"]}
            if how["key"] == "weightlife.session.operation":
                assert set(how["values"]) == {member["value"] for member in kind["members"]}
            if how["key"] == "weightlife.session.outcome":
                assert {m["value"] for m in kind["members"]} - set(how["values"]) == {"committed", "observed"}

    @pytest.mark.parametrize(
        ("trace", "stays"),
        [
            ([{"outcome": "aborted", "status": "ERROR"}], True),
            ([{"outcome": "refused"}], True),
            ([{"outcome": "committed", "end": 58}], True),
            ([{"outcome": "committed"}], True),
            ([{"method": "start_weight_update"}], True),
            ([{}, {"status": "ERROR"}], True),
            ([{}, {"start": 3, "end": 14}], True),
            ([{}, {}], False),
        ],
    )
    @pytest.mark.parametrize("percentage", [100, 0])
    def test_what_stays(self, sampling, trace, stays, percentage):
        """With no share of the good and fast loads, too: nothing that failed or was slow may hang on it."""
        if percentage == 0 and trace == [{"outcome": "committed"}]:
            stays = False
        spans = [
            {
                "status": span.get("status", "UNSET"),
                "start": span.get("start", 0),
                "end": span.get("end", 1),
                "attributes": {
                    **({"weightlife.session.outcome": span["outcome"], "weightlife.session.operation": "reload"}
                       if "outcome" in span else {}),
                    **({"weightlife.rpc.method": span["method"]} if "method" in span else {}),
                },
            }
            for span in trace
        ]  # fmt: skip
        chosen = json.loads(json.dumps(sampling["policies"]))
        for policy in chosen:
            for sub in policy.get("and", {}).get("and_sub_policy", []):
                if sub["type"] == "probabilistic":
                    sub["probabilistic"]["sampling_percentage"] = percentage
        assert any(kept(policy, spans) for policy in chosen) is stays

    def test_the_decision_waits_for_the_load_that_everybody_complains_of(self, sampling):
        assert int(sampling["decision_wait"].removesuffix("s")) > 58
