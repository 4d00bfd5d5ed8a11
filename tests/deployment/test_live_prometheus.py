"""A real Prometheus over a live fleet under load and swaps: what dashboards and alerts ask for is there and moves.

Two routers and two replicas of a tiny model; started once.
"""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import psutil
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from serve_app.cli.node_streams import ANSWERING
from serve_app.metrics import METRICS
from serve_app.settings import parse_settings
from tests.deployment.prometheus_server import (
    DEADLINE_S,
    check_alerts,
    check_expressions,
    check_panels,
    eventually,
    prometheus_over,
)
from tests.serve_app.running_app import ADMIN_KEY, APP_NAME, running_app
from tests.serve_app.tiny_model import changed_weights, make_model_folder

pytestmark = pytest.mark.slow

MODEL = "tiny"
STILL = {
    "pitstop_engine_alive",  # 1 from the start
    "pitstop_engine_paused",  # for milliseconds, between two scrapes
    "pitstop_kv_block_tokens",  # constants
    "pitstop_kv_blocks",
    "pitstop_work_target_seconds",
    "pitstop_kv_blocks_on_host",  # no host tier here; tests of the engine's blocks have one
    "pitstop_kv_blocks_offloaded_total",
    "pitstop_kv_blocks_restored_total",
    "pitstop_heartbeat_failures_total",  # needs a controller that is away: the end-to-end tests kill it
    "pitstop_replicas",
    "pitstop_replica_starts_total",  # before the first look
    "pitstop_replica_start_failures_total",  # test_fleet_weights
    "pitstop_replica_losses_total",  # test_replica_census
    "pitstop_weight_skew_versions",  # for less than a scrape
    "pitstop_weight_skew_seconds",
    "pitstop_pause_leases",
    "pitstop_version_refusals_total",
    "pitstop_max_running_requests",  # constants here
    "pitstop_step_max_tokens",
    "pitstop_step_request_seconds",  # too little in a tiny model; test_step_times
    "pitstop_step_prompt_token_seconds",
    "pitstop_replicas_wanted",  # as many replicas as there are; test_fleet_scaling
    "pitstop_scaling_decisions_total",
    "pitstop_scaling_failures_total",
    "pitstop_queued_tokens_at_router",  # for less than a scrape; test_admission
    "pitstop_requests_in_line",
    "pitstop_resumes_total",  # needs a replica that dies: test_resuming_stream, test_router, test_chaos
    "pitstop_resume_seconds",
    "pitstop_poison_requests_total",
}
"""What this run does not move; every other metric of the table has to."""

ONE_WAITS = r"^pitstop_requests_waiting_for_weights\{.*\} 1\.0$"
TWO_READY = r'^pitstop_replicas\{state="ready"\} 2\.0$'
SCRAPE_TIMEOUT_S = 8
"""Of the monitors on Kubernetes."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("weights")
    found = {name: make_model_folder(root / name, seed=seed) for seed, name in enumerate(("base", "next"))}
    found["broken"] = changed_weights(found["base"], root / "broken", change="non-finite")
    return found


@pytest.fixture(scope="module")
def http(folders: dict[str, str]) -> Iterator[httpx.Client]:
    settings = parse_settings(
        {
            "model": folders["base"],
            "served_model_name": MODEL,
            "engine": {"page_size": 16, "num_blocks": 24},
            "replicas": {"min": 2, "max": 2, "torch_threads": 1, "num_cpus": 0.5, "graceful_shutdown_timeout_s": 1},
            "routing": {"num_routers": 2},
            "metrics": {"ray_interval_s": 1},
        }
    )
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    with running_app(settings) as url, httpx.Client(base_url=url, timeout=DEADLINE_S, headers=headers) as client:
        yield client


@pytest.fixture(scope="module")
def pages(http: httpx.Client, folders: dict[str, str]) -> list[str]:
    """The page before, during and after load, swaps, and what goes wrong."""
    found = [eventually(lambda: _page_with(http, TWO_READY), what="two replicas on the page")]
    found += load(http)
    assert swap(http, folders["next"]) == 200
    assert swap(http, folders["broken"]) == 400
    found += load(http)
    assert http.post("/admin/weights/rollback", json={}).status_code == 200
    assert complete(http, model="another") == 404
    found.append(wait_for_weights(http))
    return [*found, http.get("/metrics").text]


@pytest.fixture(scope="module")
def prometheus(http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    url = http.base_url
    with prometheus_over(f"{url.host}:{url.port}", tmp_path_factory.mktemp("prometheus")) as client:
        yield client


def complete(http: httpx.Client, *, model: str = MODEL, prompt: list[int] | None = None, **fields: int) -> int:
    body = {"model": model, "prompt": prompt or [7] * 40, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    return http.post("/v1/completions", json=body | fields).status_code


def wait_for_weights(http: httpx.Client) -> str:
    """Gives a page while a request waits for a version that never comes."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(complete, http, min_weight_version=99, timeout=5)
        page = eventually(
            lambda: _page_with(http, r"^pitstop_requests_waiting_for_weights\{.*\} 1\.0$"), what="a waiter"
        )
        assert asked.result() == 409
    return page


