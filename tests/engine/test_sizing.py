"""What `None` becomes: blocks and steps as large as memory allows, and no larger than requests can use."""

import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import greedy, prompt_of, run_all, running
from tiny_models import SLIDING_WINDOW, tiny_model
from transformers import PreTrainedModel

from engine import ContinuousBatchingConfig, InvalidRequest, WorkloadHints
from engine.config import ResolvedConfig
from engine.graphs import MAX_GRAPH_TOKENS
from engine.host_memory import free_host_bytes, total_host_bytes
from engine.kv_cache import KVCache
from engine.model_runner import probe_layers
from engine.profiling import dummy_step
from engine.sizing import resolve_config

MIB = 2**20
FREE_BYTES = 256 * MIB


def resolve(
    model: PreTrainedModel, *, hints: WorkloadHints | None = None, free_bytes: int = FREE_BYTES, **values: Any
) -> ResolvedConfig:
    offers = {name: values.pop(name) for name in ("measure", "no_flash", "no_graphs") if name in values}
    config = ContinuousBatchingConfig(**values)
    return resolve_config(config, model, probe_layers(model), hints, free_bytes=free_bytes, **offers)


def cache_bytes(model: PreTrainedModel, config: ResolvedConfig) -> int:
    cache = KVCache(probe_layers(model), config, dtype=model.dtype, device=torch.device("cpu"))
    return sum(store.nbytes for store in (*cache._keys_HNCD, *cache._values_HNCD))


