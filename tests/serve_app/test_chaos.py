"""Replicas that are killed, stopped and taken away under load: no request fails, and every answer is its twin's.

Three replicas, 64 clients. Each request has a twin that was answered before anything was disturbed.
"""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray import serve
from ray.serve.schema import ServeDeploySchema

from engine import PitstopError, SamplingParams
from serve_app.client import Pitstop, connect
from serve_app.client.completion import Completion, join_events
from serve_app.messages import ReplicaReport
from tests.ports import free_port
from tests.serve_app.running_app import ADMIN_KEY, APP_NAME, ENVIRONMENT, clients_beside, start_ray
from tests.serve_app.tiny_model import make_model_folder
from tests.waiting import eventually

pytestmark = pytest.mark.long

NUM_REPLICAS = 3
NUM_CLIENTS = 64
NUM_FAULTS = 5
"""Of each kind, twice over."""
NUM_TWINS = 48
CLIENT_DEADLINE_S = 120.0
READY_DEADLINE_S = 240.0
"""For a replica to be missed, ended and replaced on a busy machine."""
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
STOPPED_S = 6.0
"""Of every second replica that is stopped, before it goes on; the others are left for Serve to replace."""


def app_config(model: str, *, num_replicas: int) -> ServeDeploySchema:
    """Gives what `serve deploy` sends; another number of replicas is changed in place."""
    settings = {
        "model": model,
        "served_model_name": "tiny",
        "dtype": "float32",
        "engine": {"page_size": 16, "num_blocks": 1024},
        "replicas": {
            "min": NUM_REPLICAS,
            "max": NUM_REPLICAS,
            "torch_threads": 1,
            "num_cpus": 0.1,
            "health_check_period_s": 1,
            "health_check_timeout_s": 2,
        },
        "weights": {"heartbeat_interval_s": 0.5},
        "resume": {"silent_after_s": 3},
    }
    scaled = {"name": "EngineReplica", "num_replicas": num_replicas, "graceful_shutdown_timeout_s": 30}
    application = {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": "serve_app.app:build_app",
        "args": settings,
        "deployments": [scaled],
    }
    return ServeDeploySchema.model_validate({"applications": [application]})


def deploy(model: str, *, num_replicas: int) -> None:
    serve.context._get_global_client().deploy_apps(app_config(model, num_replicas=num_replicas))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def url(model: str) -> Iterator[str]:
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        start_ray(num_cpus=2)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            deploy(model, num_replicas=NUM_REPLICAS)
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


@pytest.fixture
async def llm(url: str) -> Pitstop:
    async def look() -> Pitstop | str:
        try:
            pitstop = connect(APP_NAME)
            await pitstop.status()
            return pitstop
        except PitstopError as error:
            return str(error)

    found = await eventually(look, until=lambda seen: isinstance(seen, Pitstop), deadline_s=READY_DEADLINE_S)
    await ready(found, NUM_REPLICAS)
    return found


async def ready(llm: Pitstop, number: int) -> list[ReplicaReport]:
    """Waits until so many replicas are ready, and no other is heard of."""

    async def look() -> list[ReplicaReport]:
        try:
            return (await llm.status()).replicas
        except PitstopError:
            return []

    def are_ready(reports: list[ReplicaReport]) -> bool:
        return len(reports) == number and all(one.state == "ready" and one.age_s < 2 for one in reports)

    found: list[ReplicaReport] = await eventually(look, until=are_ready, deadline_s=READY_DEADLINE_S)
    return found


@dataclass
class Ask:
    prompt: list[int]
    sampling: SamplingParams
    structured: dict[str, Any] | None

    async def answer(self, llm: Pitstop) -> Completion:
        events = [event async for event in llm.generate(self.prompt, self.sampling, structured=self.structured)]
        return join_events(events)


def make_asks() -> list[Ask]:
    rng = random.Random(0)
    asks = []
    for number in range(NUM_TWINS):
        sampling = SamplingParams(
            temperature=0.0 if number % 2 else rng.choice([0.7, 1.0, 1.3]),
            seed=rng.getrandbits(60),
            max_new_tokens=rng.randrange(100, 500),
            eos_token_ids=(),
            presence_penalty=rng.choice([None, 0.5]),
            logprobs=number % 4 == 0,
        )
        structured = {"regex": "([a-z]{2,9} )*"} if number % 8 == 2 else None
        asks.append(Ask([rng.randrange(256) for _ in range(rng.randrange(5, 200))], sampling, structured))
    return asks


