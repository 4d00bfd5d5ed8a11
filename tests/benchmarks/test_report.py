from typing import Any

from benchmarks.peers import BASELINE, PEERS, ours
from benchmarks.report import Result, notes, table
from benchmarks.workload import Measurement


def measured(seconds: float, outputs: list[list[int]]) -> Measurement:
    return Measurement(seconds=seconds, cpu_s=2 * seconds, peak_mib=100.0, outputs=outputs)


def result(contestant: Any, **speeds: Measurement) -> Result:
    return Result(contestant, measured=dict(speeds))


def test_each_contestant_counts_with_its_best_setting() -> None:
    same, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    results = [
        result(ours, own=measured(1.0, same)),
        result(BASELINE, slow=measured(8.0, same), fast=measured(4.0, same)),
        result(PEERS["vllm"], only=measured(2.0, other)),
    ]
    lines = table(results).splitlines()
    assert lines[2] == "| pitstop | 4.0 | 4.00x | 1.00x | 1.0 | 2.0 | 100 MiB | 2 of 2, 100.0 % of tokens |"
    assert "fast | 1.0 | 1.00x | 4.00x | 4.0 |" in lines[3]
    assert lines[4].endswith("| 2.0 | 2.00x | 2.00x | 2.0 | 4.0 | 100 MiB | 1 of 2, 75.0 % of tokens |")
    assert "slow: 0.5; fast: 1.0" in notes(results)


def test_a_peer_that_did_not_run_has_a_line_that_says_why() -> None:
    failed = Result(PEERS["llamacpp"], failures={"installing": "exit code 1: no such version"})
    lines = table([result(ours, own=measured(1.0, [[1]])), failed]).splitlines()
    assert lines[3] == "| llama.cpp | none: exit code 1: no such version | - | - | - | - | - | - |"
    assert "installing: failed, exit code 1: no such version" in notes([failed])


def test_a_setting_keeps_its_fastest_round() -> None:
    one = Result(ours)
    for seconds in (3.0, 2.0, 4.0):
        one.add("own", measured(seconds, [[1]]))
    assert one.measured["own"].seconds == 2.0
