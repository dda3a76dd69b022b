"""Cases O16, O19, O20, O21 of the fault list, and the HTTP edge, over the stub."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests import sse
from tests.conftest import MODEL, Server, children, poll
from tests.wire import Answer, Wire, connected

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi there"}]
BODY = {"model": MODEL, "messages": HI, "max_tokens": 2}
GOOD = json.dumps(BODY).encode()
LIMIT = 2**20
ALLOWED = "https://app.example"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def canary(stub: Server) -> Iterator[None]:
    """After each case a plain request passes and nothing is left in the engine."""
    yield
    with stub.client() as client:
        answer = client.post(CHAT, json=BODY | {"max_tokens": 1}, timeout=5)
    assert answer.status_code == 200
    poll(stub.drained, "drained")


def _refused(answer: httpx.Response | Answer, status: int, code: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status if isinstance(answer, httpx.Response) else answer.status == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]
    assert code is None or error["code"] == code
    return dict(error)


O16_FORMS = {
    "scheme in lower case": ("Authorization", "bearer KEY", 200),
    "scheme in upper case": ("Authorization", "BEARER KEY", 200),
    "two spaces": ("Authorization", "Bearer  KEY", 200),
    "trailing space": ("Authorization", "Bearer KEY ", 200),
    "x-api-key": ("X-API-Key", "KEY", 200),
    "byte E9": ("Authorization", "Bearer \xe9", 401),
    "smart quote": ("Authorization", "Bearer \u201cKEY\u201d", 401),
    "scheme alone": ("Authorization", "Bearer", 401),
    "empty token": ("Authorization", "Bearer ", 401),
    "another scheme": ("Authorization", "Basic KEY", 401),
    "no scheme": ("Authorization", "KEY", 401),
    "two tokens": ("Authorization", "Bearer KEY KEY", 401),
    "key cut": ("Authorization", "Bearer lapilli_x", 401),
    "x-api-key empty": ("X-API-Key", "", 401),
    "x-api-key with a scheme": ("X-API-Key", "Bearer KEY", 401),
    "64 kB": ("Authorization", "Bearer " + "k" * 65_536, 431),
    "1 kB": ("Authorization", "Bearer " + "k" * 1024, 401),
}


@pytest.mark.parametrize("path", ["/v1/models", CHAT])
def test_o16_spellings_of_the_authorization_header(stub: Server, path: str) -> None:
    """Good keys in any spelling that RFC 7235 allows; all else is 401 with a challenge, and never 5xx."""
    before = len(stub.text)
    for form, (name, value, status) in O16_FORMS.items():
        raw = value.replace("KEY", stub.key).encode(
            "latin-1" if value.isascii() or "\xe9" in value else "utf-8"
        )
        with connected(stub) as wire:
            lines = ("Content-Type: application/json", f"Content-Length: {len(GOOD)}") if path == CHAT else ()
            head = wire.head("POST" if path == CHAT else "GET", path, *lines, key=False)
            body = GOOD if path == CHAT else b""
            wire.send(head[:-2] + name.encode() + b": " + raw + b"\r\n\r\n" + body)
            answer = wire.answer()
        assert answer.status == status, form
        if status == 401:
            _refused(answer, 401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
    assert "Traceback" not in stub.text[before:]


def test_o16_conflicting_headers(stub: Server) -> None:
    """Two headers must hold the same key: neither the good nor the bad one wins."""
    good, bad = f"Bearer {stub.key}", "Bearer lapilli_" + "x" * 43
    table = [
        ([("Authorization", good), ("X-API-Key", stub.key)], 200),
        ([("Authorization", good), ("X-API-Key", bad[7:])], 401),
        ([("Authorization", bad), ("X-API-Key", stub.key)], 401),
        ([("Authorization", good), ("Authorization", bad)], 401),
        ([("Authorization", good), ("Authorization", good)], 401),
        ([("X-API-Key", stub.key), ("X-API-Key", stub.key)], 401),
    ]
    with httpx.Client(base_url=stub.url) as client:
        for headers, status in table:
            assert client.get("/v1/models", headers=headers).status_code == status, headers


O19_TYPES = {
    "application/json": 200,
    "application/json; charset=utf-8": 200,
    'application/json;charset="UTF-8"': 200,
    "APPLICATION/JSON": 200,
    "Application/Json ; x=y": 200,
    "application/vnd.api+json": 200,
    "application/x-www-form-urlencoded": 415,
    "text/plain": 415,
    "text/plain; application/json": 415,
    "multipart/form-data; boundary=x": 415,
    "application/jsonx": 415,
    "application/octet-stream": 415,
    "": 415,
}


def test_o19_content_types(stub: Server) -> None:
    """JSON types in any case and with parameters are served; others, and none, are 415."""
    with stub.client() as client:
        for path, body in ((CHAT, GOOD), ("/v1/completions", b'{"prompt": "hi", "max_tokens": 1}')):
            for content_type, status in O19_TYPES.items():
                headers = {"Content-Type": content_type} if content_type else {}
                answer = client.post(path, content=body, headers=headers)
                assert answer.status_code == status, content_type
                if status == 415:
                    _refused(answer, 415, "unsupported_media_type")
        assert client.post(CHAT, content=GOOD).status_code == 415  # no such header at all


def test_o19_final_slash(stub: Server) -> None:
    """A path with a final slash is no path of ours: 404, and never a redirect, behind https either."""
    with stub.client(**{"X-Forwarded-Proto": "https"}) as client:
        for method, path in (("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models")):
            answer = client.request(method, path + "/", json=BODY)
            _refused(answer, 404)
            assert "location" not in answer.headers


O19_BODIES = {
    "broken": b'{"model": "secret-marker"',
    "byte FF": b'{"messages": "secret-marker\xff"}',
    "UTF-16": '{"messages": []}'.encode("utf-16"),
    "UTF-8 with a mark": b"\xef\xbb\xbf{}",
    "empty": b"",
    "spaces": b"   ",
    "two documents": GOOD + GOOD,
    "form": b"messages=secret-marker",
    "zeros": b"\0" * 64,
    "deep": b'{"messages":' * 5000,
}


@pytest.mark.parametrize("name", O19_BODIES)
def test_o19_broken_bodies(stub: Server, name: str) -> None:
    """What is no JSON is 400 with JSON, and the body is not quoted."""
    with stub.client(**JSON) as client:
        answer = client.post(CHAT, content=O19_BODIES[name])
    _refused(answer, 400)
    assert "secret-marker" not in answer.text


def test_content_encodings(stub: Server) -> None:
    """A compressed body is refused unread: small on the wire, it could be anything in memory."""
    with stub.client(**JSON) as client:
        for encoding in ("gzip", "GZIP", "deflate", "br", "zstd", "identity, gzip"):
            answer = client.post(CHAT, content=GOOD, headers={"Content-Encoding": encoding})
            _refused(answer, 415, "unsupported_content_encoding")
            assert answer.headers["accept-encoding"] == "identity"
        assert client.post(CHAT, content=GOOD, headers={"Content-Encoding": "identity"}).status_code == 200


def _upload(wire: Wire, *, chunked: bool, size: int, declared: int | None = None) -> int:
    """Sends spaces as a body until the server answers; returns how many bytes went out before."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {declared or size}"
    wire.send(wire.head("POST", CHAT, "Content-Type: application/json", length))
    block = b" " * 2**14
    piece = b"%x\r\n%b\r\n" % (len(block), block) if chunked else block
    sent = 0
    while sent < size and not wire.readable():
        try:
            wire.send(piece)
        except OSError:
            break
        sent += len(block)
        time.sleep(0)
    return sent


