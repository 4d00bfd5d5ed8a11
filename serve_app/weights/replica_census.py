"""Which replicas have come and gone: each start once, and each loss that the autoscaler has not asked for."""

import asyncio

from serve_app.metrics import Recorder

LOST_AFTER_S = 30.0
"""Of silence. One that is starved for a while is heard again sooner, and Serve ends one that is not."""
MAX_REMEMBERED = 4096
"""Ids of lost replicas, so that one that comes back has not started; more than an autoscaler makes in a day."""


class ReplicaCensus:
    """Counts the replicas that start, by their reports, and those that are lost, by their silence.

    One event loop only, and its clock.
    """

    def __init__(self, recorder: Recorder, *, forget_after_s: float) -> None:
        self._recorder = recorder
        self._lost_after_s = max(LOST_AFTER_S, forget_after_s)
        self._heard_at: dict[str, float] = {}
        self._gone: dict[str, None] = {}
        """Who was heard of before, the latest at the end."""
        self._leaving_until: list[float] = []
        """One for each replica that is scaled away and not gone yet."""
        self._looked_at = float("-inf")

    def hear(self, replica_id: str, *, is_serving: bool) -> bool:
        """Takes that a replica reports; gives whether it has started, and so was not known before.

        is_serving: it has served before; a controller that was started anew learns of it only now.
        """
        is_known = replica_id in self._heard_at or replica_id in self._gone
        self._gone.pop(replica_id, None)
        self._heard_at[replica_id] = _now()
        if is_known or is_serving:
            return False
        self._recorder.count("pitstop_replica_starts_total")
        return True

    def expect_leaving(self, num_replicas: int, *, within_s: float) -> None:
        """Takes that so many replicas are scaled away, whichever they are, and will have ended after this time."""
        self._leaving_until += [_now() + within_s + self._lost_after_s] * num_replicas

    def look(self) -> None:
        """Counts those that have been silent for too long, but for as many as are scaled away."""
        now = _now()
        if now - self._looked_at > self._lost_after_s:
            # It was this process that stood still, so nobody could be heard.
            self._heard_at = dict.fromkeys(self._heard_at, now)
        self._looked_at = now
        self._leaving_until = [until for until in self._leaving_until if until >= now]
        for name in [name for name, at in self._heard_at.items() if now - at > self._lost_after_s]:
            del self._heard_at[name]
            self._gone[name] = None
            if len(self._gone) > MAX_REMEMBERED:
                del self._gone[next(iter(self._gone))]
            if self._leaving_until:
                self._leaving_until.pop(0)
            else:
                self._recorder.count("pitstop_replica_losses_total")


def _now() -> float:
    return asyncio.get_running_loop().time()
