"""What idle connections cost: memory of one gateway worker before and after thousands are opened.

    python -m benchmarks.idle --connections 2000 --json

Starts Lapilli with one worker over the stub engine. Each connection asks once, is answered and stays open.
The worker's memory is taken then, after each has asked once more (all have to be answered), and when all are
closed.
"""

import argparse
import asyncio
import json
import resource
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine
from benchmarks.processes import MIB
from benchmarks.servers import RunningServer, end_on_sigterm, started
from benchmarks.soak_checks import workers
from benchmarks.specs import EngineOptions, Spec
from benchmarks.wire import Connection, Target, connected, request
from server.sections import DEMO_MODEL_NAME

WARM_CONNECTIONS = 64
AT_A_TIME = 64
SETTLE_S = 2.0
KEEP_ALIVE_S = 3600
"""Seconds the server keeps an idle connection here: none is to end meanwhile."""

_Memory = dict[str, float]
"""Of the worker, in MiB: `rss_mib`, `pss_mib`."""


def ask_of(target: Target, kind: str) -> bytes:
    """The request of each connection: `health`, or `chat` (an answer of one token)."""
    if kind == "health":
        return request(target, "/health", b"", method="GET", keep_open=True)
    messages = [{"role": "user", "content": "How deep is the river here?"}]
    body = {"model": target.model, "messages": messages, "max_tokens": 1}
    return request(target, "/v1/chat/completions", body, keep_open=True)


async def _opened(
    stack: AsyncExitStack, target: Target, question: bytes, connections: int
) -> list[Connection]:
    """`connections` connections, each answered once, closed with `stack`."""
    opening = asyncio.Semaphore(AT_A_TIME)

    async def one() -> Connection:
        async with opening:
            connection = await stack.enter_async_context(connected(target))
            await _ask(connection, question)
            return connection

    return await asyncio.gather(*(one() for _ in range(connections)))


async def _ask(connection: Connection, question: bytes) -> None:
    await connection.send(question)
    status, _ = await connection.answer()
    if status != 200:
        raise SystemExit(f"a connection was answered {status}")


async def _measure(server: RunningServer, args: argparse.Namespace) -> dict[str, Any]:
    (worker,) = workers(server.root)
    target = Target(server.url, server.key, server.model)
    question = ask_of(target, args.request)
    async with AsyncExitStack() as stack:
        await _opened(stack, target, question, WARM_CONNECTIONS)
    before = await _memory(worker)
    async with AsyncExitStack() as stack:
        connections = await _opened(stack, target, question, args.connections)
        idle = await _memory(worker)
        for connection in connections:
            await _ask(connection, question)
        again = await _memory(worker)
    return figures(args.connections, before, idle, again, await _memory(worker))


async def _memory(worker: psutil.Process) -> _Memory:
    """Resident and proportional memory of `worker` in MiB, once it has settled."""
    await asyncio.sleep(SETTLE_S)
    info = worker.memory_full_info()
    return {"rss_mib": info.rss / MIB, "pss_mib": info.pss / MIB}


def figures(
    connections: int, before: _Memory, idle: _Memory, again: _Memory, closed: _Memory
) -> dict[str, Any]:
    """What `connections` connections add: idle after one answer each, after a second one, and once closed."""
    growth_mib = idle["rss_mib"] - before["rss_mib"]
    return {
        "connections": connections,
        "growth_rss_mib": round(growth_mib, 1),
        "growth_pss_mib": round(idle["pss_mib"] - before["pss_mib"], 1),
        "per_connection_kib": round(growth_mib * 1024 / connections, 1),
        "growth_rss_asked_again_mib": round(again["rss_mib"] - before["rss_mib"], 1),
        "growth_rss_closed_mib": round(closed["rss_mib"] - before["rss_mib"], 1),
        "worker_rss_mib": round(before["rss_mib"], 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--request", choices=["health", "chat"], default="chat", help="asked on each")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    end_on_sigterm()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    flags = ["--gateway.keep_alive_timeout_s", str(KEEP_ALIVE_S), "--stub.ttft_ms", "0"]
    options = EngineOptions("stub", "demo", DEMO_MODEL_NAME, lapilli_flags=flags)
    with (
        tempfile.TemporaryDirectory() as logs,
        started(Spec("lapilli"), options, Path(logs) / "lapilli.log") as server,
    ):
        result = {"benchmark": "idle", "request": args.request, "machine": machine.facts()}
        result |= asyncio.run(_measure(server, args))
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:22} {value}")


if __name__ == "__main__":
    main()
