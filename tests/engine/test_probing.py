"""A probe says what staged weights would answer, while the old ones go on answering."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine_runs import prompt_of, result_of, running
from safetensors.torch import save_file
from tiny_models import SUPPORTED, tiny_model
from transformers import PreTrainedModel

from engine import ContextLengthExceeded, InvalidRequest, WeightsError, stage_weights
from engine.probing import probe

PROMPTS = [prompt_of(40, seed=1), prompt_of(7, seed=2), [5]]


def log_probabilities(model: PreTrainedModel, prompt: Sequence[int]) -> list[float]:
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    found: list[float] = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_family_is_probed_without_being_touched(family: str, tmp_path: Path) -> None:
    model, other = tiny_model(family, seed=1), tiny_model(family, seed=2)
    other.save_pretrained(tmp_path)
    staged = stage_weights(model, tmp_path)
    before, state = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    found = probe(model, staged.pairs, PROMPTS, attention=model.config._attn_implementation)
    assert found == [log_probabilities(other, prompt) for prompt in PROMPTS]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    staged.commit()
    assert found == [log_probabilities(model, prompt) for prompt in PROMPTS]


@pytest.mark.usefixtures("depth")
def test_a_probe_runs_beside_generation(tmp_path: Path) -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    other.save_pretrained(tmp_path)
    expected = [log_probabilities(other, prompt) for prompt in PROMPTS]
    with running(model) as manager:
        staged = manager.stage_weights(tmp_path)
        request_id = manager.add_request(PROMPTS[0], max_new_tokens=300)
        for _ in range(5):
            assert manager.probe_weights(staged, PROMPTS) == expected
        assert [span.version for span in result_of(manager, request_id).weight_versions] == [1]


def test_a_partial_update_is_probed_over_what_it_leaves(tmp_path: Path) -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=1)
    with torch.no_grad():
        other.model.norm.weight.mul_(2.0)
    save_file({"model.norm.weight": other.model.norm.weight.data}, tmp_path / "model.safetensors")
    with running(model) as manager:
        staged = manager.stage_weights(tmp_path, partial=True)
        assert manager.probe_weights(staged, PROMPTS[:1]) == [log_probabilities(other, PROMPTS[0])]


def test_what_is_not_finite_is_told(tmp_path: Path) -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    with torch.no_grad():
        other.lm_head.weight.fill_(3e38)
    other.save_pretrained(tmp_path)
    with running(model) as manager:
        (found,) = manager.probe_weights(manager.stage_weights(tmp_path), PROMPTS[:1])
        assert not all(torch.isfinite(torch.tensor(found)))


def test_what_cannot_be_probed_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model(seed=1)
    tiny_model(seed=2).save_pretrained(tmp_path / "new")
    with running(model) as manager:
        staged = manager.stage_weights(tmp_path / "new")
        with pytest.raises(InvalidRequest, match="input_ids"):
            manager.probe_weights(staged, [[1, 256]])
        with pytest.raises(ContextLengthExceeded):
            manager.probe_weights(staged, [[1] * 600])
        streamed = manager.stage_weights(tmp_path / "new", memory="inside", undo_folder=tmp_path)
        with pytest.raises(WeightsError, match="not in memory"):
            manager.probe_weights(streamed, PROMPTS)
        manager.commit_weights(staged)
        with pytest.raises(WeightsError, match="committed or discarded"):
            manager.probe_weights(staged, PROMPTS)
        model.add_module("adapter", torch.nn.Linear(2, 2))
        other = stage_weights(tiny_model(seed=2), tmp_path / "new")
        with pytest.raises(WeightsError, match="adapter"):
            manager.probe_weights(other, PROMPTS)
        del model.adapter
