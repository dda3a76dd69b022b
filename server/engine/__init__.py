"""The engine side: starting vLLM (or the stub), talking to it, checking it.

vLLM is imported only here and in `server/protocol/`.
"""
