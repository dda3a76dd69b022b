"""Where settings come from: defaults < YAML file < environment < flags, each value with its origin."""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from server.auth_sections import state_defaults
from server.config import ENV_PREFIX, Leaf, Settings, leaves, sections, shown

DEFAULT_FILE = "configs/lapilli.yaml"
CONFIG_VARIABLE = "LAPILLI_CONFIG"
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "LAPILLI_API_KEY"})
"""Variables with the prefix that are no settings: the file's name, and the key that client examples use."""

# Kubernetes describes each Service to each container; one named "lapilli" becomes LAPILLI_PORT=tcp://... etc.
_KUBERNETES_NAME = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?$")
_KUBERNETES_PORT = re.compile(r"^(tcp|udp|sctp)://")
_NULL = "null"


class SettingsError(Exception):
    """Settings cannot be used; the message is one line for the user (the command line exits with 2)."""


@dataclass(frozen=True)
class Loaded:
    """Valid settings, and where each came from.

    `origins`: dotted path -> "default", a file's name, "env NAME" or "flag --NAME".
    """

    settings: Settings
    origins: dict[str, str]


@dataclass(frozen=True)
class _Given:
    value: Any
    origin: str


def load_settings(
    argv: Sequence[str] = (), env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Loaded:
    """Settings from all sources.

    `argv`: flags only, no command name. `env`: default the process's. `cwd`: where `configs/lapilli.yaml` and
    relative file names are looked up. Raises SettingsError.
    """
    env = os.environ if env is None else env
    flags, flag_file = _from_flags(argv)
    given: dict[str, _Given] = {}
    given.update(_from_file(flag_file or env.get(CONFIG_VARIABLE) or None, cwd or Path.cwd()))
    given.update(_from_env(env))
    given.update(flags)
    tree: dict[str, dict[str, Any]] = {}
    values = state_defaults(env) | {path: item.value for path, item in given.items()}
    for path, value in values.items():
        section, name = path.split(".")
        tree.setdefault(section, {})[name] = value
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_describe(error, given)) from None
    origins = {leaf.path: given[leaf.path].origin if leaf.path in given else "default" for leaf in leaves()}
    return Loaded(settings, origins)


def flag_options() -> list[click.Option]:
    """One option per setting, and `--config`: used to read flags and to print help."""
    options = [
        click.Option(
            [*leaf.flags, _parameter(leaf)],
            metavar=_metavar(leaf),
            help=f"{leaf.description} [default: {leaf.default_text}]",
        )
        for leaf in leaves()
    ]
    text = f"YAML file of settings. [default: {DEFAULT_FILE} if it exists; env {CONFIG_VARIABLE}]"
    return [click.Option(["--config"], metavar="FILE", help=text), *options]


def _parameter(leaf: Leaf) -> str:
    return leaf.path.replace(".", "__")


def _metavar(leaf: Leaf) -> str:
    text = str(leaf.field.annotation)
    if "Literal" in text:
        return "|".join(re.findall(r"'(\w+)'", text))
    for name, metavar in {
        "Path": "FILE",
        "dict": "JSON",
        "bool": "true|false",
        "float": "NUMBER",
        "int": "INTEGER",
    }.items():
        if name in text:
            return metavar
    return "TEXT"


def _from_flags(argv: Sequence[str]) -> tuple[dict[str, _Given], str | None]:
    """The flags' values, and the file that `--config` names."""
    command = click.Command("serve", params=list(flag_options()), add_help_option=False)
    try:
        values = command.make_context("lapilli", list(argv)).params
    except click.NoSuchOption as error:
        raise SettingsError(unknown_flag(error.option_name, command)) from None
    except click.UsageError as error:
        raise SettingsError(" ".join(error.format_message().split())) from None
    found = {}
    for leaf in leaves():
        value = values[_parameter(leaf)]
        if value is not None:
            flag = written_flag(leaf.flags, argv)
            found[leaf.path] = _Given(None if value == _NULL else value, f"flag {flag}")
    return found, values["config"]


def written_flag(flags: Sequence[str], argv: Sequence[str]) -> str:
    """Which of the spellings `flags` the last use in `argv` has."""
    words = [word.split("=", 1)[0] for word in reversed(argv)]
    return next((word for word in words if word in flags), flags[0])


