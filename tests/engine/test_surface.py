"""Every name of the reference's continuous batching is here, in its order and with its default."""

import dataclasses
import inspect
import os
from pathlib import Path
from typing import Any

import pytest

import engine
from engine import ContinuousBatchingConfig, ContinuousBatchingManager, ContinuousMixin

NONE = inspect.Parameter.empty
METHODS: dict[tuple[type, str], dict[str, Any]] = {
    (ContinuousMixin, "generate_batch"): {
        "inputs": NONE,
        "generation_config": None,
        "continuous_batching_config": None,
        "record_timestamps": False,
        "progress_bar": False,
        "persistent_manager": False,
        "warmup": True,
    },
    (ContinuousMixin, "init_continuous_batching"): {
        "generation_config": None,
        "continuous_batching_config": None,
        "workload_hints": None,
    },
    (ContinuousMixin, "continuous_batching_context_manager"): {
        "generation_config": None,
        "block": True,
        "timeout": None,
        "continuous_batching_config": None,
        "persistent_manager": False,
        "warmup": True,
        "workload_hints": None,
    },
    (ContinuousMixin, "destroy_cached_continuous_batching_manager"): {},
    (ContinuousBatchingManager, "__init__"): {
        "model": NONE,
        "generation_config": NONE,
        "continuous_batching_config": NONE,
        "workload_hints": None,
    },
    (ContinuousBatchingManager, "add_request"): {
        "input_ids": NONE,
        "request_id": None,
        "max_new_tokens": None,
        "streaming": False,
        "record_timestamps": False,
        "eos_token_id": None,
        "logit_processor_kwargs": NONE,
    },
    (ContinuousBatchingManager, "add_requests"): {
        "inputs": NONE,
        "max_new_tokens": None,
        "streaming": False,
        "record_timestamps": False,
        "logit_processor_kwargs": NONE,
    },
    (ContinuousBatchingManager, "cancel_request"): {"request_id": NONE},
    (ContinuousBatchingManager, "destroy"): {},
    (ContinuousBatchingManager, "get_result"): {"request_id": None, "timeout": None},
    (ContinuousBatchingManager, "is_running"): {},
    (ContinuousBatchingManager, "join"): {"stop_trigger_time": NONE, "timeout": None},
    (ContinuousBatchingManager, "pause"): {},
    (ContinuousBatchingManager, "paused"): {},
    (ContinuousBatchingManager, "register_result_handler"): {"request_id": NONE, "callback": NONE},
    (ContinuousBatchingManager, "request_id_iter"): {"request_id": NONE},
    (ContinuousBatchingManager, "start"): {},
    (ContinuousBatchingManager, "stop"): {
        "block": True,
        "timeout": None,
        "keep_for_next_session": False,
        "hard_stop": False,
    },
    (ContinuousBatchingManager, "switch_to_cb_friendly_attn"): {"model": NONE, "auto_switch_to_flash": True},
    (ContinuousBatchingManager, "warmup"): {},
}
OURS = ["pack_weights"]
CONFIG: dict[str, Any] = {
    "page_size": 256,
    "num_blocks": None,
    "max_batch_tokens": None,
    "max_memory_percent": None,
    "max_requests_per_batch": None,
    "max_blocks_per_request": None,
    "allow_block_sharing": True,
    "use_async_batching": None,
    "use_cuda_graph": None,
    "q_padding_interval_size": 0,
    "kv_padding_interval_size": 0,
    "varlen_compile_config": None,
    "decode_compile_config": None,
    "default_compile_level": 0,
    "scheduler_type": "fifo",
    "safety_margin": None,
    "return_logprobs": False,
    "seed": None,
    "auto_switch_to_flash": True,
    "cpu_offload_space": 0.0,
    "cpu_offload_space_safety_threshold": 0.8,
    "max_queue_size": 0,
    "per_request_processors": False,
    "drop_unsupported_processors": True,
    "disable_nccl_graph_mixing": True,
    "cpu_group_timeout": 300.0,
    "use_default_compile_configs": None,
    "max_cached_graphs": None,
    "block_size": None,
}


@pytest.mark.parametrize(("owner", "name"), METHODS, ids=lambda value: getattr(value, "__name__", value))
def test_a_method_takes_the_reference_parameters_in_their_order(owner: type, name: str) -> None:
    wanted = METHODS[owner, name]
    parameters = list(inspect.signature(getattr(owner, name)).parameters.values())[1:]
    ours = {parameter.name: parameter.default for parameter in parameters}
    assert [key for key in ours if key in wanted] == list(wanted)
    for key, default in wanted.items():
        assert ours[key] == default or (default is NONE and ours[key] is None), key
    extra = [parameter for parameter in parameters if parameter.name not in wanted]
    by_keyword = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    assert {parameter.kind for parameter in extra} <= by_keyword, "ours come by keyword only"


def test_the_config_has_the_reference_fields_in_their_order() -> None:
    fields = dataclasses.fields(ContinuousBatchingConfig)  # type: ignore[arg-type]  # pydantic's are dataclasses too
    assert [field.name for field in fields] == [*CONFIG, *OURS], "ours come behind those of the reference"
    config = ContinuousBatchingConfig()
    assert {name: getattr(config, name) for name in CONFIG} == CONFIG


def test_the_table_of_this_test_is_the_reference_page() -> None:
    folder = os.environ.get("PITSTOP_CRDS")
    page = Path(folder).parent / "continuous_batching_reference.txt" if folder else None
    if page is None or not page.exists():
        pytest.skip("PITSTOP_CRDS is not set, so the reference page is not at hand")
    text = page.read_text()
    signature = text[text.index("( page_size: int = 256") :].split(")", 1)[0] + text[text.index("( page_size") :]
    positions = [signature.index(f"{name}: ") for name in CONFIG]
    assert positions == sorted(positions)
    for owner, name in METHODS:
        if owner is ContinuousBatchingManager and name not in ("__init__", "pause", "paused"):
            for parameter in METHODS[owner, name]:
                assert parameter in text, f"{name}({parameter})"


def test_public_names_exist() -> None:
    for name in engine.__all__:
        assert hasattr(engine, name)


@pytest.mark.parametrize(
    ("values", "name"),
    [({"block_size": 16}, "block_size"), ({"use_default_compile_configs": False}, "use_default_compile_configs")],
)
def test_deprecated_parameters_warn_with_their_remedy(values: dict[str, Any], name: str) -> None:
    with pytest.warns(FutureWarning, match=f"{name} is deprecated"):
        config = ContinuousBatchingConfig(**values)
    assert config.tokens_per_block == values.get("block_size", 256)


@pytest.mark.parametrize(
    "values",
    [{"page_sizes": 16}, {"page_size": 2}, {"safety_margin": 1.5}, {"scheduler_type": "lifo"}, {"num_blocks": 0}],
)
def test_unknown_names_and_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(values))):
        ContinuousBatchingConfig(**values)
