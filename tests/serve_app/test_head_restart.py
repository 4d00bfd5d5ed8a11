"""A head node that dies and comes back, with its state in Redis: who enters through a worker does not notice.

Started as KubeRay does it: a head without CPUs, a worker, `ray start` for each, the application by Serve's REST API.
"""

import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
import yaml

from tests.ports import free_port
from tests.serve_app.running_app import ADMIN_KEY, APP_NAME, ENVIRONMENT, clients_beside
from tests.serve_app.tiny_model import make_model_folder
from tests.waiting import eventually

pytestmark = pytest.mark.long

NUM_REPLICAS = 2
NUM_CLIENTS = 8
BETWEEN_S = 0.5
"""Between two requests of a client: a head that starts beside replicas with much to do does not start in time."""
NUM_WITHOUT_HEAD = 8 * NUM_CLIENTS
"""Answers that begin and end while there is no head."""
NUM_TWINS = 24
CLIENT_DEADLINE_S = 120.0
START_DEADLINE_S = 240.0
PASSWORD = "a-password-for-tests-only"
TOKEN = "a-token-for-tests-only-of-32-characters"
PRODUCTION = Path(__file__).parents[2] / "configs" / "production.yaml"
"""Its deployments are placed here as there: away from the head."""
APPLICATIONS = "/api/serve/applications/"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