@pytest.mark.parametrize("kind", ["declared", "chunked", "endless"])
def test_o20_bodies_over_the_limit(stub: Server, kind: str) -> None:
    """413 as soon as the limit is crossed, however the length is told; then the connection is closed."""
    size = 64 * LIMIT if kind == "endless" else LIMIT + 1
    with connected(stub) as wire:
        sent = _upload(wire, chunked=kind != "declared", size=size)
        answer = wire.answer()
        _refused(answer, 413, "request_too_large")
        assert answer.headers["connection"] == "close"
        assert wire.closed()
    # What lies in the kernel's buffers counts as sent, hence the second limit's worth.
    assert sent <= 1.2 * LIMIT + 6 * LIMIT


@pytest.mark.parametrize("chunked", [False, True])
def test_o20_without_a_key_no_body_is_read(stub: Server, chunked: bool) -> None:
    """401 comes before the body, and the connection is closed on the rest of it."""
    with connected(stub) as wire:
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {LIMIT + 1}"
        wire.send(wire.head("POST", CHAT, "Content-Type: application/json", length, key=False))
        answer = wire.answer()
        _refused(answer, 401, "invalid_api_key")
        assert answer.headers["connection"] == "close"
        assert wire.closed()


def test_o20_many_endless_uploads(stub: Server) -> None:
    """Ten at once: all refused, the canary is served meanwhile, the worker's memory stays flat."""
    (worker,) = children(stub.process.pid, "lapilli-worker-1")
    process = psutil.Process(worker)

    def one(_: int) -> int:
        with connected(stub) as wire:
            _upload(wire, chunked=True, size=64 * LIMIT)
            return wire.answer().status

    before = process.memory_info().rss
    with ThreadPoolExecutor(10) as pool, stub.client() as client:
        statuses = pool.map(one, range(10))
        assert client.post(CHAT, json=BODY, timeout=5).status_code == 200
        assert set(statuses) == {413}
    assert process.memory_info().rss - before < 16 * LIMIT  # of the 640 that they would send


