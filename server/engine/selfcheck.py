"""Numbers that can be trusted at start: known sequences are scored before the server says it is ready.

A wrong kernel, a broken weight file or a quantisation gone astray answers fluently and wrongly. So the
engine's log-probabilities are compared with those of an independent implementation (transformers in
float32, written by tools/make_golden.py), and its greedy answers with the known ones.
"""

import json
import math
from contextlib import aclosing
from pathlib import Path
from typing import Any

import structlog
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams

from server.config import Settings
from server.sections import DEMO_MODEL

log = structlog.get_logger()

DEMO_GOLDEN = Path(__file__).parent / "golden" / "smollm2-135m-instruct.json"
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "1 2 3 4 5 6 7 8 9 10",
    "def add(a, b): return a + b",
)
GREEDY_TOKENS = 8


class SelfCheckError(Exception):
    """The engine's numbers are wrong. The message says which, in one line."""


def golden_file(settings: Settings) -> Path | None:
    """The file to compare with: the one set, else the demo model's own; None where there is none.

    Quantised weights are other numbers by design, so the demo's file counts only for unquantised ones.
    """
    if settings.selfcheck.golden is not None:
        return settings.selfcheck.golden
    if settings.engine.model == DEMO_MODEL and settings.engine.quantization is None:
        return DEMO_GOLDEN
    return None


async def run_self_check(llm: Any, settings: Settings) -> None:
    """Scores and generates through `llm` (AsyncLLM); raises SelfCheckError on a mismatch.

    Without a golden file only this is checked: all log-probabilities finite, and output at all.
    """
    if "generate" not in await llm.get_supported_tasks():
        log.info("self_check_skipped", reason="the model does not generate")
        return
    path = golden_file(settings)
    if path is None:
        tokenizer = llm.renderer.get_tokenizer()
        for text in TEXTS:
            await _check_finite(llm, tokenizer.encode(text), text)
        log.info("self_check_passed", golden=None)
        return
    golden = read_golden(path)
    dtype = str(llm.model_config.dtype).removeprefix("torch.")
    tolerance = golden["tolerance_nat"]["float32" if dtype == "float32" else "16bit"]
    difference = [await _check_prompt(llm, prompt, tolerance) for prompt in golden["prompts"]]
    log.info("self_check_passed", golden=path.name, max_mean_difference_nat=max(difference), dtype=dtype)


def read_golden(path: Path) -> dict[str, Any]:
    """The golden file's content; raises SelfCheckError where it can't be read."""
    try:
        golden: dict[str, Any] = json.loads(path.read_text())
        golden["prompts"][0]["token_logprobs"][0]
        golden["tolerance_nat"]["16bit"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise SelfCheckError(f"golden file {path} can't be used: {type(error).__name__} {error}") from None
    return golden


async def _check_prompt(llm: Any, prompt: dict[str, Any], tolerance: float) -> float:
    """Mean absolute difference in nat of one golden prompt."""
    question = prompt["messages"][-1]["content"]
    sequence = prompt["prompt_token_ids"] + prompt["greedy_token_ids"]
    scored = await _score(llm, sequence, question)
    difference = mean_difference(scored, prompt["token_logprobs"])
    if not difference <= tolerance:
        raise SelfCheckError(
            f"self-check: log-probabilities of {question!r} are off by {difference:.4f} nat on average, "
            f"allowed are {tolerance}"
        )
    text = await _greedy(llm, prompt["prompt_token_ids"], len(prompt["greedy_token_ids"]))
    if text != prompt["greedy_text"]:
        raise SelfCheckError(f"self-check: {question!r} gave {text!r}, expected {prompt['greedy_text']!r}")
    return difference


def mean_difference(scored: list[float], expected: list[float]) -> float:
    """Mean absolute difference in nat; infinite where the lengths differ."""
    if len(scored) != len(expected):
        return math.inf
    return sum(abs(a - b) for a, b in zip(scored, expected, strict=True)) / len(expected)


async def _check_finite(llm: Any, token_ids: list[int], text: str) -> None:
    await _score(llm, token_ids, text)
    await _greedy(llm, token_ids, GREEDY_TOKENS)


async def _score(llm: Any, token_ids: list[int], what: str) -> list[float]:
    """Log-probability in nat of each token given those before it, from the second on; all finite."""
    params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0.0, detokenize=False)
    output = await _run(llm, token_ids, params, f"selfcheck.score.{len(token_ids)}")
    rows = output.prompt_logprobs[1:]
    scored = [row[token].logprob for row, token in zip(rows, token_ids[1:], strict=True)]
    if not all(math.isfinite(value) for value in scored):
        raise SelfCheckError(f"self-check: a log-probability of {what!r} is not finite")
    return scored


async def _greedy(llm: Any, token_ids: list[int], max_tokens: int) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    output = await _run(llm, token_ids, params, f"selfcheck.greedy.{len(token_ids)}")
    return str(output.outputs[0].text)


async def _run(llm: Any, token_ids: list[int], params: SamplingParams, request_id: str) -> Any:
    params.output_kind = RequestOutputKind.FINAL_ONLY
    prompt = TokensPrompt(prompt_token_ids=token_ids)
    async with aclosing(llm.generate(prompt, params, request_id)) as outputs:
        async for output in outputs:
            if output.finished:
                return output
    raise SelfCheckError("self-check: the engine gave no answer")
