"""The engine beside transformers and its peers: the same prompts, model, threads and memory, in one run.

    python -m benchmarks.engine
    python -m benchmarks.engine --prompts 16,64 --peers vllm,openvino,llamacpp

Each measurement is a process of its own, one after the other; everybody else counts with the best of several settings.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.peers import ALWAYS, PEERS
from benchmarks.peers.environment import ContestantFailed, make_ready, measure_here, measure_peer
from benchmarks.report import Result
from benchmarks.workload import Measurement, Workload, default_model, draw_prompts


def main() -> None:
    """Runs every contestant at every size, prints a table a size."""
    arguments = _parse_arguments()
    model = arguments.model or default_model()
    models = {name: _ready_model(name, arguments.peers_dir / name, model) for name in arguments.peers}
    print(report.machine())
    print(f"Command: python -m benchmarks.engine {' '.join(sys.argv[1:])}".rstrip())
    for num_prompts in arguments.prompts:
        prompts = draw_prompts(num_prompts, vocab_size(model))
        workload = Workload(model, prompts, arguments.tokens, arguments.threads)
        results = [_run(one, arguments, partial(measure_here, one, workload)) for one in ALWAYS]
        results += _run_peers(arguments, workload, models)
        print(f"\n{report.heading(workload, arguments.rounds)}\n\n{report.table(results)}\n\n{report.notes(results)}")
    if arguments.growth:
        # In a process of its own, as every contestant is.
        subprocess.run([sys.executable, "-m", "benchmarks.growth", "--model", model], check=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a folder or hub id; peers take a folder; the default model when not given")
    parser.add_argument("--prompts", type=_sizes, default=[64], help="how many: one number, or several with commas")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens for each prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="the best of so many counts, for each setting")
    parser.add_argument("--settings", type=int, default=3, help="the first so many of each; 1 is a quick look")
    parser.add_argument("--peers", type=_peer_names, default=[], help=f"with commas, of {', '.join(PEERS)}")
    parser.add_argument("--peers-dir", type=Path, default=Path.home() / ".cache" / "pitstop" / "peers")
    parser.add_argument("--growth", action="store_true", help="also print the table of benchmarks.growth")
    return parser.parse_args()


def _sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _peer_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return names


def vocab_size(model: str) -> int:
    """Gives how many tokens a model knows."""
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    return size


def _run_peers(
    arguments: argparse.Namespace, workload: Workload, models: dict[str, str | ContestantFailed]
) -> Iterator[Result]:
    for name, model in models.items():
        peer, folder = PEERS[name], arguments.peers_dir / name
        if isinstance(model, ContestantFailed):
            yield Result(peer, failures={"installing": str(model)})
        else:
            yield _run(peer, arguments, partial(measure_peer, peer, folder, replace(workload, model=model)))


def _run(contestant: Any, arguments: argparse.Namespace, measure: Callable[[dict[str, Any]], Measurement]) -> Result:
    """Measures every setting; what fails is told in the table."""
    result = Result(contestant)
    for setting in contestant.SETTINGS[: arguments.settings]:
        title = report.setting_title(setting)
        for _ in range(arguments.rounds):
            try:
                measured = measure(setting)
            except ContestantFailed as failure:
                result.failures[title] = str(failure)
                print(f"{contestant.TITLE}, {title}: {failure}", file=sys.stderr)
                break
            print(f"{contestant.TITLE}, {title}: {measured.tokens_per_s:.1f} tokens/s", file=sys.stderr)
            result.add(title, measured)
    return result


def _ready_model(name: str, folder: Path, model: str) -> str | ContestantFailed:
    try:
        return make_ready(PEERS[name], folder, model)
    except ContestantFailed as failure:
        return failure


if __name__ == "__main__":
    if not __package__:
        # As a script this file would hide the package of the same name.
        raise SystemExit("run it as: python -m benchmarks.engine")
    main()
