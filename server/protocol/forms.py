"""Forms that an answer must keep, tried before vLLM's request models: a bad one is an early, clear error.

What they have not seen (the grammars that tool choices are turned into), the engine client has tried when the
request is sent (server/engine/llm.py).
"""

from typing import Any

import orjson
from vllm.sampling_params import StructuredOutputsParams

from server.engine.grammar import CONSTRAINTS, OPTIONS, GrammarChecker, GrammarRefused, GrammarUnavailable
from server.errors import ApiError, unavailable


class AnswerForms:
    """Checks `response_format`, `structured_outputs` and `text.format` of a validated body."""

    def __init__(self, grammars: GrammarChecker | None) -> None:
        self._grammars = grammars

    async def check(self, fields: dict[str, Any]) -> None:
        """Raises ApiError for a form that does not compile in time."""
        if self._grammars is None:
            return
        for param, constraint in _constraints(fields):
            await self.check_constraint(param, constraint)

    async def check_constraint(self, param: str, constraint: dict[str, Any]) -> None:
        """One constraint in vLLM's names (`{"json": schema}`); `param` is the body's field that gave it."""
        if self._grammars is None:
            return
        try:
            await self._grammars.check(StructuredOutputsParams(**constraint), param)
        except GrammarRefused as error:
            code = "invalid_json_schema" if "json" in constraint else "invalid_grammar"
            raise ApiError(400, error.message, code=code, param=param) from None
        except GrammarUnavailable as error:
            raise unavailable(error.message) from None


def _constraints(fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The constraints of a body by the field that gives them."""
    found = []
    if (form := fields.get("response_format")) is not None:
        if form["type"] == "json_schema":
            found.append(("response_format", {"json": form["json_schema"]["schema"]}))
        elif form["type"] == "structural_tag":
            found.append(("response_format", {"structural_tag": orjson.dumps(form).decode()}))
    form = text.get("format") if isinstance(text := fields.get("text"), dict) else None  # /v1/responses
    if isinstance(form, dict) and form.get("type") == "json_schema" and isinstance(form.get("schema"), dict):
        found.append(("text.format", {"json": form["schema"]}))
    if (given := fields.get("structured_outputs")) is not None:
        known = {name: given[name] for name in (*CONSTRAINTS, *OPTIONS) if given.get(name) is not None}
        found.append(("structured_outputs", known))
    return found
