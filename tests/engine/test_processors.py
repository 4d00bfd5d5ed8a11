"""What acts on the scores: everything of a generation config, as `generate` does it, for the config or one request."""

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from functools import cache
from random import Random
from types import MethodType
from typing import Any

import pytest
import torch
from engine_runs import assert_idle, prompt_of, result_of, run_all, running, wait_until
from tiny_models import VOCAB_SIZE, tiny_model
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SequenceBiasLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from engine import FinishReason, InvalidRequest, RequestStatus, SamplingParams, generate_batch
from engine.active_request import ActiveRequest
from engine.generation_defaults import REFUSED, WITHOUT_EFFECT, generation_defaults
from engine.request import GenerationOutput
from engine.sampling.history import TokenHistory
from engine.sampling.processors import ProcessorBuilder
from engine.sampling_fields import CHECKS

NUM_NEW = 14
PROMPTS = [[7], prompt_of(21)]
ROOMY = {"num_blocks": 300}
TIGHT = {"num_blocks": 7, "max_batch_tokens": 12, "max_requests_per_batch": 6}
"""Prompts come in chunks, and the running requests push each other out."""


@cache
def model() -> PreTrainedModel:
    return tiny_model("llama")


@cache
def plain(prompt_index: int) -> list[int]:
    """Gives what the model says to a prompt when nothing acts on its scores."""
    return by_generate(PROMPTS[prompt_index], max_new_tokens=NUM_NEW)


def by_generate(prompt: list[int], **fields: Any) -> list[int]:
    ids = torch.tensor([prompt])
    tokenizer = fields.pop("tokenizer", None)
    processors = fields.pop("logits_processor", None)
    config = GenerationConfig(pad_token_id=0, **fields)
    answer = model().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        tokenizer=tokenizer,
        logits_processor=processors,
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


def greedy_cases() -> dict[str, dict[str, Any]]:
    """Gives fields of a generation config, chosen so that each changes the plain answer to a prompt."""
    first, second = plain(0), plain(1)
    end = second[4]
    return {
        "repetition_penalty": {"repetition_penalty": 1.8},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.5},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1, "sequence_bias": {(PROMPTS[1][3],): 9.0}},
        "min_length": {"min_length": 13, "eos_token_id": first[3]},
        "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [end, first[3]]},
        "bad_words_ids": {"bad_words_ids": [[first[0]], second[1:3]]},
        "sequence_bias": {"sequence_bias": {(second[0],): -30.0, (first[1], first[2]): -30.0}},
        "suppress_tokens": {"suppress_tokens": [first[2], second[2]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [first[0], second[0]]},
        "forced_bos_token_id": {"forced_bos_token_id": 200},
        "forced_eos_token_id": {"forced_eos_token_id": 201},
        "forced_eos_token_ids": {"forced_eos_token_id": [201, 17]},
        "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.9), "eos_token_id": 33},
        "renormalize_logits": {
            "renormalize_logits": True,
            "remove_invalid_values": True,
            "suppress_tokens": [first[0]],
        },
        "watermark_left": {"watermarking_config": WatermarkingConfig(bias=6.0)},
        "watermark_self": {"watermarking_config": WatermarkingConfig(bias=6.0, seeding_scheme="selfhash")},
        "watermark_synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 9, 12])},
        "overflow": {
            # The score of the end token becomes the least number there is, and the decay then makes it infinite.
            "min_new_tokens": 9,
            "remove_invalid_values": True,
            "exponential_decay_length_penalty": (2, 1.9),
            "eos_token_id": 33,
        },
        "together": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 6, "eos_token_id": end},
    }


