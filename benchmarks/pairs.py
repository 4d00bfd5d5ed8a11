"""The engine and one peer in turn, several times: a ratio that a machine's ups and downs do not make.

python -m benchmarks.pairs --peer vllm --setting 1
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks import report
from benchmarks.engine import vocab_size
from benchmarks.peers import PEERS, ours
from benchmarks.peers.environment import make_ready, measure_here, measure_peer
from benchmarks.workload import Workload, default_model, draw_prompts


def main() -> None:
    """Measures and prints."""
    options = _parse_arguments()
    peer, folder, model = PEERS[options.peer], options.peers_dir / options.peer, options.model or default_model()
    workload = Workload(model, draw_prompts(options.prompts, vocab_size(model)), options.tokens, options.threads)
    peers_workload = replace(workload, model=make_ready(peer, folder, model))
    setting = peer.SETTINGS[options.setting]
    print(report.machine())
    print(f"Command: python -m benchmarks.pairs {' '.join(sys.argv[1:])}".rstrip())
    print(f"\n| pitstop, tokens/s | {peer.TITLE}, {report.setting_title(setting)} | ratio |\n|---|---|---|")
    ratios = []
    for _ in range(options.pairs):
        mine, theirs = measure_here(ours, workload, {}), measure_peer(peer, folder, peers_workload, setting)
        ratios.append(mine.tokens_per_s / theirs.tokens_per_s)
        print(f"| {mine.tokens_per_s:.1f} | {theirs.tokens_per_s:.1f} | {ratios[-1]:.3f} |", flush=True)
    print(f"\nThe median ratio: {median(ratios):.3f}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", choices=sorted(PEERS), required=True)
    parser.add_argument("--setting", type=int, default=0, help="which of the peer's, counted from 0")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--model", help="a folder; the default model when not given")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens for each prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers-dir", type=Path, default=Path.home() / ".cache" / "pitstop" / "peers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
