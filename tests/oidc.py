"""An OpenID Connect issuer in the test's own process: real keys, real HTTP, and a log of what was asked."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa


def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    """A fresh RSA key."""
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


def jwk(private: Any, kid: str, **more: Any) -> dict[str, Any]:
    """The public half as a JWK."""
    kinds: dict[type, Any] = {
        rsa.RSAPrivateKey: jwt.algorithms.RSAAlgorithm,
        ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm,
        ed25519.Ed25519PrivateKey: jwt.algorithms.OKPAlgorithm,
    }
    algorithm = next(found for kind, found in kinds.items() if isinstance(private, kind))
    return {**algorithm.to_jwk(private.public_key(), as_dict=True), "kid": kid, "use": "sig", **more}


class Issuer:
    """What it serves may be changed at any time."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = []
        self.asked: list[str] = []
        """Paths of all requests."""
        self.status = 200
        self.body: bytes | None = None
        """Served instead of the keys."""
        self.hold = threading.Event()
        """Answers wait until it is set."""
        self.hold.set()
        self.url = ""

    @property
    def fetches(self) -> int:
        """How often the keys were fetched."""
        return self.asked.count("/jwks")

    def answer(self, path: str) -> bytes:
        """The body for a path."""
        if path == "/.well-known/openid-configuration":
            return json.dumps({"issuer": self.url, "jwks_uri": self.url + "/jwks"}).encode()
        return self.body if self.body is not None else json.dumps({"keys": self.keys}).encode()


@contextmanager
def running_issuer() -> Iterator[Issuer]:
    """An issuer on a free loopback port."""
    issuer = Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.asked.append(self.path)
            issuer.hold.wait(10)
            body = issuer.answer(self.path)
            self.send_response(issuer.status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        issuer.hold.set()
        server.shutdown()
        server.server_close()
