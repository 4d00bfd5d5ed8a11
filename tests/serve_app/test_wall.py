import asyncio
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any, get_args

import httpx
import pytest
from fastapi import FastAPI

from engine import SwapConflict
from serve_app.bearer_keys import KeySource
from serve_app.messages import (
    CommittedVersion,
    CommittedWeights,
    FleetStatus,
    PauseLease,
    ReplicaReport,
    SwapFailure,
    SwapPhase,
    SwapResult,
    WeightSource,
)
from serve_app.metrics import CONTROLLER_METRICS, METRICS, REPLICA_METRICS, ROUTER_METRICS, Recorder
from serve_app.router.admission import Admission
from serve_app.router.http import build_http
from serve_app.router.keys import KeyRing
from serve_app.router.numbers import RouterNumbers
from serve_app.router.wall import HISTOGRAMS, NUMBERS, Wall, read_numbers, wall_data
from serve_app.router.wall_routes import content_policy, wall_routes
from serve_app.scaling_report import ScalingChange, ScalingReport
from serve_app.settings import LimitSettings

KEY = "user-0123456789abcdef"
PAGE = files("serve_app.router").joinpath("wall.html").read_text()
SECRET = "/secret/folder"

RESULT = SwapResult(2, 1, ["a", "b"], 0.5, 0.01, 0.7, swap_id="s1", phases_s={"stage": 0.5}, lagging=["b"])
STATUS = FleetStatus(
    CommittedWeights(2, WeightSource(SECRET)),
    [ReplicaReport("a", 2, "ready", WeightSource(SECRET), 3, 1, 0.25, generated_tokens=70, age_s=0.5)],
    history=[
        CommittedVersion(2, WeightSource(SECRET), label="step 2", requested_by="somebody", result=RESULT),
        CommittedVersion(1),
    ],
    pauses=[PauseLease("lease-id", 60.0, 12.5, requested_by="somebody")],
    failures=[SwapFailure("2026-01-01T00:00:00+00:00", "source", f"{SECRET} cannot be read", "step 3", "somebody")],
)


@dataclass
class FakeFleet:
    """Counts who asks."""

    num_asked: int = 0
    failures: list[Exception] = field(default_factory=list)

    async def status(self) -> FleetStatus:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop()
        return STATUS

    async def metrics(self) -> list[str]:
        return []


def make_wall(fleet: Any) -> Wall:
    recorder = Recorder(ROUTER_METRICS)
    admission = Admission(LimitSettings(), max_waiting=10, recorder=recorder)
    return Wall(fleet, RouterNumbers(recorder, admission), model="tiny")


def make_app(*, keys: str = "") -> FastAPI:
    ring = KeyRing(KeySource(keys), what="API key")
    routes = wall_routes(make_wall(FakeFleet()))
    recorder = Recorder(ROUTER_METRICS)
    admission = Admission(LimitSettings(), max_waiting=10, recorder=recorder)
    return build_http([routes], recorder=recorder, admission=admission, keys=ring)


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://wall")


async def test_the_page_may_run_its_own_script_alone_and_ask_its_own_host_alone() -> None:
    async with client_of(make_app()) as http:
        response = await http.get("/")
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert policy == content_policy(PAGE)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "*" not in policy


def test_the_page_names_no_other_host_and_writes_no_markup() -> None:
    allowed = "http://www.w3.org/2000/svg"  # a name, which nobody asks
    assert set(re.findall(r"(?:https?:)?//[\w.][^\s'\"`)]*", PAGE.replace("// ", ""))) <= {allowed}
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "DOMParser", "new Function"):
        assert way not in PAGE


