"""The one tree of settings: names, types, bounds, defaults, meaning.

Its sections are in sections.py, auth_sections.py and audit_sections.py; loading is in config_sources.py.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from server.audit_sections import AuditSettings
from server.auth_sections import AuthSettings, JwtSettings, LimitsSettings, state_defaults
from server.sections import (
    AdminSettings,
    BatchSettings,
    EngineSettings,
    GatewaySettings,
    LogSettings,
    RequestSettings,
    SelfCheckSettings,
    StubSettings,
)

ENV_PREFIX = "LAPILLI_"
ENV_DELIMITER = "__"

SHORT_FLAGS = {
    "gateway.host": "--host",
    "gateway.port": "--port",
    "gateway.workers": "--workers",
    "engine.kind": "--engine",
    "engine.model": "--model",
    "engine.served_model_name": "--served-model-name",
    "engine.dtype": "--dtype",
    "engine.quantization": "--quantization",
    "engine.tensor_parallel_size": "--tp-size",
    "engine.max_model_len": "--max-model-len",
    "log.level": "--log-level",
}
"""Leaves with a second, short flag."""


class Settings(BaseSettings):
    """All settings. `Settings()` is the defaults; `config_sources.load_settings` adds the other sources."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_DELIMITER,
        # Values stay text until the tree validates them, so that every source has the same error messages.
        enable_decoding=False,
    )

    gateway: GatewaySettings = GatewaySettings()
    admin: AdminSettings = AdminSettings()
    engine: EngineSettings = EngineSettings()
    selfcheck: SelfCheckSettings = SelfCheckSettings()
    requests: RequestSettings = RequestSettings()
    batch: BatchSettings = BatchSettings()
    stub: StubSettings = StubSettings()
    auth: AuthSettings = Field(default_factory=AuthSettings)
    jwt: JwtSettings = JwtSettings()
    limits: LimitsSettings = LimitsSettings()
    audit: AuditSettings = Field(default_factory=AuditSettings)
    log: LogSettings = LogSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: config_sources merges the sources, to know each value's origin."""
        return (init_settings,)


@dataclass(frozen=True)
class Leaf:
    """One setting: its dotted path (`gateway.port`) and what the tree says about it."""

    path: str
    field: FieldInfo

    @property
    def env_name(self) -> str:
        """`LAPILLI_GATEWAY__PORT`."""
        return ENV_PREFIX + self.path.replace(".", ENV_DELIMITER).upper()

    @property
    def flags(self) -> list[str]:
        """`--gateway.port`, and the short form where there is one."""
        return [f"--{self.path}", *([SHORT_FLAGS[self.path]] if self.path in SHORT_FLAGS else [])]

    @property
    def default_text(self) -> str:
        """The default as YAML and documents write it."""
        varying = state_defaults({"XDG_STATE_HOME": "/<user state folder>"})
        if self.path in varying:
            return str(varying[self.path]).replace("/<", "<", 1)
        return json.dumps(self.field.default)

    @property
    def description(self) -> str:
        """One sentence with the unit."""
        return self.field.description or ""


def sections() -> dict[str, type[BaseModel]]:
    """The sections of the tree by name, in order."""
    return {
        name: field.annotation
        for name, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def leaves() -> Iterator[Leaf]:
    """Every setting, in the order of the tree."""
    for section, model in sections().items():
        for name, field in model.model_fields.items():
            yield Leaf(f"{section}.{name}", field)


SECRETS = frozenset({"admin.token", "audit.hec_token"})
"""Leaves whose values are never shown."""
_SECRET_NAME = re.compile(r"token|secret|passw|api_?key", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://[^:@/]*):.*@")


def shown(path: str, value: Any) -> str:
    """`value` as text for people; URL passwords and secret-looking `engine.args` become `***`."""
    if value is not None and path in SECRETS:
        return "***"
    if path == "engine.args":
        return json.dumps(_masked(value), default=str) if isinstance(value, dict) else "***"
    text = str(value) if isinstance(value, str | Path) else json.dumps(value, default=str)
    return _URL_PASSWORD.sub(r"\1:***@", text)


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "***" if _SECRET_NAME.search(str(k)) else _masked(v) for k, v in value.items()}
    return [_masked(item) for item in value] if isinstance(value, list) else value
