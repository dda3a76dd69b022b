"""Whether the engine can be given a grammar: asked of a process apart, before the request is sent.

vLLM checks grammars on the event loop (vllm/sampling_params.py), where one slow regular expression stops all
streams for seconds, and its engine core finds the rest out when it compiles them.
"""

import asyncio
import contextlib
import hashlib
import http
import multiprocessing
from collections import OrderedDict
from typing import Any

import orjson
import structlog
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from server.engine import grammar_process
from server.sections import RequestSettings

log = structlog.get_logger()

MAX_REMEMBERED = 1024
"""Grammars whose answer is kept: clients send the same few again and again."""
MAX_WAITING = 32
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")

Answer = dict[str, Any]


class GrammarRefused(VLLMValidationError):
    """A grammar that is not taken; `message` is for the client."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, parameter=param)
        self.message = message


class GrammarUnavailable(GracefulHTTPError):
    """Grammars can't be tried at the moment: 503."""

    def __init__(self, message: str) -> None:
        super().__init__(message, http.HTTPStatus.SERVICE_UNAVAILABLE)


class GrammarChecker:
    """Asks the grammar process, one grammar at a time, and remembers its answers.

    To be made while the process has one thread and no event loop: it forks. Only a replacement for a process
    that ended is started afresh, which takes some seconds.
    """

    def __init__(self, config: Any, settings: RequestSettings) -> None:
        self._config = config
        self._timeout_s = settings.grammar_timeout_s
        self._answers: OrderedDict[bytes, asyncio.Future[Answer]] = OrderedDict()
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._start("fork")

    def _start(self, method: str) -> None:
        context: Any = multiprocessing.get_context(method)
        self._connection, theirs = context.Pipe()
        args = (theirs, self._config, self._timeout_s)
        self._process = context.Process(target=grammar_process.run, args=args, name="grammar", daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id of the grammar process."""
        return int(self._process.pid)

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.kill()

    async def check(self, params: StructuredOutputsParams | None, param: str = "tools") -> None:
        """Leaves `params` as vLLM's own check would; raises GrammarRefused, naming the body's field `param`.

        GrammarUnavailable: too many wait, or the process can't be started.
        """
        if params is None or params.all_constraints_none():
            return
        answer = await self._answer({name: getattr(params, name) for name in (*CONSTRAINTS, *OPTIONS)})
        if "fault" in answer:
            log.error("grammar_check_failed", exception=answer["fault"])
        if "refused" in answer:
            raise GrammarRefused(f"The grammar of '{param}' is not accepted: {answer['refused']}.", param)
        for name, value in answer["fields"].items():
            setattr(params, name, value)

    async def _answer(self, fields: dict[str, Any]) -> Answer:
        job = orjson.dumps({name: value for name, value in fields.items() if value})
        key = hashlib.sha256(job).digest()
        future = self._answers.get(key)
        if future is None:
            if self._waiting >= MAX_WAITING:
                raise GrammarUnavailable("Too many grammars wait to be compiled.")
            # A task of its own: a client that leaves must not take the answer away from the pipe half read.
            future = asyncio.ensure_future(self._ask(job))
            self._answers[key] = future
            future.add_done_callback(lambda done: self._forget_failed(key, done))
            if len(self._answers) > MAX_REMEMBERED:
                self._answers.popitem(last=False)
        else:
            self._answers.move_to_end(key)
        return await asyncio.shield(future)

    def _forget_failed(self, key: bytes, future: "asyncio.Future[Answer]") -> None:
        if future.cancelled() or future.exception() is not None:
            self._answers.pop(key, None)

    async def _ask(self, job: bytes) -> Answer:
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(self._exchange, job)
        finally:
            self._waiting -= 1

    def _exchange(self, job: bytes) -> Answer:
        """One question and its answer; in a thread. The process is started again if it has ended."""
        for last_try in (False, True):
            try:
                self._connection.send_bytes(job)
                return dict(orjson.loads(self._connection.recv_bytes()))
            except (EOFError, OSError):
                log.error("grammar_process_ended", pid=self.pid)
                if last_try:
                    break
                with contextlib.suppress(OSError):
                    self._connection.close()
                self._start("spawn")
        raise GrammarUnavailable("Grammars can't be compiled at the moment.")
