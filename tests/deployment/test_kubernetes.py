"""The manifests: rendered by kustomize, checked against KubeRay's definition and against what its schema cannot say."""

import copy
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate
from ray.serve.schema import ServeDeploySchema

from k8s.generate import CONFIG_OF_OVERLAY, REPOSITORY, generated_files, serve_config
from serve_app.app import build_app
from serve_app.settings import AppSettings, parse_settings
from tests.tools.crdcheck import Loader, errors_of, load_definition
from tests.tools.kuberay_rules import broken_budgets, broken_rules
from tests.tools.strict_serve import unknown_keys

OVERLAYS = list(CONFIG_OF_OVERLAY)
GPU_OVERLAYS = OVERLAYS[1:]
OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.30.0", "1.37.0"
API_VERSION_OF = {
    "ray.io_rayservices": "ray.io/v1",
    "monitoring.coreos.com_podmonitors": "monitoring.coreos.com/v1",
    "monitoring.coreos.com_prometheusrules": "monitoring.coreos.com/v1",
}
MAX_CONFIG_MAP_BYTES = 2**20
STOP_MARGIN_S = 60.0
"""For two commands to start, a last answer each, and `ray stop`."""
Tree = dict[str, Any]


@functools.cache
def rendered(overlay: str) -> tuple[Tree, ...]:
    """What `kubectl apply -k` would send."""
    return built(REPOSITORY / "k8s" / "overlays" / overlay)


