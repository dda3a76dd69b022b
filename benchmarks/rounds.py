"""Interleaved rounds: in each, every server gets the same loads in turn while the others are idle."""

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import figures, load
from benchmarks.clients import Clients
from benchmarks.servers import RunningServer

MOST_SHORT_REQUESTS = 512
PROMPTS_A_ROUND = 1_000_000
"""Distance between the request numbers of two rounds, so that no prompt comes twice to a prefix cache."""


@dataclass(frozen=True)
class Plan:
    """What is measured; `stream_counts` holds (streams at a time, requests of each stream)."""

    stream_counts: list[tuple[int, int]]
    repeats: int
    input_words: int
    output_tokens: int
    budget_s: float
    """Seconds after which no further round begins."""
    runs_file: Path | None = None
    """Gets each single run as one JSON line, as soon as it is there."""


class Rounds:
    """Measures `servers` by `plan`; `runs[server][streams]` holds each run's figures."""

    def __init__(self, servers: dict[str, RunningServer], pool: Clients, plan: Plan) -> None:
        self._servers = servers
        self._pool = pool
        self._plan = plan
        self._numbers = itertools.count(PROMPTS_A_ROUND, PROMPTS_A_ROUND)
        self.runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in servers}

    def run(self) -> None:
        """Warm-up, then all rounds; the order of the servers moves on by one from round to round."""
        ends_at = time.monotonic() + self._plan.budget_s
        names = list(self._servers)
        for server in self._alive(names):
            self._warm_up(server)
        for repeat in range(self._plan.repeats):
            for place, (streams, rounds) in enumerate(self._plan.stream_counts):
                if time.monotonic() > ends_at:
                    print(f"budget of {self._plan.budget_s} s is used up", file=sys.stderr)
                    return
                number = next(self._numbers)
                order = figures.rotated(names, repeat + place)
                for server in self._alive(order):
                    self._measure(server, number, streams, rounds)

    def _alive(self, names: list[str]) -> Iterator[RunningServer]:
        for name in names:
            server = self._servers[name]
            if server.alive():
                yield server
            else:
                print(f"{name} has ended, see {server.log}", file=sys.stderr, flush=True)

    def _warm_up(self, server: RunningServer) -> None:
        streams = max(count for count, _ in self._plan.stream_counts)
        self._load(server, 0, streams, streams, 8)

    def _measure(self, server: RunningServer, number: int, streams: int, rounds: int) -> None:
        """One load of full answers, then one of one-token answers for the cost of a request."""
        long = self._load(server, number, streams, streams * rounds, self._plan.output_tokens)
        num_short = max(streams, min(MOST_SHORT_REQUESTS, streams * rounds * 4))
        short = self._load(server, number + PROMPTS_A_ROUND // 2, streams, num_short, 1)
        long["gateway_cpu_us_per_request"] = short["gateway_cpu_us_per_request"]
        long["gateway_rss_mib"] = round(server.rss_mib())
        self.runs[server.name].setdefault(str(streams), []).append(long)
        line = json.dumps({"server": server.name, "streams": streams, **long})
        print(line, file=sys.stderr, flush=True)
        if self._plan.runs_file is not None:
            with self._plan.runs_file.open("a") as file:
                file.write(line + "\n")

    def _load(
        self, server: RunningServer, number: int, streams: int, requests: int, output_tokens: int
    ) -> dict[str, Any]:
        plan = load.Load(
            server.url,
            server.key,
            server.model,
            streams,
            requests,
            self._plan.input_words,
            output_tokens,
            first_number=number,
        )
        server.cpu_s()
        results = self._pool.run(plan)
        return figures.summary(results, server.cpu_s())

    def by_server(self) -> dict[str, dict[str, Any]]:
        """For each server its start, processes and, by stream count, the medians and all runs."""
        return {
            name: {
                "start_s": round(server.start_s, 1),
                "gateway_pss_mib": server.pss_mib(),
                "processes": server.described(),
                "streams": {
                    streams: figures.medians(runs) | {"runs": runs}
                    for streams, runs in self.runs[name].items()
                },
            }
            for name, server in self._servers.items()
        }
