"""From a request's body to vLLM's request models, without the fields that are not the client's to set."""

from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError

from server.errors import ApiError
from server.protocol.answers import api_error, validation_error

SERVER_FIELDS = (
    *("request_id", "priority", "session_id", "cache_salt", "vllm_xargs", "kv_transfer_params"),
    *("ec_transfer_params", "chat_template"),
)
"""Body fields that vLLM would obey and that are not the client's to set; they are ignored."""

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_fields(body: bytes) -> dict[str, Any]:
    """The body as a JSON object, without the fields that are the server's. Raises ApiError."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error.msg}.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    for name in SERVER_FIELDS:
        fields.pop(name, None)
    return fields


def parse(model: type[ModelT], fields: dict[str, Any]) -> ModelT:
    """The fields as one of vLLM's request models. Raises ApiError."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from None
    except (VLLMError, ValueError) as error:
        raise api_error(create_error_response(error)) from None
    except (TypeError, AttributeError, KeyError, IndexError):
        # vLLM's checks that run before pydantic's own stumble over shapes they do not expect.
        raise ApiError(400, "A field of the request has the wrong shape.") from None


def check_integer(fields: dict[str, Any], name: str, *, least: int = 1) -> None:
    """An integer of at least `least`, where the field is given. vLLM would take "10" and true."""
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < least):
        raise ApiError(400, f"'{name}' must be an integer of at least {least}.", param=name)
