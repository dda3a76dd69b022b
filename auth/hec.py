"""Delivery of spooled audit records to a Splunk HTTP Event Collector (HEC).

At least once: a segment leaves the spool when the collector has answered for it, with indexer acknowledgement
when its index has it. The protocol: https://help.splunk.com, "HTTP Event Collector REST API endpoints" and
"About HTTP Event Collector Indexer Acknowledgment".
"""

import asyncio
import contextlib
import gzip
import json
import random
import ssl
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import structlog

from auth.spool import Segment, Spool
from metrics.audit import AuditMetrics

log = structlog.get_logger()

EVENT_PATH = "/services/collector/event"
ACK_PATH = "/services/collector/ack"
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_UNACKED = 64
"""Segments sent that wait for their acknowledgement; they wait on disk, not in memory."""
POISON_CODES = frozenset({5, 6, 12, 13, 15})
"""HEC's codes for what no later try makes better: no data, bad format, event missing or blank, fields."""
Answer = Literal["accepted", "rejected", "busy", "unclear"]
"""`busy`: surely not taken; `unclear`: it may have been."""


@dataclass(frozen=True)
class Collector:
    """Where records are delivered, and how patiently. Times are seconds."""

    url: str
    token: str
    ack: bool
    timeout_s: float
    ack_timeout_s: float
    poll_s: float
    ca_file: Path | None = None


@dataclass(frozen=True)
class _Sent:
    segment: Segment
    num_records: int
    deadline: float