@pytest.mark.parametrize("percent", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_cache_and_a_step_take_the_allowed_share_of_free_memory(
    family: str, percent: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(family, max_position_embeddings=8192)
    with caplog.at_level(logging.INFO, logger="engine.sizing"):
        config = resolve(model, max_memory_percent=percent, page_size=16)
    (record,) = caplog.records
    names = dict(part.split("=") for part in record.getMessage().split() if "=" in part)
    used_bytes = cache_bytes(model, config) + float(names["step_gib"]) * 2**30
    if family == "mistral":  # its windows need less than there is, and it gets no more
        assert used_bytes <= percent * FREE_BYTES * 1.05
    else:
        assert used_bytes == pytest.approx(percent * FREE_BYTES, rel=0.05)
    assert (int(names["blocks"]), names["share"]) == (config.num_blocks, f"{percent:.2f}")
    assert float(names["cache_gib"]) == pytest.approx(cache_bytes(model, config) / 2**30, abs=0.001)


def test_a_measured_step_takes_the_place_of_the_estimate() -> None:
    model, asked = tiny_model(max_position_embeddings=8192), []

    def measure(num_tokens: int, num_rows: int) -> int:
        asked.append((num_tokens, num_rows))
        return num_tokens * 10_000

    config = resolve(model, measure=measure, max_batch_tokens=2048, max_requests_per_batch=100, no_flash=None)
    without = resolve(model, measure=measure, max_batch_tokens=1024, max_requests_per_batch=100, no_flash=None)
    assert asked == [(2048, 100), (1024, 100)]
    block_bytes = 256 * 2 * 2 * 2 * 16 * 4
    for resolved, num_tokens in ((config, 2048), (without, 1024)):
        expected = (0.6 * FREE_BYTES - num_tokens * 10_000) / block_bytes
        assert resolved.num_blocks == pytest.approx(expected, abs=1)


def test_captured_steps_get_memory_of_their_own() -> None:
    model, asked = tiny_model(max_position_embeddings=8192), []

    def measure(num_tokens: int, num_rows: int) -> int:
        asked.append((num_tokens, num_rows))
        return num_tokens * 10_000

    arguments = {"measure": measure, "max_batch_tokens": 2048, "no_flash": None}
    plain = resolve(model, **arguments)
    captured = resolve(model, no_graphs=None, **arguments)
    assert asked == [(2048, 1024), (2048, 1024), (MAX_GRAPH_TOKENS, 1024)]
    block_bytes = 256 * 2 * 2 * 2 * 16 * 4
    lost_bytes = MAX_GRAPH_TOKENS * 10_000 + block_bytes
    assert plain.num_blocks - captured.num_blocks == pytest.approx(lost_bytes / block_bytes, abs=1)


def test_a_kernel_that_reads_in_place_needs_no_room_to_gather_or_mask() -> None:
    model = tiny_model(max_position_embeddings=8192)
    assert resolve(model, no_flash=None).num_blocks > resolve(model).num_blocks


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe", "gpt2"])
def test_the_step_that_is_measured_runs_the_model_and_leaves_it_as_it_was(family: str) -> None:
    model = tiny_model(family)
    model.train()
    implementation = model.config._attn_implementation
    probabilities_RV = dummy_step(model, num_tokens=40, num_rows=7)
    assert probabilities_RV.shape == (7, 256)
    assert dummy_step(model, num_tokens=2, num_rows=7).shape == (2, 256)
    assert model.training
    assert model.config._attn_implementation == implementation


def test_no_block_is_made_that_no_request_can_use() -> None:
    model = tiny_model()
    assert resolve(model, page_size=16, max_requests_per_batch=3).num_blocks == 3 * 512 / 16
    hints = WorkloadHints(max_prompt_length=40, max_generated_length=20, num_requests=5)
    config = resolve(model, page_size=16, hints=hints)
    assert (config.num_blocks, config.max_requests_per_batch) == (5 * 4, 5)


def test_a_step_takes_no_more_tokens_than_memory_and_requests_have() -> None:
    model = tiny_model()
    assert resolve(model, free_bytes=4096 * MIB).max_batch_tokens == 8192
    assert resolve(model, free_bytes=4096 * MIB, max_requests_per_batch=2).max_batch_tokens == 2 * 512
    assert 100 < resolve(model, free_bytes=16 * MIB, max_memory_percent=1.0).max_batch_tokens < 4096
    assert resolve(model, max_batch_tokens=77).max_batch_tokens == 77


def test_no_more_requests_run_than_a_step_has_tokens() -> None:
    assert resolve(tiny_model(), max_batch_tokens=7, max_requests_per_batch=100).max_requests_per_batch == 7


@pytest.mark.parametrize("values", [{"free_bytes": MIB}, {"free_bytes": 0}])
def test_too_little_memory_is_said_with_the_numbers_and_a_remedy(values: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="lower page_size or max_batch_tokens, or free memory") as caught:
        resolve(tiny_model(), **values)
    assert caught.value.param == "num_blocks"


def test_a_named_number_of_blocks_is_taken_or_refused_and_never_cut() -> None:
    model = tiny_model()
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4
    assert resolve(model, page_size=16, num_blocks=10_000).num_blocks == 10_000
    with pytest.raises(InvalidRequest, match="num_blocks=100000 takes"):
        resolve(model, page_size=16, num_blocks=100_000)
    share = 5_000 * block_bytes / FREE_BYTES
    resolve(model, page_size=16, num_blocks=5_000, max_memory_percent=share * 1.01)
    with pytest.raises(InvalidRequest, match="raise max_memory_percent"):
        resolve(model, page_size=16, num_blocks=5_000, max_memory_percent=share * 0.99)


def test_layers_with_a_window_get_only_what_windows_need() -> None:
    config = resolve(tiny_model("gemma3"), page_size=16, num_blocks=500, max_requests_per_batch=4, max_batch_tokens=64)
    assert config.windows == (None, SLIDING_WINDOW)
    assert config.blocks_of_group == (500, 4 * 3 + 4)


@pytest.mark.parametrize(
    ("space", "threshold", "expected"), [(0.0, 0.8, 0), (0.01, 0.8, 0.01), (1000.0, 0.001, 0.001), (None, 0.002, 0.002)]
)
def test_the_host_tier_is_as_large_as_asked_and_as_its_threshold_allows(
    space: float | None, threshold: float, expected: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    config = resolve(
        model, page_size=16, num_blocks=8, cpu_offload_space=space, cpu_offload_space_safety_threshold=threshold
    )
    expected_bytes = expected * 2**30 if space == expected else expected * total_host_bytes()
    assert config.num_host_slots == pytest.approx(expected_bytes / cache_bytes(model, config) * 8, abs=1)
    assert ("safety threshold" in caplog.text) == (space == 1000.0)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_limit_of_a_control_group_and_of_its_parents_counts(tmp_path: Path) -> None:
    machine = free_host_bytes(tmp_path)
    write(tmp_path / "proc/self/cgroup", "1:cpu:/\n0::/box/job\n")
    mount = tmp_path / "sys/fs/cgroup"
    write(mount / "box/job/memory.max", "max\n")
    assert free_host_bytes(tmp_path) == pytest.approx(machine, rel=0.2)
    write(mount / "box/job/memory.max", f"{50 * MIB}\n")
    write(mount / "box/job/memory.current", f"{20 * MIB}\n")
    write(mount / "box/job/memory.stat", f"anon 7\ninactive_file {5 * MIB}\nactive_file 3\n")
    assert free_host_bytes(tmp_path) == 35 * MIB
    write(mount / "box/memory.max", f"{40 * MIB}\n")
    write(mount / "box/memory.current", f"{39 * MIB}\n")
    assert free_host_bytes(tmp_path) == MIB
    assert total_host_bytes(tmp_path) == 40 * MIB


def test_version_one_control_groups_and_paths_of_the_host_are_understood(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:memory:/unknown/inside\n3:cpuset:/\n")
    mount = tmp_path / "sys/fs/cgroup/memory"
    write(mount / "memory.limit_in_bytes", f"{64 * MIB}")
    write(mount / "memory.usage_in_bytes", f"{60 * MIB}")
    write(mount / "memory.stat", f"cache 0\ntotal_inactive_file {2 * MIB}\n")
    assert free_host_bytes(tmp_path) == 6 * MIB
    write(mount / "memory.usage_in_bytes", f"{80 * MIB}")
    assert free_host_bytes(tmp_path) == 0


def test_a_full_cache_takes_no_more_of_the_machine_than_its_share() -> None:
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import psutil
        import torch
        torch.set_num_threads(1)
        from engine import ContinuousBatchingConfig, init_continuous_batching
        from engine.host_memory import free_host_bytes
        from engine_runs import prompt_of
        from tiny_models import tiny_model
        model = tiny_model("llama", head_dim=128, num_key_value_heads=4, max_position_embeddings=1024)

        def fill(num_requests, **values):
            config = ContinuousBatchingConfig(page_size=16, max_batch_tokens=512, **values)
            manager = init_continuous_batching(model, continuous_batching_config=config)
            manager.start()
            num_requests = num_requests or manager.config.num_blocks * 16 // 400 + 1
            ids = manager.add_requests([prompt_of(400, seed=n) for n in range(num_requests)], max_new_tokens=2)
            assert all(manager.get_result(request_id, timeout=60) for request_id in ids)
            used = psutil.Process().memory_info().rss
            stats = manager.stats()
            assert num_requests == 4 or stats.num_cached_blocks > 0.9 * stats.num_blocks
            manager.destroy()
            return used

        before = fill(4, num_blocks=40)
        allowed = 192 * 2**20
        used = fill(None, max_memory_percent=allowed / free_host_bytes()) - before
        print(used / allowed)
    """
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parents[2],
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert 0.7 < float(finished.stdout) <= 1.05


def test_layers_with_a_window_keep_only_their_window() -> None:
    model = tiny_model("gemma3")
    prompt = prompt_of(200, seed=3)
    expected, used = greedy(model, prompt, 100), []
    with running(model, page_size=4, num_blocks=128, max_batch_tokens=32) as manager:
        pools = [group.pool for group in manager._loop._scheduler.groups]
        model.register_forward_pre_hook(lambda *_: used.append([pool.num_blocks - pool.num_free for pool in pools]))
        assert run_all(manager, [prompt], 100) == [expected]
    most_full, most_windowed = (max(column) for column in zip(*used, strict=True))
    assert most_full == 75
    # What a window of 20 can see from a step of 32 tokens, in blocks of 4; and from one token when it decodes.
    assert most_windowed <= (SLIDING_WINDOW + 32) // 4 + 1
    assert used[-1][1] <= SLIDING_WINDOW // 4 + 1
