"""The table of model families in the README: what was compared with plain `generate` and came out equal.

    python -m tests.engine.zoo --write

Tiny random models, greedy, float32, every attention implementation that a family has, with shared prefixes and without.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import UnsupportedModel
from engine.model import check_supported
from tests.engine.engine_runs import greedy, prompt_of, run_all, running
from tests.engine.tiny_models import REFUSED, SUPPORTED, tiny_model

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- zoo -->", "<!-- /zoo -->"
FAMILIES = [family for family in (*SUPPORTED, *REFUSED) if family != "llama_tied"]
"""Each class of models once."""
IMPLEMENTATIONS = ("eager", "sdpa")
SHARING = {True: "on", False: "off"}
EQUAL = "equal"
NUM_NEW = 12
SYSTEM_PROMPT = prompt_of(34, seed=4)
PROMPTS = [prompt_of(1, seed=4), prompt_of(50, seed=4), *(SYSTEM_PROMPT + prompt_of(n, seed=4) for n in (1, 20))]


@dataclass(frozen=True, slots=True)
class Line:
    """What one family does; family is the class of the model."""

    family: str
    attention: str
    sharing: str
    result: str

    @property
    def behaviour(self) -> str:
        """The cells of the table that families share."""
        return f" {self.attention} | {self.sharing} | {self.result} |"


def lines_of(family: str) -> list[Line]:
    """Runs a family in every way it has; ways with the same result share a line."""
    if family in REFUSED:
        return [_refusal(family)]
    by_result: dict[str, list[Line]] = {}
    for line in _ways(family):
        by_result.setdefault(line.result, []).append(line)
    return [
        Line(ways[0].family, _named(way.attention for way in ways), _named(way.sharing for way in ways), result)
        for result, ways in by_result.items()
    ]


def table(lines: list[Line]) -> str:
    """Gives the text between the markers; families that do the same share a row."""
    head = ["| models | attention | prefix sharing | greedy output, beside `generate` |", "|---|---|---|---|"]
    families: dict[str, list[str]] = {}
    for line in lines:
        families.setdefault(line.behaviour, []).append(line.family)
    rows = [f"| {', '.join(names)} |{behaviour}" for behaviour, names in families.items()]
    return "\n".join([BEGIN, *head, *rows, END])


def readme_families() -> dict[str, list[str]]:
    """Gives the families of the README's table, by what it says they do."""
    found = {}
    for row in _between_markers(README.read_text()).splitlines()[3:-1]:
        names, _, behaviour = row.removeprefix("|").partition("|")
        found[behaviour] = [name.strip() for name in names.split(",")]
    return found


def _ways(family: str) -> Iterator[Line]:
    for implementation in IMPLEMENTATIONS:
        try:
            model = tiny_model(family, attn_implementation=implementation)
        except ValueError as error:
            if "does not support" not in str(error):  # transformers' words at the load of a model that has it not
                raise
            continue
        assert model.config._attn_implementation == implementation
        answers = [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]
        for sharing in SHARING:
            with running(model, allow_block_sharing=sharing, max_batch_tokens=48) as manager:
                got = [run_all(manager, PROMPTS, NUM_NEW) for _ in range(2)]
                assert (manager.stats().cached_tokens_total > 0) == sharing
            result = EQUAL if got == [answers] * 2 else "different"
            yield Line(type(model).__name__, implementation, SHARING[sharing], result)


def _refusal(family: str) -> Line:
    model = tiny_model(family)
    try:
        check_supported(model)
    except UnsupportedModel as error:
        return Line(type(model).__name__, "", "", f"refused: {str(error).partition(': ')[2]}")
    raise AssertionError(f"{family} is served")


def _named(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _between_markers(text: str) -> str:
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def _main() -> None:
    torch.set_num_threads(1)
    made = table([line for family in FAMILIES for line in lines_of(family)])
    if sys.argv[1:] == ["--write"]:
        text = README.read_text()
        README.write_text(text.replace(_between_markers(text), made))
    else:
        sys.stdout.write(made + "\n")


if __name__ == "__main__":
    _main()
