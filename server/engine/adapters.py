"""LoRA adapters: folders that are served as models of their own (`engine.lora_modules`)."""

import json
from pathlib import Path
from typing import Any

from server.config_sources import SettingsError
from server.sections import EngineSettings

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has room for (MaxLoRARanks in vllm/config/lora.py)."""


def adapter_folders(settings: EngineSettings) -> dict[str, Path]:
    """The folder of each adapter by its name. Raises SettingsError for what is no adapter."""
    folders = {name: Path(path).expanduser().resolve() for name, path in settings.lora_modules.items()}
    for name, folder in folders.items():
        if not name or name == settings.public_model_name:
            raise SettingsError(f"engine.lora_modules: {name!r} is not a name of its own")
        _rank(name, folder)
    return folders


def adapter_args(settings: EngineSettings) -> dict[str, Any]:
    """vLLM's engine arguments for the adapters; none without adapters. Raises SettingsError."""
    folders = adapter_folders(settings)
    if not folders:
        return {}
    if settings.kind == "stub":
        raise SettingsError("engine.lora_modules: the stub engine has no adapters")
    most = max(_rank(name, folder) for name, folder in folders.items())
    if most > RANKS[-1]:
        raise SettingsError(f"engine.lora_modules: rank {most} is above {RANKS[-1]}, the most vLLM takes")
    rank = next(room for room in RANKS if room >= most)
    return {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": rank}


def _rank(name: str, folder: Path) -> int:
    where = f"engine.lora_modules: {name!r}: {str(folder)!r}"
    try:
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
    except (OSError, ValueError, TypeError, KeyError):
        raise SettingsError(f"{where} is not an adapter folder (adapter_config.json with 'r')") from None
    if type(rank) is not int or rank < 1:
        raise SettingsError(f"{where}: adapter_config.json has no valid rank 'r'")
    return rank
