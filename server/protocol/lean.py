"""Chat by vLLM's serving class, with the stream of plain text taken over by the lean path.

Everything up to the engine (model check, chat template, limits, sampling parameters) is vLLM's own code for
both paths. Only the loop over tokens differs; tools, logprobs, several choices, reasoning and the rest keep
vLLM's loop.
"""

import time
from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError

from server.engine.llm import LeanRequest
from server.protocol.frames import ChatFrames, StreamFrames
from server.protocol.reserving import reserve_tokens
from server.streaming import DONE


class LeanServingChat(OpenAIServingChat):
    """OpenAIServingChat whose stream generator understands a LeanRequest."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._frames = ChatFrames(self.models.model_name(), self.system_fingerprint)

    def is_plain(self, request: ChatCompletionRequest) -> bool:
        """Whether the request's stream is nothing but text of one choice."""
        options = request.stream_options
        return bool(
            request.stream
            and (request.n or 1) == 1
            and self.parser_cls is None
            and not request.logprobs
            and not request.tools
            and not request.echo
            and not request.use_beam_search
            and not request.return_token_ids
            and not request.return_prompt_text
            and request.prompt_logprobs is None
            and request.add_generation_prompt
            and request.model in (None, self.models.model_name())
            and not (options and options.include_usage and options.continuous_usage_stats)
            and self.engine_client.vllm_config.scheduler_config.stream_interval == 1
        )

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """As vLLM's, then reserves tokens; raises ApiError where a limit refuses."""
        result = await super().render_chat_request(request)
        if not isinstance(result, ErrorResponse):
            await reserve_tokens(
                self, request, result[1], self.engine_client.contexts.get(request.request_id)
            )
        return result

    def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: Any,
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[Any, None]:
        """As vLLM's, or the lean one; the lean one yields bytes and raises its errors."""
        if isinstance(result_generator, LeanRequest):
            usage = bool(request.stream_options and request.stream_options.include_usage)
            frames = self._frames.stream(request_id, int(time.time()), usage=usage)
            return _lean_events(result_generator, frames)
        return super().chat_completion_stream_generator(
            request, result_generator, request_id, *args, **kwargs
        )


async def _lean_events(request: LeanRequest, frames: StreamFrames) -> AsyncGenerator[bytes, None]:
    """What the sink does not send by itself: the first frames, the last, and those of a slow client."""
    try:
        sink = await request.send()
        piece = await sink.next()
        before = frames.role
        while piece.finish_reason is None:
            yield before + frames.text(piece.text)
            before = b""
            sink.frame = frames.text  # all so far is sent: later frames need no reader
            piece = await sink.next()
        if piece.finish_reason == "error":
            raise GenerationError("Internal server error")
        yield b"".join(
            (
                before,
                frames.finish(piece.text, piece.finish_reason, piece.stop_reason),
                frames.usage_chunk(sink.num_prompt_tokens, sink.num_tokens),
                DONE,
            )
        )
    finally:
        await request.abort()
