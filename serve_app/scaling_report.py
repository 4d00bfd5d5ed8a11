"""What the autoscaling policy tells of its decisions; imports nothing, as it is read in Serve's own controller."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalingChange:
    """One change of the number of replicas. number counts from 1; at: seconds since 1970; why: one sentence."""

    number: int
    at: float
    before: int
    after: int
    reason: str
    why: str

    @property
    def direction(self) -> str:
        return "up" if self.after > self.before else "down"


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """What a policy has decided so far. source: another one where it was started anew, and counts from 1 again.

    changes: the latest ones, newest first. num_replicas, needed, reason, why: its latest word, which may have changed
    nothing. num_failures: how often it could not decide and kept what was.
    """

    source: str
    changes: tuple[ScalingChange, ...] = ()
    num_replicas: int = 0
    needed: int = 0
    reason: str = ""
    why: str = ""
    num_failures: int = 0
