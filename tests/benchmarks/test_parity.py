"""Log-probabilities of rollouts are those of a trainer's forward pass, whatever the engine did to be fast."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.parity import measure
from tests.serve_app.tiny_model import make_model_folder

LIMIT = 1e-5
"""Mean absolute difference in nats, float32 on a CPU."""
BFLOAT16_LIMIT = 4e-3
"""Likewise: what rounding one number to bfloat16 may change of it, 2^-8 of its value."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model_folder(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_rollouts_agree_with_the_trainer_before_and_after_a_swap(folder: str) -> None:
    before, after = measure(folder, dtype="float32", in_flight="recompute", num_prompts=8, num_new_tokens=96)
    assert (before.version, after.version) == (1, 2)
    for found in (before, after):
        assert len(found.absolute) > 96
        assert found.num_cached_tokens > 0
        assert found.mean < LIMIT
        assert found.largest < 100 * LIMIT


def test_in_bfloat16_rollouts_agree_to_its_own_rounding(folder: str) -> None:
    for found in measure(folder, dtype="bfloat16", in_flight="recompute", num_prompts=8, num_new_tokens=96):
        assert len(found.absolute) > 96
        assert found.num_cached_tokens > 0
        assert LIMIT < found.mean < BFLOAT16_LIMIT
        assert found.largest < 50 * BFLOAT16_LIMIT


def test_keys_and_values_kept_over_a_swap_are_not_the_trainers(folder: str) -> None:
    before, after = measure(folder, dtype="float32", in_flight="keep", num_prompts=8, num_new_tokens=96)
    assert before.mean < LIMIT < after.mean
