"""The process that tries grammars: whether they compile, and can be followed, in bounded time and memory.

Each grammar is tried in a child of its own, forked from a process that holds the tokenizer ready: the kernel
ends the child at the limit, whatever native code it is in. What passes here, the engine core compiles again;
it is known by then to cost it no more than it did here.
"""

import contextlib
import os
import random
import re
import resource
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import orjson
import setproctitle
from vllm.exceptions import VLLMError

from auth.redaction import describe_exception

NAME = "lapilli-grammar"
NICENESS = 10
"""Streams come first: this work takes what they leave."""
WALL_FACTOR = 8
"""A child that gets little of a busy machine has this much more wall time than CPU time."""
MEMORY_BYTES = 2**30
"""What a grammar may add to the process."""
NUM_STEPS = 192
"""Random tokens that are drawn by the grammar: what is slow to follow would hold up the engine's own loop."""
NUM_SHORT = 256
MAX_STEP_S = 0.02
"""CPU time that one of the last of them may take."""
GROWTH, GROWN_STEP_S = 3, 0.0005
"""More time by this factor at the end than near the beginning, and not next to nothing: it grows on."""
MIN_WINDOW = 8
"""Tokens at either end of an answer that are compared: of fewer, one that the machine held up decides."""
INNER_DETAIL = re.compile(r"^.*?\.(?:cc|h):\d+: ", re.DOTALL)
"""xgrammar's errors begin with a time and a place in its source."""
QUOTED = re.compile(r"[\"'`:{\[(<].*$")
"""Where errors may begin to quote the grammar: what a client sent is not said again."""
REPEATED = ("multiple repeat", "nothing to repeat")


class Refused(Exception):
    """The grammar is not taken; the message is for the client."""


