"""Checks a Grafana dashboard without Grafana: its layout, its variables and every PromQL expression."""

import re
from collections.abc import Iterator
from typing import Any

import promql_parser

BUILT_IN_VARIABLES = {"__interval": "1m", "__rate_interval": "5m", "__range": "1h"}
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::[^}]*)?\}|\$([A-Za-z_]\w*)")
GRID_COLUMNS = 24
CHILDREN = ("lhs", "rhs", "expr", "param", "vector_selector")


def errors_of(dashboard: dict[str, Any]) -> list[str]:
    """What is wrong with the dashboard, each with the title of its panel."""
    panels = list(_panels(dashboard["panels"]))
    ids = [panel["id"] for panel in panels]
    errors = [f"duplicate panel id {number}" for number in sorted({number for number in ids if ids.count(number) > 1})]
    errors += [
        f"{panel['title']}: wider than the grid"
        for panel in panels
        if panel["gridPos"]["x"] + panel["gridPos"]["w"] > GRID_COLUMNS
    ]
    cells = [cell for panel in panels for cell in _cells(panel["gridPos"])]
    if len(cells) != len(set(cells)):
        errors.append("panels overlap")
    declared = {variable["name"] for variable in dashboard["templating"]["list"]}
    for title, expression in expressions_of(dashboard):
        errors += [f"{title}: undeclared ${name}" for name in _variables(expression) - declared - {*BUILT_IN_VARIABLES}]
        errors += [f"{title}: {error}" for error in _syntax_errors(substituted(expression))]
    return errors


def expressions_of(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """The title and the PromQL of every query and annotation."""
    queries = [
        (panel["title"], target["expr"])
        for panel in _panels(dashboard["panels"])
        for target in panel.get("targets", [])
        if "expr" in target
    ]
    annotations = dashboard.get("annotations", {}).get("list", [])
    return queries + [(item["name"], item["expr"]) for item in annotations if "expr" in item]


def metrics_of(dashboard: dict[str, Any]) -> set[str]:
    """The metrics it asks for."""
    return {name for _, expression in expressions_of(dashboard) for name in metrics_of_expression(expression)}


def metrics_of_expression(expression: str) -> set[str]:
    """The metrics that the parser finds in it."""
    return _selected(promql_parser.parse(substituted(expression)))


def _panels(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels", []))


def _cells(position: dict[str, int]) -> Iterator[tuple[int, int]]:
    for column in range(position["x"], position["x"] + position["w"]):
        for line in range(position["y"], position["y"] + position["h"]):
            yield column, line


def _variables(expression: str) -> set[str]:
    return {braced or bare for braced, bare in VARIABLE.findall(expression)}


def substituted(expression: str) -> str:
    """The expression with a value for every variable; in a label matcher any text is one."""
    return VARIABLE.sub(lambda match: BUILT_IN_VARIABLES.get(match.group(1) or match.group(2), ".*"), expression)


def _syntax_errors(expression: str) -> list[str]:
    try:
        promql_parser.parse(expression)
    except ValueError as error:
        return [f"{error} in {expression}"]
    return []


def _selected(node: Any) -> set[str]:
    """The names of the selectors in a part of an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        return {node.name}
    parts = [getattr(node, name) for name in CHILDREN if hasattr(node, name)]
    parts += list(getattr(node, "args", []))
    return {name for part in parts if part is not None for name in _selected(part)}
