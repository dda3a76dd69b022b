"""The caller of a request, once known."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: the API key's id and name, both safe to log."""

    key_id: str
    key_name: str
