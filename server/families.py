"""How a model's family speaks: its tool calls, its reasoning, its chat template (configs/models/)."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from server.config_sources import SettingsError
from server.sections import EngineSettings

FOLDER = Path(__file__).parent.parent / "configs" / "models"
OFF = "none"
"""Value of `engine.tool_parser` and `engine.reasoning_parser` that turns the family's own choice off."""


class Family(BaseModel):
    """One entry of configs/models/*.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    architectures: tuple[str, ...]
    """Names as in the model's config.json."""
    model: str = ""
    """Regular expression found in the model's name, in any case; empty: every name."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    """A file beside the entry's; absent: the model's own."""

    def fits(self, architectures: Sequence[str], names: Sequence[str]) -> bool:
        """Whether the family is the one of a model with these architectures and names."""
        if not set(self.architectures) & set(architectures):
            return False
        return any(re.search(self.model, name, re.IGNORECASE) for name in names)


class Speech(BaseModel):
    """What a served model speaks: names of vLLM's parsers, and a template's text."""

    model_config = ConfigDict(frozen=True)

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None


STUB_SPEECH = Speech(tool_parser="hermes")


def speech_of(settings: EngineSettings, architectures: Sequence[str]) -> Speech:
    """What the settings say, and where they say nothing, the model's family. Raises SettingsError."""
    family = None
    if settings.kind == "vllm":
        names = (settings.public_model_name, settings.model)
        family = next((found for found in families() if found.fits(architectures, names)), None)
    found = STUB_SPEECH if settings.kind == "stub" else Speech()
    if family is not None:
        template = (FOLDER / family.chat_template).read_text() if family.chat_template else None
        found = Speech(
            tool_parser=family.tool_parser,
            reasoning_parser=family.reasoning_parser,
            chat_template=template,
        )
    return Speech(
        tool_parser=_chosen(settings.tool_parser, found.tool_parser),
        reasoning_parser=_chosen(settings.reasoning_parser, found.reasoning_parser),
        chat_template=_template(settings.chat_template) or found.chat_template,
    )


@cache
def families() -> list[Family]:
    """All families, in the order in which they are tried."""
    entries: list[Family] = []
    for file in sorted(FOLDER.glob("*.yaml")):
        try:
            entries += TypeAdapter(list[Family]).validate_python(yaml.safe_load(file.read_text()))
        except (ValidationError, yaml.YAMLError) as error:
            raise SettingsError(f"configs/models/{file.name}: {str(error).splitlines()[0]}") from None
    return entries


def _chosen(setting: str | None, default: str | None) -> str | None:
    return default if setting is None else (None if setting == OFF else setting)


def _template(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        raise SettingsError(f"engine.chat_template: {str(file)!r} is not a readable text file") from None
