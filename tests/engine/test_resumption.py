"""A request that starts with tokens it has already goes on as the one that generated them would have."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine_runs import prompt_of, result_of, running, wait_until
from tiny_models import VOCAB_SIZE, tiny_model
from transformers import PreTrainedModel

from engine import ContinuousBatchingManager, FinishReason, GenerationOutput, InvalidRequest, SamplingParams, WeightSpan

pytestmark = pytest.mark.usefixtures("depth")

NUM_NEW = 14
EOS_ID = 7
SYNTH_ID = {"ngram_len": 4, "keys": [654, 400, 836, 123], "context_history_size": 16}
FIELDS: dict[str, list[Any]] = {
    "top_k": [0, 20],
    "top_p": [1.0, 0.8],
    "min_p": [0.0, 0.05],
    "repetition_penalty": [1.0, 1.3],
    "presence_penalty": [0.0, 0.7],
    "frequency_penalty": [0.0, 0.4],
    "encoder_repetition_penalty": [1.0, 1.2],
    "no_repeat_ngram_size": [0, 2],
    "min_new_tokens": [None, 6],
    "min_length": [None, 45],
    "exponential_decay_length_penalty": [None, (3, 1.5)],
    "bad_words_ids": [None, [[3, 4], [9]]],
    "begin_suppress_tokens": [None, [11, 12]],
    "forced_bos_token_id": [None, 21],
    "forced_eos_token_id": [None, (33,)],
    "watermarking_config": [None, None, {"greenlist_ratio": 0.4}, SYNTH_ID],
    "eos_token_ids": [(), (EOS_ID,), tuple(range(0, VOCAB_SIZE, 9))],
    "top_logprobs": [0, 3],
}


class Cycle:
    """Token i of the output is in class i of a cycle of classes, by remainder."""

    def __init__(self, num_classes: int = 5, num_told: int = 0) -> None:
        self.num_classes = num_classes
        self.num_told = num_told

    def fill_mask(self, mask: memoryview) -> None:
        for token in range(self.num_told % self.num_classes, VOCAB_SIZE, self.num_classes):
            mask[token // 8] |= 1 << token % 8

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if token % self.num_classes != self.num_told % self.num_classes:
                raise ValueError(f"{token} is not allowed")
            self.num_told += 1

    @property
    def is_finished(self) -> bool:
        return self.num_told == NUM_NEW - 1

    def fork(self) -> "Cycle":
        return Cycle(self.num_classes, self.num_told)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def manager(model: PreTrainedModel) -> Iterator[ContinuousBatchingManager]:
    with running(model) as manager:
        yield manager


def random_sampling(rng: random.Random) -> SamplingParams:
    chosen = {name: rng.choice(values) for name, values in FIELDS.items() if rng.random() < 0.4}
    if chosen.get("exponential_decay_length_penalty"):
        chosen["eos_token_ids"] = (EOS_ID,)
    temperature = rng.choice([0.0, 0.7, 1.0, 1.5])
    return SamplingParams(temperature=temperature, seed=rng.getrandbits(60), max_new_tokens=NUM_NEW, **chosen)


def complete(manager: ContinuousBatchingManager, prompt: list[int], **arguments: Any) -> GenerationOutput:
    return result_of(manager, manager.add_request(prompt, **arguments))


def assert_goes_on(resumed: GenerationOutput, whole: GenerationOutput, cut: int) -> None:
    assert resumed.error is None
    assert list(resumed.generated_tokens) == list(whole.generated_tokens)
    assert resumed.new_tokens == list(whole.generated_tokens)[cut:]
    assert resumed.finish_reason == whole.finish_reason
    assert resumed.logprobs == pytest.approx(list(whole.logprobs)[cut:], abs=1e-4)
    assert resumed.weight_versions == (WeightSpan(1, cut, len(whole.generated_tokens)),)
    assert [[token for token, _ in place] for place in resumed.top_logprobs] == [
        [token for token, _ in place] for place in list(whole.top_logprobs)[cut:]
    ]


@pytest.mark.parametrize("seed", range(8))
def test_it_goes_on_from_every_place_with_any_sampling(manager: ContinuousBatchingManager, seed: int) -> None:
    rng = random.Random(seed)
    sampling = replace(random_sampling(rng), logprobs=True)
    prompt = prompt_of(rng.randrange(1, 60), seed=seed)
    is_constrained = rng.random() < 0.3 and not (sampling.forced_bos_token_id or sampling.forced_eos_token_id)
    whole = complete(manager, prompt, sampling=sampling, constraint=Cycle() if is_constrained else None)
    if whole.error is not None:
        pytest.skip("the settings leave no token, which is tested elsewhere")
    tokens = list(whole.generated_tokens)
    # All at once, so that they share their steps with each other.
    ids = [
        manager.add_request(
            prompt, sampling=sampling, resumed=[tokens[:cut]], constraint=Cycle() if is_constrained else None
        )
        for cut in range(len(tokens))
    ]
    for cut, request_id in enumerate(ids):
        assert_goes_on(result_of(manager, request_id), whole, cut)


def test_a_watermark_that_remembers_goes_on(manager: ContinuousBatchingManager) -> None:
    prompt = [1, 2, 3]
    # Few tokens to choose from, so that contexts come again, which it does not mark twice.
    sampling = SamplingParams(
        temperature=1.0, seed=3, max_new_tokens=40, allowed_token_ids=(4, 5), watermarking_config=SYNTH_ID
    )
    whole = list(complete(manager, prompt, sampling=sampling).generated_tokens)
    for cut in (1, 3, 5, 20, 39):
        assert list(complete(manager, prompt, sampling=sampling, resumed=[whole[:cut]]).generated_tokens) == whole


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt2"])
def test_it_goes_on_in_other_families(family: str) -> None:
    prompt, sampling = prompt_of(30, seed=1), SamplingParams(temperature=1.0, seed=5, max_new_tokens=30)
    with running(tiny_model(family)) as manager:
        whole = complete(manager, prompt, sampling=sampling)
        for cut in (1, 2, 17, 29):
            tokens = list(whole.generated_tokens)
            resumed = complete(manager, prompt, sampling=sampling, resumed=[tokens[:cut]])
            assert list(resumed.generated_tokens) == tokens


def test_each_sequence_goes_on_with_its_own_tokens_and_seed(manager: ContinuousBatchingManager) -> None:
    prompt = prompt_of(40, seed=2)
    sampling = SamplingParams(temperature=1.2, seed=11, max_new_tokens=NUM_NEW, num_return_sequences=4)
    names = ["a", *(f"a__child#{index}" for index in range(3))]
    manager.add_request(prompt, "a", sampling=sampling)
    whole = [list(result_of(manager, name).generated_tokens) for name in names]
    assert len({tuple(tokens) for tokens in whole}) == 4
    for cuts in ((0, 0, 0, 0), (3, 5, 0, 9), (None, 2, None, 4), (6, None, None, None)):
        parts = [None if cut is None else tokens[:cut] for cut, tokens in zip(cuts, whole, strict=True)]
        manager.add_request(prompt, "a", sampling=sampling, resumed=parts)
        for name, part, tokens in zip(names, parts, whole, strict=True):
            if part is not None:
                output = result_of(manager, name)
                assert list(output.generated_tokens) == tokens
                assert output.new_tokens == tokens[len(part) :]
    assert manager.get_result(timeout=0) is None, "an output that had ended was heard of again"


def test_all_resumed_sequences_end_with_their_family(manager: ContinuousBatchingManager) -> None:
    sampling = SamplingParams(temperature=1.0, seed=1, max_new_tokens=400, num_return_sequences=3)
    manager.add_request(prompt_of(20), "a", sampling=sampling, resumed=[None, [1, 2], [3]])
    wait_until(lambda: manager.stats().num_running == 2)
    with pytest.raises(InvalidRequest, match="in flight"):
        manager.add_request(prompt_of(20), "a")
    manager.cancel_request("a")
    for name in ("a__child#0", "a__child#1"):
        assert result_of(manager, name).finish_reason == FinishReason.CANCELLED


def test_what_was_generated_comes_from_the_cache(manager: ContinuousBatchingManager) -> None:
    prompt, sampling = prompt_of(50, seed=9), SamplingParams(temperature=0.0, max_new_tokens=60)
    whole = complete(manager, prompt, sampling=sampling)
    before = manager.stats()
    resumed = complete(manager, prompt, sampling=sampling, resumed=[list(whole.generated_tokens)[:55]])
    assert list(resumed.generated_tokens) == list(whole.generated_tokens)
    # 105 tokens, of which 96 are six whole pages; the prompt has 50.
    assert resumed.num_cached_tokens == 50
    assert manager.stats().cached_tokens_total - before.cached_tokens_total == 50


def test_it_goes_on_after_it_was_sent_back_for_want_of_blocks(model: PreTrainedModel) -> None:
    prompts = [prompt_of(30, seed=seed) for seed in range(6)]
    sampling = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=60) for seed in range(6)]
    with running(model) as manager:
        whole = [
            list(complete(manager, prompt, sampling=one).generated_tokens)
            for prompt, one in zip(prompts, sampling, strict=True)
        ]
    with running(model, num_blocks=14) as manager:
        ids = [
            manager.add_request(prompt, sampling=one, resumed=[tokens[:25]])
            for prompt, one, tokens in zip(prompts, sampling, whole, strict=True)
        ]
        assert [list(result_of(manager, request_id).generated_tokens) for request_id in ids] == whole
        assert manager.stats().preemptions_total > 0


@pytest.mark.parametrize(
    ("resumed", "more", "message"),
    [
        ([[1, 2], [3]], {}, "there are 1"),
        ("ab", {}, "there are 1"),
        ([None], {}, "every output has ended"),
        ([[1, VOCAB_SIZE]], {}, r"resumed\[1\] is 256"),
        ([["x"]], {}, r"resumed\[0\] is 'x'"),
        ([[1, 2, 3, 4]], {"max_new_tokens": 4}, "at most 4"),
        ([[1, 9]], {"eos_token_ids": (9,)}, "ends with 9"),
        ([[1]], {"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_resumed_is_refused_by_name(
    manager: ContinuousBatchingManager, resumed: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        manager.add_request([5, 6], sampling=SamplingParams(**{"max_new_tokens": 8, **more}), resumed=resumed)


def test_tokens_that_break_their_constraint_are_refused(manager: ContinuousBatchingManager) -> None:
    sampling = SamplingParams(max_new_tokens=NUM_NEW)
    with pytest.raises(InvalidRequest, match="does not follow the constraint"):
        manager.add_request([5, 6], sampling=sampling, resumed=[[0, 2]], constraint=Cycle())
    told = [index % 5 for index in range(NUM_NEW - 1)]
    with pytest.raises(InvalidRequest, match="completes"):
        manager.add_request([5, 6], sampling=sampling, resumed=[told], constraint=Cycle())
