"""The model through torch.compile: the same tokens, one graph, and a clear word where it cannot be had."""

import importlib
from typing import Any

import pytest
import torch
from engine_runs import greedy, prompt_of, result_of, run_all, running, small_config
from fake_graphs import FakeGraphs
from flash_reference import KERNELS
from tiny_models import tiny_model
from transformers import CompileConfig, GenerationConfig, PreTrainedModel

from engine import ContinuousBatchingManager, InvalidRequest, SamplingParams, init_continuous_batching
from engine.compilation import CompileOptions, compile_options

NUM_NEW = 12
PROMPTS = [prompt_of(length, seed=6) for length in (1, 5, 40, 70)]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TRACED = CompileConfig(mode="default", dynamic=True, backend="eager")
"""All that is ours of torch.compile; making machine code takes a minute."""
BOTH = {"varlen_compile_config": TRACED, "decode_compile_config": TRACED}


class Codes:
    """Counts what torch.compile has made since."""

    def __init__(self) -> None:
        utils: Any = importlib.import_module("torch._dynamo.utils")
        utils.counters.clear()
        self._counters = utils.counters

    @property
    def num_graphs(self) -> int:
        made: int = self._counters["stats"]["unique_graphs"]
        return made

    @property
    def num_breaks(self) -> int:
        return sum(self._counters["graph_break"].values())


@pytest.fixture(autouse=True)
def _no_code_of_other_tests() -> None:
    torch.compiler.reset()