def built(folder: Path) -> tuple[Tree, ...]:
    kubectl = Path(sysconfig.get_path("scripts")) / "kubectl"
    command = [str(kubectl), "kustomize", str(folder)]
    return tuple(yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def service_of(overlay: str) -> Tree:
    (service,) = (copy.deepcopy(resource) for resource in rendered(overlay) if resource["kind"] == "RayService")
    return service


def cluster_of(overlay: str) -> Tree:
    cluster: Tree = service_of(overlay)["spec"]["rayClusterConfig"]
    return cluster


def groups_of(overlay: str) -> list[Tree]:
    cluster = cluster_of(overlay)
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pods_of(overlay: str) -> list[Tree]:
    return [group["template"]["spec"] for group in groups_of(overlay)]


def settings_of(overlay: str) -> AppSettings:
    deployed = yaml.safe_load(service_of(overlay)["spec"]["serveConfigV2"])
    return parse_settings(deployed["applications"][0]["args"])


def images_of(overlay: str, *, set_image: str, folder: Path) -> set[str]:
    """Gives the images of all pods after `kustomize edit set image NAME=NEW` in the overlay."""
    shutil.copytree(REPOSITORY / "k8s", folder, dirs_exist_ok=True)
    edited = folder / "overlays" / overlay / "kustomization.yaml"
    name, _, new = set_image.partition("=")
    new_name, _, tag = new.rpartition(":")
    tree = yaml.safe_load(edited.read_text()) | {"images": [{"name": name, "newName": new_name, "newTag": tag}]}
    edited.write_text(yaml.safe_dump(tree))
    (service,) = (resource for resource in built(edited.parent) if resource["kind"] == "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return {each["image"] for pod in pods for each in (*pod.get("initContainers", []), *pod["containers"])}


@functools.cache
def definition(name: str) -> Tree:
    folder = os.environ.get("PITSTOP_CRDS")
    if not folder:
        pytest.skip("PITSTOP_CRDS names no folder of custom resource definitions")
    (schema,) = (load_definition(Path(folder) / f"{name}.yaml")[version] for version in [API_VERSION_OF[name]])
    return schema


@pytest.fixture(scope="module")
def schema() -> Tree:
    return definition("ray.io_rayservices")


# Schemas and rules


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_definition_takes_the_service(overlay: str, schema: Tree) -> None:
    assert errors_of(service_of(overlay), schema) == []


def test_the_definition_refuses_what_is_misspelt(schema: Tree) -> None:
    broken = service_of("cpu")
    broken["spec"]["serveConfigv2"] = broken["spec"].pop("serveConfigV2")
    broken["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    broken["spec"]["rayClusterConfig"]["authOptions"]["mode"] = "bearer"
    del broken["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["groupName"]
    errors = " ".join(errors_of(broken, schema))
    for part in ("serveConfigv2", "num-cpus", "bearer", "groupName"):
        assert part in errors


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_takes_every_other_resource_and_every_pod(overlay: str, version: str) -> None:
    others = [resource for resource in rendered(overlay) if resource["apiVersion"] not in API_VERSION_OF.values()]
    templates = [group["template"] for group in groups_of(overlay)]
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "pod", **template["metadata"]},
            "spec": template["spec"],
        }
        for template in templates
    ]
    for resource in (*others, *pods):
        validate(resource, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_operator_breaks_no_rule_of_its_own_over_the_service(overlay: str) -> None:
    assert broken_rules(service_of(overlay)) == []
    assert cluster_of(overlay)["rayVersion"] == importlib.metadata.version("ray")


def _set(path: str, value: object) -> Callable[[Tree], None]:
    def change(service: Tree) -> None:
        *parents, last = path.split(".")
        node: Any = service
        for name in parents:
            node = node[int(name)] if isinstance(node, list) else node[name]
        node[last] = value

    return change


CLUSTER = "spec.rayClusterConfig"
HEAD, WORKER = f"{CLUSTER}.headGroupSpec", f"{CLUSTER}.workerGroupSpecs.0"
BREAKS = [
    (_set("metadata.name", "p" * 48), "DNS label"),
    (_set("spec.upgradeStrategy.type", "NewClustr"), "upgradeStrategy.type is NewClustr"),
    (_set("spec.upgradeStrategy.type", "NewClusterWithIncrementalUpgrade"), "clusterUpgradeOptions"),
    (_set(f"{CLUSTER}.upgradeStrategy", {"type": "Recreate"}), "not for a RayService"),
    (_set(f"{HEAD}.headService", {"metadata": {"name": "head"}}), "headService has a name"),
    (_set(f"{CLUSTER}.rayVersion", "2.51.1"), "2.52 or newer"),
    (_set(f"{CLUSTER}.authOptions.enableK8sTokenAuth", True), "enableK8sTokenAuth"),
    (_set(f"{CLUSTER}.gcsFaultToleranceOptions.externalStorageNamespace", "one"), "shared by the old and the new"),
    (_set(f"{HEAD}.rayStartParams.redis-password", "secret"), "redis-password"),
    (_set("metadata.annotations", {"ray.io/ft-enabled": "true"}), "ray.io/ft-enabled"),
    (_set(f"{WORKER}.template.spec.restartPolicy", "Always"), "restartPolicy Never"),
    (_set(f"{HEAD}.template.spec.automountServiceAccountToken", False), "service account token"),
    (_set(f"{CLUSTER}.enableInTreeAutoscaling", False), "do nothing"),
    (_set(f"{WORKER}.rayStartParams.num-cpus", 4), "no string"),
    (_set(f"{WORKER}.rayStartParams.labels", "a=b"), "rayStartParams.labels"),
    (_set(f"{HEAD}.resources", {"CPU": "1"}), "and in the group"),
    (_set(f"{WORKER}.template.spec.containers.0.resources.requests", {"nvidia.com/gpu": "1"}), "GPUs from limits"),
    (_set(f"{WORKER}.template.spec.containers.0.resources.limits", {}), "memory from limits"),
    (_set(f"{HEAD}.template.spec.containers.0.ports", [{"name": "gcs", "containerPort": 6379}]), "named serve"),
    (_set(f"{WORKER}.template.spec.containers.0.ports.0.name", "serve-but-much-too-long"), "too long"),
    (_set(f"{WORKER}.replicas", 9), "is not so"),
]


@pytest.mark.parametrize(("change", "sentence"), BREAKS, ids=[sentence for _, sentence in BREAKS])
def test_a_broken_rule_is_noticed(change: Callable[[Tree], None], sentence: str) -> None:
    service = service_of("production")
    change(service)
    assert sentence in " ".join(broken_rules(service))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_disruption_budget_lets_pods_be_evicted(overlay: str) -> None:
    assert broken_budgets(rendered(overlay)) == []
    workers = cluster_of(overlay)["workerGroupSpecs"]
    for budget in (resource for resource in rendered(overlay) if resource["kind"] == "PodDisruptionBudget"):
        assert budget["spec"]["minAvailable"] < min(group["minReplicas"] for group in workers)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"maxUnavailable": 1}, "needs a scale subresource"),
        ({"maxUnavailable": "50%"}, "needs a scale subresource"),
        ({"minAvailable": "50%"}, "minAvailable is 50%"),
        ({}, "minAvailable is None"),
    ],
)
def test_a_disruption_budget_that_blocks_for_ever_is_noticed(spec: Tree, sentence: str) -> None:
    budget = {"kind": "PodDisruptionBudget", "metadata": {"name": "workers"}, "spec": spec}
    assert sentence in " ".join(broken_budgets([budget]))


