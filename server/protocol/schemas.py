"""The schemas of requests and answers, most from vLLM's own models: what server/openapi.py documents."""

from dataclasses import dataclass
from typing import Any, get_args

from openai.types import Batch, FileDeleted, FileObject
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicCountTokensResponse,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
    AnthropicStreamEvent,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponse,
    CompletionStreamResponse,
)
from vllm.entrypoints.openai.responses.protocol import (
    ResponsesRequest,
    ResponsesResponse,
    StreamingResponsesResponse,
)
from vllm.entrypoints.pooling.embed.protocol import (
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
    EmbeddingResponse,
)
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)

from server.batches.schemas import BatchCreateRequest, BatchList, FileCreateRequest, FileList
from server.protocol.responses import Deleted
from server.validation.bodies import REFUSED_FIELDS, SERVER_FIELDS

REF = "#/components/schemas/{model}"


Models = tuple[type[BaseModel], ...]
"""Alternatives."""


@dataclass(frozen=True)
class Bodies:
    """The models of an operation's bodies."""

    requests: Models = ()
    answer: type[BaseModel] | None = None
    events: Models = ()
    """Of the data of each event, where the operation can stream."""


BODIES = {
    "POST /v1/chat/completions": Bodies(
        (ChatCompletionRequest,), ChatCompletionResponse, (ChatCompletionStreamResponse,)
    ),
    "POST /v1/completions": Bodies((CompletionRequest,), CompletionResponse, (CompletionStreamResponse,)),
    "POST /v1/responses": Bodies(
        (ResponsesRequest,), ResponsesResponse, get_args(StreamingResponsesResponse)
    ),
    "GET /v1/responses/{response_id}": Bodies(
        answer=ResponsesResponse, events=get_args(StreamingResponsesResponse)
    ),
    "DELETE /v1/responses/{response_id}": Bodies(answer=Deleted),
    "POST /v1/responses/{response_id}/cancel": Bodies(answer=ResponsesResponse),
    "POST /v1/messages": Bodies(
        (AnthropicMessagesRequest,), AnthropicMessagesResponse, (AnthropicStreamEvent,)
    ),
    "POST /v1/messages/count_tokens": Bodies((AnthropicCountTokensRequest,), AnthropicCountTokensResponse),
    "POST /v1/embeddings": Bodies((EmbeddingCompletionRequest, EmbeddingChatRequest), EmbeddingResponse),
    "GET /v1/models": Bodies(answer=ModelList),
    "GET /v1/models/{model}": Bodies(answer=ModelCard),
    "POST /tokenize": Bodies((TokenizeCompletionRequest, TokenizeChatRequest), TokenizeResponse),
    "POST /detokenize": Bodies((DetokenizeRequest,), DetokenizeResponse),
    "POST /v1/files": Bodies((FileCreateRequest,), FileObject),
    "GET /v1/files": Bodies(answer=FileList),
    "GET /v1/files/{file_id}": Bodies(answer=FileObject),
    "GET /v1/files/{file_id}/content": Bodies(),
    "DELETE /v1/files/{file_id}": Bodies(answer=FileDeleted),
    "POST /v1/batches": Bodies((BatchCreateRequest,), Batch),
    "GET /v1/batches": Bodies(answer=BatchList),
    "GET /v1/batches/{batch_id}": Bodies(answer=Batch),
    "POST /v1/batches/{batch_id}/cancel": Bodies(answer=Batch),
}
"""By method and path. A route of the API that is missing here fails a test."""


@dataclass(frozen=True)
class Schemas:
    """The schemas of one operation, as references into the components."""

    request: dict[str, Any] | None
    answer: dict[str, Any] | None
    event: dict[str, Any] | None


def schemas() -> tuple[dict[str, Schemas], dict[str, Any]]:
    """The schemas of every operation by `METHOD /path`, and the components they refer to."""
    models: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {}
    for bodies in BODIES.values():
        models |= {(model, "validation"): None for model in bodies.requests}
        models |= {(model, "serialization"): None for model in (*_answers(bodies), *bodies.events)}
    refs, definitions = models_json_schema(list(models), ref_template=REF)
    components: dict[str, Any] = definitions["$defs"]
    for model, mode in models:
        if mode == "validation":
            _keep_client_fields(components[_name(refs[model, mode])])

    def any_of(alternatives: Models, mode: JsonSchemaMode) -> dict[str, Any] | None:
        found = [refs[model, mode] for model in alternatives]
        return {"anyOf": found} if len(found) > 1 else next(iter(found), None)

    operations = {
        name: Schemas(
            any_of(bodies.requests, "validation"),
            any_of(_answers(bodies), "serialization"),
            any_of(bodies.events, "serialization"),
        )
        for name, bodies in BODIES.items()
    }
    return operations, components


def _answers(bodies: Bodies) -> Models:
    return () if bodies.answer is None else (bodies.answer,)


def _name(ref: dict[str, Any]) -> str:
    return str(ref["$ref"]).rsplit("/", 1)[1]


def _keep_client_fields(schema: dict[str, Any]) -> None:
    """Takes away the fields that validation drops or refuses."""
    for name in (*SERVER_FIELDS, *REFUSED_FIELDS):
        schema["properties"].pop(name, None)
