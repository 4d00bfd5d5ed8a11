"""`pitstop wait-streams`: what a machine still answers, by what Ray's metrics agent on it says."""

import time
from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serve_app.cli.failure import CommandFailed

ANSWERING = ("ray_serve_num_ongoing_http_requests", "ray_pitstop_http_requests_in_flight")
"""Of the proxy and of the router on the machine: a stream may run through either alone."""
QUIET_FOR_S = 20.0
"""No longer than this do numbers take to the agent's page: five seconds by `metrics.ray_interval_s`, ten by Ray."""
LOOK_INTERVAL_S = 2.0
LOOK_TIMEOUT_S = 5.0


def wait_for_streams(
    url: str,
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Waits until nobody has been answered for QUIET_FOR_S, or the time is up; gives how many still are.

    url: of the page of Ray's metrics agent. Where nothing listens there any more, nobody is answered either. A router
    that is gone is not on the page. Raises CommandFailed where the page was never seen in this time.
    """
    began = quiet_since = clock()
    left: int | None = None
    while True:
        try:
            page = httpx.get(url, timeout=LOOK_TIMEOUT_S, trust_env=False).raise_for_status().text
            left = num_answered(page)
        except httpx.ConnectError:
            return 0
        except (httpx.HTTPError, ValueError):
            # Nothing is known, so it may be answering; it is asked again.
            quiet_since = clock()
        now = clock()
        if left:
            quiet_since = now
        if left == 0 and now - quiet_since >= QUIET_FOR_S:
            return 0
        if now - began >= timeout_s:
            break
        sleep(min(LOOK_INTERVAL_S, timeout_s - (now - began)))
    if left is None:
        raise CommandFailed(f"{url} gave no page of metrics within {timeout_s:g} s")
    return left


def num_answered(page: str) -> int:
    """Gives how many HTTP requests are being answered; one that runs through proxy and router here counts once.

    Raises ValueError for what is no page of metrics.
    """
    found = dict.fromkeys(ANSWERING, 0.0)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return int(max(found.values()))
