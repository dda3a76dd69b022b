"""Which parsers and template a model gets: by its family, or by the settings."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from server.config import Settings
from server.config_sources import SettingsError
from server.demo_model import ensure_demo_model
from server.families import FOLDER, families, speech_of

KNOWN = {
    ("LlamaForCausalLM", "demo"): ("hermes", None),
    ("LlamaForCausalLM", "meta-llama/Llama-3.1-8B-Instruct"): ("llama3_json", None),
    ("LlamaForCausalLM", "somebody/else"): (None, None),
    ("LlamaForCausalLM", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"): (None, "deepseek_r1"),
    ("Llama4ForConditionalGeneration", "meta-llama/Llama-4-Scout-17B-16E-Instruct"): (
        "llama4_pythonic",
        None,
    ),
    ("Qwen2ForCausalLM", "Qwen/Qwen2.5-7B-Instruct"): ("hermes", None),
    ("Qwen3ForCausalLM", "Qwen/Qwen3-8B"): ("hermes", "qwen3"),
    ("Qwen3MoeForCausalLM", "Qwen/Qwen3-30B-A3B-Instruct-2507"): ("hermes", None),
    ("Qwen3MoeForCausalLM", "Qwen/Qwen3-Coder-30B-A3B-Instruct"): ("qwen3_coder", None),
    ("DeepseekV3ForCausalLM", "deepseek-ai/DeepSeek-V3.1"): ("deepseek_v31", "deepseek_v3"),
    ("DeepseekV3ForCausalLM", "deepseek-ai/DeepSeek-R1-0528"): ("deepseek_v3", "deepseek_r1"),
}


@pytest.mark.parametrize(("architecture", "model"), KNOWN)
def test_known_models(architecture: str, model: str) -> None:
    """Architecture and name decide."""
    speech = speech_of(Settings(engine={"model": model}).engine, [architecture])  # type: ignore[arg-type]
    assert (speech.tool_parser, speech.reasoning_parser) == KNOWN[architecture, model]


def test_all_names_are_vllms() -> None:
    """Every parser and template that a family names exists."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert {file.stem for file in FOLDER.glob("*.yaml")} == {"deepseek", "llama", "qwen", "smollm2"}
    for family in families():
        assert family.tool_parser in (None, *ToolParserManager.list_registered()), family.name
        assert family.reasoning_parser in (None, *ReasoningParserManager.list_registered()), family.name
        assert family.chat_template is None or (FOLDER / family.chat_template).is_file()
    assert sum(len(yaml.safe_load(file.read_text())) for file in FOLDER.glob("*.yaml")) == len(families())


def test_settings_win(tmp_path: Path) -> None:
    """A parser that is set replaces the family's, `none` turns it off, a template is read from its file."""
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages }}")
    given: Any = {"tool_parser": "none", "reasoning_parser": "qwen3", "chat_template": str(template)}
    speech = speech_of(Settings(engine=given).engine, ["LlamaForCausalLM"])
    assert (speech.tool_parser, speech.reasoning_parser) == (None, "qwen3")
    assert speech.chat_template == "{{ messages }}"
    missing = Settings(engine={"chat_template": str(tmp_path / "no.jinja")})  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="chat_template"):
        speech_of(missing.engine, ["LlamaForCausalLM"])


def test_unknown_parsers() -> None:
    """A typo is told before anything loads, with the nearest name."""
    from server.engine.speech import settle_speech

    for kind, name, near in (("tool_parser", "hermess", "hermes"), ("reasoning_parser", "qwen33", "qwen3")):
        with pytest.raises(SettingsError, match=f"engine.{kind}: .* did you mean '{near}'"):
            settle_speech(Settings(engine={kind: name}).engine, None)  # type: ignore[arg-type]


def test_the_demo_models_template_is_its_own_without_tools() -> None:
    """The golden answers depend on it: the same text, system message or not; with tools they are shown."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model())
    template = speech_of(Settings().engine, ["LlamaForCausalLM"]).chat_template
    user = {"role": "user", "content": " hi\n"}
    chats = [
        [user],
        [{"role": "system", "content": "be\nbrief "}, user, {"role": "assistant", "content": "x"}, user],
        [user, {"role": "system", "content": "late"}],
        [{"role": "assistant", "content": ""}],
    ]
    for chat in chats:
        for prompt in (True, False):
            options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt}
            own = tokenizer.apply_chat_template(chat, **options)
            assert tokenizer.apply_chat_template(chat, chat_template=template, **options) == own
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    turns = [
        user,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ok"},
    ]
    text = tokenizer.apply_chat_template(turns, tools=[{"name": "f"}], tokenize=False, chat_template=template)
    assert '<tools>\n{"name": "f"}\n</tools>' in text
    assert 'assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\nok\n</tool_response>" in text
