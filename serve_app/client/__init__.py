"""The Python side of a running application: `connect("pitstop")`, and `connect_sync` for code without an event loop.

    pitstop = connect("pitstop")
    async for event in pitstop.generate("The race starts"):
        print(event.text, event.token_ids, event.weight_versions)

Every error is one of the project's (`engine.errors`, `serve_app.protocol.errors`), never one of Ray's.
"""

from serve_app.client.completion import Completion
from serve_app.client.connecting import connect, connect_sync
from serve_app.client.pitstop import Pitstop
from serve_app.client.swap import Swap, SyncSwap
from serve_app.client.sync import SyncPitstop
from serve_app.resume_point import ResumePoint, ResumeTrail

__all__ = [
    "Completion",
    "Pitstop",
    "ResumePoint",
    "ResumeTrail",
    "Swap",
    "SyncPitstop",
    "SyncSwap",
    "connect",
    "connect_sync",
]