def as_sampling(fields: dict[str, Any], **more: Any) -> SamplingParams:
    values = {"temperature": 0.0, **fields, **more}
    if "eos_token_id" in values:
        eos = values.pop("eos_token_id")
        values["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else (eos,)
    return SamplingParams(**values)


@cache
def greedy_answers() -> dict[tuple[str, int], list[int]]:
    return {
        (name, i): by_generate(prompt, max_new_tokens=NUM_NEW, **fields)
        for name, fields in greedy_cases().items()
        for i, prompt in enumerate(PROMPTS)
    }


@pytest.mark.parametrize("how", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_greedy_outputs_are_those_of_generate_and_neighbours_do_not_change(how: dict[str, Any]) -> None:
    cases, expected = greedy_cases(), greedy_answers()
    for name in cases:
        assert any(expected[name, i] != plain(i) for i in range(len(PROMPTS))), f"{name} changes nothing"
    generator_state = torch.get_rng_state()
    with running(model(), **how) as manager:
        requests = {}
        for (name, i), answer in expected.items():
            sampling = as_sampling(cases[name], max_new_tokens=NUM_NEW)
            requests[manager.add_request(PROMPTS[i], sampling=sampling)] = answer
            requests[manager.add_request(PROMPTS[i], max_new_tokens=NUM_NEW)] = plain(i)
        outputs = {request_id: result_of(manager, request_id) for request_id in requests}
        assert (manager.stats().preemptions_total > 0) == (how is TIGHT)
        wait_until(lambda: holds_nothing(manager))
    assert {request_id: list(output.generated_tokens) for request_id, output in outputs.items()} == requests
    assert torch.equal(torch.get_rng_state(), generator_state)


def random_fields(random: Random) -> dict[str, Any]:
    """Gives a few fields of a generation config with values that any prompt of one token or more can have."""

    def tokens(num: int) -> list[int]:
        return random.choices(range(VOCAB_SIZE), k=num)

    makers: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: random.uniform(0.5, 2),
        "encoder_repetition_penalty": lambda: random.uniform(0.5, 2),
        "no_repeat_ngram_size": lambda: random.randrange(1, 4),
        "encoder_no_repeat_ngram_size": lambda: random.randrange(1, 3),
        "min_length": lambda: random.randrange(1, NUM_NEW),
        "min_new_tokens": lambda: random.randrange(12),
        "bad_words_ids": lambda: [tokens(random.randrange(1, 3)) for _ in range(20)],
        "sequence_bias": lambda: {tuple(tokens(random.randrange(1, 3))): random.uniform(-9, 9) for _ in range(20)},
        "suppress_tokens": lambda: tokens(30),
        "begin_suppress_tokens": lambda: tokens(30),
        "forced_bos_token_id": lambda: 200,
        "forced_eos_token_id": lambda: 201,
        "exponential_decay_length_penalty": lambda: (random.randrange(5), random.uniform(1, 2)),
        "renormalize_logits": lambda: True,
        "remove_invalid_values": lambda: True,
        "watermarking_config": lambda: WatermarkingConfig(bias=3.0, context_width=random.randrange(1, 3)),
    }
    fields = {name: makers[name]() for name in random.sample(sorted(makers), random.randrange(1, 7))}
    if "suppress_tokens" in fields:
        fields["suppress_tokens"] = sorted({*fields["suppress_tokens"]} - {200, 201})
    return fields | {"eos_token_id": tokens(3)}


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.usefixtures("depth")
def test_random_combinations_are_those_of_generate() -> None:
    random = Random(1)
    cases = [(prompt_of(random.choice([1, 2, 5, 17, 30]), seed=i), random_fields(random)) for i in range(25)]
    expected = [by_generate(prompt, max_new_tokens=NUM_NEW, **fields) for prompt, fields in cases]
    with running(model(), **TIGHT) as manager:
        ids = [
            manager.add_request(prompt, sampling=as_sampling(fields, max_new_tokens=NUM_NEW))
            for prompt, fields in cases
        ]
        outputs = [result_of(manager, request_id) for request_id in ids]
    assert [list(output.generated_tokens) for output in outputs] == expected


def test_a_config_asks_for_the_same_as_the_fields_of_a_request() -> None:
    nothing = GenerationConfig()
    for fields in greedy_cases().values():
        defaults = generation_defaults(nothing, GenerationConfig(max_new_tokens=NUM_NEW, **fields)).sampling
        wanted = as_sampling(fields, max_new_tokens=NUM_NEW)
        assert SamplingParams().filled_from(defaults) == wanted.filled_from(defaults)
        assert all(getattr(defaults, name) is not None for name in fields if name != "eos_token_id")


def test_a_config_of_the_caller_is_filled_from_the_models_own() -> None:
    own = tiny_model("llama")
    own.generation_config.repetition_penalty = 1.8
    prompt = PROMPTS[1]
    expected = by_generate(prompt, max_new_tokens=NUM_NEW, repetition_penalty=1.8)
    for config in (None, GenerationConfig(do_sample=False)):
        with running(own, generation_config=config) as manager:
            assert run_all(manager, [prompt], NUM_NEW) == [expected]
            unset = SamplingParams(repetition_penalty=1.0)
            assert run_all(manager, [prompt], NUM_NEW, sampling=unset) == [plain(1)]


WARPERS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.05},
    "top_h": {"top_h": 0.6, "top_k": 30},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "renormalize_logits": {"renormalize_logits": True, "top_p": 0.8},
    "repetition_penalty": {"repetition_penalty": 1.4, "top_p": 0.8, "top_k": 20},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=1.0), "top_k": 40},
    "all_at_once": {"min_p": 0.01, "typical_p": 0.9, "top_p": 0.95, "no_repeat_ngram_size": 2, "epsilon_cutoff": 1e-4},
}


