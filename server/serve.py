"""`lapilli serve`: checks everything, opens the ports, then hands over to the supervisor."""

import asyncio
import contextlib
import importlib.util
import json
import os
import resource
import socket
import tempfile
from pathlib import Path

import structlog
import uvloop

from auth import audit_check
from auth.database import Database
from auth.services import Services, offer_of
from auth.store import KeyStore
from server.admin_token import admin_token
from server.config import Settings
from server.config_sources import Loaded, SettingsError
from server.engine import build
from server.engine.stub_model import write_stub_model
from server.forking import start_fork_server
from server.logs import configure_logging, engine_logging
from server.tls import check_tls

log = structlog.get_logger()

LISTEN_BACKLOG = 2048
SEND_BUFFER_BYTES = 2**18
MAX_DESCRIPTORS = 2**16


def run(loaded: Loaded) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests finish.

    Raises SettingsError for what can't work, KeyStoreUnavailable and DemoModelError for what is missing;
    ends with exit code 1 when the engine does not start.
    """
    settings = loaded.settings
    configure_logging(settings.log)
    if importlib.util.find_spec("vllm") is None:
        raise SettingsError("vLLM is not installed: run ./install.sh, or pip install '.[cpu]' or '.[gpu]'")
    check_tls(settings.gateway)
    if (problem := audit_check.problem(settings.audit)) is not None:
        raise SettingsError(problem)
    _raise_descriptor_limit()
    if settings.jwt.issuer is not None and settings.jwt.audience is None:
        raise SettingsError("jwt.issuer needs jwt.audience: tokens meant for others must not be good here")
    admin_token(settings)
    services = Services(settings.auth.services_file, offer_of(settings))
    _check_limits(settings)
    listeners = _listeners(settings)
    admin = _listen("admin", settings.admin.host, settings.admin.port)
    build.prepare_environment(settings)
    with tempfile.TemporaryDirectory(prefix="lapilli-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        _log_as_we_do(settings, Path(folder))
        # Before the slow import of vLLM: a wrong folder is told at once.
        model = _model(settings, Path(folder))
        start_fork_server("server.supervisor")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_serve(settings, model, services, listeners, admin))
    if code:
        raise SystemExit(code)


def _log_as_we_do(settings: Settings, folder: Path) -> None:
    """Has vLLM's processes log as ours do: it reads the file when imported. A user's own file goes first."""
    file = folder / "vllm-logging.json"
    file.write_text(json.dumps(engine_logging(settings.log)))
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(file))


def _check_limits(settings: Settings) -> None:
    """A limit counted in each of several workers would be a wrong limit."""
    workers = settings.gateway.workers
    if settings.limits.store == "memory" and workers > 1:
        raise SettingsError(
            f"limits.store: memory counts in one worker alone, and gateway.workers is {workers}; "
            "use redis (limits.redis_url), or none to serve without limits"
        )
    if settings.limits.store == "none":
        log.warning("limits_off", reason="limits.store is none")


def _raise_descriptor_limit() -> None:
    """Each connection takes a file descriptor; the usual soft limit is 1024. Processes below inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _model(settings: Settings, folder: Path) -> str:
    """The model's folder or hub name; the stub's is written into `folder`."""
    if settings.engine.kind == "stub":
        return str(write_stub_model(folder / "stub-model", settings.stub.max_model_len))
    return build.resolve_model(settings)


def _listeners(settings: Settings) -> list[socket.socket]:
    """One listening socket on the public port for each worker; the kernel spreads connections over them."""
    gateway = settings.gateway
    first = _listen("gateway", gateway.host, gateway.port, shared=False)
    if gateway.workers == 1:
        return [first]
    port = first.getsockname()[1]
    first.close()  # it has shown that the port is nobody else's: shared listening would not
    return [_listen("gateway", gateway.host, port, shared=True) for _ in range(gateway.workers)]


def _listen(section: str, host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket, so that a taken port is told before anything loads."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(
            (host, port), family=family, backlog=LISTEN_BACKLOG, reuse_port=shared
        )
        # Connections inherit it; by itself the kernel would buffer megabytes for each slow reader.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        return listener
    except OSError as error:
        raise SettingsError(f"{section}: can't listen on {host} port {port}: {error.strerror}") from None


async def _serve(
    settings: Settings,
    model: str,
    services: Services,
    listeners: list[socket.socket],
    admin: socket.socket,
) -> int:
    """Runs the supervisor to its end; returns the exit code."""
    # Here, not above: it imports vLLM, which reads the environment that `run` has just prepared.
    from server.supervisor import Supervisor

    config = build.vllm_config(settings, model)
    key = await _first_key(settings)
    url = _url(listeners[0], tls=settings.gateway.tls_cert_file is not None)

    def ready() -> None:
        log.info(
            "ready", url=url, model=settings.engine.public_model_name, engine=settings.engine.kind,
            admin_url=_url(admin),
        )  # fmt: skip
        with contextlib.suppress(OSError):
            print(_banner(url, settings.engine.public_model_name, key), flush=True)

    return await Supervisor(settings, config, services, listeners, admin, ready).run()


async def _first_key(settings: Settings) -> str | None:
    """The first API key where it was made just now, printed at once; else None."""
    database = Database(settings.auth.database_url)
    await database.open()
    try:
        await (database.upgrade() if settings.auth.migrate else database.check())
        key = await KeyStore(database).ensure_first_key()
    finally:
        await database.close()
    if key is not None:
        print(f"First API key (shown only now): {key}", flush=True)
    return key


def _url(listener: socket.socket, *, tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{host}:{port}"


def _banner(url: str, model: str, key: str | None) -> str:
    return f"""
Lapilli is ready: {model} on {url}

  export LAPILLI_API_KEY={key or "...  # yours; `lapilli keys create` makes another"}
  curl {url}/v1/chat/completions -H "Authorization: Bearer $LAPILLI_API_KEY" \\
    -H 'Content-Type: application/json' -d '{{"model": "{model}", "temperature": 0,
      "messages": [{{"role": "user", "content": "Name the capital of France in one sentence."}}]}}'
"""
