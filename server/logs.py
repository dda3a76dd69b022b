"""Logging: structlog, one line an event, on stderr; the standard library's loggers go through it too.

Every line passes auth/redaction.py. In processes that see requests, what other libraries log is shown by its
place in their code alone: vLLM's lines quote prompts, outputs and tool arguments, at all levels.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import structlog

from auth.redaction import WITHHELD, describe_exception, redact_event
from server.sections import LogSettings

QUIET_LOGGERS = {
    "uvicorn.access": logging.WARNING,
    "sse_starlette": logging.WARNING,
    "aiosqlite": logging.INFO,
    "alembic.runtime.plugins": logging.WARNING,
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
    "vllm.tool_parsers": logging.CRITICAL,  # a traceback for each tool call that a model has botched
    "vllm.triton_utils.importing": logging.ERROR,  # says at each start that a CPU is no GPU
}
OURS = frozenset({"server", "auth", "metrics", "uvicorn"})
"""Packages whose loggers say nothing of what is in a request."""
ENGINE_WITHHELD = ("vllm.v1.structured_output", "vllm.logging_utils.dump_input")
ENGINE_WITHHELD_FUNCTION = "_handle_request_preproc_error"
"""What in the engine core quotes grammars and sampling parameters."""

Event = MutableMapping[str, Any]
log = structlog.get_logger()


def configure_logging(settings: LogSettings, *, sees_requests: bool = False) -> None:
    """Sets up both structlog and `logging` for this process."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    handler = logging.StreamHandler(sys.stderr)
    guard = _Guard(_is_foreign, always=True) if sees_requests else _Guard(_never)
    handler.setFormatter(_formatter(guard, as_json=_as_json(settings)))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name, quiet in QUIET_LOGGERS.items():
        logging.getLogger(name).setLevel(max(level, quiet))
    logging.captureWarnings(True)
    if sees_requests:
        handler.addFilter(lambda record: record.levelno >= logging.WARNING or not _is_foreign(record))
        _take_over_vllm()
        _take_over_uncaught()


def engine_logging(settings: LogSettings) -> dict[str, Any]:
    """A `logging.config.dictConfig` for vLLM's own processes (VLLM_LOGGING_CONFIG_PATH): our formatter."""
    level = "DEBUG" if settings.level == "debug" else "WARNING"
    quiet = {name: {"level": logging.getLevelName(least)} for name, least in QUIET_LOGGERS.items()}
    name = "lapilli"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {name: {"()": "server.logs.engine_formatter", "as_json": _as_json(settings)}},
        "handlers": {
            name: {"class": "logging.StreamHandler", "formatter": name, "stream": "ext://sys.stderr"}
        },
        "loggers": quiet | {"vllm": {"handlers": [name], "level": level, "propagate": False}},
    }


def engine_formatter(as_json: bool) -> logging.Formatter:
    """The formatter that `engine_logging` names."""
    return _formatter(_Guard(_is_of_a_request), as_json=as_json)


def _as_json(settings: LogSettings) -> bool:
    return settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())


def _shared() -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _formatter(guard: "_Guard", *, as_json: bool) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared(),
        processors=[
            guard,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            redact_event,
            structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(),
        ],
    )


class _Guard:
    """Shows lines that may tell of a request by their place in the code, exceptions without their texts."""

    def __init__(self, withheld: Callable[[logging.LogRecord], bool], *, always: bool = False) -> None:
        """`always`: no exception's text is shown, whoever logs it."""
        self._withheld = withheld
        self._always = always

    def __call__(self, logger: Any, method: str, event: Event) -> Event:
        record: logging.LogRecord = event["_record"]
        withheld = self._withheld(record)
        if withheld:
            place = f"{'/'.join(Path(record.pathname).parts[-3:])}:{record.lineno}"
            event.update(event=WITHHELD, where=f"{place} in {record.funcName}")
        if not (withheld or self._always):
            return structlog.processors.format_exc_info(logger, method, event)
        info = event.pop("exc_info", None)
        error = sys.exception() if info is True else info[1] if isinstance(info, tuple) else info
        if isinstance(error, BaseException):
            event["exception"] = describe_exception(error)
        return event


def _never(_record: logging.LogRecord) -> bool:
    return False


def _is_foreign(record: logging.LogRecord) -> bool:
    return record.name.split(".", 1)[0] not in OURS


def _is_of_a_request(record: logging.LogRecord) -> bool:
    return record.name.startswith(ENGINE_WITHHELD) or record.funcName == ENGINE_WITHHELD_FUNCTION


def _take_over_vllm() -> None:
    """vLLM sets up its own logging when it is imported: undone where it has been, prevented where not yet."""
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    os.environ.pop("VLLM_LOGGING_CONFIG_PATH", None)
    vllm = logging.getLogger("vllm")
    vllm.handlers = []
    vllm.propagate = True
    vllm.setLevel(logging.WARNING)


def _take_over_uncaught() -> None:
    """Errors that nobody catches are logged like others; Python would print them with their texts."""

    def thread(args: threading.ExceptHookArgs) -> None:
        log.error("thread_failed", exc_info=args.exc_value)

    def unraisable(args: Any) -> None:
        log.error("error_while_cleaning_up", exc_info=args.exc_value)

    threading.excepthook = thread
    sys.unraisablehook = unraisable
