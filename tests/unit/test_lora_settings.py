"""LoRA adapters in the settings: what vLLM is told, and mistakes found before anything loads."""

import json

import pytest

from server.config import Settings
from server.config_sources import SettingsError
from server.engine.build import _engine_args


def args(**engine):
    settings = Settings.model_validate({"engine": {"model": "owner/name"} | engine})
    return _engine_args(settings, "owner/name", on_cpu=True)


def adapter(folder, content):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(content)
    return str(folder)


def test_ranks_and_number_of_adapters(tmp_path):
    folders = {name: adapter(tmp_path / name, json.dumps({"r": r})) for name, r in (("a", 4), ("b", 20))}
    found = args(lora_adapters=folders)
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 2, 32)
    assert "enable_lora" not in args()


BAD = {
    "no folder": None,
    "not JSON": "{",
    "no rank": "{}",
    "rank of another type": '{"r": "8"}',
    "list": "[]",
    "rank too large": '{"r": 1024}',
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_mistakes_are_one_line(tmp_path, content):
    folder = str(tmp_path / "none") if content is None else adapter(tmp_path / "x", content)
    with pytest.raises(SettingsError, match=r"^engine\.lora_adapters: [^\n]+$"):
        args(lora_adapters={"x": folder})


def test_an_adapter_is_not_named_as_the_model(tmp_path):
    folder = adapter(tmp_path / "x", '{"r": 8}')
    with pytest.raises(SettingsError, match="is the name of the model itself"):
        args(lora_adapters={"owner/name": folder})
