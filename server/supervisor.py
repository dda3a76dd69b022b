"""The supervisor: parent of the engine core and of the gateway workers, and server of the admin port.

It holds the listening sockets, so that a connection waits while its worker is replaced; it starts the engine
again when it ends or stalls; it aborts a dead worker's requests; and its own loop answers the admin port, so
that probes never wait behind requests.
"""

import asyncio
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

import structlog
from prometheus_client import Counter, Gauge
from prometheus_client.multiprocess import mark_process_dead

from auth.audit import AuditLog
from auth.audit_check import SUPERVISOR
from auth.database import Database
from auth.services import Services
from server.admin import create_admin_app
from server.config import Settings
from server.engine.client import EngineState
from server.engine.core import EngineStartError
from server.engine.host import EngineHost
from server.engine.table import request_ids, shared_table
from server.gateway import DRAINING
from server.health import Health
from server.messages import Attach, Attached, Channel, Check, Checked, Drain, EngineLost, Hello, Serve
from server.tasks import Tasks
from server.worker import CUT_LIMIT_S, QuietServer, WorkerPlan, http_config, run

log = structlog.get_logger()

BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
STEADY_S = 600.0
"""An engine that has served this long starts with a clean record."""
GAUGE_PERIOD_S = 0.5
MAX_FAILED_WORKERS = 5
"""Workers that may die one after another without one getting as far as serving."""


class WorkerProcess:
    """One worker as the supervisor sees it."""

    def __init__(
        self, name: str, process: Any, channel: Channel, listener: socket.socket, table: Any
    ) -> None:
        self.name = name
        self.process = process
        self.channel = channel
        self.listener = listener
        self.table = table
        self.greeted = False
        self.host: EngineHost | None = None
        """The engine it has been told to attach to."""
        self.attached = False
        self.serving = False

    def detach(self) -> None:
        """Its engine is gone."""
        self.host = None
        self.attached = self.serving = False