def test_the_owner_of_the_pods_cannot_be_scaled() -> None:
    folder = os.environ.get("PITSTOP_CRDS")
    if not folder:
        pytest.skip("PITSTOP_CRDS names no folder of custom resource definitions")
    cluster = yaml.load((Path(folder) / "ray.io_rayclusters.yaml").read_text(), Loader)
    assert not any("scale" in version.get("subresources", {}) for version in cluster["spec"]["versions"])


def test_the_prometheus_operator_takes_monitors_and_rules() -> None:
    monitoring = [each for each in rendered("production") if each["apiVersion"].startswith("monitoring")]
    assert [each["kind"] for each in monitoring] == ["PodMonitor"] * 3 + ["PrometheusRule"]
    for resource in monitoring:
        assert errors_of(resource, definition(f"monitoring.coreos.com_{resource['kind'].lower()}s")) == []


def test_monitors_find_ports_that_the_pods_have() -> None:
    head, worker = (pod["containers"][0]["ports"] for pod in pods_of("production"))
    for resource in rendered("production"):
        if resource["kind"] == "PodMonitor":
            is_head = resource["spec"]["selector"]["matchLabels"]["ray.io/node-type"] == "head"
            names = {port["name"] for port in (head if is_head else worker)}
            assert {endpoint["port"] for endpoint in resource["spec"]["podMetricsEndpoints"]} <= names


def test_a_dashboard_fits_its_config_map() -> None:
    maps = [resource for resource in rendered("production") if resource["kind"] == "ConfigMap"]
    assert len(maps) == 4
    for resource in maps:
        (text,) = resource["data"].values()
        assert len(text) < MAX_CONFIG_MAP_BYTES
        assert json.loads(text)["uid"] == resource["metadata"]["name"]
        assert resource["metadata"]["labels"]["grafana_dashboard"] == "1"


# The application


def test_what_is_generated_is_current() -> None:
    for path, content in generated_files():
        assert path.read_text() == content, f"{path.name} is not what `make manifests` writes"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_application_is_that_of_the_config_and_can_be_built(overlay: str) -> None:
    deployed = yaml.safe_load(service_of(overlay)["spec"]["serveConfigV2"])
    name = CONFIG_OF_OVERLAY[overlay]
    assert deployed == serve_config(name)
    config = yaml.safe_load((REPOSITORY / "configs" / name).read_text())
    assert deployed["applications"] == config["applications"]
    assert unknown_keys(deployed) == []
    ServeDeploySchema.model_validate(deployed)
    build_app(settings_of(overlay))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_node_has_a_proxy_where_the_probes_and_the_service_look(overlay: str) -> None:
    deployed = yaml.safe_load(service_of(overlay)["spec"]["serveConfigV2"])
    assert deployed["proxy_location"] == "EveryNode"
    assert deployed["http_options"] == {"host": "0.0.0.0", "port": 8000}
    for pod in pods_of(overlay):
        assert {"name": "serve", "containerPort": 8000} in pod["containers"][0]["ports"]


