"""The answers of a pre-flight, as rows of one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Colour = Literal["green", "yellow", "red"]
_MARKS = {"green": "[green]ok[/green]", "yellow": "[yellow]warn[/yellow]", "red": "[red]STOP[/red]"}


class Answer(NamedTuple):
    """One row of the table.

    Attributes:
        question: in two or three words.
        colour: green: fine. yellow: worth knowing. red: the run would fail, or teach nothing.
        finding: what was found, with figures.
        fix: what to change; empty where nothing is wrong.
    """

    question: str
    colour: Colour
    finding: str
    fix: str = ""

    @property
    def line(self) -> str:
        """The row in one line, for an error."""
        return f"{self.question}: {self.finding}" + (f". {self.fix}" if self.fix else "")


def worst(answers: Sequence[Answer]) -> Colour:
    """Return the worst colour; green where there are no rows."""
    order: tuple[Colour, ...] = ("green", "yellow", "red")
    return max((answer.colour for answer in answers), key=order.index, default="green")


def as_dicts(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return plain data for JSON."""
    return [answer._asdict() for answer in answers]


def print_answers(answers: Sequence[Answer], console: Console, *, only_problems: bool = False) -> None:
    """Print the table.

    Args:
        answers: the rows.
        console: where to.
        only_problems: leave green rows out, and the table too where all are green.
    """
    shown = [answer for answer in answers if not only_problems or answer.colour != "green"]
    if not shown:
        return
    table = Table("", "pre-flight", "finding", title="Before training", title_justify="left")
    for answer in shown:
        text = escape(answer.finding) + (f"\n[bold]→[/bold] {escape(answer.fix)}" if answer.fix else "")
        table.add_row(_MARKS[answer.colour], answer.question, text)
    console.print(table)