def test_a_draw_is_from_the_scores_that_generate_would_draw_from() -> None:
    prompt, num_new = PROMPTS[1], 6
    outputs = {}
    with running(model(), **TIGHT) as manager:
        for seed, (name, fields) in enumerate(WARPERS.items()):
            values = {"top_k": 0, "top_p": 1.0, **fields, "temperature": 0.9, "seed": seed, "logprobs": True}
            sampling = SamplingParams(max_new_tokens=num_new, **values)
            outputs[name] = manager.add_request(prompt, sampling=sampling)
        results = {name: result_of(manager, request_id) for name, request_id in outputs.items()}
    for name, output in results.items():
        tokens = list(output.generated_tokens)
        fields = {"top_k": 0, "top_p": 1.0, **WARPERS[name], "temperature": 0.9}
        expected = [next_logprob(prompt + tokens[:i], token, fields) for i, token in enumerate(tokens)]
        assert output.logprobs == pytest.approx(expected, abs=2e-4), name


def next_logprob(ids: list[int], token: int, fields: dict[str, Any]) -> float:
    config = GenerationConfig(
        do_sample=True, max_new_tokens=1, pad_token_id=0, output_scores=True, return_dict_in_generate=True, **fields
    )
    ids_1T = torch.tensor([ids])
    answer = model().generate(ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=config)
    return float(answer.scores[0][0].log_softmax(dim=-1)[token])


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    class Penalty(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = scores.clone()
            output = input_ids[0, len(prompt) :].tolist()
            for token in set(output):
                scores[0, token] -= 1.5 + 0.7 * output.count(token)
            return scores

    # One token is liked so much that only the penalties ever make it give way.
    prompt, bias = PROMPTS[1], {(44,): 12.0}
    processors = LogitsProcessorList([Penalty()])
    expected = by_generate(prompt, max_new_tokens=30, sequence_bias=bias, logits_processor=processors)
    assert 1 < expected.count(44) < 30
    sampling = SamplingParams(sequence_bias=bias, presence_penalty=1.5, frequency_penalty=0.7)
    with running(model()) as manager:
        assert run_all(manager, [prompt], 30, sampling=sampling) == [expected]


def test_no_token_but_the_allowed_ones_is_drawn() -> None:
    allowed = [3, 17, 40, 41]
    for temperature in (0.0, 5.0):
        sampling = SamplingParams(temperature=temperature, allowed_token_ids=allowed, eos_token_ids=())
        with running(model()) as manager:
            outputs = run_all(manager, PROMPTS, 30, sampling=sampling)
        assert all({*tokens} <= {*allowed} for tokens in outputs)
        assert temperature == 0 or any(len({*tokens}) > 1 for tokens in outputs)


def test_a_stop_token_ends_a_request_beside_the_models_own_and_after_the_least_number() -> None:
    tokens = plain(1)
    index = next(i for i in range(3, NUM_NEW) if tokens[i] not in tokens[:i])
    sampling = SamplingParams(stop_token_ids=[tokens[index]], temperature=0.0)
    with running(model()) as manager:
        request_id = manager.add_request(PROMPTS[1], max_new_tokens=NUM_NEW, sampling=sampling)
        assert request_id is not None
        output = result_of(manager, request_id)
        later = SamplingParams(stop_token_ids=[tokens[index]], temperature=0.0, min_new_tokens=NUM_NEW)
        longer = run_all(manager, [PROMPTS[1]], NUM_NEW, sampling=later)[0]
    assert (list(output.generated_tokens), output.finish_reason) == (tokens[: index + 1], FinishReason.STOP)
    assert len(longer) == NUM_NEW
    assert tokens[index] not in longer


def test_samples_of_one_prompt_have_processors_of_their_own() -> None:
    prompt = PROMPTS[1]
    sampling = SamplingParams(temperature=1.5, num_return_sequences=4, no_repeat_ngram_size=1, seed=3)
    for how in ({}, TIGHT):
        with running(model(), **how) as manager:
            parent = manager.add_request(prompt, max_new_tokens=NUM_NEW, sampling=sampling)
            ids = [*(f"{parent}__child#{i}" for i in range(3)), parent]
            outputs = [list(result_of(manager, request_id).generated_tokens) for request_id in ids]
        assert all(len({*tokens}) == NUM_NEW and not {*tokens} & {*prompt} for tokens in outputs)
        assert len({tuple(tokens) for tokens in outputs}) == 4


def test_keywords_of_a_request_are_the_fields_of_its_sampling() -> None:
    expected = by_generate(PROMPTS[1], max_new_tokens=NUM_NEW, repetition_penalty=1.8)
    with running(model(), per_request_processors=True) as manager:
        assert run_all(manager, PROMPTS[1:], NUM_NEW, repetition_penalty=1.8, temperature=0.0) == [expected]
        for name in ("seed", "filter_value", "num_beams", "repetition_penaltys"):
            with pytest.raises(InvalidRequest, match=f"{name} is not a parameter"):
                manager.add_request([1], **{name: 1})
        with pytest.raises(InvalidRequest, match="repetition_penalty is -1"):
            manager.add_request([1], repetition_penalty=-1)
    with running(model()) as manager, pytest.raises(InvalidRequest, match="min_p needs per_request_processors=True"):
        manager.add_request([1], min_p=0.1)


def test_a_total_length_bounds_a_request_that_names_no_number_of_tokens() -> None:
    prompt = PROMPTS[1]
    for fields in ({"max_length": 26}, {"max_length": 26, "max_new_tokens": 9}):
        expected = by_generate(prompt, **fields)
        (output,) = generate_batch(model(), [prompt], GenerationConfig(**fields)).values()
        assert output.generated_tokens == expected
    (output,) = generate_batch(model(), [prompt], GenerationConfig(max_length=21)).values()
    assert "more than the 21 that fit" in (output.error or "")


def test_requests_of_one_watermark_share_its_table() -> None:
    sampling = as_sampling({"watermarking_config": WatermarkingConfig()}, seed=1)
    builder = ProcessorBuilder(model())
    first, second = (builder.build(ActiveRequest(name, [1], sampling, created_time=0.0)) for name in "ab")
    assert first._processors[0].fixed_table is second._processors[0].fixed_table
    table = weakref.ref(first._processors[0])
    del first, second
    assert table() is None


# Stop strings and time


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Gives one whose tokens are mostly two letters, so that a string may begin inside of one."""
    letters = [chr(97 + i) for i in range(26)]
    pairs = [(letters[i // 26], letters[i % 26]) for i in range(VOCAB_SIZE - 26)]
    vocab = {token: i for i, token in enumerate([*letters, *map("".join, pairs)])}
    built = Tokenizer(models.BPE(vocab, pairs))
    built.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=built)


@pytest.mark.usefixtures("depth")
def test_stop_strings_end_a_request_where_generate_ends_it() -> None:
    text = tokenizer().decode(plain(1))
    stops = [text[9:12], "zzzz"]
    expected = by_generate(PROMPTS[1], max_new_tokens=NUM_NEW, stop_strings=stops, tokenizer=tokenizer())
    assert len(expected) == 7
    with running(model()) as manager:
        request_id = manager.add_request(
            PROMPTS[1], max_new_tokens=NUM_NEW, sampling=SamplingParams(stop_strings=stops), tokenizer=tokenizer()
        )
        output = result_of(manager, request_id)
        assert (output.generated_tokens, output.finish_reason) == (expected, FinishReason.STOP)
        wait_until(lambda: holds_nothing(manager))
        with pytest.raises(InvalidRequest, match="stop_strings need the tokenizer"):
            manager.add_request([1], sampling=SamplingParams(stop_strings="a"))
        with pytest.raises(InvalidRequest, match="stop_strings are"):
            manager.add_request([1], sampling=SamplingParams(stop_strings="ß"), tokenizer=tokenizer())
    config = GenerationConfig(stop_strings=stops, max_new_tokens=NUM_NEW)
    (output,) = generate_batch(model(), PROMPTS[1:], config, tokenizer=tokenizer()).values()
    assert output.generated_tokens == expected
    (output,) = generate_batch(model(), PROMPTS[1:], config).values()
    assert "tokenizer" in (output.error or "")


def test_stop_strings_of_the_models_own_config_apply_where_a_tokenizer_is() -> None:
    own = copy.copy(model())
    own.generation_config = GenerationConfig(stop_strings=tokenizer().decode(plain(1))[9:12], max_new_tokens=NUM_NEW)
    (output,) = generate_batch(own, PROMPTS[1:], tokenizer=tokenizer()).values()
    assert output.generated_tokens == plain(1)[:7]
    (output,) = generate_batch(own, PROMPTS[1:]).values()
    assert output.generated_tokens == plain(1)


def test_max_time_ends_a_request_with_the_token_that_exceeds_it() -> None:
    with running(model()) as manager:
        sampling = SamplingParams(max_time=1e-6)
        output = result_of(manager, manager.add_request(PROMPTS[1], max_new_tokens=NUM_NEW, sampling=sampling))
        assert (output.generated_tokens, output.finish_reason) == (plain(1)[:1], FinishReason.LENGTH)
        assert run_all(manager, PROMPTS[1:], NUM_NEW, sampling=SamplingParams(max_time=600)) == [plain(1)]


# Isolation


def with_processors(extra: Callable[[GenerationConfig], list[LogitsProcessor]]) -> PreTrainedModel:
    """Gives a model that adds processors of its own, as a class may that brings its code along."""
    own = copy.copy(model())

    def build(self: PreTrainedModel, config: GenerationConfig, **arguments: Any) -> LogitsProcessorList:
        built = type(self)._get_logits_processor(self, config, **arguments)
        return LogitsProcessorList([*extra(config), *built])

    own._get_logits_processor = MethodType(build, own)
    return own


class OnlyFortyFour(LogitsProcessor):
    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([44]), 0.0)


def test_a_foreign_processor_is_dropped_with_its_name_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    own = with_processors(lambda _: [OnlyFortyFour()])
    with caplog.at_level(logging.WARNING, "engine"), running(own) as manager:
        assert run_all(manager, PROMPTS[1:], NUM_NEW) == [plain(1)]
    assert caplog.text.count("processor=OnlyFortyFour") == 1
    with pytest.raises(InvalidRequest, match="adds OnlyFortyFour"), running(own, drop_unsupported_processors=False):
        pass


def test_a_processor_of_transformers_that_the_model_adds_counts() -> None:
    own = with_processors(lambda _: [SequenceBiasLogitsProcessor({(44,): 100.0})])
    with running(own, drop_unsupported_processors=False) as manager:
        assert run_all(manager, PROMPTS[1:], 3) == [[44, 44, 44]]


def test_processors_that_raise_or_leave_nothing_fail_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # What pytest catches of the log would hold the request with the traceback.
    monkeypatch.setattr(logging.getLogger("engine"), "propagate", False)
    own = with_processors(
        lambda config: [SequenceBiasLogitsProcessor({(VOCAB_SIZE,): 1.0})] if config.suppress_tokens == (5,) else []
    )
    everything = tuple(range(VOCAB_SIZE))
    with running(own) as manager:
        raising = manager.add_request(PROMPTS[1], sampling=SamplingParams(suppress_tokens=(5,)))
        empty = manager.add_request(PROMPTS[1], sampling=SamplingParams(suppress_tokens=everything))
        good = manager.add_request(PROMPTS[1], max_new_tokens=NUM_NEW)
        outputs = [result_of(manager, request_id) for request_id in (raising, empty, good)]
        wait_until(lambda: holds_nothing(manager))
    assert [output.status for output in outputs] == [RequestStatus.FAILED] * 2 + [RequestStatus.FINISHED]
    assert "vocabulary size" in (outputs[0].error or "")
    assert "no token is left" in (outputs[1].error or "")
    assert outputs[2].generated_tokens == plain(1)


@pytest.mark.usefixtures("depth")
def test_nothing_of_a_cancelled_request_is_kept() -> None:
    with running(model()) as manager:
        sampling = SamplingParams(repetition_penalty=1.2, stop_strings="zzzz", num_return_sequences=2, temperature=1.0)
        request_id = manager.add_request(PROMPTS[1], sampling=sampling, streaming=True, tokenizer=tokenizer())
        output: GenerationOutput = next(manager.request_id_iter(request_id))
        assert not output.is_finished()
        manager.cancel_request(request_id)
        for member in (f"{request_id}__child#0", request_id):
            *_, output = manager.request_id_iter(member)
            assert output.status is RequestStatus.CANCELLED
        assert_idle(manager)
        wait_until(lambda: holds_nothing(manager))


def holds_nothing(manager: Any) -> bool:
    gc.collect()
    return not len(manager._sampler._processors) and not len(manager._stop_strings._criteria)


def test_a_history_is_copied_seldom_however_long_it_grows() -> None:
    history, ids, places = TokenHistory(torch.device("cpu")), list(range(50)), set()
    for token in range(20_000):
        ids.append(token)
        view_1T = history.extended_to(ids, len(ids))
        places.add(view_1T.data_ptr())
    assert view_1T[0].tolist() == ids
    assert len(places) < 20


# Refusals


def test_every_field_of_a_generation_config_is_honoured_or_refused() -> None:
    honoured = {*CHECKS, "do_sample", "max_length", "eos_token_id"}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - honoured - {*REFUSED} - WITHOUT_EFFECT == set()
    assert not honoured & {*REFUSED} | honoured & WITHOUT_EFFECT | WITHOUT_EFFECT & {*REFUSED}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_beams", 2),
        ("guidance_scale", 1.5),
        ("penalty_alpha", 0.6),
        ("prompt_lookup_num_tokens", 3),
        ("assistant_early_exit", 1),
        ("dola_layers", "high"),
        ("token_healing", True),
        ("force_words_ids", [[1]]),
        ("use_mtp", True),
        ("output_scores", True),
        ("temprature", 0.5),
    ],
)
def test_what_the_engine_does_not_do_is_refused_by_name(
    field: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = GenerationConfig()
    setattr(config, field, value)
    with pytest.raises(InvalidRequest, match=f"{field}={value!r}".replace("[", r"\[")) as caught:
        generation_defaults(GenerationConfig(), config)
    assert caught.value.param == field
    with caplog.at_level(logging.WARNING, "engine"):
        generation_defaults(config, None)
    assert (field in caplog.text) == (field in REFUSED), "a model's own names are its own"


BAD_VALUES: dict[str, list[Any]] = {
    "min_p": [-0.1, 1.1, "a", True, float("nan")],
    "top_h": [-0.1, 1.5],
    "typical_p": [0, 1.1],
    "epsilon_cutoff": [-0.1, 1],
    "eta_cutoff": [-0.1, 1.0],
    "repetition_penalty": [0, -1.0, float("inf"), "high"],
    "encoder_repetition_penalty": [0],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1, None.__class__],
    "no_repeat_ngram_size": [-1, 1.5, True],
    "encoder_no_repeat_ngram_size": [-1],
    "min_length": [-1, 2.0],
    "min_new_tokens": [-1, "3"],
    "exponential_decay_length_penalty": [(1,), (-1, 1.1), (1, 0), 5, "ab"],
    "max_time": [0, -1, "soon"],
    "bad_words_ids": [[[]], [1], 5, [[-1]], [["a"]], "ab", [[True]]],
    "sequence_bias": [{(): 1.0}, {(1,): "a"}, {(1,): float("nan")}, {1: 1.0}, [[1]], 5],
    "suppress_tokens": [5, [-1], [1.5], "a"],
    "begin_suppress_tokens": [5, [-1]],
    "forced_bos_token_id": [-2, 1.5],
    "forced_eos_token_id": [-1, [1.5], "a"],
    "stop_strings": [5, [""], "", [5]],
    "renormalize_logits": [1, "yes"],
    "remove_invalid_values": [0],
    "logprobs": [3],
    "allowed_token_ids": [5, [-1], "a"],
    "watermarking_config": [
        5,
        {"greenlist_ratio": 1.0},
        {"bias": "a"},
        {"seeding_scheme": "righthash"},
        {"context_width": 0},
        {"hashing_key": 2**63},
        {"bias": 1.0, "ngram_len": 5},
        {"ngram_len": 1, "keys": [1]},
        {"ngram_len": 5, "keys": []},
        {"ngram_len": 5, "keys": [2**63]},
        {"ngram_len": 5, "keys": [1], "sampling_table_size": 2**25},
    ],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values])
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"bad_words_ids": [[1, VOCAB_SIZE]]}, "bad_words_ids"),
        ({"sequence_bias": {(VOCAB_SIZE,): 1.0}}, "sequence_bias"),
        ({"suppress_tokens": [VOCAB_SIZE]}, "suppress_tokens"),
        ({"begin_suppress_tokens": [VOCAB_SIZE]}, "begin_suppress_tokens"),
        ({"allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"forced_bos_token_id": VOCAB_SIZE}, "forced_bos_token_id"),
        ({"forced_eos_token_id": [VOCAB_SIZE]}, "forced_eos_token_id"),
        ({"exponential_decay_length_penalty": (1, 1.5)}, "exponential_decay_length_penalty"),
        ({"bad_words_ids": [[5]], "eos_token_ids": (5,)}, "bad_words_ids"),
        ({"forced_bos_token_id": 5, "suppress_tokens": [5]}, "forced_bos_token_id"),
        ({"forced_eos_token_id": [5, 6], "suppress_tokens": [5, 6]}, "forced_eos_token_id"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with running(model()) as manager:
        with pytest.raises(InvalidRequest, match=name) as caught:
            manager.add_request([1], sampling=SamplingParams(**fields))
        assert caught.value.param == name


def test_every_field_of_sampling_has_a_range() -> None:
    assert {*CHECKS} == {*SamplingParams.__slots__}
    assert SamplingParams(**dict.fromkeys(CHECKS)) == SamplingParams()
