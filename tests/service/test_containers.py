"""Checks of the container files that need no build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from inferencecenter.config.loader import OTHER_ENVIRONMENT
from inferencecenter.config.settings import ServerSettings, environment_name, setting_fields
from inferencecenter.daemon import STOP_S
from inferencecenter.server.listener import CLOSING_S

DOCKER_STOP_S = 10
ROOT = Path(__file__).parents[2]
KNOWN = {environment_name(name) for name, _ in setting_fields()} | set(OTHER_ENVIRONMENT)


@pytest.fixture(scope="module")
def compose() -> Any:
    """The compose file."""
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def dockerfile() -> str:
    """The image's instructions, with continued lines joined."""
    return (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def test_mounted_files_exist(compose: Any) -> None:
    """Docker would create a directory instead."""
    mounted = [
        source
        for service in compose["services"].values()
        for source in (volume.split(":")[0] for volume in service.get("volumes", ()))
        if source.startswith("./config/")
    ]
    assert len(mounted) == 5
    assert [source for source in mounted if not (ROOT / source).is_file()] == []


def test_volumes_and_secrets_are_declared(compose: Any) -> None:
    """Exactly the volumes and secrets that services use are declared."""
    services = compose["services"].values()
    used = {volume.split(":")[0] for service in services for volume in service.get("volumes", ())}
    assert {name for name in used if not name.startswith("./")} == set(compose["volumes"])
    assert {name for service in services for name in service.get("secrets", ())} == set(compose["secrets"])


def test_ports_are_published_on_loopback_only(compose: Any) -> None:
    """No two services use the same port."""
    ports = [port for service in compose["services"].values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len({port.split(":")[1] for port in ports}) == len(ports)


def test_prometheus_scrapes_the_daemon(compose: Any) -> None:
    """Service, port and secret have the compose file's names."""
    (job,) = yaml.safe_load((ROOT / "config/prometheus/prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    service, port = target.split(":")
    assert compose["services"][service]["ports"][0].endswith(f":{port}")
    assert Path(job["authorization"]["credentials_file"]).name in compose["secrets"]


def test_grafana_uses_prometheus(compose: Any) -> None:
    """Its address is the name and the port of the service."""
    (source,) = yaml.safe_load((ROOT / "config/grafana/datasources.yml").read_text())["datasources"]
    service, port = source["url"].removeprefix("http://").split(":")
    assert compose["services"][service]["ports"][0].endswith(f":{port}")


def test_settings_in_the_environment_exist(compose: Any, dockerfile: str) -> None:
    """The daemon refuses unknown variables."""
    names = set(re.findall(r"\b(INFERENCECENTER_\w+)=", dockerfile))
    names |= set(compose["services"]["inferencecenter"]["environment"])
    assert names
    assert names - KNOWN == set()


def test_stages_have_a_base(dockerfile: str) -> None:
    """Each stage starts from an external image or an earlier stage."""
    for backend in ("cpu", "cuda"):
        before: set[str] = set()
        for line in re.findall(r"^FROM (.+)$", dockerfile, flags=re.MULTILINE):
            base, _, name = line.replace("${BACKEND}", backend).partition(" AS ")
            assert base in before or re.match(r"(ubuntu|nvidia/cuda):", base), line
            before.add(name)


def test_image_runs_without_root_and_portably(dockerfile: str) -> None:
    """It has a health check, and llama.cpp is not built for the builder's CPU."""
    assert re.findall(r"^USER (\S+)$", dockerfile, flags=re.MULTILINE)[-1] == "10001"
    (health,) = re.findall(r"^HEALTHCHECK .* CMD (.+)$", dockerfile, flags=re.MULTILINE)
    assert health == '["inferencecenter", "healthcheck"]'
    assert dockerfile.count("ENV PORTABLE=1") == len(re.findall(r"^FROM .* AS build-", dockerfile, flags=re.MULTILINE))


def test_stop_timeouts_fit(compose: Any, dockerfile: str) -> None:
    """The compose file covers the whole stop; plain ``docker stop`` covers running turns."""
    grace = compose["services"]["inferencecenter"]["stop_grace_period"]
    assert re.fullmatch(r"\d+s", grace)
    longest_s = ServerSettings().shutdown_timeout_s + STOP_S
    assert int(grace[:-1]) >= longest_s
    (turns,) = re.findall(r"INFERENCECENTER_SERVER__SHUTDOWN_TIMEOUT_S=(\d+)", dockerfile)
    assert int(turns) + CLOSING_S < DOCKER_STOP_S
    assert re.findall(r"^STOPSIGNAL (\w+)$", dockerfile, flags=re.MULTILINE) == ["SIGTERM"]
    (documented,) = re.findall(r"--stop-timeout (\d+)", (ROOT / "docs/operations.md").read_text())
    assert int(documented) >= longest_s


def test_build_inputs_are_not_ignored(dockerfile: str) -> None:
    """.dockerignore passes what the package is built from."""
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"inferencecenter", "pyproject.toml", "README.md", "LICENSE", "tools/llama"} == let_through
    assert all((ROOT / name).exists() for name in let_through)
