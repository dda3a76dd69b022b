"""A model's speech (server/families.py) held against vLLM and the model's tokenizer."""

import difflib
from typing import Any

import structlog
from vllm.config.reasoning import ReasoningConfig
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tool_parsers import ToolParserManager

from server.config_sources import SettingsError
from server.families import OFF, Speech, speech_of
from server.sections import EngineSettings

log = structlog.get_logger()


def settle_speech(settings: EngineSettings, config: Any) -> None:
    """Checks what the settings name, and tells the engine how the model reasons. Raises SettingsError."""
    _check_name("tool_parser", settings.tool_parser, ToolParserManager)
    _check_name("reasoning_parser", settings.reasoning_parser, ReasoningParserManager)
    speech = served_speech(settings, config.model_config, cached_tokenizer_from_config(config.model_config))
    if speech.reasoning_parser is not None:
        config.structured_outputs_config.reasoning_parser = speech.reasoning_parser
        config.reasoning_config = ReasoningConfig(reasoning_parser=speech.reasoning_parser)
        config.reasoning_config.initialize_token_ids(config.model_config)


def served_speech(settings: EngineSettings, model_config: Any, tokenizer: Any) -> Speech:
    """What the model speaks here: the settings' choice, or its family's where its tokenizer knows it.

    Raises SettingsError where the settings' own choice needs tokens that the tokenizer lacks.
    """
    speech = speech_of(settings, model_config.architectures)
    if settings.kind == "stub" or model_config.runner_type != "generate":
        return speech
    changes: dict[str, None] = {}
    for kind, chosen in (
        ("tool_parser", settings.tool_parser),
        ("reasoning_parser", settings.reasoning_parser),
    ):
        name = getattr(speech, kind)
        if name is None or (reason := _misfit(kind, name, tokenizer)) is None:
            continue
        if chosen is not None:
            raise SettingsError(f"engine.{kind}: {name!r} does not fit this model's tokenizer: {reason}")
        log.warning("parser_left_out", kind=kind, name=name, reason=reason)
        changes[kind] = None
    return speech.model_copy(update=changes)


def _misfit(kind: str, name: str, tokenizer: Any) -> str | None:
    """Why the tokenizer can't carry the parser, in one line; None where it can."""
    names = {"tool_parser_name": name} if kind == "tool_parser" else {"reasoning_parser_name": name}
    try:
        ParserManager.get_parser(**names, enable_auto_tools=True, tokenizer=tokenizer)
    except TypeError as error:
        return str(error.__cause__ or error).splitlines()[0]
    return None


def _check_name(kind: str, name: str | None, manager: Any) -> None:
    if name is None or name == OFF:
        return
    known = manager.list_registered()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"engine.{kind}: vLLM has no {kind.replace('_', ' ')} {name!r}{hint}")
