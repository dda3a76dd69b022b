"""The supervisor's own line to the engine core: client slot 0.

Slot 0 is special: the core sends the statistics of steps without outputs there (vllm/v1/core/sched/
scheduler.py), so it must never be a worker that can die. Over it go the heartbeat, which has to pass through
the core's main loop to tell a stalled or deaf core from a healthy one, and the aborts of dead workers'
requests.
"""

import asyncio
import contextlib
from typing import Any

from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from server.engine import build

REPEAT_S = (1.0, 3.0)
"""A worker writes its figures every half second (metrics/batched.py)."""


class EngineLink:
    """Client 0 of an engine core. The constructor blocks until the core's greeting is there."""

    def __init__(self, config: Any, addresses: dict[str, Any], num_slots: int) -> None:
        config = build.client_config(config)
        self._client: Any = EngineCoreClient.make_async_mp_client(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=True,
            client_addresses=addresses,
            client_count=num_slots,
            client_index=0,
        )
        self._statistics = PrometheusStatLogger(config, self._client.engine_ranks_managed)
        self._reader: asyncio.Task[None] | None = None
        self._last: Any = None

    def listen(self) -> None:
        """Starts taking in statistics; call it on the event loop."""
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(EngineDeadError):
            while True:
                outputs = await self._client.get_output_async()
                if (stats := outputs.scheduler_stats) is not None:
                    self._statistics.record(stats, None, engine_idx=outputs.engine_index)
                    self._last = stats
                    if not stats.num_running_reqs and not stats.num_waiting_reqs:
                        for delay_s in REPEAT_S:
                            asyncio.get_running_loop().call_later(
                                delay_s, self._repeat, stats, outputs.engine_index
                            )

    def _repeat(self, stats: SchedulerStats, engine_idx: int) -> None:
        """Says once more that the engine is idle.

        A worker that lags may have written an earlier step's gauges over it, and an idle engine says no more.
        When the engine works again meanwhile, the next step's gauges correct this one.
        """
        if self._last is stats:
            idle = SchedulerStats(kv_cache_usage=stats.kv_cache_usage)  # no counts: they are recorded already
            self._statistics.record(idle, None, engine_idx=engine_idx)

    async def ping(self, limit_s: float) -> bool:
        """Whether the core's main loop answers within `limit_s` seconds."""
        try:
            await asyncio.wait_for(self._client.get_supported_tasks_async(), limit_s)
        except (TimeoutError, EngineDeadError):
            return False
        return True

    async def abort(self, request_ids: list[str]) -> None:
        """Ends these requests (internal ids) in the engine; ids it does not know are ignored."""
        with contextlib.suppress(EngineDeadError):
            await self._client.abort_requests_async(request_ids)

    def close(self) -> None:
        """Closes the line."""
        if self._reader is not None:
            self._reader.cancel()
        self._client.shutdown()
