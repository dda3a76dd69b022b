"""What knowing the caller costs: `python -m benchmarks.auth --json`.

- `key_cache_mb_100k`: memory (MB, 10^6 bytes) that 100 000 cached keys of 1000 tenants hold in a worker, as
  Python's allocator counts it.
- `added_p50_us_memory`, `added_p50_us_redis`: microseconds that keys, limits of every kind and audit
  add to a request at the median (benchmarks/request_path.py).
- `key_check_p50_us`: median time of one check of a cached key, from the request's headers to the Principal.
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select

from auth.cache import KeyCache
from auth.database import Database
from auth.keys import new_key, parse_credentials
from auth.records import now
from auth.schema import api_keys, tenants
from auth.store import DEFAULTS, _row
from benchmarks import request_path

NUM_KEYS = 100_000
NUM_TENANTS = 1000
NUM_CHECKS = 20_000


async def _filled(database: Database, num_keys: int) -> list[str]:
    """Tenants and keys in an empty database; the keys' secrets."""
    await database.open()
    await database.upgrade()
    common = {"service_class": "standard", "weight": 1.0, "created_at": now(), "changed": 0}
    owners = [
        common | {"name": f"tenant-{number}", "limits": {"tokens_per_day": 1_000_000 + number}}
        for number in range(NUM_TENANTS)
    ]
    secrets = [new_key() for _ in range(num_keys)]
    rows = [
        _row(f"key_{number:012x}", f"tenant-{number % NUM_TENANTS}", secret,
             DEFAULTS | {"name": f"key number {number}", "limits": {"tokens_per_min": 50_000 + number % 7}})
        for number, secret in enumerate(secrets)
    ]  # fmt: skip
    async with database.writing() as connection:
        await connection.execute(insert(tenants), owners)
        await connection.execute(insert(api_keys), rows)
    return secrets


async def _warm(cache: KeyCache, database: Database) -> None:
    """What 100 000 look-ups would leave in the cache, from one query."""
    async with database.reading() as connection:
        rows = await connection.stream(select(api_keys))
        async for row in rows:
            tenant = cache._tenants.get(row.tenant) or await cache.tenant(row.tenant)
            assert tenant is not None
            cache._keep(bytes.fromhex(row.hash), cache._principal(row, tenant), None)


async def key_cache(num_keys: int = NUM_KEYS) -> dict[str, float]:
    """Memory (MB) of a cache of `num_keys` keys, and median time of a check in it (microseconds)."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite+aiosqlite:///{Path(folder) / 'keys.db'}")
        try:
            secrets = await _filled(database, num_keys)
            await _warm(KeyCache(database), database)  # code, connections, free lists: not the cache's
            cache = KeyCache(database, max_keys=num_keys, refresh_s=3600)
            gc.collect()
            tracemalloc.start()
            await _warm(cache, database)
            gc.collect()
            held_mb = tracemalloc.get_traced_memory()[0] / 1e6
            tracemalloc.stop()
            return {"mb": held_mb, "check_p50_us": await _check_us(cache, secrets)}
        finally:
            await database.close()


async def _check_us(cache: KeyCache, secrets: Sequence[str]) -> float:
    chosen = random.Random(0).choices(secrets, k=NUM_CHECKS)
    headers = [[(b"host", b"h"), (b"authorization", b"Bearer " + key.encode())] for key in chosen]
    times = []
    for header in headers:
        started = time.perf_counter()
        assert await cache.authenticate(parse_credentials(header)) is not None
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def measure() -> dict[str, Any]:
    """All figures. The request path comes first: it is the most easily disturbed."""
    added = request_path.measure()
    cache = asyncio.run(key_cache())
    return {
        **added,
        "key_cache_mb_100k": round(cache["mb"], 1),
        "key_check_p50_us": round(cache["check_p50_us"], 2),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    as_json = parser.parse_args().json
    figures = measure()
    print(json.dumps(figures) if as_json else "\n".join(f"{k:26} {v}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
