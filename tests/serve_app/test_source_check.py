"""Weights that the controller checks where no replica runs: the same digest as a replica, the same refusals."""

from pathlib import Path

import pytest

from engine import ContinuousBatchingConfig, WeightsInvalid, WeightsSourceError, init_continuous_batching, load_model
from serve_app.messages import SwapOrder, WeightSource
from serve_app.settings import AppSettings
from serve_app.source_check import CheckAlone
from tests.serve_app.tiny_model import changed_weights, make_model_folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model") / "base", seed=0)


def checker(base: str, *, num_running: int = 0) -> CheckAlone:
    async def count() -> int:
        return num_running

    return CheckAlone(AppSettings(model=base), count_running=count)


async def test_the_controller_finds_the_digest_that_a_replica_finds(base: str, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other", seed=1)
    checked = await checker(base)(SwapOrder("s", 2, WeightSource(other)))
    assert checked is not None
    manager = init_continuous_batching(load_model(base), None, ContinuousBatchingConfig(page_size=16, num_blocks=32))
    staged = manager.stage_weights(other)
    assert checked.digest == staged.digest
    assert checked.details.digests == dict(staged.digests)
    staged.discard()
    manager.destroy()


async def test_the_configured_model_is_checked_under_what_lies_over_it(base: str) -> None:
    alone = checker(base)
    configured = await alone(SwapOrder("s", 2, None, cast=True))
    over = await alone(SwapOrder("s", 2, WeightSource(layers=(base,), on_model=True), cast=True))
    assert configured is not None
    assert over is not None
    assert configured.digest == over.digest


async def test_what_a_replica_would_refuse_the_controller_refuses(base: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsSourceError, match="nowhere"):
        await checker(base)(SwapOrder("s", 2, WeightSource(str(tmp_path / "nowhere"))))
    faulty = changed_weights(base, tmp_path / "faulty", change="non-finite")
    with pytest.raises(WeightsInvalid, match=r"mlp\.down_proj\.weight"):
        await checker(base)(SwapOrder("s", 2, WeightSource(faulty)))


async def test_where_a_replica_runs_the_check_is_left_to_it(base: str, tmp_path: Path) -> None:
    assert await checker(base, num_running=1)(SwapOrder("s", 2, WeightSource(str(tmp_path / "nowhere")))) is None
