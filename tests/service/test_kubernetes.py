"""Checks of the Kubernetes manifests that need no cluster."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kubernetes_validate
import pytest
import typer.main
import yaml

from inferencecenter.cli.node import app
from inferencecenter.config.loader import OTHER_ENVIRONMENT
from inferencecenter.config.settings import Settings, environment_name, setting_fields
from inferencecenter.models.registry import LOCAL_NODE

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "config/kubernetes"
KUBERNETES = "1.34"
# Of KubeRay's types, as its operator 1.5 knows them: the fields that these manifests may have, and those required.
CLUSTER_FIELDS: Final = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD_FIELDS: Final = {"serviceType", "rayStartParams", "template"}
WORKER_FIELDS: Final = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def documents() -> Iterator[dict[str, Any]]:
    """All objects of the manifests."""
    for path in sorted(MANIFESTS.glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def the(kind: str, name: str = "inferencecenter") -> dict[str, Any]:
    """Return the object of a kind and name."""
    (found,) = (each for each in documents() if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    """The specification of the Ray cluster."""
    spec: dict[str, Any] = the("RayCluster")["spec"]
    return spec


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the head's group and those of the other nodes."""
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the containers of all pods."""
    return [each for group in groups(cluster) for each in group["template"]["spec"]["containers"]]


def as_pod(template: dict[str, Any]) -> dict[str, Any]:
    """Return the pod of a template."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}


@pytest.mark.parametrize("manifest", list(documents()), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_objects_match_their_schema(manifest: dict[str, Any]) -> None:
    """Those of Kubernetes; of a Ray cluster its pods."""
    if manifest["kind"] != "RayCluster":
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    assert manifest["apiVersion"] == "ray.io/v1"
    for group in groups(manifest["spec"]):
        kubernetes_validate.validate(as_pod(group["template"]), KUBERNETES, strict=True)


def test_schema_check_can_fail(cluster: dict[str, Any]) -> None:
    """It fails for a misspelled field and a value of another type."""
    changes: list[dict[str, Any]] = [{"readynessProbe": {}}, {"args": "inferencecenter"}]
    for change in changes:
        template = copy.deepcopy(cluster["headGroupSpec"]["template"])
        template["spec"]["containers"][0].update(change)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(as_pod(template), KUBERNETES, strict=True)


def test_cluster_has_fields_of_kuberay(cluster: dict[str, Any]) -> None:
    """All parameters of Ray are text, as KubeRay demands."""
    assert cluster.keys() == CLUSTER_FIELDS
    assert cluster["headGroupSpec"].keys() == HEAD_FIELDS
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() == WORKER_FIELDS
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"] == 1, (
            "a node's name is that of one pod"
        )
    assert all(isinstance(value, str) for group in groups(cluster) for value in group["rayStartParams"].values())


def test_ray_has_the_version_of_the_extra(cluster: dict[str, Any]) -> None:
    """KubeRay chooses its own requests by it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (ray,) = (each for each in extras["cluster"] if re.match(r"ray\b", each))
    (lowest,) = re.findall(r">=([\d.]+)", ray)
    assert cluster["rayVersion"].startswith(f"{lowest}.")


def test_nodes_are_those_of_the_settings(cluster: dict[str, Any]) -> None:
    """Each node that runs a model has a group, and each group runs one."""
    text = the("ConfigMap")["data"]["inferencecenter.toml"]
    settings = Settings(**tomllib.loads(text))
    used = {node for model in settings.models.values() for node in model.nodes or ()}
    assert used - {LOCAL_NODE} == {group["groupName"] for group in cluster["workerGroupSpecs"]}


def test_commands_exist(cluster: dict[str, Any]) -> None:
    """Each option and variable of a node's command exists."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    started = [each["args"] for each in containers(cluster) if "args" in each]
    assert len(started) == len(groups(cluster))
    for container in containers(cluster):
        arguments = container.get("args", ())
        if arguments:
            program, group, name, address, *options = arguments
            assert (program, group) == ("inferencecenter", "node")
            known = {spelled for parameter in commands[name].params for spelled in parameter.opts}
            assert set(options[::2]) <= known
            assert address.endswith(":6380")
        variables = {each["name"] for each in container["env"]}
        assert set(re.findall(r"\$\((\w+)\)", str(arguments) + str(container["env"]))) <= variables


