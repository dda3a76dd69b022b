"""What a client may send: strict JSON, and every field within the bounds of the model that is served.

All rules live here. They need no vLLM and run before its request models: nothing unchecked goes further.
"""

from server.validation.bodies import SERVER_FIELDS, Validator
from server.validation.limits import ModelLimits

__all__ = ["SERVER_FIELDS", "ModelLimits", "Validator"]
