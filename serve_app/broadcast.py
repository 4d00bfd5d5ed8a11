"""Calls to every replica of a deployment. The one place that uses Ray Serve's `handle.broadcast`, an alpha API.

What it does not do, tried: replicas that are starting or just died are silently left out, so callers compare the
answers with the replicas they expect; it sends nothing until its results are asked for; with no replica it raises.
"""

from typing import Any

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
