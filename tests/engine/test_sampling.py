"""Sampling is exact, a function of the row alone, and hurts no neighbour.

Shapes: R rows, V vocabulary.
"""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.sampling import SampleResult, SamplingRow, draw, uniform
from engine.sampling.sampler import _processed_scores

PARAMETERS = [
    (0.7, 0, 1.0),
    (1.0, 5, 1.0),
    (1.3, 0, 0.9),
    (0.9, 40, 0.95),
    (1.0, 10**6, 0.5),
    (2.5, 1, 0.1),
    (1.0, 0, 0.999999),
    (1.0, 700, 1e-6),
]

PINNED = [
    0.8833108082136426,
    0.43152799704850997,
    0.7497482413580301,
    0.05588332997080059,
    0.7851694351566804,
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def row(
    temperature: float = 1.0, *, top_k: int = 0, top_p: float = 1.0, seed: int = 0, position: int = 0
) -> SamplingRow:
    return SamplingRow(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, position=position)


def sample(logits_RV: Tensor, rows: Sequence[SamplingRow], *, logprob_rows: Sequence[int] = ()) -> SampleResult:
    return draw(logits_RV, rows, logprob_rows=logprob_rows).result()


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def warped(logits_RV: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    scores_RV = logits_RV.float()
    no_ids = torch.empty(len(logits_RV), 0, dtype=torch.long)
    if temperature != 1:
        scores_RV = TemperatureLogitsWarper(temperature)(no_ids, scores_RV)
    if top_k:
        scores_RV = TopKLogitsWarper(top_k)(no_ids, scores_RV)
    return TopPLogitsWarper(top_p)(no_ids, scores_RV) if top_p < 1 else scores_RV


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("vocab_size", [37, 5000])
@pytest.mark.parametrize("scale", [0.02, 3.0, 30.0])
def test_processed_scores_equal_those_of_transformers(
    parameters: tuple[float, int, float], vocab_size: int, scale: float
) -> None:
    logits_RV = random_logits(16, vocab_size, scale=scale)
    ours_RV = _processed_scores(logits_RV, range(16), [SamplingRow(*parameters, seed=0, position=0)] * 16)
    assert torch.equal(ours_RV, warped(logits_RV, *parameters))


@pytest.mark.parametrize("vocab_size", [64, 3000])
def test_equal_scores_are_kept_as_transformers_keeps_them(vocab_size: int) -> None:
    logits_RV = random_logits(8, vocab_size).mul(0.5).round()
    for temperature, top_k, top_p in itertools.product((1.0, 0.5), (0, 7, 200), (1.0, 0.99, 0.8, 0.3)):
        mixed = [SamplingRow(temperature, top_k, top_p, seed=0, position=0)] * 8
        ours_RV = _processed_scores(logits_RV, range(8), mixed)
        assert torch.equal(ours_RV, warped(logits_RV, temperature, top_k, top_p))


def test_rows_of_one_batch_have_parameters_of_their_own() -> None:
    logits_RV = random_logits(len(PARAMETERS), 2000)
    rows = [SamplingRow(*parameters, seed=1, position=2) for parameters in PARAMETERS]
    ours_RV = _processed_scores(logits_RV, range(len(rows)), rows)
    for i, parameters in enumerate(PARAMETERS):
        assert torch.equal(ours_RV[i : i + 1], warped(logits_RV[i : i + 1], *parameters))


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits_RV = random_logits(24, 49_152)
    choices = itertools.cycle([(0.0, 0, 1.0), *PARAMETERS])
    rows = [SamplingRow(*next(choices), seed=100 + i, position=i) for i in range(24)]
    together = sample(logits_RV, rows, logprob_rows=range(24))
    for i in range(24):
        alone = sample(logits_RV[i : i + 1], [rows[i]], logprob_rows=[0])
        assert alone.tokens == [together.tokens[i]]
        assert alone.logprobs[0] == together.logprobs[i]
    backwards = sample(logits_RV.flip(0), rows[::-1], logprob_rows=range(24))
    assert backwards.tokens == together.tokens[::-1]
    assert [backwards.logprobs[23 - i] for i in range(24)] == [together.logprobs[i] for i in range(24)]


def test_a_large_batch_in_chunks_gives_what_single_rows_give(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_RV = random_logits(10, 1000)
    rows = [row(0.8 * (i % 3), top_k=20, seed=i) for i in range(10)]
    whole = sample(logits_RV, rows, logprob_rows=range(10))
    monkeypatch.setattr("engine.sampling.sampler._CHUNK_SIZE_BYTES", 16 * 1000 * 3)
    assert sample(logits_RV, rows, logprob_rows=range(10)) == whole


def test_greedy_takes_the_best_token_whatever_the_other_parameters() -> None:
    logits_RV = random_logits(5, 300)
    rows = [row(0.0, top_k=3, top_p=0.5, seed=i) for i in range(5)]
    assert sample(logits_RV, rows).tokens == logits_RV.argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_read_only_and_of_any_float_type(dtype: torch.dtype) -> None:
    logits_RV = random_logits(3, 100).to(dtype)
    before_RV = logits_RV.clone()
    result = sample(logits_RV, [row(0.0), row(0.5, top_k=4), row(top_p=0.5)], logprob_rows=[0, 1, 2])
    assert torch.equal(logits_RV, before_RV)
    assert result.bad_rows == []


def test_log_probabilities_are_those_of_the_processed_scores() -> None:
    logits_RV = random_logits(4, 900)
    rows = [row(0.0), row(0.7, top_k=9, seed=5), row(top_p=0.8, seed=6), row(1.9, seed=7)]
    result = sample(logits_RV, rows, logprob_rows=[0, 1, 3])
    assert sorted(result.logprobs) == [0, 1, 3]
    for i in (0, 1, 3):
        parameters = (rows[i].temperature or 1.0, rows[i].top_k, rows[i].top_p)
        expected_RV = warped(logits_RV[i : i + 1], *parameters).double().log_softmax(dim=-1)
        assert result.logprobs[i] == pytest.approx(float(expected_RV[0, result.tokens[i]]), abs=1e-5)


@pytest.mark.parametrize("parameters", [(0.8, 0, 1.0), (1.2, 12, 1.0), (1.0, 0, 0.85), (0.9, 25, 0.9)])
@pytest.mark.parametrize("vocab_size", [40, 600])
def test_draws_follow_the_exact_distribution(parameters: tuple[float, int, float], vocab_size: int) -> None:
    logits_RV = random_logits(1, vocab_size, seed=3, scale=2.0)
    probs_V = warped(logits_RV, *parameters).double().softmax(dim=-1)[0]
    num_draws = 20_000
    counts_V = torch.zeros(vocab_size, dtype=torch.float64)
    for start in range(0, num_draws, 2000):
        rows = [SamplingRow(*parameters, seed=start + i, position=i % 7) for i in range(2000)]
        tokens = torch.tensor(sample(logits_RV.expand(2000, -1), rows).tokens)
        counts_V += torch.bincount(tokens, minlength=vocab_size)
    assert counts_V[probs_V == 0].sum() == 0
    assert chi_square_excess(counts_V, probs_V * num_draws) < 4


def chi_square_excess(counts_V: Tensor, expected_V: Tensor) -> float:
    """Gives how many standard deviations Pearson's statistic lies above its mean; rare tokens are counted as one."""
    common_V = expected_V >= 5
    cells = [(counts_V[common_V], expected_V[common_V])]
    if expected_V[~common_V].sum() >= 5:
        cells.append((counts_V[~common_V].sum()[None], expected_V[~common_V].sum()[None]))
    statistic = sum(float(((counts - expected) ** 2 / expected).sum()) for counts, expected in cells)
    freedom = sum(len(counts) for counts, _ in cells) - 1
    return float((statistic - freedom) / (2 * max(freedom, 1)) ** 0.5)


def test_uniform_numbers_are_pinned_for_good() -> None:
    # A stream that was begun by another release, on another machine, must go on with the same numbers.
    pairs = [(0, 0), (0, 1), (1, 0), (-1, 5), (2**63 - 1, 10**6)]
    assert [uniform(*pair) for pair in pairs] == PINNED


def test_uniform_numbers_are_even_and_unrelated_between_neighbours() -> None:
    by_position = torch.tensor([uniform(7, i) for i in range(20_000)])
    by_seed = torch.tensor([uniform(i, 7) for i in range(20_000)])
    for numbers in (by_position, by_seed):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert chi_square_excess(torch.histc(numbers, 100, 0, 1), torch.full((100,), 200.0)) < 4
        assert abs(float(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1])) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([by_position, by_seed]))[0, 1])) < 0.03


