"""The command line: `lapilli serve`, `config`, `keys`, `tenants`, `services`, `db`."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from auth.errors import KeyStoreUnavailable
from auth.records import KeyIsDead, TenantExists, UnknownKey, UnknownTenant
from server import __version__, cli_auth
from server.commands import SettingsCommand, json_flag, load, print_json, print_table
from server.config import leaves, shown
from server.config_sources import Loaded, SettingsError, unknown_flag

EXIT_FAILED = 1
EXIT_BAD_USAGE = 2

# The words of the user are not repeated: they may be the key itself.
_FAILURES: dict[type[Exception], str] = {
    UnknownKey: "no API key has this id; `lapilli keys list` shows the ids",
    UnknownTenant: "no tenant has this name; `lapilli tenants list` shows the names",
    TenantExists: "a tenant of this name exists already",
    KeyIsDead: "the API key is revoked or expired",
}


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
    loaded = load(ctx)
    # Here, not above: it imports vLLM, which the other commands need not have.
    from server.serve import run

    run(loaded)


@lapilli.command(cls=SettingsCommand)
@json_flag
@click.pass_context
def config(ctx: click.Context, /, as_json: bool, **_flags: str) -> None:
    """Print every setting's value and where it comes from."""
    loaded = load(ctx)
    values = {leaf.path: _value(loaded, leaf.path) for leaf in leaves()}
    if as_json:
        entries = {p: {"value": _json_value(p, v), "origin": loaded.origins[p]} for p, v in values.items()}
        print_json(entries)
        return
    print_table(
        ("setting", "value", "origin"), [(p, shown(p, v), loaded.origins[p]) for p, v in values.items()]
    )


lapilli.add_command(cli_auth.tenants)
lapilli.add_command(cli_auth.keys)
lapilli.add_command(cli_auth.services)
lapilli.add_command(cli_auth.db)


def _value(loaded: Loaded, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(loaded.settings, section), name)


def _json_value(path: str, value: Any) -> Any:
    """`value` for JSON: numbers and nulls as they are, text and mappings without secrets."""
    if isinstance(value, dict):
        return json.loads(shown(path, value))
    return value if value is None or isinstance(value, bool | int | float) else shown(path, value)


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
    except tuple(_FAILURES) as error:
        return _fail(_FAILURES[type(error)], EXIT_FAILED)
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