def test_o20_content_length_that_lies(stub: Server) -> None:
    """Smaller than the body: the rest is no request. Two lengths, or a length and chunks: refused."""
    with connected(stub) as wire:
        wire.send(wire.post(CHAT, GOOD) + b"garbage garbage\r\n\r\n")
        answer = wire.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert wire.closed()
    for extra in ("Content-Length: 1", "Transfer-Encoding: chunked", "Transfer-Encoding: xchunked"):
        with connected(stub) as wire:
            wire.send(wire.post(CHAT, GOOD, extra))
            _refused(wire.answer(), 400, "invalid_http")
            assert wire.closed()


INVALID = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no version": b"GET /v1/models\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "space before colon": b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    "folded header": b"GET /health HTTP/1.1\r\nA: x\r\n y\r\n\r\n",
    "null in a header": b"GET /health HTTP/1.1\r\nA: x\0y\r\n\r\n",
    "bare length": b"POST /v1/models HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "length no number": b"POST /v1/models HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n",
    "bad chunk": b"POST /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "CONNECT": b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n",
    "path of bytes": b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_http(stub: Server, name: str) -> None:
    """400 as JSON and the connection closed; a header's section too long is 431."""
    with connected(stub) as wire:
        wire.send(INVALID[name])
        answer = wire.answer()
        assert answer.status in (400, 401, 404, 405), answer
        assert "error" in answer.json()
        assert wire.closed() or answer.status != 400


def test_headers_without_end(stub: Server) -> None:
    """431 soon after 64 KiB, whether one header is endless or there are endless headers."""
    for piece in (b"a" * 4096, b"A: " + b"b" * 4093 + b"\r\n"):
        with connected(stub) as wire:
            wire.send(b"GET /health HTTP/1.1\r\nX-Long: ")
            sent = 0
            while not wire.readable() and sent < 64 * LIMIT:
                try:
                    wire.send(piece)
                except OSError:
                    break
                sent += len(piece)
            assert wire.answer().status == 431
            assert sent < 16 * LIMIT


def test_expect_100_continue(stub: Server) -> None:
    """The body is asked for once key and type are fine, and not before."""
    with connected(stub) as wire:
        lines = ("Content-Type: application/json", f"Content-Length: {len(GOOD)}", "Expect: 100-continue")
        wire.send(wire.head("POST", CHAT, *lines))
        assert wire.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.send(GOOD)
        assert wire.answer().status == 200
    with connected(stub) as wire:
        wire.send(wire.head("POST", CHAT, *lines, key=False))
        assert wire.until(b"\r\n").startswith(b"HTTP/1.1 401")


def test_chunked_bodies(stub: Server) -> None:
    """A body in chunks, cut anywhere, with an extension and a trailer, is served as one piece."""
    with connected(stub) as wire:
        wire.send(wire.head("POST", CHAT, "Content-Type: application/json", "Transfer-Encoding: chunked"))
        for start in range(0, len(GOOD), 7):
            piece = GOOD[start : start + 7]
            wire.send(b"%x;x=y\r\n%b\r\n" % (len(piece), piece))
        wire.send(b"0\r\nX-Trailer: 1\r\n\r\n")
        whole = wire.answer()
        assert whole.status == 200
        wire.send(wire.post(CHAT, GOOD))
        assert wire.answer().json()["choices"] == whole.json()["choices"]


