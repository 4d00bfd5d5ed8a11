"""Python and the packages, beside the ranges that this version of Pitstop was made for."""

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from serve_app.cli.doctor.finding import Findings, error, good, warning

DISTRIBUTION = "pitstop"
SHOWN = ("torch", "transformers", "ray")
"""Packages that are named also where they are right."""
SYSTEM = "Linux"


def check_python() -> Findings:
    """Gives what is to be said of Python and the system."""
    wanted = metadata(DISTRIBUTION)["Requires-Python"]
    found = platform.python_version()
    if found in SpecifierSet(wanted):
        yield good("python", f"{found}, {sys.executable}")
    else:
        yield error(
            "python",
            f"{found}, and {wanted} is needed",
            why="packages do not install or import",
            remedy="a newer Python",
        )
    if platform.system() != SYSTEM:
        yield warning(
            "system",
            f"{platform.system()}",
            why=f"nothing was tried elsewhere than on {SYSTEM}",
            remedy=f"serve on {SYSTEM}; clients run anywhere",
        )


def check_packages(requirements: Sequence[str] | None = None) -> Findings:
    """Gives what is to be said of every package that Pitstop depends on. requirements: in place of its own."""
    wanted = requires(DISTRIBUTION) or [] if requirements is None else requirements
    num_right = 0
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield error(
                "packages",
                f"{requirement.name} is not installed",
                why="the application imports it",
                remedy=f"pip install '{requirement}'",
            )
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield error(
                "packages",
                f"{requirement.name} is {found}, supported is {requirement.specifier}",
                why="interfaces that are used change between versions",
                remedy=f"pip install '{requirement}'",
            )
            continue
        num_right += 1
        if requirement.name in SHOWN:
            yield good(requirement.name, found)
    yield good("packages", f"{num_right} of {DISTRIBUTION}'s dependencies are in their ranges")