def test_the_same_seed_and_position_draw_the_same_token_again() -> None:
    logits_RV = random_logits(1, 500).expand(6, -1)
    rows = [row(seed=3, position=9), row(seed=3, position=10), row(seed=4, position=9)] * 2
    tokens = sample(logits_RV, rows).tokens
    assert tokens[:3] == tokens[3:]
    assert len(set(tokens)) > 1


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    sample(random_logits(3, 50), [row(0.0), row(), row(0.6, top_k=5, top_p=0.9)], logprob_rows=[0, 1, 2])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("poison", ["one_nan", "all_nan", "one_inf", "nothing_finite"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_bad_row_is_reported_and_hurts_no_neighbour(poison: str, temperature: float) -> None:
    logits_RV = random_logits(3, 200)
    rows = [row(0.0), row(temperature, top_k=5, top_p=0.9), row(0.9, seed=8)]
    clean = sample(logits_RV, rows, logprob_rows=range(3))
    spoilt_V = logits_RV[1]
    if poison == "one_nan":
        spoilt_V[7] = float("nan")
    elif poison == "one_inf":
        spoilt_V[7] = float("inf")
    else:
        spoilt_V.fill_(float("nan" if poison == "all_nan" else "-inf"))
    result = sample(logits_RV, rows, logprob_rows=range(3))
    assert result.bad_rows == [1]
    assert result.tokens == [clean.tokens[0], 0, clean.tokens[2]]
    assert result.logprobs == {0: clean.logprobs[0], 2: clean.logprobs[2]}


def test_masked_tokens_are_never_drawn() -> None:
    logits_RV = torch.full((64, 1000), float("-inf"))
    logits_RV[:, [3, 255, 256, 999]] = 0.0
    tokens = sample(logits_RV, [row(1.7, top_p=0.99, seed=i) for i in range(64)]).tokens
    assert set(tokens) == {3, 255, 256, 999}


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sampling.sampler.uniform", lambda *_: number)
    logits_RV = random_logits(4, 700)
    logits_RV[:, :10] = float("-inf")
    logits_RV[:, 690:] = float("-inf")
    tokens = sample(logits_RV, [row(), row(0.3), row(top_k=1), row(top_p=0.2)]).tokens
    assert all(10 <= token < 690 for token in tokens)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-38, 1e-10])
def test_a_temperature_near_zero_is_nearly_greedy(temperature: float) -> None:
    logits_RV = random_logits(4, 300)
    result = sample(logits_RV, [row(temperature, seed=i) for i in range(4)], logprob_rows=range(4))
    assert result.tokens == logits_RV.argmax(dim=-1).tolist()
    assert list(result.logprobs.values()) == [0.0] * 4


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 10), []) == SampleResult(tokens=[], logprobs={}, bad_rows=[])