class HecSender:
    """Sends a spool's segments in order, one request each, gzipped; one at a time is in memory.

    Acknowledgement ids count up in a channel, and start again when the collector does. So whenever it is open
    what the collector has (no answer, a server error, an id that went back), everything unacknowledged is
    sent again, and after an exchange of unknown end on a new channel: no old id can be taken for a new one.
    """

    def __init__(
        self,
        collector: Collector,
        spool: Spool,
        metrics: AuditMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collector = collector
        self._spool = spool
        self._metrics = metrics
        self._clock = clock
        self._channel = str(uuid.uuid4())
        self._last_ack_id = -1
        self._unacked: dict[int, _Sent] = {}
        self._ask_at = 0.0
        self._failures = 0
        self._stopping = asyncio.Event()
        self._client = httpx.AsyncClient(
            base_url=collector.url,
            headers={"Authorization": f"Splunk {collector.token}"},
            verify=ssl.create_default_context(cafile=collector.ca_file) if collector.ca_file else True,
            timeout=None,  # one limit for the whole exchange: see _post  # noqa: S113
        )

    async def run(self) -> None:
        """Delivers until `stop`."""
        while not self._stopping.is_set():
            try:
                more = await self.step()
            except OSError as error:
                log.error("audit_spool_unreadable", reason=error.strerror)
                self._metrics.failed("spool")
                more = False
            if not more:
                await self._pause(self._collector.poll_s)

    def stop(self) -> None:
        """Lets `run` end after what it is at, without waiting for the next try."""
        self._stopping.set()

    async def drain(self) -> None:
        """After `run`: delivers all there is, unless a try fails. The caller sets the limit in time."""
        while await self.step(at_once=True) or self._unacked:
            await asyncio.sleep(self._collector.poll_s if self._unacked else 0)

    async def close(self) -> None:
        """Ends the connections; what is not delivered stays in the spool."""
        await self._client.aclose()

    async def step(self, *, at_once: bool = False) -> bool:
        """Asks for acknowledgements, then sends one segment; whether there was one and it went out."""
        if self._unacked and self._clock() >= self._ask_at:
            await self._ask()
        if len(self._unacked) >= MAX_UNACKED:
            return False
        segment = await asyncio.to_thread(self._spool.take, at_once=at_once)
        return segment is not None and await self._send(segment)

    async def _send(self, segment: Segment) -> bool:
        try:
            data = await asyncio.to_thread(segment.path.read_bytes)
        except FileNotFoundError:  # somebody emptied the folder
            self._spool.done(segment)
            return True
        except OSError:
            self._spool.give_back([segment])
            raise
        num_records = data.count(b"\n")
        body = await asyncio.to_thread(gzip.compress, data, 5)
        answer, reply, wait_s = await self._post(EVENT_PATH, body)
        if answer == "accepted":
            if self._failures:
                log.info("audit_collector_back")
            self._failures = 0
            await self._accepted(segment, num_records, reply)
            return True
        if answer == "rejected":
            log.error("audit_rejected", code=reply.get("code"), num_records=num_records)
            await asyncio.to_thread(self._spool.done, segment)
            self._metrics.dropped("rejected", num_records)
            return True
        self._spool.give_back([segment])
        if answer == "unclear":
            self._start_again()
            self._new_channel()
        await self._back_off(wait_s)
        return False

    async def _accepted(self, segment: Segment, num_records: int, reply: dict[str, Any]) -> None:
        ack_id = reply.get("ackId")
        if not self._collector.ack or type(ack_id) is not int:
            # A collector whose token has no acknowledgement says nothing of ids.
            await asyncio.to_thread(self._spool.done, segment)
            self._metrics.delivered("hec", num_records)
            return
        if ack_id <= self._last_ack_id:  # the collector was started again
            self._start_again()
        self._last_ack_id = ack_id
        self._unacked[ack_id] = _Sent(segment, num_records, self._clock() + self._collector.ack_timeout_s)

    async def _ask(self) -> None:
        """What has been indexed leaves the spool; what is late is sent again."""
        self._ask_at = self._clock() + self._collector.poll_s
        body = gzip.compress(json.dumps({"acks": list(self._unacked)}).encode())
        answer, reply, _ = await self._post(ACK_PATH, body)
        acks = reply.get("acks")
        if answer == "accepted" and isinstance(acks, dict):
            for ack_id in [ack_id for ack_id in self._unacked if acks.get(str(ack_id)) is True]:
                sent = self._unacked.pop(ack_id)
                await asyncio.to_thread(self._spool.done, sent.segment)
                self._metrics.delivered("hec", sent.num_records)
        if any(sent.deadline < self._clock() for sent in self._unacked.values()):
            log.warning("audit_not_acknowledged", segments=len(self._unacked))
            self._metrics.failed("hec")
            self._start_again()
            self._new_channel()

    def _start_again(self) -> None:
        """All that is not acknowledged goes out again."""
        self._spool.give_back([sent.segment for sent in self._unacked.values()])
        self._unacked.clear()

    def _new_channel(self) -> None:
        self._channel = str(uuid.uuid4())
        self._last_ack_id = -1

    async def _back_off(self, asked_s: float) -> None:
        """Waits longer after each failure in a row, with jitter, and at least as long as was asked for."""
        self._metrics.failed("hec")
        self._failures += 1
        longest = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(self._failures, 10))
        await self._pause(max(asked_s, random.uniform(longest / 2, longest)))  # noqa: S311

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _post(self, path: str, body: bytes) -> tuple[Answer, dict[str, Any], float]:
        """The answer, its JSON object, and how many seconds the collector asks to wait."""
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        # The channel is in the header and, as the acknowledgement endpoint wants it, in the query.
        headers |= {"X-Splunk-Request-Channel": self._channel} if self._collector.ack else {}
        query = {"channel": self._channel} if self._collector.ack else {}
        try:
            async with asyncio.timeout(self._collector.timeout_s):
                response = await self._client.post(path, content=body, headers=headers, params=query)
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            self._tell(type(error).__name__, None)
            return "unclear", {}, 0.0
        try:
            reply = response.json()
        except ValueError:
            reply = None
        fields = reply if isinstance(reply, dict) else {}
        answer = _answer(response.status_code, fields)
        if answer not in ("accepted", "rejected"):
            self._tell(f"status {response.status_code}", fields.get("code"))
        return answer, fields, _retry_after(response.headers.get("retry-after", ""))

    def _tell(self, reason: str, code: Any) -> None:
        """One line when it stops working, not one for each try."""
        if self._failures == 0:
            log.warning("audit_collector_fails", reason=reason, code=code if type(code) is int else None)


def _answer(status: int, reply: dict[str, Any]) -> Answer:
    if status == 200:
        return "accepted"
    if status == 400 and reply.get("code") in POISON_CODES:
        return "rejected"
    return "busy" if status in (401, 403, 404, 408, 413, 429, 503) or status == 400 else "unclear"


def _retry_after(value: str) -> float:
    return min(float(value), MAX_BACKOFF_S) if value.isdigit() else 0.0
