"""`lapilli serve`: checks everything, opens the port, loads the engine while /health says 503."""

import asyncio
import contextlib
import importlib.util
import signal
import socket
from typing import TYPE_CHECKING

import structlog
import uvicorn
import uvloop
from sse_starlette.sse import AppStatus

from auth.store import KeyStore
from server.config import Settings
from server.config_sources import Loaded, SettingsError
from server.engine import build
from server.logs import configure_logging

if TYPE_CHECKING:
    from server.gateway import Gateway

log = structlog.get_logger()

EXIT_FAILED = 1
LISTEN_BACKLOG = 2048


def run(loaded: Loaded) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests finish.

    Raises SettingsError for what can't work, KeyStoreUnavailable and DemoModelError for what is missing;
    ends with exit code 1 when the engine does not start.
    """
    settings = loaded.settings
    configure_logging(settings.log)
    if importlib.util.find_spec("vllm") is None:
        raise SettingsError("vLLM is not installed: run ./install.sh, or pip install '.[cpu]' or '.[gpu]'")
    listener = _listen(settings.gateway.host, settings.gateway.port)
    build.prepare_environment(settings)
    if settings.engine.kind == "vllm":
        build.resolve_model(settings)  # before the slow import of vLLM: a wrong folder is told at once
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        started = runner.run(_serve(settings, listener))
    if not started:
        raise SystemExit(EXIT_FAILED)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a taken port is told before anything loads."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise SettingsError(f"gateway: can't listen on {host} port {port}: {error.strerror}") from None


async def _serve(settings: Settings, listener: socket.socket) -> bool:
    """Runs the server to its end; False when the engine did not start."""
    # Here, not above: these import vLLM, which reads the environment that `run` has just prepared.
    from metrics import batched
    from metrics.requests import RequestMetrics
    from server.app import create_app
    from server.engine.client import Engine
    from server.gateway import Gateway

    keys = KeyStore(settings.auth.database_url, refresh_s=settings.auth.refresh_s)
    await keys.open()
    metrics = RequestMetrics(settings.engine.public_model_name)
    gateway = Gateway(settings, keys, metrics, Engine(settings, metrics.gap, metrics.lag))
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(gateway),
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.gateway.keep_alive_timeout_s,
            timeout_graceful_shutdown=settings.gateway.drain_timeout_s,
        )
    )
    _quiet_signals()
    host, port = listener.getsockname()[:2]
    flushing = asyncio.create_task(batched.keep_flushing())
    starting = asyncio.create_task(_start(gateway, server, f"http://{host}:{port}"))
    try:
        await server.serve(sockets=[listener])
    finally:
        await gateway.engine.stop()
        flushing.cancel()
        starting.cancel()
        (result,) = await asyncio.gather(starting, return_exceptions=True)
        await keys.close()
    if isinstance(result, Exception):
        raise result
    return result is not False


def _quiet_signals() -> None:
    """uvicorn raises the signals it caught once more at its end; by then they have done their work.

    sse-starlette would cut all streams at the first signal; uvicorn's drain limit bounds them instead.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    AppStatus.enable_automatic_graceful_drain = False


async def _start(gateway: "Gateway", server: uvicorn.Server, url: str) -> bool:
    """Brings the engine up behind the open port; False (and the server ends) when it does not start.

    A failed self-check is no end: the server stays, not ready, and /health says why.
    """
    from server.engine.core import EngineStartError
    from server.engine.selfcheck import SelfCheckError
    from server.protocol.serving import OpenAIProtocol

    engine = gateway.engine
    key = await gateway.keys.ensure_first_key()
    if key is not None:
        print(f"First API key (shown only now): {key}", flush=True)
    try:
        llm = await engine.start()
        gateway.protocol = OpenAIProtocol(llm, gateway.settings)
        await asyncio.to_thread(gateway.protocol.warm_up)
    except SelfCheckError as error:
        log.error("not_ready", reason=str(error))
        return True
    except EngineStartError as error:
        log.error("engine_start_failed", reason=str(error))
        server.should_exit = True
        return False
    engine.become_ready()
    log.info(
        "ready", url=url, model=gateway.settings.engine.public_model_name, engine=engine.settings.engine.kind
    )
    with contextlib.suppress(OSError):
        print(_banner(url, gateway.settings.engine.public_model_name, key), flush=True)
    return True


def _banner(url: str, model: str, key: str | None) -> str:
    return f"""
Lapilli is ready: {model} on {url}

  export LAPILLI_API_KEY={key or "...  # yours; `lapilli keys create` makes another"}
  curl {url}/v1/chat/completions -H "Authorization: Bearer $LAPILLI_API_KEY" \\
    -H 'Content-Type: application/json' -d '{{"model": "{model}", "temperature": 0,
      "messages": [{{"role": "user", "content": "Name the capital of France in one sentence."}}]}}'
"""
