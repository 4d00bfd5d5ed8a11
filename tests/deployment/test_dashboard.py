import json
from pathlib import Path

from serve_app.metrics import METRICS
from tests.tools.dashcheck import errors_of, metrics_of

DASHBOARD = json.loads((Path(__file__).parents[2] / "configs" / "grafana" / "pitstop.json").read_text())
HISTOGRAM_SERIES = ("_bucket", "_sum", "_count")


def test_the_dashboard_is_well_formed() -> None:
    assert errors_of(DASHBOARD) == []


def test_every_metric_of_the_dashboard_exists() -> None:
    exposed = {
        metric.name + suffix
        for metric in METRICS
        for suffix in (HISTOGRAM_SERIES if metric.kind == "histogram" else ("",))
    }
    asked = metrics_of(DASHBOARD)
    assert len(asked) > 20
    assert asked - exposed == set()


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