@dataclass
class Load:
    """Clients that ask one thing after the other and compare."""

    llm: Pitstop
    asks: list[Ask]
    twins: list[Completion] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def run(self, client: int) -> None:
        rng = random.Random(client)
        while not self.is_over:
            number = rng.randrange(len(self.asks))
            try:
                answer = await asyncio.wait_for(self.asks[number].answer(self.llm), CLIENT_DEADLINE_S)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is what the test looks for
                self.outcomes[f"{type(error).__name__}: {error}"] += 1
                continue
            self.outcomes[self._difference(answer, self.twins[number])] += 1

    @staticmethod
    def _difference(answer: Completion, twin: Completion) -> str:
        if answer.token_ids != twin.token_ids or answer.text != twin.text:
            return "other tokens"
        if (answer.finish_reason, answer.prompt_ids) != (twin.finish_reason, twin.prompt_ids):
            return "another ending"
        if len(answer.logprobs) != len(twin.logprobs):
            return "log-probabilities are missing"
        if [(span.start, span.end) for span in answer.weight_versions] != [(0, len(answer.token_ids))]:
            return "spans with gaps"
        if any(abs(one - other) > 1e-2 for one, other in zip(answer.logprobs, twin.logprobs, strict=True)):
            return "other log-probabilities"
        return "same"


@asynccontextmanager
async def load_on(llm: Pitstop, url: str, *, keeps_counts: bool = True) -> AsyncIterator[Load]:
    """Runs the clients beside what is done inside; then nothing has failed, and nothing is left.

    keeps_counts: the router lives, and with it its counters.
    """
    asks = make_asks()
    load = Load(llm, asks)
    load.twins = await asyncio.gather(*(ask.answer(llm) for ask in asks))
    before = await resumes(url)
    async with clients_beside(load, NUM_CLIENTS, deadline_s=CLIENT_DEADLINE_S):
        yield load
    resumed = await resumes(url) - before if keeps_counts else float("nan")
    print(f"outcomes={dict(load.outcomes)} resumes={resumed:.0f}")  # noqa: T201  # the numbers of the run
    assert set(load.outcomes) == {"same"}
    assert load.outcomes["same"] >= NUM_CLIENTS
    assert not resumed <= 0, "nothing was disturbed"
    await eventually(lambda: is_idle(url), until=lambda busy: not busy)


async def scrape(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=30) as http:
        text = (await http.get(f"{url}/metrics")).text
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


async def resumes(url: str) -> float:
    return sum(value for name, value in (await scrape(url)).items() if name.startswith("pitstop_resumes_total"))


async def is_idle(url: str) -> dict[str, float]:
    """Gives the gauges that are not zero."""
    gauges = (
        "pitstop_requests_running",
        "pitstop_requests_waiting",
        "pitstop_kv_blocks_used",
        "pitstop_pending_decode",
    )
    return {name: value for name, value in (await scrape(url)).items() if name.startswith(gauges) and value}


def processes_of(deployment: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(f"ServeReplica:{APP_NAME}:{deployment}" in part for part in process.cmdline()):
                found.append(process)
    return found


@pytest.mark.parametrize("seed", range(2))
async def test_replicas_are_killed(llm: Pitstop, url: str, seed: int) -> None:
    rng = random.Random(seed)
    async with load_on(llm, url):
        for _ in range(NUM_FAULTS):
            names = {report.replica_id for report in await ready(llm, NUM_REPLICAS)}
            rng.choice(processes_of("EngineReplica")).kill()
            await eventually(lambda names=names: missing(llm, names), until=bool, deadline_s=READY_DEADLINE_S)
        await ready(llm, NUM_REPLICAS)


async def missing(llm: Pitstop, names: set[str]) -> set[str]:
    """Gives those of these replicas that are not heard of any more."""
    try:
        reports = (await llm.status()).replicas
    except PitstopError:
        return set()
    return names - {report.replica_id for report in reports if report.age_s < 2}


@pytest.mark.parametrize("seed", range(2))
async def test_replicas_stand_still(llm: Pitstop, url: str, seed: int) -> None:
    rng = random.Random(seed)
    stopped: list[psutil.Process] = []
    try:
        async with load_on(llm, url):
            for number in range(NUM_FAULTS):
                names = {report.replica_id for report in await ready(llm, NUM_REPLICAS)}
                # One that was stopped before is there until Serve has waited for it, though another has its place.
                running = [one for one in processes_of("EngineReplica") if one.status() != psutil.STATUS_STOPPED]
                process = rng.choice(running)
                process.suspend()
                stopped.append(process)
                await eventually(lambda names=names: missing(llm, names), until=bool, deadline_s=READY_DEADLINE_S)
                if number % 2:
                    await asyncio.sleep(STOPPED_S)
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGCONT)
            await ready(llm, NUM_REPLICAS)
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