def test_pipelining(stub: Server) -> None:
    """Requests sent without waiting are answered in their order, a stream among them too."""
    with connected(stub) as wire:
        stream = BODY | {"stream": True, "max_tokens": 20}
        wire.send(
            wire.post(CHAT, stream)
            + wire.head("GET", "/v1/models")
            + wire.post(CHAT, BODY, "X-Request-Id: third")
            + wire.head("HEAD", "/livez")
        )
        first = wire.answer()
        assert first.headers["content-type"].startswith("text/event-stream")
        assert first.body.endswith(b"data: [DONE]\n\n")
        assert wire.answer().json()["object"] == "list"
        third = wire.answer()
        assert third.headers["x-request-id"] == "third"
        assert third.json()["object"] == "chat.completion"


@pytest.mark.parametrize("after", ["garbage", "half a request"])
def test_pipelined_rubbish_does_not_touch_a_running_answer(stub: Server, after: str) -> None:
    """The stream that is under way ends whole; then the connection is closed."""
    rubbish = b"\x00\x01\r\n\r\n" if after == "garbage" else b"POST /v1/models HTTP/1.1\r\nContent-Len"
    with connected(stub) as wire:
        wire.send(wire.post(CHAT, BODY | {"stream": True, "max_tokens": 40}) + rubbish)
        answer = wire.answer()
        assert answer.status == 200
        assert answer.body.endswith(b"data: [DONE]\n\n")
        if after == "garbage":
            assert wire.closed()


def test_a_client_that_pipelines_and_leaves(stub: Server) -> None:
    """Its running request is aborted, though another one waits behind it."""
    body = BODY | {"max_tokens": 20_000, "ignore_eos": True}
    for stream in (False, True):
        with connected(stub) as wire:
            wire.send(wire.post(CHAT, body | {"stream": stream}) + wire.post(CHAT, body))
            poll(lambda: stub.metric("vllm:num_requests_running") == 1, "running")
        poll(stub.drained, "drained")


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("split", [False, True])
def test_upgrades_are_declined(stub: Server, protocol: str, split: bool) -> None:
    """A wish for another protocol (Java's HttpClient has it) is ignored: served in HTTP/1.1, body and all."""
    wish = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAAA")
    with connected(stub) as wire:
        for _ in range(2):
            request = wire.post(CHAT, GOOD, *wish)
            head, body = request.split(b"\r\n\r\n", 1)
            wire.send(head + b"\r\n\r\n" + (b"" if split else body))
            if split:
                assert not wire.readable(0.2)
                wire.send(body)
            answer = wire.answer()
            assert answer.status == 200, answer
            assert answer.json()["usage"]["completion_tokens"] == 2


def test_methods(stub: Server) -> None:
    """HEAD is GET without its body; OPTIONS and 405 name the path's methods; neither needs a key."""
    with stub.client() as client:
        for path in ("/health", "/livez", "/readyz", "/v1/models"):
            head, get = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == get.headers["content-type"]
            assert head.headers["content-length"] == get.headers["content-length"]
    with httpx.Client(base_url=stub.url) as client:
        assert client.head("/v1/models").status_code == 401
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "TRACE", "BREW"):
            answer = client.request(method, CHAT)
            assert answer.status_code == (405 if method != "BREW" else 400)
            if answer.status_code == 405:
                assert answer.headers["allow"] == "OPTIONS, POST"
                assert method == "HEAD" or _refused(answer, 405, "method_not_allowed")
        options = client.options(CHAT)
        assert (options.status_code, options.headers["allow"]) == (204, "OPTIONS, POST")
        assert client.options("/v1/models").headers["allow"] == "GET, HEAD, OPTIONS"
        assert client.options("/nope").status_code == 404
        assert not [name for name in options.headers if name.startswith("access-control")]


def _preflight(client: httpx.Client, origin: str, method: str = "POST") -> httpx.Response:
    asked = {"Origin": origin, "Access-Control-Request-Method": method}
    return client.options(
        CHAT, headers=asked | {"Access-Control-Request-Headers": "authorization,x-stainless-os"}
    )


