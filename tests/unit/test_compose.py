# SPDX-License-Identifier: Apache-2.0
"""docker-compose.yml and Jaeger's configuration agree with each other (no Docker engine needed)."""

from __future__ import annotations

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


def test_every_image_is_pinned_to_a_release_of_jaeger_2(compose):
    for name, service in compose["services"].items():
        assert re.fullmatch(r"jaegertracing/jaeger:2\.\d+\.\d+", service["image"]), name


def test_ports_are_bound_to_loopback_only(compose):
    published = {
        name: _published(service) for name, service in compose["services"].items() if "ports" in service
    }
    assert published == {"jaeger": {port: ("127.0.0.1", port) for port in (16686, 4317, 4318)}}


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
