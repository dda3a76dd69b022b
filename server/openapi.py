"""The OpenAPI document of the public port: every operation with its schemas and its errors.

Routes read their bodies themselves (server/validation/, vLLM's models), so FastAPI knows none of this.
"""

from functools import cache
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from server import __version__
from server.errors import is_anthropic
from server.protocol.schemas import Schemas, schemas

JSON = "application/json"
DESCRIPTION = "OpenAI's API over open-weight models. Rules for requests: docs/requests.md."
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key."},
}
OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/metrics", "/openapi.json"})
"""Paths that need no key."""
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
HEALTH = {
    "type": "object",
    "required": ["ready", "model", "engine", "reason", "version"],
    "properties": {
        "ready": {"type": "boolean"},
        "model": {"type": "string"},
        "engine": {"type": "object", "properties": {"kind": {"type": "string"}, "state": {"type": "string"}}},
        "reason": {"type": ["string", "null"]},
        "version": {"type": "string"},
    },
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
REQUEST_ID = {
    "X-Request-Id": {"description": "The request's, or one made here.", "schema": {"type": "string"}}
}
ERRORS_OF_ALL = (401, 403, 429, 500, 503)
ERRORS_OF_PATHS = (400, 404)
ERRORS_OF_BODIES = (400, 404, 413, 415)
QUERIES = {
    "GET /v1/responses/{response_id}": {
        "stream": {"enum": ["true", "false"]},
        "starting_after": {"type": "integer", "minimum": 0, "maximum": 10**9 - 1},
    },
    "GET /v1/files": {
        "purpose": {"type": "string"},
        "order": {"enum": ["asc", "desc"]},
        "limit": {"type": "integer", "minimum": 1, "maximum": 10_000},
        "after": {"type": "string"},
    },
    "GET /v1/batches": {
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "after": {"type": "string"},
    },
}
"""Query parameters that routes read by themselves."""
MEDIA_TYPES = {
    "POST /v1/files": ("multipart/form-data", JSON),
    "GET /v1/files/{file_id}/content": (JSON, "application/octet-stream"),
}
"""Of the bodies of request and answer, where they are not both JSON."""
ERRORS = {"DELETE /v1/files/{file_id}": 409, "POST /v1/batches/{batch_id}/cancel": 409}
"""Further errors of single operations."""
HEADERS_OF_ERRORS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    429: RETRY_AFTER,
    503: RETRY_AFTER,
}
BOUNDS: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "top_logprobs": {"minimum": 0, "maximum": 20},
    "n": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "messages": {"minItems": 1, "maxItems": 16384},
}
"""Bounds of server/validation/ that hold for every model; a test compares both."""


@cache
def document_bytes(app: FastAPI) -> bytes:
    """The document for `app`'s routes as JSON. The first call takes a second."""
    return orjson.dumps(document(app))


def document(app: FastAPI) -> dict[str, Any]:
    """The document for `app`'s routes."""
    page = get_openapi(title="Lapilli", version=__version__, description=DESCRIPTION, routes=app.routes)
    operations, components = schemas()
    _bound(components)
    page["components"] = {
        "schemas": components | {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR, "Health": HEALTH},
        "securitySchemes": KEYS,
    }
    for path, methods in page["paths"].items():
        for method, operation in methods.items():
            operation["operationId"] = f"{method}{path}".replace("/", "_").replace("{", "").replace("}", "")
            if path in OPEN_PATHS:
                operation |= {"responses": _open_answers(path), "security": []}
            else:
                name = f"{method.upper()} {path}"
                operation["parameters"] = operation.get("parameters", []) + _query(name)
                _fill(operation, name, operations.get(name, Schemas(None, None, None)))
    return page


def _query(name: str) -> list[dict[str, Any]]:
    return [
        {"name": field, "in": "query", "required": False, "schema": schema}
        for field, schema in QUERIES.get(name, {}).items()
    ]


def _fill(operation: dict[str, Any], name: str, bodies: Schemas) -> None:
    operation["security"] = [{name: []} for name in KEYS]
    request_type, answer_type = MEDIA_TYPES.get(name, (JSON, JSON))
    statuses = {*ERRORS_OF_ALL, *([ERRORS[name]] if name in ERRORS else ())}
    if bodies.request is not None:
        operation["requestBody"] = {"required": True, "content": {request_type: {"schema": bodies.request}}}
        statuses |= set(ERRORS_OF_BODIES)
    if operation["parameters"]:
        statuses |= set(ERRORS_OF_PATHS)
    operation["responses"] = {"200": _answer(bodies, answer_type)}
    operation["responses"] |= {str(status): _error(status, name.split()[1]) for status in sorted(statuses)}


def _answer(bodies: Schemas, media_type: str) -> dict[str, Any]:
    content = {media_type: {"schema": bodies.answer or {}}}
    if bodies.event is not None:
        text = (
            "Server-sent events; the data of each (but a last [DONE], where there is one) is such an object."
        )
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": text},
            "x-event-schema": bodies.event,
        }
    return {"description": "The answer.", "headers": REQUEST_ID, "content": content}


def _error(status: int, path: str) -> dict[str, Any]:
    headers = REQUEST_ID | HEADERS_OF_ERRORS.get(status, {})
    schema = {"$ref": f"#/components/schemas/{'AnthropicError' if is_anthropic(path) else 'Error'}"}
    return {"description": HTTPStatus(status).phrase, "headers": headers, "content": _json(schema)}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {JSON: {"schema": schema}}


def _open_answers(path: str) -> dict[str, Any]:
    if path == "/openapi.json":
        return {"200": {"description": "This document.", "content": _json({"type": "object"})}}
    if path == "/health":
        content = _json({"$ref": "#/components/schemas/Health"})
    else:
        content = {"text/plain": {"schema": {"type": "string"}}}
    answers = {"200": {"description": "Yes.", "content": content}}
    if path in ("/health", "/readyz"):
        answers["503"] = {"description": "Not ready.", "content": content}
    return answers


def _bound(components: dict[str, Any]) -> None:
    """Writes BOUNDS into the request schemas, past the null that a field may hold."""
    for name, schema in components.items():
        if not name.endswith("Request"):
            continue
        for field, bounds in BOUNDS.items():
            found = schema.get("properties", {}).get(field)
            for part in [] if found is None else found.get("anyOf", [found]):
                if part.get("type") in ("number", "integer", "array"):
                    part.update(bounds)
