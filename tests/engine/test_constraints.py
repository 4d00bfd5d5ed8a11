"""A constraint rules its own request, exactly, and no other."""

from collections.abc import Callable, Sequence

import pytest
import torch
from engine_runs import greedy, prompt_of, result_of, run_all, running
from tiny_models import VOCAB_SIZE, tiny_model
from transformers import PreTrainedModel

from engine import FinishReason, InvalidRequest, RequestStatus, SamplingParams, TokenConstraint

pytestmark = pytest.mark.usefixtures("depth")

PROMPT = prompt_of(37, seed=3)
NEIGHBOURS = [prompt_of(21, seed=4), prompt_of(50, seed=5)]
GREEDY = SamplingParams(temperature=0.0)
NUM_NEW = 16


class Cycle:
    """Token i of the output is in class i of a cycle of classes (by remainder); records what it is told."""

    def __init__(self, num_classes: int = 5, *, length: int | None = None, fails_at: int | None = None) -> None:
        self.num_classes = num_classes
        self.length = length
        self.fails_at = fails_at
        self.told: list[int] = []
        self.forks: list[Cycle] = []

    def allows(self, token: int) -> bool:
        return token % self.num_classes == len(self.told) % self.num_classes

    def fill_mask(self, mask: memoryview) -> None:
        if len(self.told) == self.fails_at:
            raise RuntimeError("this grammar is broken")
        for token in filter(self.allows, range(VOCAB_SIZE)):
            mask[token // 8] |= 1 << token % 8

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            assert self.allows(token)
            self.told.append(token)

    @property
    def is_finished(self) -> bool:
        return len(self.told) == self.length

    def fork(self) -> "Cycle":
        assert not self.told
        self.forks.append(Cycle(self.num_classes, length=self.length, fails_at=self.fails_at))
        return self.forks[-1]


class BrokenAdvance(Cycle):
    def advance(self, token_ids: Sequence[int]) -> None:
        raise ValueError(f"cannot take this token: {token_ids[0]}")


class Nothing(Cycle):
    def fill_mask(self, mask: memoryview) -> None:
        pass


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def answers(model: PreTrainedModel) -> list[list[int]]:
    return [greedy(model, prompt, NUM_NEW) for prompt in NEIGHBOURS]


def constrained_greedy(model: PreTrainedModel, prompt: list[int], num_new: int) -> list[int]:
    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        place = (len(ids) - len(prompt)) % 5
        return [token for token in range(VOCAB_SIZE) if token % 5 == place]

    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
        prefix_allowed_tokens_fn=allowed,
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


def test_the_output_is_that_of_generate_under_the_same_rule_and_neighbours_keep_theirs(
    model: PreTrainedModel, answers: list[list[int]]
) -> None:
    expected = constrained_greedy(model, PROMPT, NUM_NEW)
    assert expected != greedy(model, PROMPT, NUM_NEW)
    constraint = Cycle()
    with running(model) as manager:
        request_id = manager.add_request(PROMPT, max_new_tokens=NUM_NEW, sampling=GREEDY, constraint=constraint)
        assert run_all(manager, NEIGHBOURS, NUM_NEW, sampling=GREEDY) == answers
        output = result_of(manager, request_id)
    assert output.generated_tokens == expected == constraint.told
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("seed", range(3))
def test_sampled_tokens_follow_it_after_temperature_and_processors(model: PreTrainedModel, seed: int) -> None:
    plain = SamplingParams(temperature=1.5, top_k=3, top_p=0.9, seed=seed)
    processed = SamplingParams(
        temperature=1.5, seed=seed, repetition_penalty=1.3, min_p=0.01, remove_invalid_values=True
    )
    with running(model) as manager:
        constraints = [Cycle(), Cycle()]
        ids = [
            manager.add_request(PROMPT, max_new_tokens=NUM_NEW, sampling=sampling, constraint=constraint)
            for sampling, constraint in zip((plain, processed), constraints, strict=True)
        ]
        outputs = [result_of(manager, request_id) for request_id in ids]
    assert [output.error for output in outputs] == [None, None]
    assert [output.generated_tokens for output in outputs] == [constraint.told for constraint in constraints]


def test_chunked_prompts_and_preemption_tell_it_every_token_once(model: PreTrainedModel) -> None:
    prompts = [prompt_of(30, seed=seed) for seed in range(6)]
    expected = [constrained_greedy(model, prompt, 40) for prompt in prompts]
    constraints = [Cycle() for _ in prompts]
    with running(model, num_blocks=12, max_batch_tokens=32) as manager:
        ids = [
            manager.add_request(prompt, max_new_tokens=40, sampling=GREEDY, constraint=constraint)
            for prompt, constraint in zip(prompts, constraints, strict=True)
        ]
        outputs = [result_of(manager, request_id) for request_id in ids]
        assert manager.stats().preemptions_total > 0
    assert [output.generated_tokens for output in outputs] == expected
    assert [constraint.told for constraint in constraints] == expected


def test_its_end_ends_the_output(model: PreTrainedModel) -> None:
    with running(model) as manager:
        sampling = SamplingParams(temperature=0.0, eos_token_ids=())
        ids = [
            manager.add_request(PROMPT, max_new_tokens=most, sampling=sampling, constraint=Cycle(length=7))
            for most in (NUM_NEW, 7, 6)
        ]
        outputs = [result_of(manager, request_id) for request_id in ids]
    assert [len(output.generated_tokens) for output in outputs] == [7, 7, 6]
    assert [output.finish_reason for output in outputs] == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]


