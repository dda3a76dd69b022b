"""Health apart from load: how fast probes are answered while long prompts arrive all at once.

    python -m benchmarks.probes --requests 1000 --prompt-tokens 32000 --json

Starts Lapilli over the stub engine, sends all requests at the same moment, and meanwhile probes /readyz on
the admin port and on the public port, each every 10 ms over a connection that stays open.
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import machine
from benchmarks.figures import percentile_ms
from benchmarks.servers import RunningServer, end_on_sigterm, started
from benchmarks.specs import EngineOptions, Spec
from benchmarks.wire import Target, connected, request
from server.sections import DEMO_MODEL_NAME

EVERY_S = 0.01


async def _probe(url: str, stop: asyncio.Event) -> list[float]:
    """Seconds that each GET /readyz took, from when it was due to its answer's last byte."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    took: list[float] = []
    while not stop.is_set():
        due = time.perf_counter()
        writer.write(f"GET /readyz HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
        await reader.readuntil(b"ready\n")
        took.append(time.perf_counter() - due)
        await asyncio.sleep(max(0.0, due + EVERY_S - time.perf_counter()))
    writer.close()
    return took


async def _load(target: Target, requests: int, words: int) -> list[int]:
    """Statuses of `requests` requests sent together."""
    text = "river stone house bread water " * (words // 5)

    async def one(number: int) -> int:
        messages = [{"role": "user", "content": f"{number} {text}"}]
        body = {"messages": messages, "max_tokens": 4, "stream": True}
        async with connected(target) as connection:
            await connection.send(request(target, "/v1/chat/completions", body))
            status = await connection.status()
            await connection.body()
            return status

    return await asyncio.gather(*(one(number) for number in range(requests)))


def _load_process(target: Target, requests: int, words: int) -> list[int]:
    return asyncio.run(_load(target, requests, words))


async def _measure(server: RunningServer, args: argparse.Namespace) -> dict[str, Any]:
    target = Target(server.url, server.key, server.model)
    stop = asyncio.Event()
    probes = {
        "admin": asyncio.create_task(_probe(server.admin_url, stop)),
        "public": asyncio.create_task(_probe(server.url, stop)),
    }
    begun = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        job = pool.apply_async(_load_process, (target, args.requests, args.prompt_tokens))
        statuses = await asyncio.to_thread(job.get)
    load_s = time.perf_counter() - begun
    stop.set()
    result: dict[str, Any] = {"load_s": round(load_s, 1)}
    result["statuses"] = {str(status): statuses.count(status) for status in sorted(set(statuses))}
    for port, task in probes.items():
        took = await task
        result[port] = {
            "probes": len(took),
            **{f"p{share * 100:g}_ms": percentile_ms(took, share) for share in (0.5, 0.99, 0.999, 1.0)},
        }
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompt-tokens", type=int, default=32_000)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    end_on_sigterm()
    flags = ["--stub.max_model_len", str(args.prompt_tokens * 2), "--stub.tokens_per_s", "50"]
    options = EngineOptions("stub", "demo", DEMO_MODEL_NAME, lapilli_flags=flags)
    with (
        tempfile.TemporaryDirectory() as logs,
        started(Spec("lapilli"), options, Path(logs) / "lapilli.log") as server,
    ):
        result = {"benchmark": "probes", "machine": machine.facts(), **asyncio.run(_measure(server, args))}
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:10} {value}")


if __name__ == "__main__":
    main()
