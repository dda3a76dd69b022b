"""Lapilli's gateway: HTTP in front, the vLLM engine inside."""

__version__ = "0.1.0"