def test_o21_preflight(stub: Server) -> None:
    """No key, no metric, no engine; a foreign origin gets no CORS header at all."""
    counted = stub.metric("lapilli_requests_total")
    with httpx.Client(base_url=stub.url) as client:
        answer = _preflight(client, ALLOWED)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ALLOWED
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert answer.headers["access-control-max-age"] == "600"
        assert "Origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers
        assert _preflight(client, "http://localhost:3000").status_code == 200
        for origin in ("https://evil.example", "https://app.example.evil", "null", "http://app.example"):
            foreign = _preflight(client, origin)
            _refused(foreign, 400, "cors_refused")
            assert not [name for name in foreign.headers if name.startswith("access-control")]
        _refused(_preflight(client, ALLOWED, "PUT"), 400, "cors_refused")
    assert stub.metric("lapilli_requests_total") == counted


def test_o21_errors_are_readable_by_pages(stub: Server) -> None:
    """Answers and errors of every layer carry the header for an allowed origin, none for a foreign one."""
    requests: list[tuple[int, str, str, dict[str, Any]]] = [
        (200, "POST", CHAT, {"json": BODY}),
        (401, "POST", CHAT, {"json": BODY, "headers": {"Authorization": "Bearer x"}}),
        (413, "POST", CHAT, {"content": b" " * (LIMIT + 1), "headers": JSON}),
        (415, "POST", CHAT, {"content": GOOD}),
        (400, "POST", CHAT, {"content": b"{", "headers": JSON}),
        (404, "GET", "/nope", {}),
        (405, "GET", CHAT, {}),
    ]
    with stub.client() as client:
        for status, method, path, options in requests:
            for origin in (ALLOWED, "https://evil.example"):
                headers = {"Origin": origin} | options.get("headers", {})
                answer = client.request(method, path, **(options | {"headers": headers}))
                assert answer.status_code == status
                if origin == ALLOWED:
                    assert answer.headers["access-control-allow-origin"] == ALLOWED
                    exposed = answer.headers["access-control-expose-headers"].split(", ")
                    assert {"Retry-After", "X-Request-Id", "x-ratelimit-remaining-tokens"} <= set(exposed)
                else:
                    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_o21_a_stream_for_a_page(stub: Server) -> None:
    """The layer is no obstacle to a stream: same events, with the header."""
    body = BODY | {"stream": True, "max_tokens": 12}
    with stub.client() as client:
        plain = client.post(CHAT, json=body)
        page = client.post(CHAT, json=body, headers={"Origin": ALLOWED})
    assert page.headers["access-control-allow-origin"] == ALLOWED
    (events, done), (expected, _) = (sse.read(answer.text.split("\n")) for answer in (page, plain))
    assert done
    assert sse.text_of(events) == sse.text_of(expected) != ""


def test_o22_request_ids_are_for_tracing_only(stub: Server) -> None:
    """Echoed where it is short printable text; what would break a header or a log is replaced."""
    with stub.client() as client:
        for sent in ("trace-1", "a" * 128, "{}; x=1"):
            answer = client.post(CHAT, json=BODY, headers={"X-Request-Id": sent})
            assert answer.headers["x-request-id"] == sent
            assert sent not in answer.json()["id"]
        for sent in ("a" * 129, "", "\xe9", "a\tb"):
            answer = client.get("/v1/models", headers=[(b"X-Request-Id", sent.encode("latin-1"))])
            assert answer.status_code == 200
            assert answer.headers["x-request-id"] not in (sent, "")


def test_made_up_names_make_no_series(stub: Server) -> None:
    """O23: random models, users, ids and keys leave the metrics page as it was."""

    def lines() -> int:
        return len(httpx.get(f"{stub.admin_url}/metrics").text.splitlines())

    def one(number: int) -> None:
        body = BODY | {"model": f"made-up-{number}", "user": f"made-up-{number}"}
        client.post(CHAT, json=body, headers={"X-Request-Id": f"made-up-{number}"})

    with stub.client() as client:
        one(0)
        before = lines()
        for number in range(100):
            one(number)
        page = httpx.get(f"{stub.admin_url}/metrics").text
    assert "made-up" not in page
    assert lines() - before < 20
