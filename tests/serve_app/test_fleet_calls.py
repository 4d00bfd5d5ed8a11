"""What a swap is told where a replica is gone: an error of ours, that says what to do."""

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from engine import (
    EngineDead,
    EngineStopped,
    InvalidRequest,
    NotFinished,
    PitstopError,
    SwapConflict,
    WeightsError,
    WeightsInvalid,
    WeightsLost,
    WeightsSourceError,
)
from serve_app.messages import SwapReply
from serve_app.protocol.errors import ReplicaGone, rule_of
from serve_app.weights.fleet_calls import raise_refusals


@pytest.mark.parametrize("lost", [ActorDiedError(), ActorUnavailableError("The actor 8f16 is unavailable", None)])
def test_a_replica_that_ray_lost_makes_a_swap_one_to_try_again(lost: Exception) -> None:
    with pytest.raises(ReplicaGone, match="the weights are those of before, so try again") as raised:
        raise_refusals([lost])
    assert rule_of(raised.value).status == 503
    assert "actor" not in str(raised.value)


def test_a_fault_of_ours_in_a_replica_is_one_still() -> None:
    with pytest.raises(WeightsError, match="a replica failed: a fault") as raised:
        raise_refusals([ValueError("a fault")])
    assert rule_of(raised.value).status == 500


@pytest.mark.parametrize(
    ("kind", "told", "status"),
    [
        (InvalidRequest, InvalidRequest, 400),
        (WeightsInvalid, WeightsInvalid, 400),
        (WeightsSourceError, WeightsSourceError, 400),
        (NotFinished, NotFinished, 409),
        (SwapConflict, SwapConflict, 409),
        (EngineStopped, ReplicaGone, 503),
        (EngineDead, ReplicaGone, 503),
        (WeightsLost, WeightsLost, 503),
        (WeightsError, WeightsError, 500),
        (OSError, WeightsError, 500),
    ],
)
def test_a_refusal_of_a_replica_is_the_error_it_was(
    kind: type[Exception], told: type[PitstopError], status: int
) -> None:
    reply = SwapReply("r0", 1, ok=False, error="no", error_type=kind.__name__, tensor="a")
    with pytest.raises(PitstopError, match="replica r0: no") as raised:
        raise_refusals([reply])
    assert type(raised.value) is told
    assert rule_of(raised.value).status == status
    assert getattr(raised.value, "tensor", "a") == "a"
