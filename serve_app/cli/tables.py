"""Tables on stdout: as wide as the terminal, and whole where they go to a file or a pipe."""

import sys

import typer
from rich.console import Console
from rich.table import Table

FILE_WIDTH = 240
"""Characters of a line that no terminal cuts."""


def plain_table() -> Table:
    """Gives a table of columns alone, without lines between them."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def print_table(table: Table) -> None:
    """Prints it. What is in it is text: brackets of a label or an address are no markup."""
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else FILE_WIDTH
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())
