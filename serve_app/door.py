"""Whether a replica takes requests: not while it is drained, and no others beside one that is tried alone. No Ray."""

import time
from collections.abc import Mapping

from serve_app.messages import GenerateRequest
from serve_app.protocol.errors import ReplicaDraining
from serve_app.streams import TokenStream

ALONE_S = 30.0
"""How long a request is alone at most. What kills a replica does so within the first steps; a fleet of one has to go on
with the others some time.
"""


class Door:
    """Closing it has the open streams move: their routers go on with them at other replicas. For one event loop."""

    def __init__(self, streams: Mapping[str, TokenStream], *, replica_id: str) -> None:
        """streams: those that are open, by request, as they come and go."""
        self._streams = streams
        self._replica_id = replica_id
        self._alone: str | None = None
        self._alone_until = 0.0
        self.is_drained = False

    @property
    def is_closed(self) -> bool:
        return self.is_drained or self._is_alone

    def enter(self, request: GenerateRequest) -> None:
        """Lets a request in before it has a stream; raises ReplicaDraining where it has to go elsewhere."""
        if self.is_drained:
            raise ReplicaDraining(f"replica {self._replica_id} is drained")
        if self._is_alone:
            raise ReplicaDraining(f"replica {self._replica_id} tries a request alone")
        if request.is_alone:
            self._alone, self._alone_until = request.request_id, time.monotonic() + ALONE_S
            self._move_all(f"replica {self._replica_id} tries a request alone")

    def leave(self, request_id: str) -> None:
        """Takes note that a request is over."""
        if request_id == self._alone:
            self._alone = None

    def drain(self) -> None:
        """Takes no more requests, and hands those it has over."""
        self.is_drained = True
        self._move_all(f"replica {self._replica_id} is drained")

    def undrain(self) -> None:
        self.is_drained = False

    @property
    def _is_alone(self) -> bool:
        return self._alone is not None and time.monotonic() < self._alone_until

    def _move_all(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.move(reason)
