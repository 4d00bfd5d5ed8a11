"""What each rank of the tensor parallel tests runs: `python rank_program.py MODEL SCENARIO RESULT`, by torchrun."""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine import ContinuousBatchingConfig, EngineDead, SamplingParams, init_continuous_batching

PROMPTS = [list(range(1, 40)), [5, 6, 7], [*range(1, 40), 9], [200]]
TIMEOUT_S = 15.0


def main(folder: str, scenario: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
    config = ContinuousBatchingConfig(page_size=16, num_blocks=12, max_batch_tokens=40, cpu_group_timeout=TIMEOUT_S)
    manager = init_continuous_batching(model, continuous_batching_config=config)
    manager.start()
    found: dict[str, object] = {}
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12, eos_token_ids=())
    ids = [manager.add_request(prompt, sampling=sampling) for prompt in PROMPTS]
    if manager.is_driver:
        found["tokens"] = [manager.get_result(name, timeout=60).generated_tokens for name in ids]
    else:
        assert ids == [None] * len(PROMPTS)
    if scenario == "pause":
        with manager.pause():
            # Ranks change their own slices; doubling the last norm doubles the scores of every token alike.
            model.model.norm.weight.data.mul_(-1.0)
        found["version"] = manager.weight_version
        if manager.is_driver:
            name = manager.add_request(PROMPTS[0], sampling=sampling)
            output = manager.get_result(name, timeout=60)
            found["after"], found["cached"] = output.generated_tokens, output.num_cached_tokens
    if scenario == "cancel" and manager.is_driver:
        name = manager.add_request(PROMPTS[1], sampling=SamplingParams(max_new_tokens=150), streaming=True)
        manager.get_result(name, timeout=60)
        manager.cancel_request(name)
        found["status"] = [output.status.name for output in manager.request_id_iter(name)][-1]
        found["used"] = manager.stats().num_used_blocks
    if scenario == "death":
        if not manager.is_driver:
            os._exit(3)
        try:
            name = manager.add_request(PROMPTS[1], sampling=sampling)
            found["error"] = manager.get_result(name, timeout=4 * TIMEOUT_S).error
        except EngineDead as error:  # noticed before the request was sent
            found["error"] = str(error)
    if manager.is_driver:
        with open(result, "w") as file:  # noqa: PTH123
            json.dump(found, file)
    if scenario == "death":
        os._exit(0)
    if manager.is_driver:
        manager.stop()
    manager.join(0.0, timeout=60)
    assert not manager.is_running()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
