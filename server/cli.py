"""The command line: `lapilli serve`, `lapilli config`, `lapilli keys`."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from auth.store import ApiKey, KeyStore, KeyStoreUnavailable, UnknownKey
from server import __version__
from server.config import leaves, shown
from server.config_sources import (
    Loaded,
    SettingsError,
    flag_options,
    load_settings,
    unknown_flag,
    written_flag,
)

EXIT_FAILED = 1
EXIT_BAD_USAGE = 2
PIPE_COLUMNS = 200
"""Width of tables where stdout is no terminal, so that no value is folded."""

_WORDS = "lapilli.words"
_KEY_FLAGS = ("config", "auth__database_url")
_Result = TypeVar("_Result")


class SettingsCommand(click.Command):
    """A command that takes settings as flags, and keeps its words to tell how each was spelled."""

    def __init__(self, *args: Any, only: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [option for option in flag_options() if not only or option.name in only]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Also keeps the words."""
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)


def _load(ctx: click.Context) -> Loaded:
    """Settings for the flags given to this command; its other flags are left out."""
    argv = [
        f"{written_flag(option.opts, ctx.meta[_WORDS])}={ctx.params[str(option.name)]}"
        for option in flag_options()
        if ctx.params.get(str(option.name)) is not None
    ]
    return load_settings(argv)


_json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(no_args_is_help=True)
@click.version_option(__version__, prog_name="lapilli")
def lapilli() -> None:
    """OpenAI-compatible inference server around an in-process vLLM engine."""


@lapilli.command(cls=SettingsCommand)
@click.pass_context
def serve(ctx: click.Context, /, **_flags: str) -> None:
    """Start the server.

    Settings: defaults, then the YAML file, then the environment, then these flags; later ones win.
    """
    loaded = _load(ctx)
    # Here, not above: it imports vLLM, which the other commands need not have.
    from server.serve import run

    run(loaded)


@lapilli.command(cls=SettingsCommand)
@_json_flag
@click.pass_context
def config(ctx: click.Context, /, as_json: bool, **_flags: str) -> None:
    """Print every setting's value and where it comes from."""
    loaded = _load(ctx)
    values = {leaf.path: _value(loaded, leaf.path) for leaf in leaves()}
    if as_json:
        entries = {p: {"value": _json_value(p, v), "origin": loaded.origins[p]} for p, v in values.items()}
        click.echo(json.dumps(entries, indent=2))
        return
    _print_table(
        ("setting", "value", "origin"), [(p, shown(p, v), loaded.origins[p]) for p, v in values.items()]
    )


@lapilli.group(no_args_is_help=True)
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command(cls=SettingsCommand, only=_KEY_FLAGS)
@click.option("--name", default="unnamed", show_default=True, help="What the key is for, for people.")
@_json_flag
@click.pass_context
def create(ctx: click.Context, /, name: str, as_json: bool, **_flags: str) -> None:
    """Create an API key and print it, this once."""
    try:
        key, secret = _with_store(ctx, lambda store: store.create(name))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--name") from None
    if as_json:
        click.echo(json.dumps({**asdict(key), "key": secret}, indent=2))
    else:
        click.echo(f"Created {key.id} ({key.name}). The key is shown only now:", err=True)
        click.echo(secret)


@keys.command("list", cls=SettingsCommand, only=_KEY_FLAGS)
@_json_flag
@click.pass_context
def list_keys(ctx: click.Context, /, as_json: bool, **_flags: str) -> None:
    """List all API keys, revoked ones too, without their secrets."""
    found = _with_store(ctx, lambda store: store.list())
    if as_json:
        click.echo(json.dumps([asdict(key) for key in found], indent=2))
    else:
        rows = [(k.id, k.name, k.prefix + "...", k.created_at, k.revoked_at or "") for k in found]
        _print_table(("id", "name", "key", "created (UTC)", "revoked (UTC)"), rows)


@keys.command(cls=SettingsCommand, only=_KEY_FLAGS)
@click.argument("key_id", metavar="ID")
@_json_flag
@click.pass_context
def revoke(ctx: click.Context, /, key_id: str, as_json: bool, **_flags: str) -> None:
    """Revoke the API key with this ID; running servers refuse it within auth.refresh_s seconds."""
    key: ApiKey = _with_store(ctx, lambda store: store.revoke(key_id))
    click.echo(json.dumps(asdict(key), indent=2) if as_json else f"Revoked {key.id} ({key.name}).")


def _with_store(ctx: click.Context, action: Callable[[KeyStore], Coroutine[Any, Any, _Result]]) -> _Result:
    settings = _load(ctx).settings

    async def run() -> _Result:
        store = KeyStore(settings.auth.database_url)
        await store.open()
        try:
            return await action(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _value(loaded: Loaded, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(loaded.settings, section), name)


def _json_value(path: str, value: Any) -> Any:
    """`value` for JSON: numbers and nulls as they are, text and mappings without secrets."""
    if isinstance(value, dict):
        return json.loads(shown(path, value))
    return value if value is None or isinstance(value, bool | int | float) else shown(path, value)


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*titles, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        # Text, because rich would read a name like "[red]" as markup.
        table.add_row(*[Text(cell, overflow="fold") for cell in row])
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False).print(table)


def run_command(argv: Sequence[str]) -> int:
    """Run one command and return its exit code: 0, 1 (failed) or 2 (bad settings or usage)."""
    try:
        code = lapilli.main(list(argv), prog_name="lapilli", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_BAD_USAGE
    except click.NoSuchOption as error:
        command = error.ctx.command if error.ctx else lapilli
        return _fail(unknown_flag(error.option_name, command), EXIT_BAD_USAGE)
    except click.ClickException as error:
        return _fail(" ".join(error.format_message().split()), EXIT_BAD_USAGE)
    except SettingsError as error:
        return _fail(str(error), EXIT_BAD_USAGE)
    except UnknownKey:
        # The word is not repeated: a user may have given the key itself.
        return _fail("no API key has this id; `lapilli keys list` shows the ids", EXIT_FAILED)
    except KeyStoreUnavailable as error:
        return _fail(str(error), EXIT_FAILED)
    except click.Abort:
        return _fail("interrupted", EXIT_FAILED)


def _fail(message: str, code: int) -> int:
    click.echo(f"lapilli: error: {message}", err=True)
    return code


def main() -> None:
    """Entry point of the `lapilli` command."""
    sys.exit(run_command(sys.argv[1:]))
