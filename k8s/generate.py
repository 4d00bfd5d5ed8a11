"""Writes what manifests and documents take from elsewhere in the repository, so that the two never differ.

`python -m k8s.generate` rewrites the files; a test compares them with what it would write.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from k8s.dashboards import DASHBOARDS, render
from serve_app.metrics import METRICS, ROUTER_METRICS, MetricSpec
from serve_app.ray_agent import names_at_agent

REPOSITORY = Path(__file__).parents[1]
CONFIG_OF_OVERLAY = {
    "cpu": "local.yaml",
    "gpu": "gpu.yaml",
    "gpu-tensor-parallel": "tensor-parallel.yaml",
    "production": "production.yaml",
}
RAY_EXAMPLES = ("pitstop_steps_total", "pitstop_requests_running", "pitstop_time_to_first_token_seconds")
LINE_WIDTH = 100
"""After which PyYAML breaks a sentence at the next space; yamllint takes 120 characters."""
EVERY_INTERFACE = "0.0.0.0"
"""Where a pod listens; who may connect is for network policies and the gateway."""


def generated_files() -> Iterator[tuple[Path, str]]:
    """Gives each generated file with its content."""
    for overlay, config in CONFIG_OF_OVERLAY.items():
        yield REPOSITORY / "k8s" / "overlays" / overlay / "serve.yaml", _serve_patch(config)
    yield REPOSITORY / "configs" / "prometheus" / "METRICS.md", _metrics_page()
    for name, dashboard in DASHBOARDS.items():
        yield REPOSITORY / "configs" / "grafana" / f"{name}.json", render(dashboard)
    monitoring = REPOSITORY / "k8s" / "components" / "monitoring"
    yield monitoring / "rules.yaml", _rules()
    yield monitoring / "dashboards.yaml", _config_maps()


def serve_config(name: str) -> dict[str, Any]:
    """Gives one of `configs/` as it runs on Kubernetes: a proxy on every node, which KubeRay's probes ask."""
    config: dict[str, Any] = yaml.safe_load((REPOSITORY / "configs" / name).read_text())
    config["proxy_location"] = "EveryNode"
    config["http_options"]["host"] = EVERY_INTERFACE
    return config


def _serve_patch(config: str) -> str:
    patch = [{"op": "add", "path": "/spec/serveConfigV2", "value": _Block(_dump(serve_config(config)))}]
    return f"# Made from configs/{config} by `make manifests`: change that file, not this one.\n{_dump(patch)}"


def _metrics_page() -> str:
    head = [
        "# Metrics",
        "",
        "Made from `serve_app/metrics.py` by `make manifests`. `GET /metrics` of any router has them all. An alias",
        "shows the same with `model_name`, and with `engine` for `replica`; an alias of two metrics has the series of",
        "both. `vllm:cache_config_info` has `block_size` and `num_gpu_blocks`. `metrics.buckets` of the settings",
        "replaces bounds.",
        "",
        *_ray_agent_section(),
        "",
        "## All metrics",
        "",
        "| name | kind | unit | labels | what | alias |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(head + [_metric_row(spec) for spec in METRICS]) + "\n"


def _ray_agent_section() -> list[str]:
    """What differs on the page of Ray's agent, with one metric of each kind as the example."""
    examples = {spec.kind: spec for spec in METRICS if spec.name in RAY_EXAMPLES}
    rows = [
        f"| {kind} | `{spec.name}` | {', '.join(f'`{name}`' for name in names_at_agent(spec))} |"
        for kind, spec in sorted(examples.items())
    ]
    return [
        "## At Ray's metrics agent",
        "",
        "Every `metrics.ray_interval_s` each process copies its numbers to the agent of its node, under names that",
        "differ: `ray_` comes first, and of a histogram there are its sum and count alone, as two counters, to which",
        "Ray adds `_total`. It has no buckets, so no quantiles, and no alias. Ray adds labels of its own.",
        "Dashboards and alerts are made for `GET /metrics`.",
        "",
        "| kind | here | at Ray's agent |",
        "|---|---|---|",
        *rows,
    ]


def _metric_row(spec: MetricSpec) -> str:
    labels = ("router", *spec.labels) if spec in ROUTER_METRICS else spec.labels
    bounds = ", ".join(f"{bound:g}" for bound in spec.buckets)
    what = f"{spec.help} Bounds: {bounds}." if spec.kind == "histogram" else spec.help
    aliases = " ".join(f"`{alias}`" for alias in spec.aliases)
    return f"| `{spec.name}` | {spec.kind} | {spec.unit} | {', '.join(labels)} | {what} | {aliases} |"


def _rules() -> str:
    rules = yaml.safe_load((REPOSITORY / "configs" / "prometheus" / "alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = _Block(rule["expr"]) if "\n" in rule["expr"] else rule["expr"]
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "pitstop", "labels": {"release": "prometheus"}},
        "spec": rules,
    }
    return f"# Made from configs/prometheus/alerts.yaml by `make manifests`.\n{_dump(resource, width=LINE_WIDTH)}"


def _config_maps() -> str:
    documents = [
        _dump(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": dashboard.uid, "labels": {"grafana_dashboard": "1"}},
                "data": {f"{dashboard.uid}.json": _Block(render(dashboard))},
            }
        )
        for dashboard in DASHBOARDS.values()
    ]
    return "# Made from k8s/dashboards.py by `make manifests`.\n" + "---\n".join(documents)


class _Block(str):
    """A text that YAML writes as it is, line by line."""


class _Dumper(yaml.SafeDumper):
    """Indents the items of a list, as yamllint wants them."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        return super().increase_indent(flow, False)


_Dumper.add_representer(
    _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
)


def _dump(value: object, *, width: int = 1000) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=width)


if __name__ == "__main__":
    for path, content in generated_files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
