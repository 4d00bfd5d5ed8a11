"""A replica of two gloo ranks on the CPU through Ray Serve. The tests share one application and run in their order."""

from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import InvalidRequest, PitstopError, SamplingParams, WeightsInvalid
from serve_app.client import Completion, Pitstop, connect
from serve_app.settings import parse_settings
from tests.serve_app.running_app import APP_NAME, running_app
from tests.serve_app.tiny_model import changed_weights, make_model_folder
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # several Ray processes a rank take over a minute to start and to be killed

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47] * 3
RANK, REPLICA = "ray::RankWorker", "EngineReplica"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("weights")
    found = {name: make_model_folder(root / name, seed=seed) for seed, name in enumerate(("base", "second"))}
    return found | {"corrupt": changed_weights(found["base"], root / "corrupt", change="non-finite")}


@pytest.fixture(scope="module")
def application(folders: dict[str, str]) -> Iterator[None]:
    settings = parse_settings(
        {
            "model": folders["base"],
            "engine": {"page_size": 16, "num_blocks": 256},
            "replicas": {"tensor_parallel_size": 2, "torch_threads": 1, "graceful_shutdown_timeout_s": 1},
            "weights": {"heartbeat_interval_s": 0.5},
        }
    )
    with running_app(settings):
        yield
        last = processes(RANK) + processes(REPLICA)
    assert last
    assert psutil.wait_procs(last, timeout=30)[1] == [], "processes are left"


@pytest.fixture
def llm(application: None) -> Pitstop:
    return connect(APP_NAME)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=num_tokens, eos_token_ids=())


def expected_tokens(folder: str, *, num_tokens: int = 16) -> list[int]:
    """What plain `generate` gives for PROMPT with the whole model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    return tokens


def processes(title: str) -> list[psutil.Process]:
    """The processes below this one whose title, which Ray sets, has this part."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [process] if title in " ".join(process.cmdline()) else []
    return found


async def tokens_of(llm: Pitstop, num_tokens: int = 16) -> list[int] | PitstopError:
    (answer,) = await llm.generate_batch([PROMPT], greedy(num_tokens))
    return answer.token_ids if isinstance(answer, Completion) else answer


async def test_a_cut_model_answers_as_the_whole_one_and_beside_bad_requests(
    llm: Pitstop, folders: dict[str, str]
) -> None:
    witness, empty, foreign, too_long = await llm.generate_batch([PROMPT, [], [10**6], [1] * 5000], greedy(200))
    assert isinstance(witness, Completion)
    assert witness.token_ids == expected_tokens(folders["base"], num_tokens=200)
    assert all(isinstance(bad, InvalidRequest) for bad in (empty, foreign, too_long))
    (report,) = (await llm.status()).replicas
    assert report.num_ranks == 2
    assert len(processes(RANK)) == 1


async def test_weights_that_no_rank_can_take_change_none(llm: Pitstop, folders: dict[str, str]) -> None:
    with pytest.raises(WeightsInvalid, match=r"mlp\.down_proj\.weight"):
        await llm.swap_weights(folders["corrupt"])
    assert (await llm.status()).committed.version == 1
    assert await tokens_of(llm) == expected_tokens(folders["base"])


async def test_a_swap_reaches_all_ranks_while_a_stream_runs(llm: Pitstop, folders: dict[str, str]) -> None:
    versions: list[int] = []
    num_tokens, result = 0, None
    async for event in llm.generate(PROMPT, greedy(400)):
        num_tokens += len(event.token_ids)
        versions += [span.version for span in event.weight_versions]
        if result is None:
            result = await llm.swap_weights(folders["second"])
    assert result is not None
    assert (result.version, result.lagging) == (2, [])
    assert (num_tokens, versions[0], versions[-1]) == (400, 1, 2)
    assert await tokens_of(llm) == expected_tokens(folders["second"])


@pytest.mark.parametrize("victim", [RANK, REPLICA])
async def test_a_group_that_loses_a_process_is_replaced_whole(
    llm: Pitstop, folders: dict[str, str], victim: str
) -> None:
    group = processes(RANK) + processes(REPLICA)
    (before,) = (await llm.status()).replicas
    assert len(group) == 2
    events = llm.generate(PROMPT, greedy(1500))
    first = await anext(events)
    for process in processes(victim):
        process.kill()
    rest = [token async for event in events for token in event.token_ids]
    assert first.token_ids + rest == expected_tokens(folders["second"], num_tokens=1500)
    assert psutil.wait_procs(group, timeout=30)[1] == []

    async def names() -> list[str]:
        return [report.replica_id for report in (await llm.status()).replicas if report.state == "ready"]

    await eventually(names, until=lambda found: len(found) == 1 and found != [before.replica_id], deadline_s=120)
    assert await tokens_of(llm) == expected_tokens(folders["second"])
    assert (await llm.status()).committed.version == 2
