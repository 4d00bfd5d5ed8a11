"""Two gloo ranks on the CPU against the whole model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_program import PROMPTS
from tiny_models import tiny_model
from transformers import PreTrainedModel

from engine.active_request import ActiveRequest
from engine.block_pool import BlockCopy, CopyKind
from engine.parallel import Order, Verb, decode, encode
from engine.plan import PlannedRow, StepPlan
from engine.request import SamplingParams
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


def test_a_dead_rank_ends_the_group_with_a_clear_error(folder: Path) -> None:
    found = run_ranks(folder, "death")
    assert "a rank of the tensor parallel group is gone" in found["error"]


def test_an_order_survives_its_journey() -> None:
    request = ActiveRequest("a", [1, 2, 3], SamplingParams(), created_time=0.0)
    row = PlannedRow(request, 1, [2, 3], [[4], [5]], samples=True)
    order = Order(Verb.STEP, StepPlan([row], [[BlockCopy(CopyKind.TO_HOST, 1, 2)], []]))
    there = decode(encode(order).encode())
    assert (there.verb, there.plan.copies) == (order.verb, order.plan.copies)
    (copy,) = there.plan.rows
    assert (copy.start, copy.token_ids, copy.block_tables, copy.samples) == (1, [2, 3], [[4], [5]], True)
    assert copy.request.request_id == "a"
