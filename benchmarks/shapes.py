"""Model folders of a given shape without weights: a Qwen3 config beside the demo model's tokenizer."""

import json
import shutil
from pathlib import Path

VOCABULARY = 49_152
"""Of the demo model's tokenizer."""
CONTEXT_TOKENS = 8192
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "generation_config.json"),
)
SHAPES = {
    # hidden size, layers, attention heads, key-value heads, head size, intermediate size
    "qwen3-tiny": (128, 2, 4, 2, 64, 256),
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12288),
}


def config(shape: str) -> dict[str, object]:
    """The `config.json` of a shape, bf16, with its input and output embeddings tied below 8B."""
    hidden, layers, heads, kv_heads, head_dim, intermediate = SHAPES[shape]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT_TOKENS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": shape != "qwen3-8b",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def make(shape: str, tokenizer: Path, folder: Path) -> Path:
    """Writes the model folder of `shape` under `folder`; raises FileNotFoundError without a tokenizer."""
    if not (tokenizer / "tokenizer.json").is_file():
        raise FileNotFoundError(f"no tokenizer.json in {tokenizer}")
    model = folder / shape
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config(shape), indent=1))
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, model / name)
    return model