async def test_replicas_are_taken_away_and_come_back(llm: Pitstop, url: str, model: str) -> None:
    async with load_on(llm, url):
        for number in (1, NUM_REPLICAS):
            deploy(model, num_replicas=number)
            await ready(llm, number)
            await asyncio.sleep(3)


async def test_the_last_one_is_not_drained_while_serve_takes_the_others_away(
    llm: Pitstop, url: str, model: str
) -> None:
    """Those that leave say that they are ready until their streams have ended."""
    async with load_on(llm, url) as load, httpx.AsyncClient(base_url=url, timeout=60, headers=ADMIN) as http:
        names = [report.replica_id for report in await ready(llm, NUM_REPLICAS)]
        await eventually(lambda: num_busy(llm), until=lambda busy: busy == NUM_REPLICAS)
        deploy(model, num_replicas=1)
        await eventually(num_running_engines, until=lambda number: number == 1)
        body = {"timeout_s": 0, "replace": True}
        answers = [await http.post("/admin/drain", json=body | {"replica_ids": [name]}) for name in names]
        (last,) = await ready(llm, 1)
        assert last.replica_id in names
        answer = answers[names.index(last.replica_id)]
        assert answer.status_code == 400
        assert "would leave no replica that serves" in answer.json()["error"]["message"]
        assert load.outcomes.keys() <= {"same"}
    deploy(model, num_replicas=NUM_REPLICAS)
    await ready(llm, NUM_REPLICAS)


async def num_running_engines() -> int:
    states = serve.status().applications[APP_NAME].deployments["EngineReplica"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


async def test_routers_are_killed(llm: Pitstop, url: str) -> None:
    """The Python client goes on by itself; what it sees of the router is the end of its stream."""
    async with load_on(llm, url, keeps_counts=False) as load:
        for _ in range(2):
            before = load.outcomes["same"]
            (router,) = processes_of("Router")
            router.kill()
            await eventually(
                lambda before=before: load.outcomes["same"] > before + NUM_CLIENTS, deadline_s=READY_DEADLINE_S
            )


async def num_busy(llm: Pitstop) -> int:
    return sum(report.num_running > 0 for report in (await llm.status()).replicas)


async def test_a_replica_is_drained_and_replaced(llm: Pitstop, url: str) -> None:
    async with load_on(llm, url) as load, httpx.AsyncClient(base_url=url, timeout=60, headers=ADMIN) as http:
        first, second, _ = (report.replica_id for report in await ready(llm, NUM_REPLICAS))
        await eventually(lambda: num_busy(llm), until=lambda busy: busy == NUM_REPLICAS)
        answer = await http.post("/admin/drain", json={"replica_ids": [first]})
        assert answer.json() == {"replicas": [first], "requests_left": {}, "is_replaced": False}
        states = {one["replica_id"]: one for one in (await http.get("/admin/weights")).json()["replicas"]}
        assert (states[first]["state"], states[first]["num_running"]) == ("drained", 0)
        answer = await http.post("/admin/drain", json={"replica_ids": [second], "replace": True})
        assert answer.json() == {"replicas": [second], "requests_left": {}, "is_replaced": True}
        assert load.outcomes.keys() <= {"same"}
        answer = await http.post("/admin/undrain", json={"replica_ids": [first]})
        assert answer.json()["replicas"] == [first]
        names = {report.replica_id for report in await ready(llm, NUM_REPLICAS)}
        assert first in names
        assert second not in names