def load(http: httpx.Client) -> list[str]:
    """More than the small cache holds at once, half of it with one prefix, and a stream; gives pages meanwhile."""
    prompts = [[7] * 40 if index % 2 else [index] * 40 for index in range(48)]
    pages = []
    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(complete, http, prompt=prompt) for prompt in prompts]
        while not all(answer.done() for answer in answers):
            pages.append(http.get("/metrics").text)
        assert {answer.result() for answer in answers} == {200}
    body = {"model": MODEL, "prompt": [9] * 10, "max_tokens": 40, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        assert "data: [DONE]" in list(response.iter_lines())
    return pages


def swap(http: httpx.Client, folder: str) -> int:
    return http.post("/admin/weights", json={"source": {"path": folder}}).status_code


def _page_with(http: httpx.Client, pattern: str) -> str | None:
    page = http.get("/metrics").text
    return page if re.search(pattern, page, re.MULTILINE) else None


def _process_of(deployment: str) -> psutil.Process:
    """The process of one of its replicas."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(f"ServeReplica:{APP_NAME}:{deployment}" in part for part in process.cmdline()):
                found.append(process)
    return found[0]


def samples_of(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_every_metric_moves(pages: list[str]) -> None:
    seen: dict[tuple[str, frozenset[tuple[str, str]]], set[float]] = {}
    for page in pages:
        for series, value in samples_of(page).items():
            seen.setdefault(series, {0.0} if "_total" in series[0] else set()).add(value)
    moved = {name for (name, _), values in seen.items() if len(values) > 1}
    still = {spec.name for spec in METRICS if not {spec.name, f"{spec.name}_count"} & moved}
    assert still - STILL == set()
    assert {"vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"} <= moved


def test_every_router_gives_the_same_page(http: httpx.Client, pages: list[str]) -> None:
    for _ in range(8):  # far more than it takes to meet both
        series = samples_of(http.get("/metrics").text)
        for label in ("router", "replica"):
            assert {dict(labels)[label] for _, labels in series if label in dict(labels)} == {"0", "1"}
        moving = {(name, labels) for name, labels in series if name.startswith("pitstop_generated_tokens")}
        assert len(moving) == 2
        assert series[next(iter(moving))] == samples_of(pages[-1])[next(iter(moving))]


def test_prometheus_finds_all_that_dashboards_and_alerts_ask_for(prometheus: httpx.Client, pages: list[str]) -> None:
    check_expressions(prometheus)
    check_panels(prometheus)
    check_alerts(prometheus)


def test_a_replica_that_stands_still_takes_no_other_off_the_page(http: httpx.Client, pages: list[str]) -> None:
    replica = _process_of("EngineReplica")
    replica.suspend()
    try:
        started_at = time.monotonic()
        page = http.get("/metrics").text
        assert time.monotonic() - started_at < SCRAPE_TIMEOUT_S
    finally:
        replica.resume()
    series = samples_of(page)
    found = {name: [dict(labels) for other, labels in series if other == name] for name, _ in series}
    assert len(found["pitstop_engine_alive"]) == len(found["vllm:num_requests_running"]) == 1
    assert {labels["router"] for labels in found["pitstop_requests_in_line"]} == {"0", "1"}
    assert "pitstop_committed_weight_version" in found


def test_rays_own_page_has_the_numbers_too(http: httpx.Client, pages: list[str]) -> None:
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def numbers() -> dict[str, float]:
        text = httpx.get(url, timeout=DEADLINE_S, trust_env=False).text
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith(("ray_pitstop_", "ray_serve_num_ongoing_")):
                name = line.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return found

    wanted = ("ray_pitstop_generated_tokens_total", "ray_pitstop_engine_alive", "ray_pitstop_swaps_total")
    found = eventually(lambda: (n := numbers()) and all(n.get(name) for name in wanted) and n, what=f"{wanted}")
    assert found["ray_pitstop_engine_alive"] == 2  # type: ignore[index]
    # What a worker that is ended waits for.
    assert set(ANSWERING) <= set(found)  # type: ignore[call-overload]
