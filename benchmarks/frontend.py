"""The gateway's own cost: CPU per token and per request, TTFT, gaps.

    python -m benchmarks.frontend --engine stub --streams 64 --json

The engine core and the load generator are processes of their own, so `gateway_cpu_us_per_token` is the
gateway's CPU time (user and system) over the load, divided by the tokens it delivered. A request's own cost
(connection, authentication, parsing, rendering) is measured in a second load of one-token answers and
printed as `gateway_cpu_us_per_request`; the cost per token has it still in.
"""

import argparse
import json
import multiprocessing
import time
from typing import Any

from benchmarks import load
from benchmarks.servers import RunningServer, lapilli


def measure(server: RunningServer, plan: load.Load) -> dict[str, Any]:
    """One load against one server, the client in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        cpu, started = server.cpu_s(), time.perf_counter()
        results = pool.apply(load.run, (plan,))
        wall_s = time.perf_counter() - started
        cpu_s = server.cpu_s() - cpu
    good = [result for result in results if result.status == 200 and result.done]
    tokens = sum(result.tokens for result in good)
    ttft = [result.ttft_s for result in good if result.ttft_s is not None]
    gaps = [gap for result in good for gap in result.gaps_s]
    tpot = [(r.total_s - r.ttft_s) / (r.tokens - 1) for r in good if r.ttft_s is not None and r.tokens > 1]
    return {
        "requests": len(results),
        "ok": len(good),
        "tokens": tokens,
        "tokens_per_s": round(tokens / wall_s, 1),
        "frames_per_token": round(sum(result.frames for result in good) / max(1, tokens), 3),
        "ttft_p50_ms": load.percentile_ms(ttft, 0.5),
        "ttft_p99_ms": load.percentile_ms(ttft, 0.99),
        "gap_p50_ms": load.percentile_ms(gaps, 0.5),
        "gap_p99_ms": load.percentile_ms(gaps, 0.99),
        "tpot_p50_ms": load.percentile_ms(tpot, 0.5),
        "gateway_cpu_us_per_token": round(cpu_s * 1e6 / max(1, tokens), 1),
        "gateway_cpu_us_per_request": round(cpu_s * 1e6 / max(1, len(good)), 1),
        "gateway_cores": round(cpu_s / wall_s, 3),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the server, warms it up, measures both loads."""
    flags = ["--engine", args.engine, "--model", args.model]
    flags += ["--stub.tokens_per_s", str(args.stub_tokens_per_s)] if args.engine == "stub" else []
    with lapilli(*flags, *args.flags) as server:

        def plan(requests: int, output_tokens: int) -> load.Load:
            return load.Load(server.url, server.key, args.streams, requests, args.input_words, output_tokens)

        measure(server, plan(args.streams, 8))
        long = measure(server, plan(args.streams * args.rounds, args.output_tokens))
        short = measure(server, plan(args.streams * args.rounds * 4, 1))
        return {
            "benchmark": "frontend",
            "engine": args.engine,
            "streams": args.streams,
            "output_tokens": args.output_tokens,
            "start_s": round(server.start_s, 1),
            "gateway_rss_mib": round(server.rss_mib()),
            **long,
            "gateway_cpu_us_per_request": short["gateway_cpu_us_per_request"],
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["stub", "vllm"], default="stub")
    parser.add_argument("--model", default="demo", help="for --engine vllm")
    parser.add_argument("--streams", type=int, default=64, help="streams at a time")
    parser.add_argument("--rounds", type=int, default=1, help="requests of each stream")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--input-words", type=int, default=64)
    parser.add_argument("--stub-tokens-per-s", type=float, default=50.0, help="of each stream")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("flags", nargs="*", help="further flags of `lapilli serve`, after --")
    args = parser.parse_args()
    result = run(args)
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
