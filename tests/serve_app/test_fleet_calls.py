"""What a swap is told where a replica is gone: an error of ours, that says what to do."""

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from engine import WeightsError
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
