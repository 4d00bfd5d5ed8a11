"""The manifests: rendered by kustomize, checked against KubeRay's definition and against what its schema cannot say."""

import copy
import importlib.metadata
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tools.crdcheck import errors_of, load_definition
from tests.tools.strict_serve import unknown_keys

REPOSITORY = Path(__file__).parents[2]
MAX_NAME_LENGTH = 47
"""Of a RayService: KubeRay derives longer names from it."""


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    """The one resource that the CPU overlay renders."""
    kubectl = Path(sysconfig.get_path("scripts")) / "kubectl"
    command = [str(kubectl), "kustomize", str(REPOSITORY / "k8s" / "overlays" / "cpu")]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True)
    (resource,) = yaml.safe_load_all(rendered.stdout)
    return dict(resource)


@pytest.fixture(scope="module")
def cluster(service: dict[str, Any]) -> dict[str, Any]:
    return dict(service["spec"]["rayClusterConfig"])


@pytest.fixture(scope="module")
def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    folder = os.environ.get("PITSTOP_CRDS")
    if not folder:
        pytest.skip("PITSTOP_CRDS names no folder of custom resource definitions")
    return load_definition(Path(folder) / "ray.io_rayservices.yaml")["ray.io/v1"]


def test_the_definition_takes_the_service_and_refuses_what_is_misspelt(
    service: dict[str, Any], schema: dict[str, Any]
) -> None:
    assert errors_of(service, schema) == []
    broken = copy.deepcopy(service)
    broken["spec"]["serveConfigv2"] = broken["spec"].pop("serveConfigV2")
    broken["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    broken["spec"]["rayClusterConfig"]["authOptions"]["mode"] = "bearer"
    del broken["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["groupName"]
    errors = " ".join(errors_of(broken, schema))
    for part in ("serveConfigv2", "num-cpus", "bearer", "groupName"):
        assert part in errors


def test_kubernetes_serves_the_application_of_the_local_config(service: dict[str, Any]) -> None:
    deployed = yaml.safe_load(service["spec"]["serveConfigV2"])
    local = yaml.safe_load((REPOSITORY / "configs" / "local.yaml").read_text())
    assert deployed["applications"] == local["applications"]
    assert deployed["logging_config"] == local["logging_config"]
    assert unknown_keys(deployed) == []


def test_every_node_has_a_proxy_where_the_probes_and_the_service_look(
    service: dict[str, Any], pods: list[dict[str, Any]]
) -> None:
    deployed = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert deployed["proxy_location"] == "EveryNode"
    assert deployed["http_options"] == {"host": "0.0.0.0", "port": 8000}
    for pod in pods:
        assert {"name": "serve", "containerPort": 8000} in pod["containers"][0]["ports"]


def test_the_rules_of_the_operator_that_no_schema_holds(service: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert len(service["metadata"]["name"]) <= MAX_NAME_LENGTH
    assert cluster["rayVersion"] == importlib.metadata.version("ray")
    assert "upgradeStrategy" not in cluster
    assert "headService" not in cluster["headGroupSpec"]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_pods_are_unprivileged_bounded_and_hold_no_secret(pods: list[dict[str, Any]]) -> None:
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["initContainers"], *pod["containers"]]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
        environment = {variable["name"]: variable for variable in pod["containers"][0]["env"]}
        assert "value" not in environment["PITSTOP_ADMIN_KEY"]


def test_every_pod_has_the_model_before_ray_starts(pods: list[dict[str, Any]]) -> None:
    for pod in pods:
        (fetch,) = pod["initContainers"]
        assert fetch["command"] == ["pitstop", "fetch"]
        assert fetch["image"] == pod["containers"][0]["image"]
        assert fetch["volumeMounts"] == pod["containers"][0]["volumeMounts"]


def test_streams_may_finish_before_a_pod_is_killed(service: dict[str, Any], cluster: dict[str, Any]) -> None:
    replicas = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]["replicas"]
    for group in cluster["workerGroupSpecs"]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > replicas["graceful_shutdown_timeout_s"]
