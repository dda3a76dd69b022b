"""A gateway worker: one process with one event loop that serves HTTP on the shared port."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import setproctitle
import structlog
import uvicorn
import uvloop
from sse_starlette.sse import AppStatus

from auth.audit import AuditLog
from auth.identity import Identity
from auth.limiter import Limiter
from auth.services import Services, ServiceTable, offer_of
from metrics import batched
from metrics.limits import LimitMetrics
from metrics.requests import RequestMetrics
from server.app import create_app
from server.batches.runner import BatchRunner
from server.config import Settings
from server.config_sources import SettingsError
from server.connection import connection_class
from server.engine.client import Engine
from server.engine.core import EngineStartError
from server.engine.grammar import GrammarChecker
from server.engine.selfcheck import SelfCheckError
from server.gateway import Gateway
from server.logs import configure_logging
from server.messages import Attach, Attached, Channel, Check, Checked, Drain, EngineLost, Hello, Serve
from server.protocol.serving import OpenAIProtocol
from server.tasks import Tasks
from server.tls import Certificates

log = structlog.get_logger()

POLL_S = 0.05
CUT_LIMIT_S = 5
"""Seconds that streams cut by the drain limit have to write their error event."""


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker is started with; it travels to the new process once."""

    name: str
    settings: Settings
    config: Any
    """vLLM's VllmConfig, made and checked by the supervisor."""
    services: ServiceTable
    """The services in force; the worker follows their file from here."""
    listener: socket.socket
    channel: Connection
    table: Any
    """Shared memory of the worker's RequestTable."""
    replaces: bool
    """Whether it takes a dead worker's place: the engine serves, so it takes no request before it can."""


def run(plan: WorkerPlan) -> None:
    """Entry point of the process; returns when the supervisor says so or is gone."""
    setproctitle.setproctitle(f"lapilli-{plan.name}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
    configure_logging(plan.settings.log, sees_requests=True)
    try:
        grammars = GrammarChecker(plan.config, plan.settings.requests)  # forks: before loop and threads
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(plan, grammars))
    except Exception:
        log.critical("worker_failed", worker=plan.name, exc_info=True)
        raise SystemExit(1) from None


async def _serve(plan: WorkerPlan, grammars: GrammarChecker) -> None:
    settings = plan.settings
    identity = Identity(settings.auth, settings.jwt)
    await identity.start()
    services = Services(settings.auth.services_file, offer_of(settings), plan.services)
    metrics = RequestMetrics(settings.engine.public_model_name)
    audit = AuditLog(settings.audit, plan.name)
    await asyncio.to_thread(audit.open)
    audit.start()
    limiter = Limiter(settings.limits, LimitMetrics(metrics.registry))
    await limiter.open_store()
    engine = Engine(settings, plan.config, metrics.gap, metrics.lag, plan.table, grammars)
    gateway = Gateway(settings, identity, services, metrics, audit, engine, limiter)
    certificates = await Certificates.wait(settings.gateway)
    context = certificates.context if certificates is not None else None
    server = QuietServer(http_config(create_app(gateway), settings, context))
    runner = BatchRunner(gateway)
    worker = Worker(gateway, server, Channel(plan.channel), runner)
    tasks = Tasks()
    tasks.spawn(batched.keep_flushing())
    tasks.spawn(services.follow())
    tasks.spawn(runner.run())
    if certificates is not None:
        tasks.spawn(certificates.follow())
    try:
        await worker.greet(answer_first=not plan.replaces)
        await server.serve(sockets=[plan.listener])
    finally:
        tasks.cancel()
        batched.flush()
        worker.close()
        grammars.close()
        await audit.close()
        await limiter.close()
        await identity.close()


class QuietServer(uvicorn.Server):
    """uvicorn's server without its signal handling: when to stop is the supervisor's to say."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def http_config(app: Any, settings: Settings, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    """uvicorn's settings for the public and the admin port; with `tls` the port speaks HTTPS."""
    # Streams end by our drain limit; sse-starlette would cut them at the first sign of an end.
    AppStatus.enable_automatic_graceful_drain = False
    return uvicorn.Config(
        app,
        http=connection_class(settings.gateway.request_timeout_s, settings.gateway.read_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.gateway.keep_alive_timeout_s,
        timeout_graceful_shutdown=CUT_LIMIT_S,
        proxy_headers=bool(settings.gateway.trusted_proxies),
        forwarded_allow_ips=list(settings.gateway.trusted_proxies),
        ssl_context_factory=(lambda _config, _default: tls) if tls is not None else None,
    )


class Worker:
    """The worker's side of the conversation with the supervisor."""

    def __init__(
        self, gateway: Gateway, server: uvicorn.Server, channel: Channel, runner: BatchRunner
    ) -> None:
        self._gateway = gateway
        self._server = server
        self._channel = channel
        self._runner = runner
        self._core_pids: tuple[int, ...] = ()
        self._tasks = Tasks()
        self._told = asyncio.Event()

    async def greet(self, *, answer_first: bool) -> None:
        """Says hello; unless the port is to answer first (with 503), waits for the supervisor's word."""
        self._channel.listen(self._receive, self._orphaned)
        self._channel.send(Hello())
        if not answer_first:
            await self._told.wait()

    def close(self) -> None:
        """Lets go of engine and pipe."""
        self._tasks.cancel()
        self._channel.close()
        self._gateway.engine.close()

    def _receive(self, message: Any) -> None:
        match message:
            case Attach():
                self._core_pids = message.core_pids
                self._tasks.spawn(self._attach(message))
            case Check():
                self._tasks.spawn(self._check())
            case Serve():
                self._gateway.engine.become_ready()
                self._told.set()
            case EngineLost():
                self._gateway.engine.lost(message.reason, failed=message.failed)
                self._told.set()
            case Drain():
                self._tasks.spawn(self._drain(message.limit_s))
                self._told.set()

    async def _attach(self, message: Attach) -> None:
        try:
            llm = await self._gateway.engine.attach(message.addresses, message.index, message.count)
        except EngineStartError as error:
            self._channel.send(Attached(str(error)))
            return
        try:
            protocol = OpenAIProtocol(llm, self._gateway.settings)
            await protocol.load_adapters()
        except (SettingsError, ValueError) as error:
            self._channel.send(Attached(f"the model's parsers or adapters: {error}"))
            return
        self._gateway.protocol = protocol
        await asyncio.to_thread(protocol.warm_up)
        self._channel.send(Attached())

    async def _check(self) -> None:
        try:
            await self._gateway.engine.check()
        except SelfCheckError as error:
            self._channel.send(Checked(str(error)))
        except EngineStartError:
            pass  # the supervisor sees the engine's end by itself
        else:
            self._channel.send(Checked())

    async def _drain(self, limit_s: float) -> None:
        """Refuses new requests, waits for the running ones, ends the rest with an error event."""
        self._gateway.draining = True
        await asyncio.gather(self._until_idle(limit_s), self._runner.stop(limit_s))
        if self._gateway.metrics.in_flight:
            log.warning("drain_limit", limit_s=limit_s, requests=self._gateway.metrics.in_flight)
            self._gateway.engine.fail_requests()
            await self._until_idle(CUT_LIMIT_S)
        self._server.should_exit = True

    async def _until_idle(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._gateway.metrics.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def _orphaned(self) -> None:
        """The supervisor is gone without a word (kill -9): nobody else would end the engine core."""
        log.critical("supervisor_gone")
        for pid in self._core_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._server.should_exit = self._server.force_exit = True
        self._told.set()
