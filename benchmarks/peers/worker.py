"""Measures one contestant, inside the contestant's own environment: a plain script on the standard library alone.

    python -P worker.py CONTESTANT.py < job.json

`prepare` makes the contestant's form of the model; `measure` generates, after a warm-up of four short requests, and
answers in JSON on the last line of its output. Whatever the contestant itself prints goes to the error stream.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

NUM_WARM_UP_PROMPTS, WARM_UP_PROMPT_LENGTH, NUM_WARM_UP_TOKENS = 4, 32, 8


def main() -> None:
    """Reads the job, does it, prints the answer."""
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # some print from C++ as well, before and after the answer
    contestant, job = _load_module(sys.argv[1]), json.load(sys.stdin)
    answer: dict[str, Any] = {}
    if job["action"] == "prepare":
        contestant.prepare(job["model"], job["target"])
    else:
        answer = _measure(contestant.load(job), job["prompts"], job["num_new_tokens"])
    os.write(answer_fd, f"{json.dumps(answer)}\n".encode())
    sys.stderr.flush()
    # The answer is given: threads and destructors that end badly have no say in it.
    os._exit(0)


def _measure(generate: Any, prompts: list[list[int]], num_new_tokens: int) -> dict[str, Any]:
    """Calls `generate(prompts, num_new_tokens)`, which submits all prompts at once and gives the new ids of each."""
    generate([prompt[:WARM_UP_PROMPT_LENGTH] for prompt in prompts[:NUM_WARM_UP_PROMPTS]], NUM_WARM_UP_TOKENS)
    started, cpu_started = perf_counter(), process_time()
    outputs = generate(prompts, num_new_tokens)
    seconds, cpu_s = perf_counter() - started, process_time() - cpu_started
    if {len(output) for output in outputs} != {num_new_tokens}:
        raise RuntimeError(f"a request ended early: {sorted({len(output) for output in outputs})} new tokens")
    return {"seconds": seconds, "cpu_s": cpu_s, "peak_mib": _peak_mib(), "outputs": outputs}


def _peak_mib() -> float:
    # Not ru_maxrss, which counts what the parent held before this program was started.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _load_module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("contestant", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
