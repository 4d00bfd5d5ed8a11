"""The README's table of model families is what the models really do."""

import pytest
from tiny_models import SUPPORTED

from tests.engine.zoo import EQUAL, FAMILIES, lines_of, readme_families

TABLE = readme_families()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_does_what_the_readme_says(family: str) -> None:
    lines = lines_of(family)
    assert {line.result == EQUAL for line in lines} == {family in SUPPORTED}
    for line in lines:
        assert line.family in TABLE.get(line.behaviour, []), "python -m tests.engine.zoo --write"


def test_the_readme_names_no_other_family() -> None:
    named = [name for names in TABLE.values() for name in names]
    assert len(named) == len(set(named)) == len(FAMILIES)