@pytest.mark.parametrize("num_prompt", [1, 37])
def test_every_sample_of_a_prompt_has_its_own(model: PreTrainedModel, num_prompt: int) -> None:
    parent = Cycle()
    sampling = SamplingParams(temperature=1.0, seed=5, num_return_sequences=3)
    with running(model) as manager:
        request_id = manager.add_request(
            PROMPT[:num_prompt], max_new_tokens=NUM_NEW, sampling=sampling, constraint=parent
        )
        assert request_id is not None
        ids = [f"{request_id}__child#0", f"{request_id}__child#1", request_id]
        outputs = [result_of(manager, member).generated_tokens for member in ids]
    assert outputs == [parent.forks[0].told, parent.forks[1].told, parent.told]
    assert outputs[0] != outputs[1] != outputs[2]


def test_log_probabilities_are_of_what_it_leaves(model: PreTrainedModel) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=True)
    with running(model) as manager:
        # All classes are single tokens.
        request_id = manager.add_request(
            PROMPT, max_new_tokens=4, sampling=sampling, constraint=Cycle(num_classes=VOCAB_SIZE)
        )
        output = result_of(manager, request_id)
    assert (output.generated_tokens, output.logprobs) == ([0, 1, 2, 3], [0.0] * 4)


@pytest.mark.parametrize(
    ("make", "num_tokens", "message"),
    [
        (lambda: Cycle(fails_at=0), 0, "RuntimeError: this grammar is broken"),
        (lambda: Cycle(fails_at=3), 3, "RuntimeError: this grammar is broken"),
        (BrokenAdvance, 0, "ValueError: cannot take this token: "),
        (Nothing, 0, "no token is left to choose"),
    ],
    ids=["first mask", "later mask", "advance", "nothing allowed"],
)
def test_one_that_fails_ends_its_own_request_alone(
    model: PreTrainedModel, answers: list[list[int]], make: Callable[[], TokenConstraint], num_tokens: int, message: str
) -> None:
    witness = Cycle()
    with running(model) as manager:
        failing = manager.add_request(PROMPT, max_new_tokens=NUM_NEW, sampling=GREEDY, constraint=make())
        other = manager.add_request(PROMPT, max_new_tokens=NUM_NEW, sampling=GREEDY, constraint=witness)
        assert run_all(manager, NEIGHBOURS, NUM_NEW, sampling=GREEDY) == answers
        output = result_of(manager, failing)
        assert output.status is RequestStatus.FAILED
        assert message in str(output.error)
        assert len(output.generated_tokens) == num_tokens
        assert result_of(manager, other).generated_tokens == witness.told


def test_what_is_no_constraint_is_refused(model: PreTrainedModel) -> None:
    with running(model) as manager, pytest.raises(InvalidRequest, match="constraint is a dict"):
        manager.add_request(PROMPT, constraint={"type": "object"})  # type: ignore[arg-type]
