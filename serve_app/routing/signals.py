"""What the routing policy and the open streams of the same process tell each other of replicas and requests.

Imported by name, as `state`, and therefore the same for both. What is written in one thread is read in another;
each value is replaced whole.
"""

import time
from collections.abc import Iterable

AVOID_S = 5.0
"""How long a word to avoid a replica counts; whoever gave it says it again as long as it holds."""
MAX_PLACES = 100_000
"""Places remembered at most; beyond it the oldest are forgotten, whose streams name their replica by then."""

_candidates: frozenset[str] = frozenset()
_avoided: dict[str, float] = {}
_places: dict[str, str] = {}


def set_candidates(replica_ids: frozenset[str]) -> None:
    """Notes which replicas Ray Serve offers; one that it stops is no longer among them. For the routing thread."""
    global _candidates
    _candidates = replica_ids


def candidates() -> frozenset[str]:
    """Gives the replicas that Ray Serve offers; none before it has said so."""
    return _candidates


def avoid(replica_ids: Iterable[str]) -> None:
    """Has routing avoid these replicas and no others, for a few seconds."""
    global _avoided
    until = time.monotonic() + AVOID_S
    _avoided = dict.fromkeys(replica_ids, until)


def is_avoided(replica_id: str) -> bool:
    """Gives whether routing has to avoid it just now."""
    return _avoided.get(replica_id, 0.0) > time.monotonic()


def note_place(request_id: str, replica_id: str) -> None:
    """Notes to which replica a request was sent: it may never say so itself."""
    _places[request_id] = replica_id
    if len(_places) > MAX_PLACES:
        del _places[next(iter(_places))]


def place_of(request_id: str) -> str | None:
    """Gives the replica that a request was sent to, where it is known."""
    return _places.get(request_id)


def forget_place(request_id: str) -> None:
    """Forgets a request that has ended or is sent elsewhere."""
    _places.pop(request_id, None)
