"""The README's table of model families is what the models really do."""

import pytest
from tiny_models import SUPPORTED

from tests.engine.zoo import EQUAL, FAMILIES, lines_of, readme_lines

TABLE = readme_lines()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_does_what_the_readme_says(family: str) -> None:
    lines = lines_of(family)
    assert {line.result == EQUAL for line in lines} == {family in SUPPORTED}
    for line in lines:
        assert str(line) in TABLE, "python -m tests.engine.zoo --write"


def test_the_readme_names_no_other_family() -> None:
    assert len(TABLE) == len(set(TABLE)) == len(FAMILIES)
