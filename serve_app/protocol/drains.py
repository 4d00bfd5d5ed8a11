"""The bodies of `/admin/drain` and `/admin/undrain`."""

from typing import Annotated

from pydantic import Field

from serve_app.messages import MAX_WAIT_S, DrainRequest
from serve_app.protocol.strict import Items, RequestModel

ReplicaId = Annotated[str, Field(min_length=1, max_length=128)]


class UndrainBody(RequestModel):
    """replica_ids: the replicas meant, as GET /admin/weights names them. node: all replicas of this address, too."""

    replica_ids: Items[ReplicaId] = Field(default_factory=list)
    node: ReplicaId | None = None

    def request(self) -> DrainRequest:
        """Gives what the controller takes."""
        return DrainRequest(replica_ids=tuple(self.replica_ids), node=self.node)


class DrainBody(UndrainBody):
    """timeout_s: how long to wait until they have no requests. replace: then end them, so that others start; else they
    stay and take no requests until they are undrained. force: even where no other replica serves.
    """

    timeout_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 30.0
    replace: bool = False
    force: bool = False

    def request(self) -> DrainRequest:
        """Gives what the controller takes."""
        return DrainRequest(
            replica_ids=tuple(self.replica_ids),
            node=self.node,
            timeout_s=self.timeout_s,
            is_replaced=self.replace,
            is_forced=self.force,
        )