def cpus_beside(overlay: str) -> dict[str, float]:
    """Gives what the deployments without a model ask for, where they ask for more than nothing."""
    (application,) = yaml.safe_load(service_of(overlay)["spec"]["serveConfigV2"])["applications"]
    return {one["name"]: one["ray_actor_options"]["num_cpus"] for one in application.get("deployments", [])}


def test_what_clients_need_does_not_go_down_with_a_head_that_comes_back() -> None:
    cluster = cluster_of("production")
    assert cluster["gcsFaultToleranceOptions"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert {name: cpus > 0 for name, cpus in cpus_beside("production").items()} == {
        "Router": True,
        "WeightController": True,
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_worker_holds_a_replica_and_the_group_all_of_them(overlay: str) -> None:
    replicas = settings_of(overlay).replicas
    (group,) = cluster_of(overlay)["workerGroupSpecs"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    gpus = int(resources["limits"].get("nvidia.com/gpu", 0))
    assert gpus == replicas.num_gpus * replicas.tensor_parallel_size
    beside = sum(cpus_beside(overlay).values())
    fitting = int((int(resources["requests"]["cpu"]) - beside) / (replicas.num_cpus * replicas.tensor_parallel_size))
    per_worker = 1 if gpus else fitting
    assert fitting >= 1
    assert group["minReplicas"] * per_worker >= replicas.min
    assert group["maxReplicas"] * per_worker >= replicas.max


# Pods


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_image_is_set_as_the_readme_says(overlay: str, tmp_path: Path) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    (of_cpu,) = re.findall(r"cd k8s/overlays/cpu && kustomize edit set image (\S+)\)", readme)
    (of_gpu,) = re.findall(r"the other overlays: (pitstop\S+)", readme)
    step = of_cpu if overlay == "cpu" else of_gpu
    assert images_of(overlay, set_image=step, folder=tmp_path) == {step.partition("=")[2]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_unprivileged_bounded_and_hold_no_secret(overlay: str) -> None:
    for pod in pods_of(overlay):
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
        assert not [variable for variable in pod["containers"][0]["env"] if variable["name"].endswith(("KEY", "TOKEN"))]
        (keys,) = (volume for volume in pod["volumes"] if volume["name"] == "keys")
        assert keys["secret"] == {"secretName": "pitstop-keys", "defaultMode": 0o440}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_mount_has_its_volume_and_every_volume_is_mounted(overlay: str) -> None:
    for pod in pods_of(overlay):
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        for container in pod.get("initContainers", []):
            assert container["image"] == pod["containers"][0]["image"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= mounted


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_code_compiled_on_a_pod_is_kept_where_it_can_be_written(overlay: str) -> None:
    for pod in pods_of(overlay):
        scratch = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
        for container in pod["containers"]:
            (folder,) = (entry["value"] for entry in container["env"] if entry["name"] == "NUMBA_CACHE_DIR")
            places = [mount for mount in container["volumeMounts"] if folder.startswith(f"{mount['mountPath']}/")]
            assert any(mount["name"] in scratch or not mount.get("readOnly") for mount in places)


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_every_pod_has_the_default_model_before_ray_starts(overlay: str) -> None:
    for pod in pods_of(overlay):
        (fetch,) = pod["initContainers"]
        assert fetch["command"] == ["pitstop", "fetch"]
        assert {"name": "cache", "mountPath": "/home/ray/.cache"} in fetch["volumeMounts"]


@pytest.mark.parametrize("overlay", ["gpu-tensor-parallel", "production"])
def test_a_model_of_ones_own_is_on_a_mounted_claim_in_every_pod(overlay: str) -> None:
    settings = settings_of(overlay)
    for pod in pods_of(overlay):
        paths = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert "/" + settings.model.split("/")[1] in paths
        assert settings.weights.folder is None or settings.weights.folder in paths
        assert "initContainers" not in pod


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_slow_start_is_no_reason_to_kill_and_a_worker_is_ready_with_its_proxy(overlay: str) -> None:
    for pod in pods_of(overlay):
        container = pod["containers"][0]
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
        assert container["livenessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}
    command = pods_of(overlay)[1]["containers"][0]["readinessProbe"]["exec"]["command"][-1]
    assert ":8000/-/healthz" in command


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_streams_may_finish_before_a_pod_is_killed(overlay: str) -> None:
    replicas = settings_of(overlay).replicas
    for group in cluster_of(overlay)["workerGroupSpecs"]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > replicas.graceful_shutdown_timeout_s


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_is_stopped_only_once_streams_had_time_to_end(overlay: str) -> None:
    for group in cluster_of(overlay)["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        shell, option, script = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, option) == ("/bin/sh", "-c")
        # Each whatever became of the one before.
        drain, wait, stop = (step.split() for step in script.split(";"))
        assert (drain[:2], wait[:2], stop) == (["pitstop", "drain"], ["pitstop", "wait-streams"], ["ray", "stop"])
        waits_s = [float(step[step.index("--timeout") + 1]) for step in (drain, wait)]
        assert sum(waits_s) + STOP_MARGIN_S <= pod["terminationGracePeriodSeconds"]
        assert waits_s[1] >= pod["terminationGracePeriodSeconds"] / 2
        assert {"name": "metrics", "containerPort": 8080} in container["ports"]


@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_workers_go_to_gpu_machines_and_the_head_sees_no_gpu(overlay: str) -> None:
    head, worker = pods_of(overlay)
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in worker["tolerations"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in head["containers"][0]["env"]
    assert cluster_of(overlay)["autoscalerOptions"]["version"] == "v2"


# Production


def test_production_outlives_its_head_and_keeps_its_token() -> None:
    spec = service_of("production")["spec"]
    assert spec["excludeHeadPodFromServeSvc"] is True
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token", "secretName": "pitstop-ray-token"}
    assert "secretKeyRef" in spec["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]
    assert settings_of("production").replicas.min >= 2
    for pod in pods_of("production"):
        environment = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
        assert environment["PITSTOP_API_KEYS_FILE"] == "/etc/pitstop/keys/api-keys"


def test_the_network_lets_in_the_operator_prometheus_and_clients_and_nobody_else() -> None:
    (ingress,) = (resource for resource in rendered("production") if resource["metadata"]["name"] == "pitstop-ingress")
    allowed = {}
    for rule in ingress["spec"]["ingress"]:
        (peer,) = rule["from"]
        labels = {
            **peer.get("namespaceSelector", {}).get("matchLabels", {}),
            **peer.get("podSelector", {}).get("matchLabels", {}),
        }
        allowed[next(iter(labels.values()))] = {port["port"] for port in rule.get("ports", [])}
    assert allowed == {
        "pitstop": set(),  # every port
        "kuberay-operator": {8265, 8000, 52365},
        "monitoring": {8000, 8080, 44217, 44227},
        "allowed": {8000},
    }


def test_policies_and_budget_select_the_pods() -> None:
    for resource in rendered("production"):
        spec = resource.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is None:
            continue
        for template in (group["template"] for group in groups_of("production")):
            wanted = {key: value for key, value in selector["matchLabels"].items() if not key.startswith("ray.io/")}
            assert wanted.items() <= template["metadata"]["labels"].items()


# Text


def test_yaml_is_tidy() -> None:
    command = [sys.executable, "-m", "yamllint", "--strict", "-c", str(REPOSITORY / ".yamllint"), "configs", "k8s"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
