"""OpenAI's Responses API by vLLM's serving class, with stored responses that end and have an owner."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal

import structlog
from pydantic import BaseModel
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError

from server.context import RequestContext
from server.errors import ApiError
from server.protocol.answers import ENGINE_ERRORS, Answer, as_api_error, json_of, result_of
from server.protocol.bodies import parse
from server.protocol.parts import Parts
from server.protocol.reserving import reserve_tokens
from server.protocol.response_store import OPEN, ResponseStore
from server.sections import GatewaySettings
from server.streaming import StreamBroken

log = structlog.get_logger()

PREFIX = "resp_"
FIRST_EVENTS = ("response.created", "response.in_progress")


class FailedEvent(BaseModel):
    """The last event of a background stream that failed; vLLM has none."""

    type: Literal["response.failed"] = "response.failed"
    sequence_number: int
    response: ResponsesResponse


class ServingResponses(OpenAIServingResponses):
    """vLLM's class over a ResponseStore; background work whose end is seen."""

    def __init__(self, parts: Parts, store: ResponseStore, *, enabled: bool) -> None:
        super().__init__(parts.llm, parts.models, **parts.chat_options)
        self.store = store
        self.enable_store = enabled
        self.response_store, self.msg_store, self.event_store = store.responses, store.messages, store.events

    async def _render_resolved_response_inputs(
        self, request: ResponsesRequest, *args: Any, **kwargs: Any
    ) -> Any:
        """As vLLM's, then reserves tokens; raises ApiError where a limit refuses."""
        result = await super()._render_resolved_response_inputs(request, *args, **kwargs)
        if not isinstance(result, ErrorResponse):
            ctx = self.engine_client.contexts.get(request.request_id.removeprefix(PREFIX))
            await reserve_tokens(self, request, [result.engine_input], ctx)
        return result

    def _convert_generation_error_to_streaming_response(self, e: GenerationError) -> str:
        # vLLM makes a text of it that its own event models refuse.
        raise e

    async def _run_background_request(self, request: ResponsesRequest, *args: Any, **kwargs: Any) -> None:
        async with self._in_background(request):
            await super()._run_background_request(request, *args, **kwargs)

    async def _run_background_request_stream(
        self, request: ResponsesRequest, *args: Any, **kwargs: Any
    ) -> None:
        async with self._in_background(request):
            await super()._run_background_request_stream(request, *args, **kwargs)

    @contextlib.asynccontextmanager
    async def _in_background(self, request: ResponsesRequest) -> AsyncIterator[None]:
        """Whatever happens, the stored response has a final status and its readers are told."""
        response_id = request.request_id
        self.response_store[response_id].status = "in_progress"
        try:
            yield
        except Exception as error:
            if not isinstance(error, ENGINE_ERRORS):
                log.exception("background_response_failed", response_id=response_id)
        finally:
            self._finish(response_id)

    def _finish(self, response_id: str) -> None:
        stored = self.response_store[response_id]
        if stored.status in OPEN:
            stored.status = "failed"
            if (ctx := self.engine_client.contexts.get(response_id.removeprefix(PREFIX))) is not None:
                ctx.outcome = "server_error"
        if response_id in self.event_store:
            events, changed = self.event_store[response_id]
            if stored.status == "failed":
                events.append(FailedEvent(sequence_number=len(events), response=stored))
            changed.set()
        self.store.settle(response_id)

    async def responses_background_stream_generator(
        self, response_id: str, starting_after: int | None = None
    ) -> AsyncGenerator[Any, None]:
        """The events after number `starting_after`, until the response is done (vLLM's waits for ever)."""
        # The task that has just been made fills the store at its first step.
        while response_id in self.background_tasks and response_id not in self.event_store:
            await asyncio.sleep(0)
        if response_id not in self.event_store:
            return
        events, changed = self.event_store[response_id]
        position = 0 if starting_after is None else starting_after + 1
        while True:
            changed.clear()
            while position < len(events):
                yield events[position]
                position += 1
            stored = self.response_store.get(response_id)
            if stored is None or stored.status not in OPEN:
                return
            await changed.wait()