def test_environment_has_settings(cluster: dict[str, Any]) -> None:
    """The daemon refuses unknown variables."""
    known = {environment_name(name) for name, _ in setting_fields()} | set(OTHER_ENVIRONMENT)
    used = {each["name"] for container in containers(cluster) for each in container["env"]}
    assert {name for name in used if name.startswith("INFERENCECENTER_")} - known == set()


def test_volumes_exist(cluster: dict[str, Any]) -> None:
    """Each mount has a volume, and each volume what it names; both containers of the head share Ray's files."""
    for group in groups(cluster):
        spec = group["template"]["spec"]
        volumes = {each["name"]: each for each in spec["volumes"]}
        mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert mounted == set(volumes)
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                the("PersistentVolumeClaim", claim["claimName"])
            if settings := volume.get("configMap"):
                the("ConfigMap", settings["name"])
            if secret := volume.get("secret"):
                assert secret["secretName"] == the("RayCluster")["metadata"]["name"], "KubeRay names it so"
    for name in ("ray", "shm"):
        places = [
            mount["mountPath"]
            for container in cluster["headGroupSpec"]["template"]["spec"]["containers"]
            for mount in container["volumeMounts"]
            if mount["name"] == name
        ]
        assert len(places) == 2
        assert len(set(places)) == 1


def test_paths_are_mounted(cluster: dict[str, Any]) -> None:
    """The files that the settings name are in a volume of the daemon."""
    settings = tomllib.loads(the("ConfigMap")["data"]["inferencecenter.toml"])
    (daemon,) = (each for each in containers(cluster) if each["name"] == "daemon")
    places = [Path(mount["mountPath"]) for mount in daemon["volumeMounts"]]
    named = [
        settings["state_dir"],
        settings["cluster"]["token_file"],
        *(model["path"] for model in settings["models"].values()),
        *(each["value"] for each in daemon["env"] if each["name"] == "INFERENCECENTER_CONFIG"),
    ]
    assert [path for path in named if not any(Path(path).is_relative_to(place) for place in places)] == []


def test_ports_match(cluster: dict[str, Any]) -> None:
    """Service, policy, settings and pods have the same ports."""
    settings = Settings(**tomllib.loads(the("ConfigMap")["data"]["inferencecenter.toml"]))
    ports = {port["name"]: port["containerPort"] for each in containers(cluster) for port in each.get("ports", ())}
    assert ports == {
        "gcs-server": 6380,
        "http": settings.server.port,
        "hosts": settings.cluster.port,
        "files": settings.cluster.files_port,
    }
    (served,) = the("Service")["spec"]["ports"]
    assert (served["port"], served["targetPort"]) == (settings.server.port, "http")
    _, outside = the("NetworkPolicy")["spec"]["ingress"]
    assert [each["port"] for each in outside["ports"]] == [settings.server.port]


def test_token_authentication_is_on(cluster: dict[str, Any]) -> None:
    """Pods get no token of Kubernetes, and run without root."""
    assert cluster["authOptions"] == {"mode": "token"}
    for group in groups(cluster):
        spec = group["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
    assert all(each["securityContext"]["capabilities"] == {"drop": ["ALL"]} for each in containers(cluster))


def test_image_is_that_of_the_documentation(cluster: dict[str, Any]) -> None:
    """All containers have the image that docs/cluster.md builds."""
    (image,) = {each["image"] for each in containers(cluster)}
    assert f"docker build -t {image} --build-arg EXTRAS=server,cluster" in (ROOT / "docs/cluster.md").read_text()
    assert 'pip install --no-cache-dir ".[${EXTRAS}]"' in (ROOT / "Dockerfile").read_text()
