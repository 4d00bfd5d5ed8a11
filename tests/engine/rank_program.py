"""What each rank of the tensor parallel tests runs: `python rank_program.py MODEL SCENARIO RESULT`, once a rank."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engine import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    EngineDead,
    SamplingParams,
    WeightsError,
    WeightsInvalid,
    generate_batch,
    init_continuous_batching,
    load_model,
    stage_weights,
)
from engine.generate import _keep
from engine.weights import read_part

PROMPTS = [list(range(1, 40)), [5, 6, 7], [*range(1, 40), 9], [200]]
TIMEOUT_S = 15.0
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, eos_token_ids=())
CUT_FAMILIES = ("llama_tied", "mixtral", "gpt_neox")
"""They have all the ways in which transformers' plans cut a parameter: by rows, by columns, in groups, not at all."""


def main(folder: str, scenario: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = load_model(folder, tensor_parallel_size=2)
    config = ContinuousBatchingConfig(page_size=16, num_blocks=12, max_batch_tokens=40, cpu_group_timeout=TIMEOUT_S)
    manager = init_continuous_batching(model, continuous_batching_config=config)
    manager.start()
    ids = [manager.add_request(prompt, sampling=GREEDY) for prompt in PROMPTS]
    found: dict[str, object] = {}
    if manager.is_driver:
        found["tokens"] = [manager.get_result(name, timeout=60).generated_tokens for name in ids]
    else:
        assert ids == [None] * len(PROMPTS)
    found |= {"pause": pause, "cancel": cancel, "batch": batch, "death": die, "swap": swap}[scenario](manager)
    if manager.is_driver:
        Path(result).write_text(json.dumps(found))
    if scenario == "death":
        os._exit(0)
    if manager.is_driver:
        manager.stop()
    manager.join(0.0, timeout=60)
    assert not manager.is_running()
    dist.destroy_process_group()


def pause(manager: ContinuousBatchingManager) -> dict[str, object]:
    """All ranks change their weights in one pause; the driver generates on the new ones."""
    with manager.pause():
        manager.model.model.norm.weight.data.mul_(-1.0)
    if not manager.is_driver:
        return {}
    output = manager.get_result(manager.add_request(PROMPTS[0], sampling=GREEDY), timeout=60)
    return {
        "version": manager.weight_version,
        "after": output.generated_tokens,
        "cached": output.num_cached_tokens,
    }


def cancel(manager: ContinuousBatchingManager) -> dict[str, object]:
    """The driver cancels a running request."""
    if not manager.is_driver:
        return {}
    name = manager.add_request(PROMPTS[1], sampling=SamplingParams(max_new_tokens=150), streaming=True)
    manager.get_result(name, timeout=60)
    manager.cancel_request(name)
    last = [output.status.name for output in manager.request_id_iter(name)][-1]
    return {"status": last, "used": manager.stats().num_used_blocks}


def batch(manager: ContinuousBatchingManager) -> dict[str, object]:
    """All ranks call generate_batch, on the manager that runs."""
    _keep(manager.model, manager)
    results = generate_batch(manager.model, PROMPTS, persistent_manager=True, sampling=GREEDY)
    assert manager.is_driver or results == {}
    try:
        stage_weights(manager.model, sys.argv[1])
    except WeightsInvalid as error:
        return {"batch": [output.generated_tokens for output in results.values()], "stage": str(error)}
    return {}


def swap(manager: ContinuousBatchingManager) -> dict[str, object]:
    """The driver brings new weights to all ranks, or to none."""
    root = Path(sys.argv[1])
    found: dict[str, object] = {"wrongly_cut": wrongly_cut(root)}
    # Beside the collectives of the model, which the loops use meanwhile.
    meeting = dist.new_group(backend="gloo")
    # The other rank finds no folder "alone", and another one under "mixed".
    os.chdir(root / ("here" if manager.is_driver else "there"))
    if manager.is_driver:
        found |= {name: refusal(manager, name) for name in ("../corrupt", "alone", "mixed")}
        found["unchanged"] = ask(manager)
        staged = manager.stage_weights("../second")
    dist.barrier(meeting)
    norm = manager.model.model.norm.weight
    held = norm.data
    if not manager.is_driver:
        norm.data = held.double()
    dist.barrier(meeting)
    if manager.is_driver:
        try:
            manager.commit_weights(staged)
        except WeightsError as error:
            found["uncommitted"] = str(error)
    dist.barrier(meeting)
    norm.data = held
    dist.barrier(meeting)
    if not manager.is_driver:
        return {}
    found |= {"still": ask(manager), "still_version": manager.weight_version}
    found["before"] = manager.weight_digests() == manager.stage_weights("../first").digests
    manager.commit_weights(staged, version=7)
    found["verified"] = manager.weight_digests() == staged.digests
    staged.discard()
    part = manager.stage_weights("../part", partial=True)
    manager.commit_weights(part, version=8)
    found["partly"] = [len(part.unchanged), manager.weight_digests() == part.digests, part.digest != staged.digest]
    manager.commit_weights(manager.stage_weights(["../first", "../second"]), version=9)
    return found | {"after": ask(manager), "version": manager.weight_version}


def wrongly_cut(root: Path) -> list[str]:
    """What staging gives for a folder, where that is not what loading it gives."""
    wrong = []
    for family in CUT_FAMILIES:
        model = load_model(str(root / family), tensor_parallel_size=2)
        pairs = read_part(model, str(root / family)).pairs
        wrong += [f"{family} {tuple(held.shape)}" for held, spare in pairs if not torch.equal(held, spare)]
    return wrong


def refusal(manager: ContinuousBatchingManager, path: str) -> str:
    """The error that staging raises."""
    try:
        manager.stage_weights(path)
    except WeightsError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def ask(manager: ContinuousBatchingManager) -> list[int]:
    return manager.get_result(manager.add_request(PROMPTS[0], sampling=GREEDY), timeout=60).generated_tokens


def die(manager: ContinuousBatchingManager) -> dict[str, object]:
    """The second rank dies; the driver is asked for more."""
    if not manager.is_driver:
        os._exit(3)
    try:
        name = manager.add_request(PROMPTS[1], sampling=GREEDY)
        return {"error": manager.get_result(name, timeout=4 * TIMEOUT_S).error}
    except EngineDead as error:  # noticed before the request was sent
        return {"error": str(error)}


if __name__ == "__main__":
    main(*sys.argv[1:])
