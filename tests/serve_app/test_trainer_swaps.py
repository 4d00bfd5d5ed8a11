"""A trainer's swaps on a real Ray: tensors to two replicas, through every way the client has, and what goes wrong."""

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import InvalidRequest, SamplingParams, WeightsError, WeightsInvalid
from serve_app.client import Pitstop, SyncPitstop, connect
from serve_app.messages import FleetStatus
from serve_app.protocol.errors import DeadlineExceeded
from serve_app.settings import AppSettings, parse_settings
from tests.serve_app.running_app import kill_actor_of, running_app
from tests.serve_app.tiny_model import WEIGHTS_FILE, make_model_folder
from tests.waiting import eventually

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROMPT = list(range(40, 72))
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("weights")
    return {name: make_model_folder(root / name, seed=seed) for seed, name in enumerate(("base", "second", "third"))}


@pytest.fixture(scope="module")
def settings(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    return parse_settings(
        {
            "model": folders["base"],
            "served_model_name": "tiny",
            "engine": {"page_size": 16, "num_blocks": 256},
            "replicas": {"min": 2, "max": 2, "torch_threads": 1, "graceful_shutdown_timeout_s": 1},
            "weights": {"heartbeat_interval_s": 0.5, "folder": str(tmp_path_factory.mktemp("manifest"))},
        }
    )


@pytest.fixture(scope="module")
def url(settings: AppSettings) -> Iterator[str]:
    with running_app(settings) as root:
        yield root


@pytest.fixture
def llm(url: str) -> Pitstop:
    return connect("pitstop")


def tensors(folder: str) -> dict[str, Tensor]:
    return load_file(Path(folder) / WEIGHTS_FILE)


def expected_tokens(folder: str) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([PROMPT])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_TOKENS, do_sample=False, use_cache=True
    )
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    return tokens


async def assert_served_everywhere(llm: Pitstop, folder: str, *, version: int) -> None:
    status = await llm.wait_for_version(version)
    assert [report.version for report in status.replicas] == [version, version]
    # Enough of them that both replicas answer some.
    answers = await llm.generate_batch([PROMPT] * 6, SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS))
    expected = expected_tokens(folder)
    for answer in answers:
        assert not isinstance(answer, Exception), answer
        assert answer.token_ids == expected
        assert {span.version for span in answer.weight_versions} == {version}


async def committed(llm: Pitstop) -> int:
    return (await llm.status()).committed.version


def stored_bytes(status: FleetStatus) -> int:
    assert status.store is not None
    return status.store.size_bytes


