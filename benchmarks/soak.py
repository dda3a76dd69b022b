"""Half an hour of mixed traffic against one Lapilli server, then a check that nothing is left behind.

    python -m benchmarks.soak --minutes 30 --engine stub --workers 2 --json

Good requests, aborts (FIN and RST), bad input and slow readers run at a steady concurrency
(benchmarks/traffic.py). With several workers, one is killed with SIGKILL every minute; the oldest is spared,
so that one worker's memory can be followed from the start to the end. An audit collector (benchmarks/hec.py)
and the limits' Redis come and go; at the end the collector has every record, and nothing is reserved. Exit
code 1 when a criterion fails.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine
from benchmarks.servers import RunningServer, end_on_sigterm, started
from benchmarks.soak_audit import AuditTrail
from benchmarks.soak_checks import Check, Watch, all_checks, workers
from benchmarks.soak_redis import LimitStore
from benchmarks.specs import EngineOptions, Spec
from benchmarks.traffic import Seen, Sizes, Traffic
from benchmarks.wire import Target
from server.sections import DEMO_MODEL_NAME

SIZES = {
    "stub": Sizes(short_tokens=32, long_tokens=256, long_words=2000),
    "vllm": Sizes(short_tokens=12, long_tokens=48, long_words=300, context_tokens=8192),
}
CONCURRENCY = {"stub": 24, "vllm": 6}
REPORT_EVERY_S = 30.0
SPARE_SLOTS = 8
MOST_SLOTS = 256  # that the setting allows


class Soak:
    """One soak of `server`: warm-up, traffic with kills and samples, quiet, checks."""

    def __init__(
        self, server: RunningServer, args: argparse.Namespace, trail: AuditTrail, limits: LimitStore
    ) -> None:
        self._args = args
        self._trail = trail
        self._limits = limits
        self._server = server
        self._run_s = args.minutes * 60
        target = Target(server.url, server.key, server.model)
        self._traffic = Traffic(target, SIZES[args.engine], args.seed)
        self._watch = Watch(server, target, self._run_s)
        self._rng = random.Random(args.seed)

    async def run(self) -> dict[str, Any]:
        """Runs to the end and returns the report."""
        await self._watch.baseline()
        stop = asyncio.Event()
        traffic = asyncio.create_task(self._traffic.run(self._args.concurrency, stop))
        faults = [asyncio.create_task(work) for work in self._faults()]
        # Ends early when the server has ended, or when something here has failed.
        await asyncio.wait([traffic, *faults], timeout=self._run_s, return_when=asyncio.FIRST_COMPLETED)
        for fault in faults:
            fault.cancel()
        results = await asyncio.gather(*faults, return_exceptions=True)
        for error in results:
            if isinstance(error, Exception):
                raise error
        stop.set()
        await traffic
        checks = await all_checks(self._watch, self._traffic.seen)
        if self._server.alive():
            kills = len(self._traffic.seen.kills_at)
            checks.append(await self._limits.check(self._watch.canary))
            checks.append(await self._trail.check(self._server, kills, self._args.concurrency))
        return _report(self._args, self._server, self._traffic.seen, self._watch, checks)

    def _faults(self) -> tuple[Coroutine[Any, Any, None], ...]:
        collector = self._trail.keep_restarting(self._args.collector_every_s)
        store = self._limits.keep_restarting(self._args.redis_every_s, self._traffic.seen)
        return self._kill(), self._sample(), self._tell(), collector, store

    async def _kill(self) -> None:
        """Kills a worker now and then; does nothing where there are no worker processes."""
        while True:
            await asyncio.sleep(self._args.kill_every_s)
            victims = workers(self._server.root)[1:]
            if victims:
                self._traffic.seen.kills_at.append(time.monotonic())
                victim = self._rng.choice(victims)
                print(f"killing worker {victim.pid}", file=sys.stderr, flush=True)
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()

    async def _sample(self) -> None:
        while self._server.alive():
            self._watch.sample()
            await asyncio.sleep(min(10.0, self._run_s / 40))

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            seen = self._traffic.seen
            line = f"{seen.total()} requests, {seen.unexplained()} unexplained, {len(seen.kills_at)} kills"
            print(line, file=sys.stderr, flush=True)


def _report(
    args: argparse.Namespace, server: RunningServer, seen: Seen, watch: Watch, checks: list[Check]
) -> dict[str, Any]:
    return {
        "benchmark": "soak",
        "engine": args.engine,
        "workers": args.workers,
        "minutes": args.minutes,
        "concurrency": args.concurrency,
        "machine": machine.facts(),
        "requests": seen.total(),
        "ok": seen.total("ok"),
        "kills": len(seen.kills_at),
        "redis_restarts": len(seen.outages_at),
        "outcomes": seen.table(),
        "surprises": seen.surprises,
        "memory": watch.memory(),
        "processes": server.described() if server.alive() else [],
        "criteria": {check.name: {"passed": check.passed, "what": check.what} for check in checks},
        "passed": all(check.passed for check in checks),
    }


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["{requests} requests, {ok} as expected, {kills} workers killed".format(**report)]
    for kind, outcomes in report["outcomes"].items():
        lines.append(f"  {kind:24} " + ", ".join(f"{outcome} {n}" for outcome, n in outcomes.items()))
    for name, criterion in report["criteria"].items():
        lines.append(f"{'pass' if criterion['passed'] else 'FAIL'}  {name}: {criterion['what']}")
    return "\n".join(lines)


def options(args: argparse.Namespace) -> EngineOptions:
    """The server's engine, with a client slot for each worker that is to be killed (and SPARE_SLOTS more)."""
    on_gpu = bool(machine.gpus())
    dtype = "auto" if on_gpu or args.engine == "stub" else "float32"
    slots = min(MOST_SLOTS, int(args.minutes * 60 / args.kill_every_s) + SPARE_SLOTS)
    flags = ["--engine.spare_client_slots", str(slots), *args.flags]
    return EngineOptions(args.engine, "demo", DEMO_MODEL_NAME, on_gpu, dtype, lapilli_flags=flags)


def main() -> None:
    """Command line."""
    args = _parser().parse_args()
    end_on_sigterm()
    args.concurrency = args.concurrency or CONCURRENCY[args.engine]
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "soak.log"
        trail, limits = AuditTrail(Path(folder)), LimitStore(Path(folder))
        args.flags = [*args.flags, *trail.flags(), *limits.flags()]
        with closing(limits), started(Spec("lapilli", args.workers), options(args), log) as server:
            report = asyncio.run(Soak(server, args, trail, limits).run())
    print(text(report))
    if args.json:
        print(json.dumps(report))
    if not report["passed"]:
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=30.0)
    add("--engine", choices=sorted(SIZES), default="stub")
    add("--workers", type=int, default=1, help="gateway workers; above 1 they are killed in turn")
    add("--kill-every-s", type=float, default=60.0, help="seconds between two kills")
    add("--collector-every-s", type=float, default=45.0, help="seconds between rests of the audit collector")
    add("--redis-every-s", type=float, default=75.0, help="seconds between restarts of Redis")
    add("--concurrency", type=int, help="requests at a time; else 24 over the stub, 6 over the demo model")
    add("--seed", type=int, default=0)
    add("--log", type=Path, help="keep the server's log here")
    add("--json", action="store_true", help="print one JSON object as the last line")
    add("flags", nargs="*", help="further flags of `lapilli serve`, after --")
    return parser


if __name__ == "__main__":
    main()
