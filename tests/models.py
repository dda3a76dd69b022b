"""Tiny models with random weights, made in the test session: nothing is downloaded.

They have the demo model's tokenizer, so their vocabulary is real; what they say is noise, unless a grammar
forces it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

THINK = ("<think>", "</think>")
SIZE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
"""A template of Qwen3's kind: tools, and reasoning unless `enable_thinking` is false."""


def tools_model(folder: Path) -> Path:
    """A Qwen3 (dense) that can be made to call tools, with two LoRA adapters beside it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    config = Qwen3Config(vocab_size=len(tokenizer), dtype="float32", eos_token_id=2, bos_token_id=1, **SIZE)
    model = Qwen3ForCausalLM(config)
    _incline(model, tokenizer)
    model.save_pretrained(folder)
    for seed, name in enumerate(("first", "second")):
        _adapter(folder / name, seed)
    return folder


def _incline(model: Any, tokenizer: Any) -> None:
    """Makes the model close what it opens and write no blanks, or its JSON would hardly ever end.

    One dimension of the residual stream is held constant; the output layer's weights of it are biases.
    """
    import torch

    words = {index: tokenizer.decode([index]) for index in range(len(tokenizer))}
    blanks = [index for index, word in words.items() if word and not word.strip()]
    ends = [index for index, word in words.items() if word in ('"', "}", "]", '"}', '",')]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[blanks, 0] = -20.0
        model.lm_head.weight[ends, 0] = 4.0


def embedding_model(folder: Path) -> Path:
    """A Qwen3 mixture of experts, served as a model of embeddings (`runner: pooling`)."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), dtype="float32", eos_token_id=2, **SIZE, **experts)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def _tokenizer(folder: Path) -> Any:
    """The demo model's tokenizer with marks of reasoning, saved into `folder`."""
    from transformers import AutoTokenizer

    from server.demo_model import ensure_demo_model

    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model())
    tokenizer.add_tokens(list(THINK))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def _adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter of rank 4 in PEFT's format, large enough to change every answer."""
    import torch
    from safetensors.torch import save_file

    rank, hidden, out = 4, SIZE["hidden_size"], SIZE["num_attention_heads"] * SIZE["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(SIZE["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "bias": "none",
              "target_modules": ["q_proj"], "base_model_name_or_path": "base"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
