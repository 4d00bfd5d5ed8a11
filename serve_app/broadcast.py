"""Calls to every replica of a deployment, and the end of one. The one place that uses `handle.broadcast`, an alpha API.

What it does not do, tried: replicas that are starting or just died are silently left out, so callers compare the
answers with the replicas they expect; it sends nothing until its results are asked for; with no replica it raises.
"""

from typing import Any

import ray
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle


async def call_all(handle: DeploymentHandle[Any], method: str, *arguments: Any, timeout_s: float) -> list[Any]:
    """Gives the answers of all running replicas, in no order; an answer is an exception where a replica failed.

    No running replica gives an empty list. Raises TimeoutError when not all have answered in time; the call may still
    be carried out afterwards, so what it does has to bear being late.
    """
    try:
        response = handle.broadcast(method, *arguments)
        answers: list[Any] = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        return answers
    except DeploymentUnavailableError:
        return []


def kill_replica(application: str, deployment: str, replica_id: str) -> None:
    """Kills the process of a replica, so that Serve starts another; does nothing where it is gone. Blocks.

    Serve has no public way to it; the name of a replica's actor is what its own tools show.
    """
    name = f"SERVE_REPLICA::{application}#{deployment}#{replica_id}"
    try:
        ray.kill(ray.get_actor(name, namespace="serve"))
    except ValueError:
        return
