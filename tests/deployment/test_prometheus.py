"""Dashboards and alerts over a page that has every metric of the table, scraped by a real Prometheus."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from engine import EngineStats
from serve_app.metric_aliases import with_aliases
from serve_app.metrics import (
    CONTENT_TYPE,
    CONTROLLER_METRICS,
    REPLICA_METRICS,
    ROUTER_METRICS,
    MetricSpec,
    Recorder,
    expose_engine,
    merge_expositions,
)
from tests.deployment.prometheus_server import check_alerts, check_expressions, check_panels, prometheus_over

pytestmark = pytest.mark.slow

VALUES = {"replica": "0", "state": "ready"}


def recorded(specs: tuple[MetricSpec, ...], **constant: str) -> str:
    """A page with one series of each metric."""
    recorder = Recorder(specs, constant=constant)
    for spec in specs:
        labels = [VALUES.get(label, "some") for label in spec.labels]
        if spec.kind == "counter":
            recorder.count(spec.name, *labels)
        elif spec.kind == "gauge":
            recorder.set_gauge(spec.name, *labels, value=1)
        else:
            recorder.observe(spec.name, *labels, value=0.1)
    return recorder.expose()


def page() -> str:
    stats = EngineStats(num_blocks=8, page_size=16, step_phase_seconds_total={"plan": 1.0}, requests_total={"stop": 1})
    parts = [expose_engine(stats, replica="0"), recorded(REPLICA_METRICS), recorded(CONTROLLER_METRICS)]
    return with_aliases(merge_expositions([*parts, recorded(ROUTER_METRICS, router="0")]), model="some")


class PageHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = page().encode()
        self.send_response(200)
        self.send_header("content-type", CONTENT_TYPE)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), PageHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with prometheus_over(f"127.0.0.1:{server.server_port}", tmp_path_factory.mktemp("prometheus")) as client:
        yield client
    server.shutdown()
    server.server_close()


def test_every_expression_is_evaluated_and_every_metric_it_names_exists(prometheus: httpx.Client) -> None:
    check_expressions(prometheus)


def test_plain_panels_show_series(prometheus: httpx.Client) -> None:
    check_panels(prometheus)


def test_the_alerts_are_loaded_and_healthy(prometheus: httpx.Client) -> None:
    check_alerts(prometheus)
