"""A real application on a real Ray: started once by a test module, on free ports of loopback, and stopped after."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import httpx
import pytest
import ray
from ray import serve

from serve_app.app import build_app
from serve_app.settings import AppSettings
from tests.ports import free_port
from tests.waiting import DEADLINE_S

APP_NAME = "pitstop"
ADMIN_KEY = "a-key-for-tests-only"
ENVIRONMENT = {
    "PITSTOP_ADMIN_KEY": ADMIN_KEY,
    # How `pitstop serve` runs Serve. Ray's processes inherit it; this one has imported Serve already and stays.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}


class Clients(Protocol):
    """What asks until it is told to end."""

    is_over: bool

    async def run(self, place: int, /) -> None: ...


@asynccontextmanager
async def clients_beside(clients: Clients, number: int, *, deadline_s: float) -> AsyncIterator[None]:
    """Runs so many clients beside what is done inside; then tells them to end, and fails as the first of them did."""
    tasks = [asyncio.create_task(clients.run(place)) for place in range(number)]
    try:
        yield
        clients.is_over = True
        await asyncio.wait_for(asyncio.gather(*tasks), deadline_s)
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def running_app(settings: AppSettings, *, num_cpus: int = 2) -> Iterator[str]:
    """Starts Ray, Serve and the application, and gives the URL of its root."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        start_ray(num_cpus)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build_app(settings), name=APP_NAME, route_prefix="/")
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def http_client(url: str) -> httpx.AsyncClient:
    """Gives a client that sends the admin key and never waits without end."""
    return httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, headers={"Authorization": f"Bearer {ADMIN_KEY}"})


def kill_actor_of(deployment: str, *, replica_id: str = "") -> None:
    """Kills the process of one replica, as `kill -9` does."""
    prefix = f"SERVE_REPLICA::{APP_NAME}#{deployment}#{replica_id}"
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    name = next(name for name in names if name.startswith(prefix))
    ray.kill(ray.get_actor(name, namespace="serve"))


def start_ray(num_cpus: int) -> None:
    """Starts an instance of Ray of this process alone."""
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _metrics_export_port=free_port(),
    )
