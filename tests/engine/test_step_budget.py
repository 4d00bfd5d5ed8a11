from test_scheduler import make_request

from engine.plan import PlannedRow, StepPlan
from engine.step_budget import StepBudget


def prompt_step(num_tokens: int) -> StepPlan:
    request = make_request([1] * num_tokens)
    return StepPlan([PlannedRow(request, 0, request.prompt_ids, [], samples=True)])


def test_the_budget_settles_where_a_step_takes_the_target() -> None:
    budget = StepBudget(max_batch_tokens=8192, target_step_s=0.5)
    for _ in range(20):
        plan = prompt_step(budget.max_tokens())
        budget.observe(plan, step_s=plan.num_tokens / 400)
    assert 190 <= budget.max_tokens() <= 200


def test_a_slower_machine_gets_shorter_steps_within_a_few() -> None:
    budget = StepBudget(max_batch_tokens=8192, target_step_s=0.5)
    budget.observe(prompt_step(1000), step_s=1.0)
    for _ in range(10):
        plan = prompt_step(budget.max_tokens())
        budget.observe(plan, step_s=plan.num_tokens / 100)
    assert budget.max_tokens() < 80


def test_decode_steps_say_nothing_about_prompts_and_no_target_means_no_bound() -> None:
    budget = StepBudget(max_batch_tokens=8192, target_step_s=0.5)
    request = make_request([1, 2])
    budget.observe(StepPlan([PlannedRow(request, 1, [2], [], samples=True)]), step_s=0.1)
    assert budget.prefill_tokens_per_s == 0
    assert budget.decode_tokens_per_s == 10
    assert StepBudget(max_batch_tokens=8192, target_step_s=None).max_tokens() == 8192
