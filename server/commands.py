"""What the commands share: settings as flags, JSON or tables as output."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.config_sources import Loaded, flag_options, load_settings, written_flag

PIPE_COLUMNS = 200
"""Width of tables where stdout is no terminal, so that no value is folded."""

_WORDS = "lapilli.words"

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class SettingsCommand(click.Command):
    """A command that takes settings as flags, and keeps its words to tell how each was spelled."""

    def __init__(self, *args: Any, only: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [option for option in flag_options() if not only or option.name in only]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Also keeps the words."""
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)


def load(ctx: click.Context) -> Loaded:
    """Settings for the flags given to this command; its other flags are left out."""
    argv = [
        f"{written_flag(option.opts, ctx.meta[_WORDS])}={ctx.params[str(option.name)]}"
        for option in flag_options()
        if ctx.params.get(str(option.name)) is not None
    ]
    return load_settings(argv)


def print_json(value: Any) -> None:
    """`value` as indented JSON."""
    click.echo(json.dumps(value, indent=2))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table, wide where stdout is no terminal."""
    table = Table(*titles, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        # Text, because rich would read a name like "[red]" as markup.
        table.add_row(*[Text(cell, overflow="fold") for cell in row])
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False).print(table)
