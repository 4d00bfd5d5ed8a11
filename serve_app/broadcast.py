"""Calls to every replica of a deployment, and the end of one. The one place that uses `handle.broadcast`, an alpha API.

What it does not do, tried: replicas that are starting or just died are silently left out, so callers compare the
answers with the replicas they expect; it sends nothing until its results are asked for; with no replica it raises;
and in time it gives the answers of all or of none, so `ask_each` waits for each replica itself.
"""

import asyncio
from collections.abc import Iterable
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


async def ask_each(handle: DeploymentHandle[Any], method: str, *arguments: Any, timeout_s: float) -> list[Any]:
    """As `call_all`, but gives the answers that came in time and leaves out who was silent. For questions alone.

    Of a replica that stands still nobody learns here; what has to be done by every replica is `call_all`'s.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        # What `results_async` waits for together, under the name it has in Ray: there is no public one.
        response: Any = handle.broadcast(method, *arguments)
        sent = await asyncio.wait_for(response._fetch_replica_results_async(), timeout_s)
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return await _answers_until(deadline, (result.get_async() for result in sent))


async def _answers_until(deadline: float, questions: Iterable[Any]) -> list[Any]:
    """Gives the answers and the errors that come until then; ends what asks for the others."""
    asked = [asyncio.ensure_future(question) for question in questions]
    try:
        done, _ = await asyncio.wait(asked, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
    finally:
        for task in asked:
            task.cancel()
    return [task.exception() or task.result() for task in done if not task.cancelled()]


def kill_replica(application: str, deployment: str, replica_id: str) -> None:
    """Kills the process of a replica, so that Serve starts another; does nothing where it is gone. Blocks.

    Serve has no public way to it; the name of a replica's actor is what its own tools show.
    """
    name = f"SERVE_REPLICA::{application}#{deployment}#{replica_id}"
    try:
        ray.kill(ray.get_actor(name, namespace="serve"))
    except ValueError:
        return
