"""What KubeRay's controller refuses, or silently does otherwise, in a RayService that its schema lets pass.

The rules are those of KubeRay 1.7 (ray-operator/controllers/ray/utils/validation.go) as far as these manifests touch
them. Without an admission webhook they are broken only after `kubectl apply` has said "created".
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

MAX_SERVICE_NAME = 47
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
UPGRADE_TYPES = ("None", "NewCluster", "NewClusterWithIncrementalUpgrade")
RESOURCE_PARAMS = {"num-cpus", "num-gpus", "memory", "resources"}
FAULT_TOLERANCE_VARIABLES = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"}
FAULT_TOLERANCE_ANNOTATIONS = {"ray.io/ft-enabled", "ray.io/external-storage-namespace"}
TOKEN_AUTH_SINCE = (2, 52)
MAX_PORT_NAME = 15
Tree = dict[str, Any]


def broken_rules(service: Tree) -> list[str]:
    """One sentence for each rule that the RayService breaks."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    return list(
        chain(
            _names(service),
            _upgrades(service["spec"], cluster),
            _authentication(cluster),
            _fault_tolerance(service, cluster, groups),
            _autoscaling(cluster, groups),
            *(_group(group) for group in groups),
            *(_bounds(group, cluster) for group in groups[1:]),
        )
    )


def broken_budgets(resources: Iterable[Tree]) -> list[str]:
    """One sentence for each disruption budget by which no pod of a RayCluster could ever be evicted.

    All pods here are a RayCluster's. It has no scale subresource, so the disruption controller takes neither
    maxUnavailable nor percentages (Kubernetes, "Arbitrary workloads and arbitrary selectors").
    """
    budgets = [resource for resource in resources if resource["kind"] == "PodDisruptionBudget"]
    return [sentence for budget in budgets for sentence in _budget(budget["metadata"]["name"], budget["spec"])]


def _budget(name: str, spec: Tree) -> Iterator[str]:
    if "maxUnavailable" in spec:
        yield f"{name}: maxUnavailable needs a scale subresource, which a RayCluster has not"
    elif not isinstance(spec.get("minAvailable"), int):
        yield f"{name}: minAvailable is {spec.get('minAvailable')}, and has to be a number of pods"


def _names(service: Tree) -> Iterator[str]:
    name = service["metadata"]["name"]
    if len(name) > MAX_SERVICE_NAME or not DNS_LABEL.fullmatch(name):
        yield f"the name {name} is no DNS label of at most {MAX_SERVICE_NAME} characters"


def _upgrades(spec: Tree, cluster: Tree) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    kind = strategy.get("type", "NewCluster")
    if kind not in UPGRADE_TYPES:
        yield f"upgradeStrategy.type is {kind}"
    if kind == UPGRADE_TYPES[2] and not (
        cluster.get("enableInTreeAutoscaling") and "clusterUpgradeOptions" in strategy
    ):
        yield "an incremental upgrade needs the autoscaler and clusterUpgradeOptions"
    if "upgradeStrategy" in cluster:
        yield "rayClusterConfig.upgradeStrategy is not for a RayService"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "headService has a name"


def _authentication(cluster: Tree) -> Iterator[str]:
    options = cluster.get("authOptions", {})
    version = tuple(int(part) for part in cluster.get("rayVersion", "0.0").split(".")[:2])
    if options.get("mode") == "token" and version < TOKEN_AUTH_SINCE:
        yield f"token authentication needs Ray 2.52 or newer, rayVersion is {cluster.get('rayVersion')}"
    if "enableK8sTokenAuth" in options:
        yield "enableK8sTokenAuth is not for a RayService"


def _fault_tolerance(service: Tree, cluster: Tree, groups: list[Tree]) -> Iterator[str]:
    options = cluster.get("gcsFaultToleranceOptions")
    if options is None:
        return
    if "externalStorageNamespace" in options:
        yield "externalStorageNamespace would be shared by the old and the new cluster of an upgrade"
    variables = {variable["name"] for group in groups for variable in _ray_container(group).get("env", [])}
    annotations = set(service["metadata"].get("annotations", {}))
    for name in sorted(variables & FAULT_TOLERANCE_VARIABLES | annotations & FAULT_TOLERANCE_ANNOTATIONS):
        yield f"{name} beside gcsFaultToleranceOptions"
    if "redis-password" in cluster["headGroupSpec"]["rayStartParams"]:
        yield "rayStartParams.redis-password beside gcsFaultToleranceOptions"


def _autoscaling(cluster: Tree, groups: list[Tree]) -> Iterator[str]:
    options = cluster.get("autoscalerOptions", {})
    if options and not cluster.get("enableInTreeAutoscaling"):
        yield "autoscalerOptions without enableInTreeAutoscaling do nothing"
    if options.get("version") == "v2":
        for group in groups:
            if group["template"]["spec"].get("restartPolicy", "Never") != "Never":
                yield "autoscaler v2 needs restartPolicy Never"
    elif any("idleTimeoutSeconds" in group for group in groups):
        yield "idleTimeoutSeconds of a group needs autoscaler v2"
    pod = cluster["headGroupSpec"]["template"]["spec"]
    if cluster.get("enableInTreeAutoscaling") and pod.get("automountServiceAccountToken") is False:
        yield "the autoscaler needs the head's service account token"


def _group(group: Tree) -> Iterator[str]:
    params, container = group.get("rayStartParams", {}), _ray_container(group)
    name = container["name"]
    for key, value in params.items():
        if not isinstance(value, str):
            yield f"{name}: rayStartParams.{key} is no string"
    if "labels" in params:
        yield f"{name}: rayStartParams.labels"
    if "resources" in group and RESOURCE_PARAMS & set(params):
        yield f"{name}: resources are in rayStartParams and in the group"
    if any(resource.endswith("/gpu") for resource in container["resources"].get("requests", {})):
        yield f"{name}: KubeRay reads GPUs from limits alone"
    if "memory" not in container["resources"].get("limits", {}):
        yield f"{name}: KubeRay reads memory from limits alone"
    yield from _ports(name, container)


def _ports(name: str, container: Tree) -> Iterator[str]:
    names = [port["name"] for port in container.get("ports", [])]
    if names and not any(port == "serve" or port.startswith("serve-") for port in names):
        yield f"{name}: without a port named serve there is no service for Serve"
    yield from (f"{name}: port name {port} is too long" for port in names if len(port) > MAX_PORT_NAME)


def _bounds(group: Tree, cluster: Tree) -> Iterator[str]:
    least, most = group.get("minReplicas"), group.get("maxReplicas")
    if least is None or most is None:
        if not cluster.get("enableInTreeAutoscaling"):
            yield f"{group['groupName']}: minReplicas and maxReplicas have to be set"
    elif not 0 <= least <= group.get("replicas", least) <= most:
        yield f"{group['groupName']}: {least} <= {group.get('replicas')} <= {most} is not so"


def _ray_container(group: Tree) -> Tree:
    container: Tree = group["template"]["spec"]["containers"][0]
    return container
