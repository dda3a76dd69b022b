"""What vLLM's serving classes are made of, and what all of them share."""

from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.renderers.online_renderer import OnlineRenderer

from server.context import RequestContext
from server.errors import ApiError
from server.sections import RequestSettings
from server.validation import ModelLimits, Validator

CONTENT_FORMAT = "auto"


@dataclass(frozen=True)
class Parts:
    """One engine client (`AsyncLLM`), the models it serves, and the renderer of prompts."""

    llm: Any
    models: OpenAIServingModels
    renderer: OnlineRenderer
    validator: Validator

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
    def chat_options(self) -> dict[str, Any]:
        """Arguments that all serving classes of chats take."""
        return {
            "online_renderer": self.renderer,
            "request_logger": None,
            "chat_template": self.renderer.chat_template,
            "chat_template_content_format": CONTENT_FORMAT,
        }


def unknown_model() -> ApiError:
    """404 without the name, which may be anything."""
    return ApiError(404, "This model is not served here.", code="model_not_found", param="model")


def make_parts(llm: Any, models: OpenAIServingModels, settings: RequestSettings) -> Parts:
    """The parts over one engine client; `settings` bound what clients may ask for."""
    renderer = OnlineRenderer(
        llm.model_config,
        llm.renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format=CONTENT_FORMAT,
    )
    validator = Validator(ModelLimits.of(llm.model_config, llm.renderer, settings))
    return Parts(llm, models, renderer, validator)
