"""Logging: structlog, one line an event, on stderr; the standard library's loggers go through it too."""

import logging
import sys
from typing import Any

import structlog

from server.sections import LogSettings

QUIET_LOGGERS = {
    "uvicorn.access": logging.WARNING,
    "sse_starlette": logging.WARNING,
    "aiosqlite": logging.INFO,
    "vllm.tool_parsers": logging.CRITICAL,  # a traceback for each tool call that a model has botched
    "vllm.triton_utils.importing": logging.ERROR,  # says at each start that a CPU is no GPU
}


def configure_logging(settings: LogSettings) -> None:
    """Sets up both structlog and `logging` for this process."""
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    as_json = settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    exceptions: list[Any] = [structlog.processors.format_exc_info] if as_json else []
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *exceptions,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name, quiet in QUIET_LOGGERS.items():
        logging.getLogger(name).setLevel(max(level, quiet))
