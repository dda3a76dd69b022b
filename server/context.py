"""One request's way through the gateway: who, what, when. Made first, finished last, and never a global."""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from starlette.types import Message, Send

from auth.audit_content import Content
from auth.principal import Principal
from auth.services import Service

if TYPE_CHECKING:
    from auth.limiter import Reservation

Outcome = Literal["ok", "client_error", "server_error", "disconnected", "stream_error"]


@dataclass(slots=True, weakref_slot=True, eq=False)
class RequestContext:
    """Facts about one HTTP request. Times are `time.monotonic()` seconds, sizes are tokens."""

    method: str
    path: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    client: str | None = None
    """Its network address, a proxy's word only where the proxy is trusted (gateway.trusted_proxies)."""
    client_request_id: str | None = None
    """The caller's X-Request-Id: echoed for tracing, never the engine's id."""
    received_at: float = field(default_factory=time.monotonic)
    service: Service | None = None
    """The service whose endpoint was called; `path` is what follows the endpoint."""
    principal: Principal | None = None
    model: str | None = None
    """The served model's or adapter's name, once the engine is asked; never the client's word."""
    reservation: "Reservation | None" = None
    """What it holds of its tenant's limits; None before the door, and where limits are off."""
    priority: int = 0
    """The engine's: smaller goes first, and is preempted last."""
    stream: bool = False
    lean: bool = False
    """Whether its tokens take the lean path (server/engine/sink.py)."""
    send: Send | None = None
    """The HTTP server's own `send`, past our layers: they look at an answer's start, never at its body."""
    write: Callable[[bytes], bool] | None = None
    """Sends one SSE event at once, False when it can't; set while the answer is an open stream."""
    background: "asyncio.Future[Any] | None" = None
    """Work that goes on after the answer: the request ends with it."""
    status: int | None = None
    """HTTP status sent; None while no response has begun."""
    outcome: Outcome | None = None
    """Set where the status alone does not tell: a client that left, a stream that broke."""

    request_bytes: int = 0
    """Bytes of the request's body that were read."""
    content: Content | None = None
    """Body and answer, only for a tenant whose audit records hold them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Output tokens of all choices and prompts together."""
    longest_choice_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None

    def final_outcome(self) -> Outcome:
        """How the request ended, from what was noted and, failing that, from the HTTP status."""
        if self.outcome is not None:
            return self.outcome
        if self.status is None or self.status >= 500:
            return "server_error"
        return "client_error" if self.status >= 400 else "ok"

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in seconds, from the arrival of the request; None without a token."""
        return None if self.first_token_at is None else self.first_token_at - self.received_at

    @property
    def tpot_s(self) -> float | None:
        """Time per output token in seconds, the first one excluded; None below two tokens."""
        if self.first_token_at is None or self.last_token_at is None or self.longest_choice_tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.longest_choice_tokens - 1)


def keep_content(ctx: RequestContext, body: bytes) -> None:
    """From now on the context gathers what is answered, beside `body`."""
    ctx.content = content = Content(body)
    send = ctx.send
    assert send is not None

    async def keeping(message: Message) -> None:
        await send(message)
        content.answered(message.get("body", b""))

    ctx.send = keeping
