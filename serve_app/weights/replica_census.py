"""Which replicas have come: each is counted once, however often it falls silent and is heard again."""

from serve_app.metrics import Recorder

MAX_REMEMBERED = 4096
"""Ids of replicas, so that one that comes back has not started; more than an autoscaler makes in a day."""


class ReplicaCensus:
    """Counts the replicas that start, by their reports. One event loop only."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[str, None] = {}
        """By when they were heard last, the latest at the end."""

    def hear(self, replica_id: str, *, is_serving: bool) -> bool:
        """Takes that a replica reports; gives whether it has started, and so was not known before.

        is_serving: it has served before; a controller that was started anew learns of it only now.
        """
        is_known = replica_id in self._known
        self._known.pop(replica_id, None)
        self._known[replica_id] = None
        if len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        if is_known or is_serving:
            return False
        self._recorder.count("pitstop_replica_starts_total")
        return True