def answers(model: PreTrainedModel) -> list[list[int]]:
    return [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning:torch")  # torch's own, at the import of its compiler
def test_level_1_makes_machine_code_that_gives_the_same_tokens() -> None:
    model = tiny_model(num_hidden_layers=1)
    expected = answers(model)
    with running(model, default_compile_level=1) as manager:
        manager.warmup()  # the deadlines of these tests are for steps, not for compiling
        assert [run_all(manager, PROMPTS, NUM_NEW) for _ in range(2)] == [expected] * 2


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_model_is_one_graph_for_steps_of_every_size(family: str) -> None:
    model = tiny_model(family)
    expected, codes = answers(model), Codes()
    with running(model, max_batch_tokens=48, **BOTH) as manager:
        manager.warmup()  # the deadlines of these tests are for steps, not for compiling
        num_graphs = codes.num_graphs
        assert [run_all(manager, PROMPTS, NUM_NEW) for _ in range(2)] == [expected] * 2
        assert run_all(manager, PROMPTS[:1], NUM_NEW) == expected[:1]
    assert codes.num_breaks == 0
    assert num_graphs == codes.num_graphs
    assert num_graphs == 1 or family == "gpt_oss", "its experts are told apart in Python"


@pytest.mark.parametrize(
    "tools", [{"flash": KERNELS}, {"flash": KERNELS, "graphs": FakeGraphs()}], ids=["flash", "graphs"]
)
def test_it_goes_together_with_flash_and_graphs(tools: dict[str, Any]) -> None:
    model = tiny_model()
    expected = answers(model)
    with running(model, tools=tools, **BOTH) as manager:
        manager.warmup()  # the deadlines of these tests are for steps, not for compiling
        assert [run_all(manager, PROMPTS, NUM_NEW) for _ in range(2)] == [expected] * 2


def test_fixed_sizes_are_multiples_and_padding_changes_no_token() -> None:
    model = tiny_model()
    expected, sizes = answers(model), []

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        sizes.extend(value.shape[1] for value in inputs if value.dim() == 2 and value.dtype == torch.int64)
        return graph.forward

    fixed = CompileConfig(mode="default", dynamic=False, backend=note)
    with running(model, varlen_compile_config=fixed, decode_compile_config=fixed) as manager:
        manager.warmup()  # the deadlines of these tests are for steps, not for compiling
        assert [run_all(manager, PROMPTS, NUM_NEW) for _ in range(2)] == [expected] * 2
    assert sizes
    assert {size % 64 for size in sizes} == {0}


@pytest.mark.parametrize("kind", ["varlen_compile_config", "decode_compile_config"])
def test_each_kind_of_step_has_its_own_config(kind: str) -> None:
    model = tiny_model()
    expected, sizes = answers(model), []

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        def call(*arguments: torch.Tensor) -> Any:
            tensors = [value for value in arguments if isinstance(value, torch.Tensor)]  # beside sizes
            sizes.extend(value.shape[1] for value in tensors if value.dim() == 2 and value.dtype == torch.int64)
            return graph.forward(*arguments)

        return call

    with running(model, **{kind: CompileConfig(mode="default", dynamic=True, backend=note)}) as manager:
        manager.warmup()  # the deadlines of these tests are for steps, not for compiling
        sizes.clear()
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert run_all(manager, [prompt], NUM_NEW) == [answer]
    # One request at a time: its prompt, or its single tokens, which are padded to two.
    assert set(sizes) == ({5, 40, 70} if kind == "varlen_compile_config" else {2})


def test_new_weights_are_computed_with() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    old, new = answers(model), answers(other)
    with running(model, **BOTH) as manager:
        manager.warmup()  # the deadlines of these tests are for steps, not for compiling
        assert run_all(manager, PROMPTS, NUM_NEW) == old
        with manager.pause():
            for parameter, moved in zip(model.parameters(), other.parameters(), strict=True):
                parameter.data = moved.data.clone()
        assert run_all(manager, PROMPTS, NUM_NEW) == new


def test_seeds_and_a_second_manager_give_the_same_samples() -> None:
    sampling = SamplingParams(temperature=1.5, seed=3, max_new_tokens=NUM_NEW)
    model, runs = tiny_model(), []
    for values in ({}, BOTH, BOTH):
        with running(model, **values) as manager:
            manager.warmup()
            runs.append(result_of(manager, manager.add_request(PROMPTS[1], sampling=sampling)).generated_tokens)
    assert runs[0] == runs[1] == runs[2]


def test_a_model_that_cannot_be_compiled_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> Any:
        raise RuntimeError("no such machine")

    model = tiny_model()
    expected = answers(model)
    broken = CompileConfig(mode="default", dynamic=True, backend=refuse)
    with running(model, varlen_compile_config=broken, decode_compile_config=broken) as manager:
        manager.warmup()  # the deadlines of these tests are for steps, not for compiling
        assert run_all(manager, PROMPTS, NUM_NEW) == expected
    told = [record.getMessage() for record in caplog.records if "cannot be compiled" in record.getMessage()]
    assert len(told) == 2
    assert "no such machine" in told[0]


def test_the_compile_config_of_a_generation_config_fills_what_is_open() -> None:
    model, codes = tiny_model(), Codes()
    expected = answers(model)
    generation_config = GenerationConfig(compile_config=TRACED)
    with running(model, generation_config=generation_config) as manager:
        manager.warmup()  # the deadlines of these tests are for steps, not for compiling
        assert run_all(manager, PROMPTS, NUM_NEW) == expected
    assert codes.num_graphs == 1


@pytest.mark.parametrize(
    ("level", "mode", "dynamic"),
    [(1, "default", True), (2, "max-autotune-no-cudagraphs", True), (3, "max-autotune-no-cudagraphs", False)],
)
def test_what_a_level_stands_for(level: int, mode: str, dynamic: bool) -> None:
    options = compile_options(small_config(default_compile_level=level), CPU)
    assert options is not None
    for config in (options.packed, options.decode):
        assert (config.mode, config.dynamic, config.fullgraph) == (mode, dynamic, False)
    given = compile_options(small_config(default_compile_level=level, decode_compile_config=TRACED), CPU)
    assert given == CompileOptions(packed=options.packed, decode=TRACED)


@pytest.mark.filterwarnings("ignore:use_default_compile_configs is deprecated:FutureWarning")
def test_the_deprecated_switch_is_the_highest_level() -> None:
    assert compile_options(small_config(), CPU) is None
    assert compile_options(small_config(use_default_compile_configs=False), CPU) is None
    assert compile_options(small_config(use_default_compile_configs=True), CPU) == compile_options(
        small_config(default_compile_level=3), CPU
    )


def test_a_machine_without_a_compiler_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    builder: Any = importlib.import_module("torch._inductor.cpp_builder")
    monkeypatch.setattr(builder, "get_cpp_compiler", lambda: "g++")
    with pytest.raises(InvalidRequest, match=r"torch.compile needs a C\+\+ compiler such as g\+\+, which this machine"):
        init_continuous_batching(tiny_model(), continuous_batching_config=small_config(default_compile_level=1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"varlen_compile_config": "fast"}, "varlen_compile_config is 'fast'"),
        ({"decode_compile_config": object()}, "decode_compile_config is"),
        ({"varlen_compile_config": {"mod": "default"}}, "varlen_compile_config is .*'mod'"),
        ({"decode_compile_config": {1: "default"}}, "decode_compile_config is .*keywords must be strings"),
        ({"pack_weights": True, "default_compile_level": 1}, "pack_weights=True cannot be had: torch.compile"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ContinuousBatchingManager(tiny_model(), None, small_config(**values))


def test_a_mode_that_captures_graphs_of_its_own_is_refused_on_a_gpu() -> None:
    config = small_config(decode_compile_config=CompileConfig(dynamic=True))
    assert compile_options(config, CPU) is not None
    with pytest.raises(InvalidRequest, match="decode_compile_config has mode 'reduce-overhead'"):
        compile_options(config, CUDA)


def test_the_fields_of_a_config_do_as_well() -> None:
    options = compile_options(small_config(varlen_compile_config={"mode": "default", "dynamic": True}), CPU)
    assert options == CompileOptions(packed=CompileConfig(mode="default", dynamic=True), decode=None)
