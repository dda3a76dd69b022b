"""From checked fields to vLLM's request models."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError

from server.errors import ApiError
from server.protocol.answers import api_error, validation_error

ModelT = TypeVar("ModelT", bound=BaseModel)


def parse(model: type[ModelT], fields: dict[str, Any]) -> ModelT:
    """The fields (server/validation/) as one of vLLM's request models. Raises ApiError."""
    known = {name: value for name, value in fields.items() if name in model.model_fields}
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise validation_error(error) from None
    except (VLLMError, ValueError) as error:
        raise api_error(create_error_response(error)) from None
    except (TypeError, AttributeError, KeyError, IndexError):
        # vLLM's checks that run before pydantic's own stumble over shapes they do not expect.
        raise ApiError(400, "A field of the request has the wrong shape.") from None
