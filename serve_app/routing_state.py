"""What a routing policy shares with the router of the same process.

Ray pickles the module of a policy by value, so globals of `routing` would be copies nobody else sees; this module is
imported by name and therefore the same for both.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class RoutingCounts:
    """Decisions since the process started. Written by the routing thread alone, read by any.

    decided: choices the policy made.
    waited: choices put off because every replica was fenced.
    failed: choices where the policy raised, and every replica was offered instead.
    """

    decided: int = 0
    waited: int = 0
    failed: int = 0


COUNTS = RoutingCounts()
