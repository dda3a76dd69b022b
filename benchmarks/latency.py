"""Latency that the gateway adds: time to first token over HTTP against that of the bare engine client.

    python -m benchmarks.latency --rounds 5 --json

Lapilli with one worker and vLLM's AsyncLLM alone (given token ids, in a process of its own) each have a stub
engine. Each round finds the gateway's saturation with a short closed loop, then gives both, one after the
other, the same requests at the same times: independent arrivals at a share of the saturation.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import figures, machine
from benchmarks.bare import BareClient, bare_client
from benchmarks.open_loop import HttpClient, poisson, timed
from benchmarks.servers import RunningServer, end_on_sigterm, started
from benchmarks.specs import EngineOptions, Spec
from benchmarks.wire import Target
from server.config import Settings
from server.sections import DEMO_MODEL_NAME, StubSettings

PROMPTS_A_ROUND = 1_000_000
WARM_UP_S = 2.0
QUIET_S = 0.5


class Rounds:
    """All rounds over one gateway and one bare client."""

    def __init__(self, server: RunningServer, bare: BareClient, args: argparse.Namespace) -> None:
        self._bare = bare
        self._args = args
        target = Target(server.url, server.key, server.model)
        self._http = HttpClient(target, args.input_words, args.output_tokens)

    async def run(self) -> list[dict[str, Any]]:
        """One row of figures for each round."""
        try:
            await self._saturation(0, WARM_UP_S)
            self._bare.run(poisson(50.0, WARM_UP_S, 0))
            return [await self._round(number) for number in range(1, self._args.rounds + 1)]
        finally:
            self._http.close()

    async def _round(self, number: int) -> dict[str, Any]:
        first = number * PROMPTS_A_ROUND
        saturation = await self._saturation(first, self._args.saturation_s)
        rate = saturation * self._args.share
        schedule = poisson(rate, self._args.duration_s, first + PROMPTS_A_ROUND // 2)
        took: dict[str, list[float | None]] = {}
        # Either goes first in turn.
        for name in figures.rotated(["http", "bare"], number):
            await asyncio.sleep(QUIET_S)
            if name == "http":
                took[name] = await timed(schedule, self._http.first_token)
            else:
                took[name] = await asyncio.to_thread(self._bare.run, schedule)
        row = {"saturation_per_s": round(saturation, 1), "rate_per_s": round(rate, 1)} | added(**took)
        print(json.dumps(row), file=sys.stderr, flush=True)
        return row

    async def _saturation(self, first_number: int, duration_s: float) -> float:
        numbers = range(first_number, first_number + PROMPTS_A_ROUND // 2)
        return await self._http.closed_loop(self._args.streams, duration_s, numbers)


def added(http: list[float | None], bare: list[float | None]) -> dict[str, Any]:
    """Percentiles of both in milliseconds, their differences, and how many requests failed."""
    row: dict[str, Any] = {"requests": len(http)}
    for name, took in (("http", http), ("bare", bare)):
        good = [seconds for seconds in took if seconds is not None]
        row[f"{name}_failed"] = len(took) - len(good)
        for share in ("p50", "p99"):
            row[f"{name}_ttft_{share}_ms"] = figures.percentile_ms(good, int(share[1:]) / 100)
    for share in ("p50", "p99"):
        of_http, of_bare = row[f"http_ttft_{share}_ms"], row[f"bare_ttft_{share}_ms"]
        known = of_http is not None and of_bare is not None
        row[f"added_{share}_ms"] = round(of_http - of_bare, 3) if known else None
    return row


def run(args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Starts both, measures, and returns the medians and all rounds."""
    stub = {"ttft_ms": args.ttft_ms, "tokens_per_s": args.tokens_per_s}
    flags = [part for name, value in stub.items() for part in (f"--stub.{name}", str(value))]
    options = EngineOptions("stub", "demo", DEMO_MODEL_NAME, lapilli_flags=[*flags, *args.flags])
    settings = Settings(engine={"kind": "stub"}, stub=StubSettings(**stub))  # type: ignore[arg-type]
    with (
        started(Spec("lapilli"), options, logs / "lapilli.log") as server,
        bare_client(settings, args.input_words, args.output_tokens) as bare,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        rounds = runner.run(Rounds(server, bare, args).run())
    shape = {name: getattr(args, name) for name in ("share", "streams", "input_words", "output_tokens")}
    result = {"benchmark": "latency", "machine": machine.facts(), **shape, "stub": stub}
    return result | figures.medians(rounds) | {"rounds": rounds}


def main() -> None:
    """Command line."""
    args = _parser().parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as logs:
        result = run(args, Path(logs))
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        if name != "rounds":
            print(f"{name:20} {value}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--share", type=float, default=0.7, help="rate of the requests, as a share of the saturation")
    add("--streams", type=int, default=64, help="requests at a time of the closed loop")
    add("--saturation-s", type=float, default=5.0, help="seconds of the closed loop of each round")
    add("--duration-s", type=float, default=10.0, help="seconds of each load of each round")
    add("--input-words", type=int, default=94)
    add("--output-tokens", type=int, default=16)
    add("--tokens-per-s", type=float, default=100.0, help="of each stream of the stub")
    add("--ttft-ms", type=float, default=20.0, help="of the stub")
    add("--json", action="store_true", help="print one JSON object as the last line")
    add("flags", nargs="*", help="further flags of `lapilli serve`, after --")
    return parser


if __name__ == "__main__":
    main()
