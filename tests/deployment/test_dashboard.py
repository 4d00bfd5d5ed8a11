"""Dashboards and alerts: well formed, and of metrics that exist. `test_prometheus` asks a real Prometheus for them."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine import UnsupportedModel, WeightsError
from k8s.dashboards import SERVER_FAULTS
from serve_app.metrics import METRICS
from serve_app.protocol.errors import ERROR_RULES, SwapUnfinished
from serve_app.router.fleet import METRICS_TIMEOUT_S
from tests.tools.dashcheck import errors_of, metrics_of, metrics_of_expression

REPOSITORY = Path(__file__).parents[2]
PROMETHEUS = REPOSITORY / "configs" / "prometheus"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in (REPOSITORY / "configs" / "grafana").glob("*.json")}
ALERTS: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"][0]["rules"]
HISTOGRAM_SERIES = ("_bucket", "_sum", "_count")
EXPOSED = {
    metric.name + suffix for metric in METRICS for suffix in (HISTOGRAM_SERIES if metric.kind == "histogram" else ("",))
}
PROMETHEUS_OWN = {"up"}
"""What Prometheus says of each target itself."""


def scrapes() -> list[tuple[str, str, str]]:
    """Who asks for our page: where it says so, how often, and for how long it waits."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    jobs = [config["global"] | job for job in config["scrape_configs"]]
    found = [(job["job_name"], job["scrape_interval"], job.get("scrape_timeout", "none")) for job in jobs]
    for path in REPOSITORY.joinpath("k8s").rglob("*.yaml"):
        for resource in (one for one in yaml.safe_load_all(path.read_text()) if isinstance(one, dict)):
            spec = resource.get("spec", {}) if resource.get("kind") in ("PodMonitor", "ServiceMonitor") else {}
            endpoints = (*spec.get("podMetricsEndpoints", ()), *spec.get("endpoints", ()))
            ours = (endpoint for endpoint in endpoints if endpoint["port"] == "serve")
            found += [(path.name, endpoint["interval"], endpoint.get("scrapeTimeout", "none")) for endpoint in ours]
    return found


def test_every_scrape_outlasts_a_page_that_waits_for_a_silent_replica() -> None:
    assert [name for name, _, _ in scrapes()] == ["pitstop", "podmonitors.yaml"]
    for name, interval, timeout in scrapes():
        assert timeout != "none", f"{name} leaves its timeout to a default"
        assert 2 * METRICS_TIMEOUT_S <= float(timeout.removesuffix("s")) <= float(interval.removesuffix("s")), name


def test_there_are_four_dashboards() -> None:
    assert set(DASHBOARDS) == {"overview", "engine", "weights", "router"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_well_formed_and_says_what_it_shows(name: str) -> None:
    assert errors_of(DASHBOARDS[name]) == []
    for panel in DASHBOARDS[name]["panels"]:
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["targets"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_metric_of_a_dashboard_exists(name: str) -> None:
    asked = metrics_of(DASHBOARDS[name])
    assert len(asked) > 5
    assert asked - EXPOSED == set()


def test_every_metric_of_an_alert_exists() -> None:
    for alert in ALERTS:
        asked = metrics_of_expression(alert["expr"])
        assert asked
        assert asked - EXPOSED - PROMETHEUS_OWN == set(), alert["alert"]


def test_every_fault_of_the_server_counts_as_an_error() -> None:
    counted = {error: bool(re.fullmatch(SERVER_FAULTS, rule.code)) for error, rule in ERROR_RULES.items()}
    for error, rule in ERROR_RULES.items():
        # What swaps and models that do not load answer has alerts of its own.
        if not issubclass(error, (WeightsError, SwapUnfinished, UnsupportedModel)):
            assert counted[error] == (rule.status >= 500), rule
    (alert,) = (alert for alert in ALERTS if alert["alert"] == "PitstopErrorRate")
    assert f'code=~"{SERVER_FAULTS}"' in alert["expr"]


def test_the_jobs_that_are_scraped_have_the_name_that_an_alert_looks_for() -> None:
    (gone,) = (alert["expr"] for alert in ALERTS if alert["alert"] == "PitstopMetricsGone")
    assert set(re.findall(r'job="(\w+)"', gone)) == {"pitstop"}
    beside_serve = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    assert [job["job_name"] for job in beside_serve["scrape_configs"]] == ["pitstop"]
    monitor = next(yaml.safe_load_all((REPOSITORY / "k8s/components/monitoring/podmonitors.yaml").read_text()))["spec"]
    # The monitor takes the job's name from a label of the pods.
    assert monitor["selector"]["matchLabels"][monitor["jobLabel"]] == "pitstop"


def test_every_alert_brings_its_line_of_the_runbook_along() -> None:
    runbook = (REPOSITORY / "README.md").read_text().partition("### Runbook")[2].partition("\n#")[0]
    lines = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", runbook, re.MULTILINE))
    assert {alert["alert"]: alert["annotations"].get("runbook") for alert in ALERTS} == lines


def test_no_alert_has_a_link_that_leads_nowhere_from_a_message() -> None:
    for alert in ALERTS:
        assert alert["annotations"].keys() == {"summary", "runbook"}


@pytest.mark.parametrize(("options", "port"), [((), 8000), (("PORT=8123",), 8123)])
def test_prometheus_asks_the_port_that_make_serve_has(tmp_path: Path, options: tuple[str, ...], port: int) -> None:
    # Without the port of a `make test PORT=...` around this.
    environment = {name: value for name, value in os.environ.items() if name not in ("PORT", "MAKEFLAGS")}
    command = ["make", "-s", "-C", str(REPOSITORY), f"BUILD={tmp_path}", f"{tmp_path}/prometheus.yaml", *options]
    subprocess.run(command, check=True, env=environment)
    config = yaml.safe_load((tmp_path / "prometheus.yaml").read_text())
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
    assert config["rule_files"] == [str(PROMETHEUS / "alerts.yaml")]


def test_a_broken_dashboard_is_noticed() -> None:
    panel = {
        "id": 1,
        "title": "a",
        "gridPos": {"x": 20, "y": 0, "w": 8, "h": 1},
        "targets": [{"expr": "rate(x{a=$b})"}],
    }
    errors = " ".join(errors_of({"panels": [panel, panel], "templating": {"list": []}}))
    for part in ("duplicate panel id 1", "wider than the grid", "panels overlap", "undeclared $b", "in rate("):
        assert part in errors


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_every_alert_fires_and_is_silent_when_it_should() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yaml").read_text())["tests"]
    names = {test["name"].partition(" where ")[0] for test in tests}
    assert names == {f"{alert['alert']} {what}" for alert in ALERTS for what in ("fires", "is silent")}
    done = promtool("test", "rules", str(PROMETHEUS / "alerts_test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["vector(1) > 2", "vector(1)"], ids=["never", "always"])
def test_an_alert_that_never_or_always_fires_is_noticed(tmp_path: Path, expression: str) -> None:
    for alert in ALERTS:
        broken = [{**rule, "expr": expression} if rule is alert else rule for rule in ALERTS]
        rules = {"groups": [{"name": "pitstop", "rules": broken}]}
        (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
        (tmp_path / "alerts_test.yaml").write_text((PROMETHEUS / "alerts_test.yaml").read_text())
        assert promtool("test", "rules", str(tmp_path / "alerts_test.yaml")).returncode != 0, alert["alert"]


@pytest.mark.slow
def test_prometheus_takes_the_configuration() -> None:
    assert promtool("check", "config", str(PROMETHEUS / "prometheus.yaml")).returncode == 0
