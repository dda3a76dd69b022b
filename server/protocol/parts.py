"""What vLLM's serving classes are made of, and what all of them share."""

from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.renderers.online_renderer import OnlineRenderer

from server.config import Settings
from server.context import RequestContext
from server.engine.speech import served_speech
from server.errors import ApiError
from server.families import Speech
from server.protocol.control_tokens import keep_control_tokens
from server.protocol.forms import AnswerForms
from server.validation import ModelLimits, Validator

CONTENT_FORMAT = "auto"


@dataclass(frozen=True)
class Parts:
    """One engine client (`AsyncLLM`), the models it serves, and the renderer of prompts."""

    llm: Any
    models: OpenAIServingModels
    renderer: OnlineRenderer
    validator: Validator
    forms: AnswerForms
    speech: Speech

    def served(self, fields: dict[str, Any], ctx: RequestContext) -> dict[str, Any]:
        """The fields with the model of the service, where they name it or none; else 404 (ApiError).

        A service's own name stands for its model. A service without a model offers all that are served.
        """
        name, service = fields.get("model"), ctx.service
        if service is not None and service.model is not None:
            if name not in (None, service.model, service.name):
                raise unknown_model()
            return fields | {"model": service.model}
        if name is not None and not self.models.is_base_model(name) and name not in self.models.lora_requests:
            raise unknown_model()
        return fields

    @property
    def generates(self) -> bool:
        """Whether the model generates text; else it makes vectors of it."""
        return bool(self.llm.model_config.runner_type == "generate")

    def require_generation(self) -> None:
        """Raises ApiError (404) for a model that generates no text."""
        if not self.generates:
            raise unsupported_endpoint("does not generate text")

    @property
    def chat_options(self) -> dict[str, Any]:
        """Arguments that all serving classes of chats take."""
        return {
            "online_renderer": self.renderer,
            "request_logger": None,
            "chat_template": self.renderer.chat_template,
            "chat_template_content_format": CONTENT_FORMAT,
        }

    @property
    def parser_options(self) -> dict[str, Any]:
        """Arguments that all serving classes of generated chats take."""
        return _parser_options(self.speech)


def unknown_model() -> ApiError:
    """404 without the name, which may be anything."""
    return ApiError(404, "This model is not served here.", code="model_not_found", param="model")


def unsupported_endpoint(reason: str) -> ApiError:
    """404 for an endpoint that the served model can't answer."""
    return ApiError(
        404, f"The model that is served here {reason}.", code="unsupported_endpoint", param="model"
    )


def make_parts(llm: Any, models: OpenAIServingModels, settings: Settings) -> Parts:
    """The parts over one engine client. Raises SettingsError where parsers do not fit the tokenizer."""
    speech = served_speech(settings.engine, llm.model_config, llm.renderer.tokenizer)
    renderer = OnlineRenderer(
        llm.model_config,
        llm.renderer,
        request_logger=None,
        chat_template=speech.chat_template,
        chat_template_content_format=CONTENT_FORMAT,
        **_parser_options(speech),
    )
    if settings.requests.control_tokens == "text":
        hides_text = not llm.model_config.enable_prompt_embeds
        keep_control_tokens(llm.renderer, hides_text=hides_text)
    validator = Validator(ModelLimits.of(llm.model_config, llm.renderer, settings.requests))
    return Parts(llm, models, renderer, validator, AnswerForms(llm.grammars), speech)


def _parser_options(speech: Speech) -> dict[str, Any]:
    return {
        "enable_auto_tools": speech.tool_parser is not None,
        "tool_parser": speech.tool_parser,
        "reasoning_parser": speech.reasoning_parser or "",
    }
