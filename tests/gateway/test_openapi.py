"""The OpenAPI document: whole, true to the rules, and kept by the server (schemathesis)."""

import json
from collections import Counter
from typing import Any
from unittest.mock import Mock

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from starlette.routing import Route

from server.config import Settings
from server.errors import ApiError
from server.openapi import BOUNDS, OPEN_PATHS
from server.protocol.schemas import BODIES
from server.validation import ModelLimits, Validator
from tests.conftest import Server, poll

EXAMPLES = 10
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    ignored_auth,
    unsupported_method,
]


@pytest.fixture(scope="module")
def page(stub: Server) -> dict[str, Any]:
    """The document, as anybody gets it."""
    answer = httpx.get(f"{stub.url}/openapi.json", timeout=60)
    assert answer.headers["content-type"] == "application/json"
    return dict(answer.json())


def test_document_is_whole(page: dict[str, Any]) -> None:
    """Every reference resolves, every schema is one, every operation has its bodies and errors."""
    schemas = page["components"]["schemas"]
    named = {part.split('"')[0] for part in json.dumps(page).split("#/components/schemas/")[1:]}
    assert named <= set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    found = set()
    for path, methods in page["paths"].items():
        for method, operation in methods.items():
            found.add(f"{method.upper()} {path}")
            assert operation["summary"]
            assert operation["responses"]["200"]
            if path not in OPEN_PATHS:
                assert operation["security"] == [{"bearer": []}, {"x-api-key": []}]
                assert {"401", "429", "503"} <= set(operation["responses"])
    assert found == {name for name in found if name.split()[1] in OPEN_PATHS or name in BODIES}
    assert "HTTPValidationError" not in schemas


def test_every_route_is_documented() -> None:
    """The table of bodies names all routes of the application."""
    from server.app import create_app

    gateway = Mock(settings=Settings())
    routes = [route for route in create_app(gateway).routes if isinstance(route, Route)]
    named = {f"{method} {_plain(route.path)}" for route in routes for method in route.methods or ()}
    assert {name for name in named if name.split()[1] not in OPEN_PATHS} <= set(BODIES)


def _plain(path: str) -> str:
    return path.replace(":path}", "}")


def test_bounds_are_those_of_validation() -> None:
    """What the document allows at its edges is taken, and what lies beyond is refused."""
    validator = Validator(ModelLimits(vocab_size=1000, max_model_len=1000))

    def check(field: str, value: Any) -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True} | {field: value}
        validator.chat(json.dumps(body).encode())

    message = {"role": "user", "content": "x"}
    edges = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0, "minItems": -1, "maxItems": 1}
    for field, bounds in BOUNDS.items():
        for bound, limit in bounds.items():
            if bound.endswith("Items"):
                inside, outside = [message] * limit, [message] * (limit + edges[bound])
            else:
                inside, outside = limit, limit + edges[bound]
            if bound != "exclusiveMinimum":
                check(field, inside)
            with pytest.raises(ApiError) as refused:
                check(field, outside)
            assert refused.value.param == field


def test_schemathesis(stub: Server, page: dict[str, Any]) -> None:
    """Requests made from the document, good and bad ones: every answer is one that it allows."""
    schema = schemathesis.openapi.from_dict(page)
    schema.config.update(base_url=stub.url, headers={"Authorization": f"Bearer {stub.key}"})
    # Bad keys are test_o16's; here they would leave few requests that get past the key.
    schema.config.generation.update(with_security_parameters=False)
    seen: Counter[tuple[str, int]] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == "/metrics":
            continue

        @settings(
            max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(
            case=st.one_of(
                *(operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)
            )
        )
        def check(case: Any) -> None:
            response = case.call_and_validate(checks=CHECKS, timeout=20)
            seen[case.operation.path, response.status_code] += 1

        check()
    # It would prove little if all requests were refused, or none.
    assert {name for name, status in seen if status in (400, 404)} >= {
        "/v1/chat/completions",
        "/v1/responses",
    }
    assert {name for name, status in seen if status == 200} >= {"/v1/models", "/detokenize"}
    poll(stub.drained, "drained")
    with stub.client() as client:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=body, timeout=5).status_code == 200
