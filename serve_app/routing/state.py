"""What a routing policy shares with the router of the same process.

Ray pickles the module of a policy by value, so globals of `work_router` would be copies nobody else sees; this module
is imported by name and therefore the same for both.
"""

from threading import Lock

from serve_app.routing.request_routing import RequestRouting

_lock = Lock()
_routings: dict[str, RequestRouting] = {}


def share_routing(app_name: str, policy: str) -> RequestRouting:
    """Gives the routing of an application in this process, the same one to all of its handles."""
    with _lock:
        if app_name not in _routings or _routings[app_name].policy != policy:
            _routings[app_name] = RequestRouting(policy)
        return _routings[app_name]


def find_routing(app_name: str) -> RequestRouting | None:
    """Gives the routing of an application in this process; None before its first handle was used."""
    return _routings.get(app_name)
