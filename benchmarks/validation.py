"""What validation costs, and what a grammar that compiles for seconds costs its neighbour.

    python -m benchmarks.validation --json

`p50_us_2kb`, `p50_us_1mb`: microseconds to read and check a chat body of that size.
`neighbour_p99_gap_ratio`: the p99 gap between tokens of a stream while schemas that compile for seconds
arrive, each another one, over that of the same stream alone; rounds of both take turns.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import orjson

from benchmarks import load, machine
from benchmarks.figures import percentile_ms
from benchmarks.servers import RunningServer, end_on_sigterm, started
from benchmarks.specs import EngineOptions, Spec
from server.sections import DEMO_MODEL, DEMO_MODEL_NAME
from server.validation import ModelLimits, Validator

DEMO_LIMITS = ModelLimits(vocab_size=49152, max_model_len=8192)
OPTIONS = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 256, "stream": True, "seed": 7, "stop": ["\n\n"]}


def _body(size: int) -> bytes:
    """A chat of four turns, `size` bytes with all else."""
    turns = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": ""}]
    turns += [{"role": "assistant", "content": "Of course."}, {"role": "user", "content": "And then?"}]
    body: dict[str, Any] = {"model": DEMO_MODEL_NAME, "messages": turns} | OPTIONS
    words = "the river moved slowly, past 'old' stone houses\n" * (size // 48 + 1)
    turns[1]["content"] = words[: size - len(orjson.dumps(body))]
    return orjson.dumps(body)


def _p50_us(work: Callable[[], object], times: int) -> float:
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        took.append(time.perf_counter() - begun)
    return round(median(took) * 1e6, 1)


def _slow_schema(number: int) -> dict[str, Any]:
    """A schema that takes xgrammar many seconds; no two are alike."""
    fields = {f"f{number}x{index}": {"type": "string", "pattern": "^[a-z]{1,500}$"} for index in range(500)}
    return {"type": "object", "properties": fields}


def _send_schemas(server: RunningServer, first: int, stop: threading.Event) -> list[int]:
    """Statuses of requests with slow schemas, one after another until `stop`."""
    statuses = []
    headers = {"Authorization": f"Bearer {server.key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as client:
        while not stop.is_set():
            form = {"json": _slow_schema(first + len(statuses))}
            messages = [{"role": "user", "content": "hi"}]
            body = {"messages": messages, "max_tokens": 4, "structured_outputs": form}
            statuses.append(client.post("/v1/chat/completions", json=body).status_code)
    return statuses


def _gaps(server: RunningServer, tokens: int) -> list[float]:
    one = load.Load(server.url, server.key, server.model, 1, 1, 16, tokens)
    (result,) = load.run(one)
    if not result.good:
        raise SystemExit(f"the stream failed: {result.error or result.status}")
    return result.gaps_s


def _neighbour(server: RunningServer, rounds: int, tokens: int) -> dict[str, Any]:
    alone: list[float] = []
    beside: list[float] = []
    statuses: list[int] = []
    _gaps(server, tokens)
    for number in range(rounds):
        alone += _gaps(server, tokens)
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(_send_schemas, server, number * 1000, stop)
            beside += _gaps(server, tokens)
            stop.set()
        statuses += sent.result()
    p99 = [percentile_ms(gaps, 0.99) or 0.0 for gaps in (alone, beside)]
    return {
        "gap_p50_ms_alone": percentile_ms(alone, 0.5),
        "gap_p50_ms_beside": percentile_ms(beside, 0.5),
        "gap_p99_ms_alone": p99[0],
        "gap_p99_ms_beside": p99[1],
        "neighbour_p99_gap_ratio": round(p99[1] / p99[0], 2),
        "schema_statuses": {str(status): statuses.count(status) for status in sorted(set(statuses))},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "stub"), default="vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400, help="length of each measured stream")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    end_on_sigterm()
    rules = Validator(DEMO_LIMITS)
    small, large = _body(2000), _body(10**6)
    result: dict[str, Any] = {"benchmark": "validation", "machine": machine.facts(), "engine": args.engine}
    result["p50_us_2kb"] = _p50_us(lambda: rules.chat(small), 5000)
    result["p50_us_1mb"] = _p50_us(lambda: rules.chat(large), 200)
    flags = ["--stub.output_tokens", str(args.tokens)] if args.engine == "stub" else []
    options = EngineOptions(args.engine, DEMO_MODEL, DEMO_MODEL_NAME, lapilli_flags=flags)
    with (
        tempfile.TemporaryDirectory() as logs,
        started(Spec("lapilli"), options, Path(logs) / "lapilli.log") as server,
    ):
        result |= _neighbour(server, args.rounds, args.tokens)
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