def run(connection: Connection, config: Any, timeout_s: float) -> None:
    """Entry point: answers grammars until the other end is closed."""
    _keep_only(connection)
    setproctitle.setproctitle(NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    compiler = Compiler(config)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send_bytes(_tried(compiler, orjson.loads(connection.recv_bytes()), timeout_s))


def _keep_only(connection: Connection) -> None:
    """Closes the files that a fork inherits: sockets and pipes of a worker must not live on in here."""
    own = connection.fileno()
    os.closerange(3, own)
    os.closerange(own + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


class Compiler:
    """vLLM's own check and backends, with all that does not depend on the grammar made before."""

    def __init__(self, config: Any) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        self._config = config
        self._tokenizer = cached_tokenizer_from_config(config.model_config)
        vocab_size = config.model_config.get_vocab_size()
        chosen = config.structured_outputs_config.backend
        kinds = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}
        # No threads are started by this: a fork would lose them.
        self._backends = {
            name: kind(config, tokenizer=self._tokenizer, vocab_size=vocab_size)
            for name, kind in kinds.items()
            if chosen == name or (chosen == "auto" and name == "xgrammar")
        }

    def try_out(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields as vLLM's check leaves them, after the grammar was compiled and followed a while.

        Raises Refused, and what the backends raise.
        """
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.structured_output.request import get_structured_output_key

        _check_patterns(fields)
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
        params._validate_structured_outputs(
            self._config.model_config, self._config.structured_outputs_config, self._tokenizer
        )
        checked = params.structured_outputs
        if (backend := self._backends.get(checked._backend)) is not None:
            kind, spec = get_structured_output_key(checked)
            bitmask = backend.allocate_token_bitmask(1)
            _follow(partial(backend.compile_grammar, kind, spec), bitmask, self._tokenizer.eos_token_id)
        changed = {name: getattr(checked, name) for name in ("choice", "grammar")}
        return changed | {"_backend": checked._backend, "_backend_was_auto": checked._backend_was_auto}


def _check_patterns(fields: dict[str, Any]) -> None:
    """Refuses a repetition of a repetition (`a**`): xgrammar takes it for one, no JSON schema allows it."""
    stack: list[Any] = [fields.get("json"), {"pattern": fields.get("regex")}]
    for name in ("json", "structural_tag"):
        if isinstance(fields.get(name), str):
            with contextlib.suppress(orjson.JSONDecodeError):
                stack.append(orjson.loads(fields[name]))
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            pattern = item.get("pattern")
            if isinstance(pattern, str):
                _check_pattern(pattern)
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:  # other dialects differ in much else: the backend is to say
        if error.msg in REPEATED:
            raise Refused(f"a pattern is not a regular expression: {error.msg}") from None
    except (OverflowError, RecursionError):
        raise Refused("a pattern is too large") from None


def _follow(compile_grammar: Callable[[], Any], bitmask: Any, end: int) -> None:
    """Draws tokens by the grammar, as an answer would; raises Refused when that is slow, or gets slower.

    `end` is the id of the token that ends an answer: it is left for when nothing else may come.
    The second walk keeps to tokens with small ids, which are short: many of them go into one rule.
    """
    draw = random.Random(0)  # noqa: S311
    for num_tokens in (None, NUM_SHORT):
        times = _walk(compile_grammar(), bitmask, draw, num_tokens, end)
        window = len(times) // 6 or 1
        early, late = (
            statistics.median(part) for part in (times[window : 2 * window] or times, times[-window:])
        )
        if late > MAX_STEP_S:
            raise Refused(f"a token takes more than {MAX_STEP_S:g} s to check against it")
        if window >= MIN_WINDOW and late > GROWN_STEP_S and late > GROWTH * early:
            raise Refused("it is ambiguous: a token takes the longer to check, the longer the answer is")


def _walk(grammar: Any, bitmask: Any, draw: random.Random, num_tokens: int | None, end: int) -> list[float]:
    """CPU seconds of each of up to NUM_STEPS tokens, drawn among the first `num_tokens` that are allowed."""
    times: list[float] = []
    while len(times) < NUM_STEPS and not grammar.is_terminated():
        begun = time.process_time()
        grammar.fill_bitmask(bitmask, 0)
        filled = time.process_time() - begun
        bits = np.unpackbits(bitmask[0].numpy().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        allowed = allowed[allowed != end][:num_tokens]
        if not len(allowed):
            break
        token = int(allowed[draw.randrange(len(allowed))])
        begun = time.process_time()
        if not grammar.accept_tokens("", [token]):
            break
        times.append(filled + time.process_time() - begun)
    return times or [0.0]


def _tried(compiler: Compiler, fields: dict[str, Any], timeout_s: float) -> bytes:
    """`{"fields": ...}` or `{"refused": why}`, found out by a child."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiving)
        _in_child(compiler, fields, timeout_s, sending)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM):
        return orjson.dumps({"refused": f"it takes more than {timeout_s:g} s to compile, the limit here"})
    if status != 0 or not answer:
        return orjson.dumps({"refused": "it takes too much memory to compile"})
    return answer


def _in_child(compiler: Compiler, fields: dict[str, Any], timeout_s: float, sending: int) -> None:
    """Tries the grammar, writes the answer and ends the process; never returns."""
    with contextlib.suppress(BaseException):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _limit_memory()
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * timeout_s)
        answer: dict[str, Any]
        try:
            answer = {"fields": compiler.try_out(fields)}
        except MemoryError:
            os._exit(1)
        except Refused as error:
            answer = {"refused": str(error)}
        except (VLLMError, ValueError, RuntimeError) as error:
            answer = {"refused": _reason(error)}
        except Exception as error:
            answer = {"refused": "it can't be compiled", "fault": describe_exception(error)}
        os.write(sending, orjson.dumps(answer))
        os._exit(0)
    os._exit(1)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    size = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _reason(error: Exception) -> str:
    """One line without places in source files or the grammar itself."""
    cause = error.__cause__
    text = str(cause if isinstance(cause, ValueError | RuntimeError) else error).split(" (parameter=")[0]
    line = INNER_DETAIL.sub("", text).strip().splitlines()
    said = QUOTED.sub("", line[0]).strip(" .") if line else ""
    return said or "it can't be compiled"