class Cluster:
    """Redis, a head and a worker, each a process with its own children; only those are ever ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis_port, self.gcs_port, self.dashboard_port = free_port(), free_port(), free_port()
        self.http_port = free_port()
        self.temp = Path(tempfile.mkdtemp(prefix="pitstop-", dir="/tmp"))
        """Ray's, whose sockets need a short path."""
        self.environment = {
            **os.environ,
            **ENVIRONMENT,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """Where clients enter: the proxy of the worker."""
        return f"http://127.0.0.1:{self.http_port}"

    def start_redis(self) -> None:
        command = ["redis-server", "--port", self.redis_port, "--bind", "127.0.0.1", "--requirepass", PASSWORD]
        self._start("redis", [*command, "--save", "", "--dir", self.folder])

    def start_head(self) -> None:
        # A new head has its own disk; this one shares the last one's, where Ray would take it for a second cluster.
        (self.temp / "ray_current_cluster").unlink(missing_ok=True)
        environment = {
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{self.redis_port}",
            "RAY_external_storage_namespace": "pitstop",
        }
        ports = ["--port", self.gcs_port, "--dashboard-port", self.dashboard_port]
        head = ["--head", "--num-cpus", 0, "--redis-password", PASSWORD, *ports, "--temp-dir", self.temp]
        self._start_node("head", [*head, "--dashboard-host", "127.0.0.1"], environment)

    def start_worker(self) -> None:
        environment = {
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.http_port),
            # KubeRay's value; Ray's own is a minute, within which a head has to be back.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }
        self._start_node(
            "worker", ["--address", f"{ray.util.get_node_ip_address()}:{self.gcs_port}", "--num-cpus", 2], environment
        )

    def kill(self, name: str) -> None:
        """Ends a node as a power cut does."""
        node = self.started.pop(name)
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(node.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        node.kill()
        node.wait()

    def stop(self) -> None:
        for name in list(self.started):
            self.kill(name)
        shutil.rmtree(self.temp)

    def processes_of(self, deployment: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.started["worker"].pid).children(recursive=True):
            with suppress(psutil.Error):
                if any(f"ServeReplica:{APP_NAME}:{deployment}" in part for part in process.cmdline()):
                    found.append(process)
        return found

    def _start_node(self, name: str, options: list[Any], environment: dict[str, str]) -> None:
        ports = ["--min-worker-port", 0, "--max-worker-port", 0, "--dashboard-agent-listen-port", free_port()]
        start = ["ray", "start", "--block", "--object-store-memory", 100 * 2**20, *ports]
        self._start(name, [*start, *options], environment)

    def _start(self, name: str, command: list[Any], environment: dict[str, str] | None = None) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.started[name] = subprocess.Popen(
                [str(part) for part in command],
                env={**self.environment, **(environment or {})},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def rest(self) -> httpx.AsyncClient:
        """Gives a client of Serve's REST API."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.dashboard_port}", timeout=60, headers=headers)

    async def status(self) -> str | None:
        """Gives Serve's status of the application; None while nobody answers."""
        assert self.started["head"].poll() is None, (self.folder / "head.log").read_text()
        try:
            async with self.rest() as http:
                answer = await http.get(APPLICATIONS)
        except httpx.HTTPError:
            return None
        return answer.json()["applications"].get(APP_NAME, {}).get("status", "") if answer.is_success else None

    async def deploy(self, settings: dict[str, Any]) -> None:
        application = {
            "name": APP_NAME,
            "route_prefix": "/",
            "import_path": "serve_app.app:build_app",
            "args": settings,
            "deployments": yaml.safe_load(PRODUCTION.read_text())["applications"][0]["deployments"],
        }
        config = {
            "http_options": {"host": "127.0.0.1", "port": free_port()},
            "applications": [application],
        }
        await eventually(self.status, until=lambda status: status is not None, deadline_s=START_DEADLINE_S)
        async with self.rest() as http:
            answer = await http.put(APPLICATIONS, json=config)
        assert answer.is_success, answer.text


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    assert shutil.which("redis-server"), "redis-server is missing: apt-get install -y redis-server"
    cluster = Cluster(tmp_path)
    try:
        cluster.start_redis()
        cluster.start_head()
        yield cluster
    finally:
        cluster.stop()


@dataclass
class Load:
    """Clients that ask one thing after the other, and compare."""

    http: httpx.AsyncClient
    prompts: list[list[int]]
    twins: list[set[str]]
    """Of each prompt, the texts with the weights of before and after."""
    outcomes: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def run(self, client: int) -> None:
        rng = random.Random(client)
        while not self.is_over:
            await asyncio.sleep(BETWEEN_S)
            number = rng.randrange(len(self.prompts))
            try:
                text = await asyncio.wait_for(ask(self.http, self.prompts[number]), CLIENT_DEADLINE_S)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is what the test looks for
                self.outcomes[repr(error)] += 1
                continue
            self.outcomes["same" if text in self.twins[number] else "another text"] += 1


async def ask(http: httpx.AsyncClient, prompt: list[int]) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def swap(http: httpx.AsyncClient, folder: str) -> list[str]:
    """Gives the replicas that generate with the new weights."""
    answer = await http.post("/admin/weights", json={"source": {"path": folder}, "in_flight": "finish"})
    assert answer.status_code == 200, answer.text
    replicas: list[str] = answer.json()["replicas"]
    return replicas


async def weights(http: httpx.AsyncClient) -> dict[str, Any]:
    try:
        answer = await http.get("/admin/weights")
    except httpx.HTTPError:
        return {}
    found: dict[str, Any] = answer.json() if answer.is_success else {}
    return found


async def serves(http: httpx.AsyncClient, version: int) -> bool:
    found = (await weights(http)).get("replicas", [])
    states = [(one["state"], one["version"]) for one in found if one["age_s"] < 3]
    return states == [("ready", version)] * NUM_REPLICAS


async def replica_ids(http: httpx.AsyncClient) -> set[str]:
    return {one["replica_id"] for one in (await weights(http)).get("replicas", [])}


async def is_replaced(http: httpx.AsyncClient, earlier: set[str]) -> bool:
    return await replica_ids(http) != earlier and await serves(http, 4)


async def test_a_head_dies_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    folders = [make_model_folder(tmp_path / f"weights-{seed}", seed=seed) for seed in (1, 2)]
    (committed := tmp_path / "committed").mkdir()
    cluster.start_worker()
    await cluster.deploy(
        {
            "model": make_model_folder(tmp_path / "model"),
            "served_model_name": "tiny",
            "dtype": "float32",
            "engine": {"page_size": 16, "num_blocks": 512},
            "replicas": {"min": NUM_REPLICAS, "max": NUM_REPLICAS, "torch_threads": 1, "num_cpus": 0.1},
            "weights": {"heartbeat_interval_s": 0.5, "folder": str(committed)},
        }
    )
    async with httpx.AsyncClient(base_url=cluster.url, timeout=CLIENT_DEADLINE_S, headers=ADMIN) as http:
        await eventually(lambda: serves(http, 1), deadline_s=START_DEADLINE_S)
        rng = random.Random(0)
        prompts = [[rng.randrange(200) for _ in range(rng.randrange(5, 100))] for _ in range(NUM_TWINS)]
        load = Load(http, prompts, [set() for _ in prompts])
        for folder in folders:
            await swap(http, folder)
            for prompt, texts in zip(load.prompts, load.twins, strict=True):
                texts.add(await ask(http, prompt))
        assert all(len(texts) == len(folders) for texts in load.twins)
        async with clients_beside(load, NUM_CLIENTS, deadline_s=CLIENT_DEADLINE_S):
            cluster.kill("head")
            before = load.outcomes.total()
            await eventually(lambda: load.outcomes.total() > before + NUM_WITHOUT_HEAD, deadline_s=CLIENT_DEADLINE_S)
            cluster.start_head()
            await eventually(lambda: serves(http, 3), deadline_s=START_DEADLINE_S)
            await eventually(cluster.status, until=lambda status: status == "RUNNING", deadline_s=START_DEADLINE_S)
            assert len(await swap(http, folders[0])) == NUM_REPLICAS
            names = await replica_ids(http)
            rng.choice(cluster.processes_of("EngineReplica")).kill()
            await eventually(lambda: is_replaced(http, names), deadline_s=START_DEADLINE_S)
        assert set(load.outcomes) == {"same"}