def test_no_element_of_the_page_has_a_style_or_a_handler_of_its_own() -> None:
    found: list[str] = []

    class Attributes(HTMLParser):
        def handle_starttag(self, _: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(name for name, _ in attrs if name == "style" or name.startswith("on"))

    Attributes().feed(PAGE)
    assert found == []


async def test_with_keys_the_page_loads_without_one_and_its_data_does_not() -> None:
    async with client_of(make_app(keys=KEY)) as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/wall/data")).status_code == 401
        answer = await http.get("/wall/data", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.json()["model"] == "tiny"


async def test_the_page_is_found_below_a_prefix_too() -> None:
    transport = httpx.ASGITransport(make_app(keys=KEY), root_path="/fleet")
    async with httpx.AsyncClient(transport=transport, base_url="http://wall", follow_redirects=True) as http:
        for path in ("/fleet", "/fleet/"):
            response = await http.get(path)
            assert response.status_code == 200
            assert str(response.url) == "http://wall/fleet/"
        assert (await http.get("/fleet/wall/data")).status_code == 401


async def test_without_keys_the_data_is_open_as_metrics_are() -> None:
    async with client_of(make_app()) as http:
        data = (await http.get("/wall/data")).json()
    (replica,) = data["replicas"]
    assert (replica["running"], replica["waiting"], replica["kv_usage"], replica["generated_tokens"]) == (
        3,
        1,
        0.25,
        70,
    )
    assert replica["reported_at"] == pytest.approx(data["at"] - 0.5)
    assert [swap["version"] for swap in data["swaps"]] == [2, 1]
    assert data["swaps"][0]["phases_s"] == {"stage": 0.5}
    assert (data["swaps"][0]["lagging"], data["swaps"][1]["strategy"]) == (1, None)
    assert [(failure["label"], failure["reason"]) for failure in data["failures"]] == [("step 3", "source")]


async def test_what_the_admin_key_is_for_is_not_in_the_data() -> None:
    async with client_of(make_app()) as http:
        text = (await http.get("/wall/data")).text
    for hidden in (SECRET, "somebody", "lease-id"):
        assert hidden not in text
    assert '"remaining_s":12.5' in text


async def test_all_who_watch_share_one_look_a_second() -> None:
    fleet = FakeFleet()
    wall = make_wall(fleet)
    answers = await asyncio.gather(*(wall.look() for _ in range(20)))
    assert fleet.num_asked == 1
    assert all(answer is answers[0] for answer in answers)
    assert await wall.look() is answers[0]
    wall._looked_at -= 1.0
    assert await wall.look() is not answers[0]
    assert fleet.num_asked == 2


async def test_a_look_that_failed_is_not_kept() -> None:
    fleet = FakeFleet(failures=[SwapConflict("the controller is away")])
    wall = make_wall(fleet)
    with pytest.raises(SwapConflict):
        await wall.look()
    assert (await wall.look())["version"] == 2


async def test_one_watcher_who_goes_away_does_not_end_the_look_of_the_others() -> None:
    wall = make_wall(FakeFleet())
    leaving, staying = asyncio.create_task(wall.look()), asyncio.create_task(wall.look())
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying)["version"] == 2


def test_the_numbers_are_added_over_the_fleet() -> None:
    pages = []
    for replica in "01":
        recorder = Recorder(REPLICA_METRICS)
        recorder.set_gauge("pitstop_work_seconds", replica, value=2.5)
        recorder.set_gauge("pitstop_work_target_seconds", replica, value=10)
        recorder.observe("pitstop_inter_token_seconds", replica, value=0.004, times=3)
        recorder.observe("pitstop_inter_token_seconds", replica, value=99.0)
        pages.append(recorder.expose())
    controller = Recorder(CONTROLLER_METRICS)
    controller.count("pitstop_swaps_total", "refused", amount=2)
    # A page that comes twice is counted once.
    numbers = read_numbers([*pages, controller.expose(), pages[0]])
    assert (numbers.work_s, numbers.work_target_s) == (5.0, 10.0)
    assert numbers.swaps == {"refused": 2.0}
    between = numbers.latencies["between_tokens"]
    assert between.bounds[:3] == [0.001, 0.0025, 0.005]
    assert between.counts[:3] == [0.0, 0.0, 6.0]
    assert (between.bounds[-1], between.counts[-1]) == (None, 8.0)


def test_every_number_is_of_a_metric_there_is() -> None:
    known = {spec.name for spec in METRICS}
    assert {*NUMBERS.values(), *HISTOGRAMS.values()} <= known


def test_a_fleet_of_which_nothing_is_known_has_data_too() -> None:
    data = wall_data(FleetStatus(CommittedWeights(1), []), read_numbers([]), model="tiny", now=1.0)
    assert (data.replicas, data.swaps, data.scaling, data.numbers.work_s) == ([], [], [], 0.0)
    assert data.numbers.latencies["first_token"].counts == []


def test_changes_of_the_number_of_replicas_are_shown_with_their_reasons() -> None:
    changes = tuple(ScalingChange(n, float(n), n, n + 1, "work", f"much work {n}") for n in range(9, 0, -1))
    status = FleetStatus(CommittedWeights(1), [], scaling=ScalingReport("a", changes))
    shown = wall_data(status, read_numbers([]), model="tiny", now=1.0).scaling
    assert (shown[0].before, shown[0].after, shown[0].reason) == (9, 10, "much work 9")
    assert len(shown) == 6


def test_the_page_knows_every_phase_of_a_swap() -> None:
    known = re.search(r"const PHASES = \{(.*?)\};", PAGE, re.DOTALL)
    assert known is not None
    assert tuple(re.findall(r"(\w+): ", known[1])) == get_args(SwapPhase)
