"""Weights that the controller checks where no replica runs: the same digest as a replica, the same refusals."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine import (
    ContinuousBatchingConfig,
    InvalidRequest,
    WeightsInvalid,
    WeightsSourceError,
    init_continuous_batching,
    load_model,
)
from serve_app.messages import Changes, Probes, SwapOrder, WeightSource
from serve_app.settings import AppSettings
from serve_app.weights.source_check import CheckAlone
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


async def test_changes_are_checked_by_themselves_and_what_they_leave_is_named(base: str, tmp_path: Path) -> None:
    tensors = load_file(Path(base) / "model.safetensors")
    name = "model.norm.weight"
    changed = tmp_path / "changed"
    changed.mkdir()

    def order(*, cast: bool) -> SwapOrder:
        whole = WeightSource(layers=(str(changed),), on_model=True)
        return SwapOrder("s", 2, whole, cast=True, changes=Changes((str(changed),), 1, cast))

    save_file({name: tensors[name] * 2}, changed / "model.safetensors")
    checked = await checker(base)(order(cast=False))
    configured = await checker(base)(SwapOrder("s", 2, None, cast=True))
    assert checked is not None
    assert configured is not None
    assert name not in checked.details.unchanged
    differing = {one for one in checked.details.digests if one not in checked.details.unchanged}
    assert differing == {name}
    assert {one: checked.details.digests[one] for one in checked.details.unchanged} == {
        one: digest for one, digest in configured.details.digests.items() if one != name
    }
    # The model under them may be cast; they may not, unless that was asked.
    save_file({name: tensors[name].bfloat16()}, changed / "model.safetensors")
    with pytest.raises(WeightsInvalid, match="another dtype"):
        await checker(base)(order(cast=False))
    assert await checker(base)(order(cast=True)) is not None


async def test_what_a_replica_would_refuse_the_controller_refuses(base: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsSourceError, match="nowhere"):
        await checker(base)(SwapOrder("s", 2, WeightSource(str(tmp_path / "nowhere"))))
    faulty = changed_weights(base, tmp_path / "faulty", change="non-finite")
    with pytest.raises(WeightsInvalid, match=r"mlp\.down_proj\.weight"):
        await checker(base)(SwapOrder("s", 2, WeightSource(faulty)))


async def test_probes_are_refused_where_no_replica_can_run_them_before_anything_is_read(
    base: str, tmp_path: Path
) -> None:
    order = SwapOrder("s", 2, WeightSource(str(tmp_path / "nowhere")), probes=Probes([[1, 2]], [[-9.0]], 0.1))
    with pytest.raises(InvalidRequest, match="no replica runs, and probes need one: send a request first") as caught:
        await checker(base)(order)
    assert caught.value.param == "probes"
    assert await checker(base, num_running=1)(order) is None


async def test_where_a_replica_runs_the_check_is_left_to_it(base: str, tmp_path: Path) -> None:
    assert await checker(base, num_running=1)(SwapOrder("s", 2, WeightSource(str(tmp_path / "nowhere")))) is None
