"""A Splunk HTTP Event Collector for tests and soaks: it can fail, hang, answer slowly, lose what it has."""

import gzip
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "b0221cd8-c4b4-465a-9a3c-273e3a75aa29"


class Collector:
    """Collects events on a free loopback port. Everything that it does wrong is an attribute."""

    def __init__(self, *, keep_events: bool = True) -> None:
        """Without `keep_events` only the ids stay in memory."""
        self._keep_events = keep_events
        self.ids: list[str] = []
        """`event_id` of all events in the order of their arrival, repeats too."""
        self.events: list[dict[str, Any]] = []
        """The event objects, in the same order."""
        self.requests = 0
        self.statuses: list[tuple[int, int]] = []
        """Answers (HTTP status, HEC code) for the next deliveries, then all is well again."""
        self.hang = False
        """No answer, and nothing is kept."""
        self.swallow = 0
        """The next deliveries are kept, but their answer never comes."""
        self.delay_s = 0.0
        self.acks = True
        """Whether the token has indexer acknowledgement."""
        self.forget_acks = 0
        """The next deliveries are taken, lost, and never acknowledged."""
        self._indexed: dict[str, dict[int, bool]] = {}
        self._lock = threading.Lock()
        self._released = threading.Event()
        self.server: ThreadingHTTPServer | None = None
        """None while it is down."""
        self._port = 0

    @property
    def url(self) -> str:
        """What `audit.hec_url` is set to."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> "Collector":
        """Starts, on the same port as before; acknowledgement ids begin at 0 again."""
        self._released.clear()
        self._indexed = {}
        handler = type("Handler", (_Handler,), {"collector": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self.server.daemon_threads = True
        self._port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Ends; connections are refused then. What it has is kept."""
        self._released.set()
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def __enter__(self) -> "Collector":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_released(self) -> None:
        """Waits until the collector ends."""
        self._released.wait(60)

    def take(self, channel: str | None, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON of the answer to one delivery."""
        with self._lock:
            self.requests += 1
            if self.statuses:
                status, code = self.statuses.pop(0)
                return status, {"text": "no", "code": code}
            if self.acks and channel is None:
                return 400, {"text": "Data channel is missing", "code": 10}
            if self.forget_acks:
                self.forget_acks -= 1
                return 200, self._answer(channel, indexed=False)
            events = [json.loads(line) for line in body.splitlines()]
            self.ids += [event["event"]["event_id"] for event in events]
            self.events += events if self._keep_events else []
            return 200, self._answer(channel, indexed=True)

    def _answer(self, channel: str | None, *, indexed: bool) -> dict[str, Any]:
        success: dict[str, Any] = {"text": "Success", "code": 0}
        if not self.acks or channel is None:
            return success
        ids = self._indexed.setdefault(channel, {})
        ids[len(ids)] = indexed
        return success | {"ackId": len(ids) - 1}

    def acked(self, channel: str, body: bytes) -> dict[str, Any]:
        """The answer to a question for acknowledgements."""
        with self._lock:
            ids = self._indexed.get(channel, {})
            return {"acks": {str(n): ids.get(n, False) for n in json.loads(body)["acks"]}}


class _Handler(BaseHTTPRequestHandler):
    collector: Collector
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        collector = self.collector
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Encoding"] == "gzip"
        if self.server is not collector.server:  # it has ended, this connection with it
            self.close_connection = True
            return
        if collector.hang:
            collector.wait_released()
            self.close_connection = True
            return
        time.sleep(collector.delay_s)
        url = urlsplit(self.path)
        channel = self.headers.get("X-Splunk-Request-Channel")
        if self.headers["Authorization"] != f"Splunk {TOKEN}":
            self._reply(403, {"text": "Invalid token", "code": 4})
        elif url.path == "/services/collector/ack":
            assert parse_qs(url.query)["channel"] == [channel]
            self._reply(200, collector.acked(str(channel), gzip.decompress(body)))
        else:
            assert url.path == "/services/collector/event"
            status, answer = collector.take(channel, gzip.decompress(body))
            if collector.swallow:
                collector.swallow -= 1
                self.close_connection = True
                return
            self._reply(status, answer)

    def _reply(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
