"""OpenVINO GenAI's continuous batching. `prepare` and `load` run in its environment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

TITLE = "OpenVINO GenAI"
REQUIREMENTS = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0")
REMOVED = ("torchvision",)
"""Text does not need it, and PyPI's wheel fails to import beside a CPU build of torch."""
SETTINGS = tuple({"max_num_batched_tokens": tokens} for tokens in (512, 1024, 2048))
NOTE = "exported in fp32 without weight compression, inference and KV cache forced to f32 (its default cache is u8)"
BLOCK_SIZE = 32
"""OpenVINO's own on CPUs."""


def environment(job: dict[str, Any], folder: Path) -> dict[str, str]:  # noqa: ARG001  # the protocol of peers
    """Gives the variables of the process."""
    return {"HF_HUB_OFFLINE": "1"}


def prepare(model: str, target: str) -> None:
    """Exports the model, with its cache as part of its state."""
    from optimum.exporters.openvino import main_export

    main_export(model, target, task="text-generation-with-past", stateful=True, ov_config=_float32_weights())


def _float32_weights() -> Any:
    from optimum.intel import OVConfig

    return OVConfig(dtype="fp32")


def load(job: dict[str, Any]) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Gives the function that generates."""
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = job["num_kv_tokens"] // BLOCK_SIZE
    scheduler.max_num_seqs = len(job["prompts"])
    scheduler.enable_prefix_caching = False
    for name, value in job["setting"].items():
        setattr(scheduler, name, value)
    properties = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_NUM_THREADS": job["num_threads"],
        "PERFORMANCE_HINT": "THROUGHPUT",
        "NUM_STREAMS": 1,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], num_new_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(max_new_tokens=num_new_tokens, ignore_eos=True, do_sample=False)
        tensors = [openvino.Tensor(numpy_ids(prompt)) for prompt in prompts]
        results = pipeline.generate(tensors, [config] * len(prompts))
        return [list(map(int, one.m_generation_ids[0])) for one in results]

    return generate


def numpy_ids(prompt: list[int]) -> Any:
    """Gives the ids as 1 x T."""
    import numpy as np

    return np.array([prompt], dtype=np.int64)
