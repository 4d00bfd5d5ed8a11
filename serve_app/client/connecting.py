"""From the name of an application to its handle."""

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from serve_app.client.pitstop import TIMEOUT_S, Pitstop
from serve_app.client.sync import SyncPitstop
from serve_app.protocol.errors import NoReplica


def connect(name: str = "pitstop", *, timeout_s: float = TIMEOUT_S) -> Pitstop:
    """Gives the application of this name in the running cluster, joining the cluster if this process has not yet.

    Raises NoReplica where no cluster or no such application runs.
    """
    try:
        if not ray.is_initialized():
            # "auto" joins a cluster and never starts one.
            ray.init(address="auto", log_to_driver=False)
        return Pitstop(serve.get_app_handle(name), timeout_s=timeout_s)
    except (ConnectionError, RayServeException) as error:
        raise NoReplica(f"the application {name!r} is not running: {error}") from error


def connect_sync(name: str = "pitstop", *, timeout_s: float = TIMEOUT_S) -> SyncPitstop:
    """Gives the same for code without an event loop."""
    return SyncPitstop(connect(name, timeout_s=timeout_s))
