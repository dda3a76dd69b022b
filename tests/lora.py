"""A LoRA adapter for a model folder: random weights, in PEFT's format."""

import json
from pathlib import Path
from typing import Any

RANK = 4


def write_adapter(folder: Path, config: dict[str, Any], *, scale: float = 0.5) -> Path:
    """An adapter of the query projections of a Llama with this `config.json`, strong enough to be seen."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    queries = config.get("head_dim", hidden // config["num_attention_heads"]) * config["num_attention_heads"]
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * scale
        weights[f"{name}.lora_B.weight"] = torch.randn(queries, RANK, generator=generator) * scale
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
        "bias": "none",
        "base_model_name_or_path": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
