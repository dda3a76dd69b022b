"""From settings to vLLM's engine configuration, with the user's mistakes found before anything loads."""

import copy
import dataclasses
import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

from server.config import Settings
from server.config_sources import SettingsError
from server.demo_model import ensure_demo_model
from server.sections import DEMO_MODEL, EngineSettings

CPU_KV_CACHE_GIB = 2
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of vLLM's MaxLoRARanks (vllm/config/lora.py)."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")
UNSAFE_ENVIRONMENT = ("VLLM_SERVER_DEV_MODE", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION")


def resolve_model(settings: Settings) -> str:
    """The model as vLLM takes it: a checked folder, or a hub name.

    Downloads and converts the demo model where it is not cached yet. Raises SettingsError for a folder
    that holds no model and for what is neither a folder nor a hub name; DemoModelError where the demo
    model can't be had.
    """
    name = settings.engine.model
    if name == DEMO_MODEL:
        return str(ensure_demo_model())
    folder = Path(name).expanduser()
    if folder.exists():
        _check_model_folder(folder)
        return str(folder.resolve())
    if name.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(name):
        raise SettingsError(f"engine.model: {name!r} is neither a folder nor a hub name (owner/name)")
    return name


def _check_model_folder(folder: Path) -> None:
    where = f"engine.model: {str(folder)!r}"
    if not folder.is_dir():
        raise SettingsError(f"{where} is a file, a folder in Hugging Face format is needed")
    config = folder / "config.json"
    if not config.is_file():
        raise SettingsError(f"{where} is not a model folder: config.json is missing")
    try:
        if not isinstance(json.loads(config.read_text()), dict):
            raise ValueError
    except (ValueError, OSError):
        raise SettingsError(f"{where}: config.json is not a readable JSON object") from None
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise SettingsError(f"{where} holds no tokenizer ({', '.join(TOKENIZER_FILES[:2])}, ...)")


def prepare_environment(settings: Settings) -> None:
    """Sets what vLLM reads from the environment. Must run before vLLM is imported."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "DEBUG" if settings.log.level == "debug" else "WARNING",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(settings.engine.start_timeout_s))),
        # A host that may be asked for media (requests.media_domains) may not send us to another one.
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        # The gateway renders prompts on threads of its own; more of them only fight over the cores.
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    for name in UNSAFE_ENVIRONMENT:
        os.environ.pop(name, None)


def vllm_config(settings: Settings, model: str) -> Any:
    """vLLM's `VllmConfig` for `model` (folder or hub name); raises SettingsError where vLLM refuses it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    from server.engine.speech import settle_speech

    args = _engine_args(settings, model, on_cpu=current_platform.is_cpu())
    _check_extra_args(settings.engine.args, {field.name for field in dataclasses.fields(AsyncEngineArgs)})
    try:
        engine_args = AsyncEngineArgs(**(args | settings.engine.args))
        config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, TypeError, OSError, RuntimeError, AssertionError, NotImplementedError) as error:
        raise SettingsError(f"engine: vLLM refuses these settings: {_first_line(error)}") from error
    settle_speech(settings.engine, config)
    return config


def client_config(config: Any) -> Any:
    """A copy of vLLM's config for one client of a core: the core's own figures are added to it.

    The client leaves logging as it is (server/logs.py): AsyncLLM would set up vLLM's again.
    """
    config = copy.copy(config)
    config.cache_config = copy.copy(config.cache_config)
    config.logging_config = dataclasses.replace(
        config.logging_config, configure_logging=False, pylogging_config_file=None
    )
    return config


def _engine_args(settings: Settings, model: str, *, on_cpu: bool) -> dict[str, Any]:
    engine = settings.engine
    dtype = engine.dtype
    if dtype == "auto" and on_cpu and engine.model == DEMO_MODEL:
        # In bf16 near ties of the demo model flip from one CPU to the next (docs/decisions/0003).
        dtype = "float32"
    args: dict[str, Any] = {
        "model": model,
        "served_model_name": [engine.public_model_name],
        "dtype": dtype,
        "quantization": engine.quantization,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "max_model_len": engine.max_model_len,
        "enforce_eager": on_cpu if engine.enforce_eager is None else engine.enforce_eager,
        "max_num_seqs": engine.max_num_seqs,
        "scheduling_policy": "priority",  # requests of batches behind those of clients
        # An engine core keeps to the backend of its first grammar (vllm/v1/structured_output/__init__.py), so
        # "auto", which picks one for each grammar, would make answers depend on who came first.
        "structured_outputs_config": {"backend": "xgrammar"},
        # Empty would mean any host. The validator says the same, earlier and in clear words.
        "allowed_media_domains": settings.requests.media_domains or ["none.invalid"],
    }
    if engine.lora_adapters:
        args |= _lora_args(engine)
    if not on_cpu:
        args["gpu_memory_utilization"] = engine.gpu_memory_utilization
    kv_cache_gib = engine.kv_cache_memory_gib or (CPU_KV_CACHE_GIB if on_cpu else None)
    if kv_cache_gib is not None:
        args["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    return args


def _lora_args(engine: EngineSettings) -> dict[str, Any]:
    """vLLM's arguments for the adapters; raises SettingsError for a folder that holds none."""
    ranks = []
    for name, folder in engine.lora_adapters.items():
        if name == engine.public_model_name:
            raise SettingsError(f"engine.lora_adapters: {name} is the name of the model itself")
        try:
            rank = json.loads((Path(folder).expanduser() / "adapter_config.json").read_text())["r"]
            if type(rank) is not int:
                raise TypeError
        except (OSError, ValueError, KeyError, TypeError):
            raise SettingsError(f"engine.lora_adapters: {name}: no LoRA adapter in {folder}") from None
        ranks.append(rank)
    fitting = [rank for rank in LORA_RANKS if rank >= max(ranks)]
    if not fitting:
        raise SettingsError(f"engine.lora_adapters: ranks over {LORA_RANKS[-1]} are not supported")
    return {"enable_lora": True, "max_loras": len(ranks), "max_lora_rank": fitting[0]}


def _check_extra_args(extra: dict[str, Any], known: set[str]) -> None:
    for name in extra:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise SettingsError(f"engine.args: vLLM has no engine argument {name!r}{hint}")


def _first_line(error: Exception) -> str:
    """The telling part of an error: pydantic puts it in its second line, after the class's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        return re.sub(r"^Value error, |\s*\[type=.*$", "", lines[1] if len(lines) == 2 else lines[-2])
    return lines[0] if lines else type(error).__name__
