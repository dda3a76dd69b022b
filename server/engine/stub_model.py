"""The stub's model folder: a tiny config and a tokenizer of English words, made on the spot.

vLLM's renderer, request models and detokeniser need a real tokenizer. This one is a byte-level BPE whose
merges are just these words, so any text can be encoded and each word the stub says is one token.
"""

import json
from pathlib import Path

BOS, EOS, END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = [END, BOS, EOS]
EOS_ID = 2
TEXT = """
the river moved slowly past old stone houses while people talked about weather and bread in quiet
voices near dark trees a small boat carried fresh apples from far hills to market every morning when
light came over water children ran along narrow paths with bright kites birds called out above green
fields where horses rested under tall grass evening brought cool wind soft rain and long songs of
home by warm fires
"""
WORDS = list(dict.fromkeys(TEXT.split()))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]], list[int]]:
    """Token ids, merges, and the ids of the whole words (each with its leading space)."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {token: index for index, token in enumerate([*SPECIAL, *sorted(ByteLevel.alphabet())])}
    merges: list[tuple[str, str]] = []
    words = []
    for word in WORDS:
        built = "Ġ"  # byte-level BPE's mark for a space
        for letter in word:
            if (built, letter) not in merges:
                merges.append((built, letter))
            built += letter
            vocab.setdefault(built, len(vocab))
        words.append(built)
    # The words get one run of ids at the end, so that the stub can pick one by arithmetic.
    prefixes = [token for token in vocab if token not in words]
    ordered = {token: index for index, token in enumerate([*prefixes, *words])}
    return ordered, merges, [ordered[word] for word in words]


NUM_WORDS = len(WORDS)
FIRST_WORD_ID = min(_vocabulary()[2])
VOCAB_SIZE = FIRST_WORD_ID + NUM_WORDS


def write_stub_model(folder: Path, max_model_len: int) -> Path:
    """Writes config and tokenizer into `folder` (made if missing) and returns it.

    `max_model_len` is the context length in tokens that the stub claims.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab, merges, _ = _vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_model_len,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": max_model_len,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder
