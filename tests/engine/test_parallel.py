"""Two gloo ranks on the CPU against the whole model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_program import CUT_FAMILIES, PROMPTS
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import PreTrainedModel

from engine import UnsupportedModel, load_model
from engine.active_request import ActiveRequest
from engine.block_pool import BlockCopy, CopyKind
from engine.parallel import Deed, Order, Verb, WeightsTask, decode, disable_graph_mixing, encode
from engine.plan import PlannedRow, StepPlan
from engine.request import SamplingParams
from engine.weights.cutting import Cut
from tests.ports import free_port

PROGRAM = Path(__file__).parent / "rank_program.py"
NUM_NEW = 12


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
        )
    return output[0, len(prompt) :].tolist()


def run_ranks(folder: Path, scenario: str) -> dict[str, Any]:
    result = folder / "result.json"
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), scenario, str(result)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **place, "RANK": str(rank), "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=180)[1] for rank in ranks]
    assert ranks[0].returncode == 0, errors[0][-3000:]
    return json.loads(result.read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def test_two_ranks_generate_what_the_whole_model_does_and_pause_together(folder: Path) -> None:
    found = run_ranks(folder, "pause")
    model = tiny_model("llama")
    assert found["tokens"] == [greedy(model, prompt) for prompt in PROMPTS]
    model.model.norm.weight.data.mul_(-1.0)
    assert found["after"] == greedy(model, PROMPTS[0])
    assert (found["version"], found["cached"]) == (2, 0)


def test_cancelling_frees_the_blocks_of_all_ranks(folder: Path) -> None:
    found = run_ranks(folder, "cancel")
    assert (found["status"], found["used"]) == ("CANCELLED", 0)


def test_a_batch_has_its_results_at_the_driver_and_staging_is_refused_by_name(folder: Path) -> None:
    found = run_ranks(folder, "batch")
    assert found["batch"] == found["tokens"] == [greedy(tiny_model("llama"), prompt) for prompt in PROMPTS]
    assert "tensor parallel" in found["stage"]


def test_new_weights_reach_every_rank_or_none(folder: Path) -> None:
    for family in CUT_FAMILIES:
        tiny_model(family, seed=3).save_pretrained(folder / family)
    tiny_model("llama").save_pretrained(folder / "first")
    for name in ("second", "here/alone", "here/mixed", "there/mixed"):
        tiny_model("llama", seed=2).save_pretrained(folder / name)
    second = load_file(folder / "second" / "model.safetensors")
    second["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    (folder / "part").mkdir()
    save_file({"model.norm.weight": torch.ones(64)}, folder / "part" / "model.safetensors")
    (folder / "corrupt").mkdir()
    save_file(second, folder / "corrupt" / "model.safetensors")
    found = run_ranks(folder, "swap")
    assert found["wrongly_cut"] == []
    assert "not finite: model.layers.1.mlp.up_proj.weight" in found["../corrupt"]
    assert found["alone"].startswith("WeightsSourceError: rank 1: there is no folder alone")
    assert found["mixed"].startswith("WeightsSourceError: rank 1 read other files than the driver")
    assert "rank 1: the model was moved or changed" in found["uncommitted"]
    old = greedy(tiny_model("llama"), PROMPTS[0])
    assert found["unchanged"] == found["still"] == old
    assert found["still_version"] == 1
    assert found["after"] == greedy(tiny_model("llama", seed=2), PROMPTS[0]) != old
    assert found["version"] == 9
    assert (found["before"], found["verified"], found["partly"]) == (True, True, [20, True, True])


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("llama", 4, "its 2 key-value heads do not divide evenly among 4 tensor parallel ranks"),
        ("gpt2", 2, "transformers has no tensor parallel plan for it"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_before_it_is_read(
    family: str, size: int, message: str, tmp_path: Path
) -> None:
    tiny_model(family).config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(str(tmp_path), tensor_parallel_size=size)


def test_a_model_is_not_cut_over_ranks_that_are_not_there(folder: Path) -> None:
    with pytest.raises(ValueError, match="this process is one of 1 ranks"):
        load_model(str(folder), tensor_parallel_size=2)


def test_parts_are_cut_as_torch_chunks() -> None:
    whole = torch.arange(24).reshape(6, 4)
    assert torch.equal(Cut(0, 1, rank=1, num_ranks=2).take(whole), whole[3:])
    assert torch.equal(Cut(0, 2, rank=1, num_ranks=2).take(whole), whole[[2, 5]])
    assert torch.equal(Cut(1, 1, rank=2, num_ranks=3).take(whole), whole[:, 4:])
    parts = [Cut(0, 1, rank=rank, num_ranks=4).take(whole) for rank in range(4)]
    assert [len(part) for part in parts] == [2, 2, 2, 0]


def test_a_dead_rank_ends_the_group_with_a_clear_error(folder: Path) -> None:
    found = run_ranks(folder, "death")
    assert "a rank of the tensor parallel group is gone" in found["error"]


def test_an_order_survives_its_journey() -> None:
    request = ActiveRequest("a", [1, 2, 3], SamplingParams(), created_time=0.0)
    row = PlannedRow(request, 1, [2, 3], [[4], [5]], samples=True)
    order = Order(Verb.STEP, StepPlan([row], [[BlockCopy(CopyKind.TO_HOST, 1, 2)], []]))
    task = WeightsTask(Deed.STAGE, 3, 3, ("/some/folder", "/another"), cast=True)
    assert decode(encode(Order(Verb.WEIGHTS, task=task)).encode()).task == task
    there = decode(encode(order).encode())
    assert there.task is None
    assert (there.verb, there.plan.copies) == (order.verb, order.plan.copies)
    (copy,) = there.plan.rows
    assert (copy.start, copy.token_ids, copy.block_tables, copy.samples) == (1, [2, 3], [[4], [5]], True)
    assert copy.request.request_id == "a"


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [("cuda", {}, "0"), ("cuda", {"NCCL_GRAPH_MIXING_SUPPORT": "1"}, "1"), ("cpu", {}, None)],
)
def test_nccl_is_told_not_to_mix_unless_somebody_has_decided(
    device: str, before: dict[str, str], after: str | None
) -> None:
    environment = dict(before)
    disable_graph_mixing(torch.device(device), environment)
    assert environment.get("NCCL_GRAPH_MIXING_SUPPORT") == after