class Supervisor:
    """Runs everything until a signal, or until the engine can't be kept up."""

    def __init__(
        self,
        settings: Settings,
        config: Any,
        services: Services,
        listeners: list[socket.socket],
        admin: socket.socket,
        on_ready: Callable[[], None],
    ) -> None:
        """`config` is vLLM's; `listeners` has one listening socket for each worker."""
        self._settings = settings
        self._config = config
        self._services = services
        self._listeners = listeners
        self._admin = admin
        self._on_ready = on_ready
        self._context: BaseContext = multiprocessing.get_context("forkserver")
        self._workers: list[WorkerProcess] = []
        self._host: EngineHost | None = None
        self._checker: WorkerProcess | None = None
        self._state = EngineState.STARTING
        self._reason: str | None = None
        self._draining = False
        self._failed_workers = 0
        self._stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks = Tasks()
        self._ready = Gauge(
            "lapilli_ready", "1 while requests can be served.", multiprocess_mode="mostrecent"
        )
        self._engine_restarts = Counter("lapilli_engine_restarts", "Engine cores started again.")
        self._worker_restarts = Counter("lapilli_worker_restarts", "Gateway workers started again.")

    def health(self) -> Health:
        """Health of the whole."""
        serving = sum(worker.serving for worker in self._workers)
        ready = self._state is EngineState.READY and serving > 0 and not self._draining
        reason = DRAINING if self._draining else self._reason
        if reason is None and not ready and self._state is EngineState.READY:
            reason = "no gateway worker serves"
        more = {"workers": {"serving": serving, "of": self._settings.gateway.workers}}
        return Health(ready, str(self._state), reason, more)

    async def run(self) -> int:
        """Runs to the end and returns the exit code."""
        self._catch_signals()
        database = Database(self._settings.auth.database_url)
        await database.open()
        audit = AuditLog(self._settings.audit, SUPERVISOR)
        audit.open()
        audit.start()
        app = create_admin_app(self._settings, self.health, database, self._services, audit)
        admin = QuietServer(http_config(app, self._settings))
        serving = asyncio.create_task(admin.serve(sockets=[self._admin]))
        for number, listener in enumerate(self._listeners, start=1):
            self._start_worker(f"worker-{number}", listener)
        self._tasks.spawn(self._services.follow())
        engine = asyncio.create_task(self._keep_engine())
        self._tasks.spawn(self._keep_gauge())
        try:
            return await self._stop
        finally:
            engine.cancel()
            self._end_workers()
            if self._host is not None:
                await self._host.stop()
            admin.should_exit = True
            await serving
            await audit.close()
            await database.close()

    async def _keep_gauge(self) -> None:
        """Writes `lapilli_ready`, also while nobody asks for health."""
        while True:
            self._ready.set(self.health().ready)
            await asyncio.sleep(GAUGE_PERIOD_S)

    def _end(self, code: int) -> None:
        if not self._stop.done():
            self._stop.set_result(code)

    # Signals and drain

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        """The first signal drains, the second ends at once."""
        if self._draining:
            log.warning("ending_at_once")
            self._end(0)
            return
        self._tasks.spawn(self._drain(self._settings.gateway.drain_timeout_s, exit_code=0))

    async def _drain(self, limit_s: float, *, exit_code: int) -> None:
        """Ends once all workers have let their requests finish and left, or are late in leaving."""
        self._draining = True
        log.info("draining", limit_s=limit_s)
        for worker in self._workers:
            worker.channel.send(Drain(limit_s))
        deadline = time.monotonic() + limit_s + 3 * CUT_LIMIT_S
        while self._workers and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._end(exit_code)

    # Workers

    def _start_worker(self, name: str, listener: socket.socket, *, replaces: bool = False) -> None:
        ours, theirs = self._context.Pipe()
        table = shared_table(self._context)
        services = self._services.table
        plan = WorkerPlan(name, self._settings, self._config, services, listener, theirs, table, replaces)
        process: Any = self._context.Process(target=run, args=(plan,), name=name)  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        worker = WorkerProcess(name, process, Channel(ours), listener, table)
        self._workers.append(worker)
        worker.channel.listen(lambda message: self._receive(worker, message), lambda: None)
        loop = asyncio.get_running_loop()
        loop.add_reader(process.sentinel, self._worker_died, worker)

    def _receive(self, worker: WorkerProcess, message: Any) -> None:
        match message:
            case Hello():
                worker.greeted = True
                self._attach(worker)
            case Attached(error=None):
                worker.attached = True
                self._admit(worker)
            case Attached(error=error):
                log.error("worker_not_attached", worker=worker.name, reason=error)
                worker.process.kill()
            case Checked(error=error):
                self._checked(error)

    def _attach(self, worker: WorkerProcess) -> None:
        """Gives a worker a client slot of the running engine, when both are there."""
        host = self._host
        runs = self._state in (EngineState.CHECKING, EngineState.READY)
        if host is None or not worker.greeted or worker.host is host or not runs:
            return
        slot = host.take_slot()
        if slot is None:
            # Without an engine the worker would leave connections on its listener waiting for ever.
            host.restart("no client slot is left for a new worker")
            return
        worker.detach()
        worker.host = host
        index, addresses = slot
        worker.channel.send(Attach(addresses, index, host.num_slots, host.core_pids))

    def _admit(self, worker: WorkerProcess) -> None:
        """Lets an attached worker serve; before the engine's numbers are checked, has them checked."""
        if self._state is EngineState.READY:
            worker.serving = True
            worker.channel.send(Serve())
            self._failed_workers = 0
        elif self._state is EngineState.CHECKING and self._checker is None:
            self._checker = worker
            worker.channel.send(Check())

    def _checked(self, error: str | None) -> None:
        self._checker = None
        if self._state is not EngineState.CHECKING:
            return
        if error is not None:
            # No end: the server stays up, not ready, and /health says why.
            log.error("not_ready", reason=error)
            self._lose_engine(error, failed=True)
            return
        self._state = EngineState.READY
        self._reason = None
        for worker in self._workers:
            if worker.attached:
                self._admit(worker)
        self._on_ready()

    def _worker_died(self, worker: WorkerProcess) -> None:
        asyncio.get_running_loop().remove_reader(worker.process.sentinel)
        worker.process.join()
        worker.channel.close()
        self._workers.remove(worker)
        mark_process_dead(worker.process.pid)  # type: ignore[no-untyped-call]
        if self._host is not None and worker.host is self._host:
            self._host.abort(request_ids(worker.table))
        if self._checker is worker:
            self._checker = None
        if self._draining or self._stop.done():
            return
        log.error("worker_died", worker=worker.name, exit_code=worker.process.exitcode)
        self._failed_workers += not worker.serving
        if self._failed_workers >= MAX_FAILED_WORKERS:
            log.critical("workers_keep_dying")
            self._end(1)
            return
        self._worker_restarts.inc()
        others_serve = self._state is EngineState.READY
        self._start_worker(worker.name, worker.listener, replaces=others_serve)

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()

    # The engine

    async def _keep_engine(self) -> None:
        """Starts the engine, and again when it ends, each time later; gives up after too many tries."""
        served_before = False
        failures = 0
        while True:
            started = time.monotonic()
            reason = await self._engine_life()
            served = self._state is EngineState.READY
            served_before = served_before or served
            failures = 1 if served and time.monotonic() - started > STEADY_S else failures + 1
            self._lose_engine(reason)
            if not served_before or failures > self._settings.engine.max_restarts:
                log.critical("engine_start_failed" if not served_before else "engine_given_up", reason=reason)
                # The engine's end has failed all requests: let the workers tell their clients.
                await self._drain(CUT_LIMIT_S, exit_code=1)
                return
            await asyncio.sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (failures - 1)))
            self._engine_restarts.inc()
            self._state = EngineState.STARTING

    async def _engine_life(self) -> str:
        """One engine core from start to end; returns what ended it."""
        host = EngineHost(self._settings, self._config)
        self._host = host
        try:
            await host.start()
        except EngineStartError as error:
            self._host = None
            return str(error)
        self._state = EngineState.CHECKING
        for worker in self._workers:
            self._attach(worker)
        try:
            return await host.ended()
        finally:
            self._host = None
            await host.stop()

    def _lose_engine(self, reason: str, *, failed: bool = False) -> None:
        self._state = EngineState.FAILED if failed else EngineState.DEAD
        self._reason = reason
        self._checker = None
        for worker in self._workers:
            worker.detach()
            worker.channel.send(EngineLost(reason, failed))