async def test_what_a_trainer_puts_is_served_by_every_replica(llm: Pitstop, folders: dict[str, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["second"])
    version = await committed(llm) + 1
    async with llm.swap(label="step 1") as swap:
        for name, parameter in model.named_parameters():
            await swap.put({name: parameter})
    assert swap.result.version == version
    await assert_served_everywhere(llm, folders["second"], version=version)
    status = await llm.status()
    assert status.history[0].label == "step 1"
    assert status.history[0].requested_by.startswith("Python client, process ")
    assert status.store is not None
    assert status.store.is_durable


async def test_tensors_in_the_object_store_are_taken_whole_and_in_parts(llm: Pitstop, folders: dict[str, str]) -> None:
    version = await committed(llm) + 1
    result = await llm.swap_weights(ray.put(tensors(folders["third"])))
    await assert_served_everywhere(llm, folders["third"], version=version)
    assert result.version == version
    parts = [ray.put({name: tensor}) for name, tensor in tensors(folders["second"]).items()]
    await llm.swap_weights(parts, label="in parts")
    await assert_served_everywhere(llm, folders["second"], version=version + 1)
    with pytest.raises(InvalidRequest, match="the weights are none"):
        await llm.swap_weights([])


async def test_a_process_group_of_their_own_carries_tensors_beside_the_trainers(
    llm: Pitstop, folders: dict[str, str]
) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        version = await committed(llm) + 1
        async with llm.swap(transport="torch_distributed", label="over gloo") as swap:
            for name, tensor in tensors(folders["third"]).items():
                await swap.put({name: tensor})
        assert swap.result.version == version
        assert torch.distributed.get_world_size() == 1
        torch.distributed.all_reduce(torch.ones(1))
    finally:
        torch.distributed.destroy_process_group()
    await assert_served_everywhere(llm, folders["third"], version=version)


async def test_the_synchronous_twin_swaps_and_waits(llm: Pitstop, folders: dict[str, str]) -> None:
    version = await committed(llm) + 1
    with SyncPitstop(connect("pitstop")) as twin:
        with twin.swap(label="twin") as swap:
            swap.put(tensors(folders["third"]))
        assert swap.result.version == version
        assert twin.wait_for_version(version).committed.version == version
        with pytest.raises(DeadlineExceeded, match=f"version {version + 1} was not served everywhere"):
            twin.wait_for_version(version + 1, timeout_s=0.3)
    await assert_served_everywhere(llm, folders["third"], version=version)


async def test_refused_and_aborted_swaps_change_nothing_and_leave_nothing(
    llm: Pitstop, folders: dict[str, str]
) -> None:
    before = await llm.status()
    broken = tensors(folders["second"])
    broken["model.norm.weight"][0] = float("nan")
    with pytest.raises(WeightsInvalid, match=r"not finite: model\.norm\.weight"):
        async with llm.swap() as swap:
            await swap.put(broken)
    with pytest.raises(WeightsInvalid, match="missing"):
        await llm.swap_weights({"model.norm.weight": torch.ones(64)})
    swap = llm.swap()

    async def fail() -> None:
        async with swap:
            await swap.put(tensors(folders["second"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    with pytest.raises(RuntimeError, match="no result"):
        _ = swap.result
    after = await llm.status()
    assert after.committed.version == before.committed.version
    assert stored_bytes(after) == stored_bytes(before)
    assert after.store is not None
    assert after.store.open_sessions == 0


async def test_partial_updates_change_what_was_put_and_name_the_rest(
    llm: Pitstop, folders: dict[str, str], tmp_path: Path
) -> None:
    await llm.swap_weights(tensors(folders["second"]))
    other = tensors(folders["third"])
    changed = {name: tensor for name, tensor in other.items() if ".layers.1." in name}
    expected = make_model_folder(tmp_path / "expected", seed=1)
    whole = tensors(expected) | changed
    save_file(whole, Path(expected) / WEIGHTS_FILE, metadata={"format": "pt"})
    async with llm.swap(partial=True, strategy="rolling") as swap:
        await swap.put(changed)
    assert sorted(swap.result.unchanged) == sorted(whole.keys() - changed.keys())
    await assert_served_everywhere(llm, expected, version=swap.result.version)
    # A new replica finds it, too.
    kill_actor_of("EngineReplica")

    async def status() -> FleetStatus:
        return await llm.status()

    await eventually(status, until=lambda found: len(found.replicas) == 1)
    await eventually(status, until=lambda found: len(found.replicas) == 2)
    await assert_served_everywhere(llm, expected, version=swap.result.version)


async def test_a_swap_whose_answer_was_lost_may_be_asked_for_again(llm: Pitstop, folders: dict[str, str]) -> None:
    version = await committed(llm) + 1
    for _ in range(2):
        async with llm.swap(idempotency_key="step 4") as swap:
            await swap.put(tensors(folders["second"]))
        assert swap.result.version == version


def unsealed(store: str) -> list[str]:
    return [path.name for path in Path(store).iterdir() if path.suffix]


@pytest.mark.parametrize("transport", ["object_store", "torch_distributed"])
async def test_a_dead_trainers_session_goes_with_its_lease(llm: Pitstop, transport: str) -> None:
    program = (
        "import asyncio, os, sys, torch\n"
        "from serve_app.client import connect\n"
        "async def main():\n"
        "    async with connect('pitstop').swap(lease_s=2, transport=sys.argv[1]) as swap:\n"
        "        await swap.put({'model.norm.weight': torch.ones(64)})\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    trainer = await asyncio.create_subprocess_exec(sys.executable, "-c", program, transport, env=environment)
    assert await trainer.wait() == -9

    async def status() -> FleetStatus:
        return await llm.status()

    found = await eventually(status, until=lambda found: found.store is not None and found.store.open_sessions == 0)
    assert unsealed(found.store.folder) == []


async def test_late_joiners_rollbacks_and_a_new_controller_find_what_was_put(
    llm: Pitstop, folders: dict[str, str]
) -> None:
    async with llm.swap() as swap:
        await swap.put(tensors(folders["third"]))
    third = swap.result.version

    async def swap_without_a_controller() -> None:
        async with llm.swap(transport="torch_distributed", group_timeout_s=10) as swap:
            await swap.put(tensors(folders["second"]))
            kill_actor_of("WeightController")
            await swap.put(tensors(folders["second"]))

    # Its receiver ended with the controller, and either may be noticed first.
    with pytest.raises(WeightsError, match=r"swap again|send all of it again"):
        await swap_without_a_controller()
    kill_actor_of("EngineReplica")

    async def status() -> FleetStatus:
        return await llm.status()

    await eventually(status, until=lambda found: len(found.replicas) == 1)
    await eventually(status, until=lambda found: len(found.replicas) == 2)
    await assert_served_everywhere(llm, folders["third"], version=third)
    async with llm.swap() as swap:
        await swap.put(tensors(folders["second"]))
    await assert_served_everywhere(llm, folders["second"], version=third + 1)
    await llm.rollback(third)
    await assert_served_everywhere(llm, folders["third"], version=third + 2)
