"""The adapter to vLLM's OpenAI protocol. With `server/engine/`, the only place that imports vLLM."""