def unknown_flag(name: str, command: click.Command) -> str:
    """The message for a flag that `command` does not have."""
    return _unknown(f"flag {name}", name, [flag for option in command.params for flag in option.opts])


class _MappingEnvSource(EnvSettingsSource):
    """pydantic-settings' reader of the environment, over a given mapping."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        super().__init__(Settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._env.items()}


def _from_env(env: Mapping[str, str]) -> dict[str, _Given]:
    known = {leaf.env_name: leaf for leaf in leaves()}
    for name, value in env.items():
        if not name.upper().startswith(ENV_PREFIX) or name in known or name in OTHER_VARIABLES:
            continue
        if _KUBERNETES_NAME.search(name) or (name.endswith("_PORT") and _KUBERNETES_PORT.match(value)):
            continue
        raise SettingsError(_unknown(f"environment variable {name}", name.upper(), known))
    tree = _MappingEnvSource({name: value for name, value in env.items() if name in known})()
    return {
        leaf.path: _Given(None if value == _NULL else value, f"env {leaf.env_name}")
        for leaf in leaves()
        if leaf.env_name in env
        for value in [_at(tree, leaf.path)]
    }


def _at(tree: Mapping[str, Any], path: str) -> Any:
    section, name = path.split(".")
    return tree[section][name]


def _from_file(name: str | None, cwd: Path) -> dict[str, _Given]:
    """Values of the named file, which must exist, or of the default file if it exists."""
    label = name or DEFAULT_FILE
    path = cwd / label
    if name is None and not path.exists():
        return {}
    document = read_yaml(path, label)
    return {path: _Given(value, label) for path, value in _flatten(document, label)}


def read_yaml(path: Path, label: str) -> Any:
    """The YAML document in a file that messages call `label`. Raises SettingsError."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise SettingsError(f"{label}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{label}: not UTF-8 text") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"{label}: not YAML ({_yaml_problem(error)})") from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which else lets a second `gateway:` silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [(key.value, key.start_mark) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for index, (key, mark) in enumerate(keys):
            if any(key == earlier for earlier, _ in keys[:index]):
                raise yaml.constructor.ConstructorError(None, None, f"key {key} appears twice", mark)
        return super().construct_mapping(node, deep)


def _yaml_problem(error: Exception) -> str:
    """The problem and its line, without the excerpt of the file that PyYAML adds: it may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "unreadable"
    return f"{problem}, line {mark.line + 1}" if mark else problem


def _flatten(document: Any, label: str) -> Iterator[tuple[str, Any]]:
    known = [leaf.path for leaf in leaves()]
    if document is None:
        return
    if not isinstance(document, dict):
        raise SettingsError(f"{label}: must hold sections ({', '.join(sections())}), not a {_kind(document)}")
    for section, content in document.items():
        if section in known:
            raise SettingsError(f"{label}: {section} must be written as a key under its section")
        if section not in sections():
            raise SettingsError(
                f"{label}: " + _unknown(f"key {section}", str(section), [*sections(), *known])
            )
        if content is None:  # a section whose keys are all commented out
            continue
        if not isinstance(content, dict):
            raise SettingsError(f"{label}: {section} must hold keys and values, not a {_kind(content)}")
        for name, value in content.items():
            path = f"{section}.{name}"
            if path not in known:
                raise SettingsError(f"{label}: " + _unknown(f"key {path}", path, known))
            yield path, value


def _kind(value: Any) -> str:
    names: dict[type, str] = {list: "list", str: "text", int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"unknown {what}" + (f"; did you mean {nearest[0]}?" if nearest else "")


def _describe(error: ValidationError, given: Mapping[str, _Given]) -> str:
    """One line: key, value, reason and source of the first wrong value, and how many more there are."""
    problems = error.errors(include_url=False)
    first = problems[0]
    path = ".".join(str(part) for part in first["loc"][:2])
    origin = given[path].origin if path in given else "default"
    reason = first["msg"].removeprefix("Value error, ")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{path} = {shown(path, first['input'])} ({origin}): {reason}{more}"