class Responses:
    """Answers of /v1/responses and /v1/responses/{id}. All raise ApiError."""

    def __init__(self, parts: Parts, settings: GatewaySettings) -> None:
        # Each worker has a memory of its own, and a next request may reach any of them.
        self._stores = settings.workers == 1 and settings.response_store_mib > 0
        self._parts = parts
        self._store = ResponseStore(settings.response_store_mib * 2**20)
        self._serving = ServingResponses(parts, self._store, enabled=self._stores)

    async def create(self, body: bytes, ctx: RequestContext) -> Answer:
        """Makes a response: its JSON body, or a generator of SSE events."""
        fields = self._parts.served(self._parts.validator.responses(body), ctx)
        self._check_store(fields, ctx)
        response_id = PREFIX + ctx.id
        request = parse(ResponsesRequest, fields | {"request_id": response_id})
        ctx.stream = bool(request.stream)
        self._store.open(response_id, _owner(ctx))
        try:
            result = await result_of(self._serving.create_responses(request))
            ctx.background = self._serving.background_tasks.get(response_id)
        except BaseException:
            self._store.settle(response_id)
            raise
        if isinstance(result, ResponsesResponse):
            if ctx.background is None:
                self._store.settle(response_id)
            return json_of(result, by_alias=True)
        return self._events(result, response_id, settle=ctx.background is None)

    def _check_store(self, fields: dict[str, Any], ctx: RequestContext) -> None:
        """What needs stored responses, refused where there are none."""
        if not self._stores:
            for name in ("store", "background", "previous_response_id"):
                if fields.get(name):
                    reason = "stored responses need one gateway worker (gateway.workers) and a store"
                    raise ApiError(400, f"'{name}' is not supported: {reason}.", param=name)
            return
        previous = fields.get("previous_response_id")
        if previous is None:
            return
        found = self._find(previous, ctx, param="previous_response_id")
        if found.status in OPEN:
            raise ApiError(400, "The previous response is not done yet.", param="previous_response_id")

    async def retrieve(
        self, response_id: str, ctx: RequestContext, *, stream: bool, starting_after: int | None
    ) -> Answer:
        """A stored response; with `stream` the events of one made in the background."""
        found = self._find(response_id, ctx)
        if not stream:
            return json_of(found, by_alias=True)
        if response_id not in self._store.events:
            raise ApiError(400, "This response was not streamed in the background.", param="stream")
        events = self._serving.responses_background_stream_generator(response_id, starting_after)
        return self._events(events, response_id, settle=False)

    async def cancel(self, response_id: str, ctx: RequestContext) -> bytes:
        """Stops a response in the background; what it has said so far is dropped."""
        found = self._find(response_id, ctx)
        task = self._serving.background_tasks.get(response_id)
        if task is None or found.status not in OPEN:
            raise ApiError(400, "Only a response that is made in the background can be cancelled.")
        found.status = "cancelled"
        task.cancel()
        await asyncio.wait({task})
        return json_of(found, by_alias=True)

    async def delete(self, response_id: str, ctx: RequestContext) -> bytes:
        """Forgets a stored response, cancelling it where it is still being made."""
        found = self._find(response_id, ctx)
        if found.status in OPEN:
            await self.cancel(response_id, ctx)
        self._store.forget(response_id)
        return json_of(Deleted(id=response_id))

    def _find(self, response_id: Any, ctx: RequestContext, param: str = "response_id") -> ResponsesResponse:
        found = self._store.find(response_id, _owner(ctx)) if isinstance(response_id, str) else None
        if found is None:
            raise ApiError(404, "There is no stored response with this id.", code="not_found", param=param)
        return found

    async def _events(
        self, events: AsyncGenerator[Any, None], response_id: str, *, settle: bool
    ) -> AsyncGenerator[bytes, None]:
        """The events as SSE. The first two tell nothing: they wait for the third, which may be an error."""
        held, number = b"", 0
        try:
            async for event in events:
                number += 1
                if event.type in FIRST_EVENTS:
                    held += _sse(event)
                else:
                    yield held + _sse(event)
                    held = b""
            if held:
                yield held
        except ENGINE_ERRORS as error:
            raise StreamBroken(as_api_error(error), number if not held else 0) from error
        finally:
            await events.aclose()
            if settle:
                self._store.settle(response_id)


class Deleted(BaseModel):
    """OpenAI's answer to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


def _owner(ctx: RequestContext) -> str:
    return ctx.principal.key_id if ctx.principal else ""


def _sse(event: Any) -> bytes:
    if event.type == "response.completed" and event.response.status == "incomplete":
        event.type = "response.incomplete"  # vLLM has one last event for both
    return f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n".encode()
