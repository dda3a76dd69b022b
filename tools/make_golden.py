"""Make the demo model's golden file: greedy answers and log-probabilities by transformers in float32.

The server's self-check compares its engine with this file. Run by `make golden`; needs the `cpu` extra.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from server.demo_model import (
    DEMO_MODEL_NAME,
    SOURCE_PACKAGE,
    SOURCE_SHA256,
    SOURCE_VERSION,
    DemoModelError,
    ensure_demo_model,
)

GOLDEN = Path(__file__).parents[1] / "server" / "engine" / "golden" / f"{DEMO_MODEL_NAME.lower()}.json"
QUESTIONS = (
    "Name the capital of France in one sentence.",
    "What is the capital of Italy? Answer with one word.",
)
MIN_MARGIN_NAT = 1.0
"""Below this a greedy answer may differ from one machine to another, so it proves nothing."""
TOLERANCE_NAT = {"float32": 0.02, "16bit": 0.15}
"""Mean absolute difference of log-probabilities that the self-check accepts, in nat."""
MAX_NEW_TOKENS = 64
LOGPROB_DIGITS = 6


def greedy(model: Any, prompt_ids: list[int], end_id: int) -> tuple[list[int], list[float]]:
    """Greedy answer, its end token included, and the margin in nat between first and second at each token."""
    ids, margins = list(prompt_ids), []
    for _ in range(MAX_NEW_TOKENS):
        logits = model(torch.tensor([ids])).logits[0, -1]
        best = logits.topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
        if ids[-1] == end_id:
            return ids[len(prompt_ids) :], margins
    raise ValueError(f"no end of the answer within {MAX_NEW_TOKENS} tokens")


def token_logprobs(model: Any, ids: list[int]) -> list[float]:
    """Log-probability in nat of each token given those before it, from the second on."""
    logits = model(torch.tensor([ids])).logits[0, :-1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1))
    return [round(float(value), LOGPROB_DIGITS) for value in chosen[:, 0]]


def golden_prompt(model: Any, tokenizer: Any, question: str) -> dict[str, Any]:
    """The golden file's entry for one question; ValueError where its answer is a near tie."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer_ids, margins = greedy(model, prompt_ids, tokenizer.eos_token_id)
    answer = tokenizer.decode(answer_ids, skip_special_tokens=True)
    if min(margins) <= MIN_MARGIN_NAT:
        raise ValueError(f"margin {min(margins):.2f} nat is not above {MIN_MARGIN_NAT} (answer: {answer!r})")
    return {
        "messages": messages,
        "prompt_token_ids": prompt_ids,
        "greedy_token_ids": answer_ids,
        "greedy_text": answer,
        "token_logprobs": token_logprobs(model, prompt_ids + answer_ids),
        "min_margin_nat": round(min(margins), LOGPROB_DIGITS),
    }


def make_golden(folder: Path) -> dict[str, Any]:
    """The golden file's content, from the model in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = []
    for question in QUESTIONS:
        try:
            with torch.inference_mode():
                prompts.append(golden_prompt(model, tokenizer, question))
        except ValueError as error:
            sys.exit(f"golden: {question!r} refused: {error}")
    return {
        "model": DEMO_MODEL_NAME,
        "source": {"package": SOURCE_PACKAGE, "version": SOURCE_VERSION, "sha256": SOURCE_SHA256},
        "made_with": {name: importlib.metadata.version(name) for name in ("transformers", "torch")},
        "tolerance_nat": TOLERANCE_NAT,
        "prompts": prompts,
    }


def main() -> None:
    """Write the golden file and print each answer with its margin."""
    try:
        golden = make_golden(ensure_demo_model())
    except DemoModelError as error:
        sys.exit(f"demo model: {error}")
    GOLDEN.write_text(json.dumps(golden, indent=2) + "\n")
    for prompt in golden["prompts"]:
        print(f"{prompt['greedy_text']}  (smallest margin {prompt['min_margin_nat']:.2f} nat)")
    print(GOLDEN)


if __name__ == "__main__":
    main()
