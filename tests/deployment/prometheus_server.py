"""A real Prometheus with the project's alerts, and what the tests ask it."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from tests.ports import free_port
from tests.tools.dashcheck import expressions_of, metrics_of_expression, substituted

CONFIGS = Path(__file__).parents[2] / "configs"
DASHBOARDS = [json.loads(path.read_text()) for path in sorted((CONFIGS / "grafana").glob("*.json"))]
ALERTS = CONFIGS / "prometheus" / "alerts.yaml"
DEADLINE_S = 90.0
OVER_TIME = ("rate(", "increase(", "changes(")
"""Functions that give nothing until a series has changed between two scrapes."""
T = TypeVar("T")


def eventually(look: Callable[[], T], *, what: str) -> T:
    """The first true result; fails after the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.2)
    return found


@contextmanager
def prometheus_over(target: str, folder: Path) -> Iterator[httpx.Client]:
    """Starts Debian's Prometheus, which asks the target every second, and gives a client of its API."""
    config: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "pitstop", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"),
        *(f"--web.listen-address={address}", "--log.level=error"),
    ]
    process = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://{address}/api/v1", timeout=DEADLINE_S, trust_env=False) as client:
            eventually(lambda: _answers(client), what="Prometheus answers")
            yield client
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def check_expressions(prometheus: httpx.Client) -> None:
    """Every expression of dashboards and alerts is evaluated, and every metric it names exists."""
    expressions = [expression for dashboard in DASHBOARDS for _, expression in expressions_of(dashboard)]
    expressions += [rule["expr"] for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]]
    asked = {name for expression in expressions for name in metrics_of_expression(expression)}
    assert len(asked) > 50

    def known() -> set[str]:
        return set(prometheus.get("/label/__name__/values").json()["data"])

    eventually(lambda: not asked - known(), what=f"missing of {sorted(asked)}")
    for expression in expressions:
        answer = prometheus.get("/query", params={"query": substituted(expression)}).json()
        assert answer["status"] == "success", (expression, answer)


def check_panels(prometheus: httpx.Client) -> None:
    """What needs no change between two scrapes gives series of this job, not names alone."""
    for dashboard in DASHBOARDS:
        for title, expression in expressions_of(dashboard):
            if not any(function in expression for function in OVER_TIME):
                _await_result(prometheus, title, substituted(expression))


def check_alerts(prometheus: httpx.Client) -> None:
    """All alerts are loaded and have been evaluated without a fault."""

    def health() -> list[str]:
        groups = prometheus.get("/rules").json()["data"]["groups"]
        return [rule["health"] for group in groups for rule in group["rules"]]

    num_alerts = len(yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"])
    eventually(lambda: health() == ["ok"] * num_alerts, what="every rule is evaluated")


def _await_result(prometheus: httpx.Client, title: str, query: str) -> None:
    def result() -> list[Any]:
        found: list[Any] = prometheus.get("/query", params={"query": query}).json()["data"]["result"]
        return found

    eventually(result, what=f"{title}: {query}")


def _answers(prometheus: httpx.Client) -> bool:
    try:
        return prometheus.get("/rules").status_code == 200
    except httpx.ConnectError:
        return False
