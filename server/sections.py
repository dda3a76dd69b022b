"""The sections of the settings tree that describe server and engine. The tree is in config.py."""

import json
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

DEMO_MODEL = "demo"
DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"


class Section(BaseModel):
    """A group of settings: closed (unknown keys are errors) and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def json_value(value: Any) -> Any:
    """Environment and flags carry lists and `engine.args` as JSON text; YAML carries them as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from None


def _texts(value: Any) -> tuple[str, ...]:
    """A list (or its JSON), or text with commas."""
    if isinstance(value, str):
        value = json_value(value) if value.startswith("[") else value.split(",")
    if not isinstance(value, list | tuple):
        raise ValueError("not a list")
    return tuple(text for part in value if (text := str(part).strip()))


def _networks(value: Any) -> Any:
    """Addresses and networks; each is written as a network."""
    return tuple(str(ip_network(text)) for text in _texts(value))


def _origins(value: Any) -> Any:
    """Origins as browsers send them (RFC 6454), or `*`: anything else would never match."""
    origins = _texts(value)
    for origin in origins:
        parts = urlsplit(origin)
        plain = f"{parts.scheme}://{parts.netloc}" == origin == origin.lower()
        if origin != "*" and not (plain and parts.scheme and parts.hostname):
            raise ValueError("an origin is scheme://host or scheme://host:port in lower case, or *")
    return origins


class GatewaySettings(Section):
    """The HTTP side."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all IPv4.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one.")
    workers: int = Field(1, ge=1, le=64, description="Gateway processes that share the engine and the port.")
    tls_cert_file: Path | None = Field(
        None, description="PEM file of the public port's certificate and its chain; unset: plain HTTP."
    )
    tls_key_file: Path | None = Field(
        None, description="PEM file of the certificate's key, no password; unset: it is in tls_cert_file."
    )
    tls_client_ca_file: Path | None = Field(
        None,
        description="PEM file of CAs; set: each client has to show a certificate signed by one of them.",
    )
    tls_min_version: Annotated[Literal["1.2", "1.3"], BeforeValidator(str)] = Field(
        "1.3", description="Oldest TLS version spoken."
    )
    trusted_proxies: Annotated[tuple[str, ...], BeforeValidator(_networks)] = Field(
        (),
        description="Networks whose X-Forwarded-For and -Proto are believed, as in 10.0.0.0/8,::1.",
    )
    max_body_bytes: int = Field(
        4 * 2**20, ge=2**20, le=64 * 2**20, description="Largest request body in bytes, 1 MiB to 64 MiB."
    )
    keep_alive_timeout_s: int = Field(
        75, ge=1, description="Seconds an idle connection is kept open for a next request."
    )
    request_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Seconds a client may take to connect and send a request, head and body.",
    )
    read_timeout_s: float = Field(
        30.0, gt=0, description="Seconds a client may leave its answer unread (buffers full); then it is cut."
    )
    max_requests_in_flight: int = Field(
        2048, ge=1, description="Most requests a worker holds at a time; further ones get 503."
    )
    drain_timeout_s: int = Field(
        30, ge=0, description="Seconds that running requests may take to finish after SIGTERM or SIGINT."
    )
    sse_ping_s: float = Field(
        15.0, gt=0, description="Seconds of silence in a stream before a keep-alive comment is sent."
    )
    coalesce_max_delay_ms: float = Field(
        20.0,
        ge=0,
        le=1000,
        description="Milliseconds a token may wait to share a frame, only when the gateway lags; 0: never.",
    )
    cors_origins: Annotated[tuple[str, ...], BeforeValidator(_origins)] = Field(
        (), description="Origins whose web pages may call the API, or `*`; empty: no CORS headers."
    )
    cors_allow_credentials: bool = Field(
        False, description="Let those pages send cookies (of a proxy in front); not together with `*`."
    )
    cors_max_age_s: int = Field(
        600, ge=0, description="Seconds a browser may remember the answer to a CORS pre-flight."
    )

    @field_validator("cors_allow_credentials")
    @classmethod
    def _not_for_all(cls, value: bool, info: ValidationInfo) -> bool:
        if value and "*" in info.data.get("cors_origins", ()):
            raise ValueError("not with cors_origins *: any page could act with its visitor's cookies")
        return value

    response_store_mib: int = Field(
        64,
        ge=0,
        description="MiB (as JSON) of stored responses of /v1/responses, with one worker only; 0: none.",
    )


class AdminSettings(Section):
    """The port for probes and Prometheus, served apart from requests. Never open it to clients."""

    host: str = Field("127.0.0.1", min_length=1, description="Address of the admin port.")
    port: int = Field(9090, ge=0, le=65535, description="TCP port of the admin port; 0 takes a free one.")
    token: str | None = Field(
        None,
        repr=False,
        description="Credential of the admin API, as a bearer token; unset, as is the file: no admin API.",
    )
    token_file: Path | None = Field(None, description="File that holds it instead, read at start.")


class EngineSettings(Section):
    """The model and the engine that runs it."""

    kind: Literal["vllm", "stub"] = Field(
        "vllm", description="`vllm`, or `stub`: words at a set rate, no model, for tests and measurements."
    )
    model: str = Field(
        DEMO_MODEL,
        min_length=1,
        description=f"Local folder or hub name; `{DEMO_MODEL}` is the demo model {DEMO_MODEL_NAME}.",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="Name clients use; unset: the hub name, or the folder's last part."
    )
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = Field(
        "auto",
        description="Type of weights and activations; `auto` is the model's own, float32 for demo on CPU.",
    )
    quantization: str | None = Field(
        None, min_length=1, description="vLLM's quantization method; unset: what the model's config says."
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Number of devices one model copy is split over.")
    max_model_len: int | None = Field(
        None, ge=1, description="Context length in tokens, prompt and output; unset: the model's own."
    )
    enforce_eager: bool | None = Field(
        None, description="Run without compilation; unset: eager on CPU (ready sooner), compiled on GPU."
    )
    kv_cache_memory_gib: float | None = Field(
        None, gt=0, description="KV cache in GiB; unset: 2 on CPU, vLLM's own sizing on GPU."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share (0 to 1) of each GPU's memory the engine may take."
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="Most sequences in one engine step; unset: vLLM's default."
    )
    start_timeout_s: float = Field(
        600.0, gt=0, description="Seconds the engine may take to start before the server gives up."
    )
    stall_limit_s: float = Field(
        60.0,
        gt=0,
        description="Seconds without a sign of life after which the engine is started again.",
    )
    spare_client_slots: int = Field(
        16,
        ge=1,
        le=256,
        description="Gateway workers that may be replaced before the engine has to be started again.",
    )
    max_restarts: int = Field(
        5, ge=0, description="Engine restarts in a row (none serving for 10 minutes) before the server ends."
    )
    tool_parser: str | None = Field(
        None,
        min_length=1,
        description="vLLM's parser of tool calls; unset: the model family's (configs/models/); `none`: none.",
    )
    reasoning_parser: str | None = Field(
        None, min_length=1, description="vLLM's parser of reasoning; unset: the model family's; `none`: none."
    )
    chat_template: Path | None = Field(
        None, description="File of a Jinja chat template; unset: the model family's, else the model's own."
    )
    lora_adapters: Annotated[dict[str, str], BeforeValidator(json_value)] = Field(
        {}, description="LoRA adapters by the name clients use: folders in PEFT's format, loaded at start."
    )
    args: Annotated[dict[str, Any], BeforeValidator(json_value)] = Field(
        {},
        description="Further vLLM engine arguments by name; a JSON object in the environment and in flags.",
    )

    @property
    def public_names(self) -> tuple[str, ...]:
        """What clients may name as `model`: the model, then its adapters."""
        return (self.public_model_name, *self.lora_adapters)

    @property
    def public_model_name(self) -> str:
        """The model's name in the API: `served_model_name`, or what `model` gives."""
        if self.served_model_name is not None:
            return self.served_model_name
        if self.model == DEMO_MODEL:
            return DEMO_MODEL_NAME
        folder = Path(self.model).expanduser()
        return folder.resolve().name if folder.is_dir() else self.model


class SelfCheckSettings(Section):
    """The check of the engine's numbers before readiness."""

    enabled: bool = Field(True, description="Score known token sequences before the server reports ready.")
    golden: Path | None = Field(
        None, description="File of expected log-probabilities (nat); unset: the demo model's own, else none."
    )


def _host_list(value: Any) -> Any:
    """Environment and flags carry a list of hosts as text, with commas or as JSON; YAML carries a list."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else value.split(",")
    if not isinstance(value, list):
        return value
    return [item.strip().lower() if isinstance(item, str) else item for item in value if item != ""]


HostName = Annotated[str, Field(pattern=r"^[a-z0-9.-]{1,253}$")]


class RequestSettings(Section):
    """What one request may ask for."""

    max_choices: int = Field(
        128, ge=1, le=1024, description="Largest `n` of a request: answers to one prompt."
    )
    max_sequences: int = Field(
        256, ge=1, le=16384, description="Most sequences of a request: `n` times its prompts."
    )
    grammar_max_bytes: int = Field(
        65536,
        ge=256,
        le=2**20,
        description="Largest grammar, regex or JSON schema an answer is held to, in bytes.",
    )
    grammar_timeout_s: float = Field(
        2.0, gt=0, le=60, description="Seconds a grammar may take to compile, in a process apart; then 400."
    )
    grammars: Literal["all", "schemas"] = Field(
        "all",
        description="`schemas`: JSON schemas, choices, regexes; `all`: also grammars and structural tags.",
    )
    control_tokens: Literal["text", "allow"] = Field(
        "text",
        description="Control tokens spelled in messages: `text` keeps them text, `allow` lets them act.",
    )
    media_domains: Annotated[list[HostName], BeforeValidator(_host_list)] = Field(
        [],
        description="Hosts media may be fetched from, exact names with commas; none: data: URLs only.",
    )


class BatchSettings(Section):
    """/v1/batches and /v1/files. See docs/batches.md."""

    max_file_mib: int = Field(100, ge=1, le=512, description="Largest file that may be uploaded, in MiB.")
    max_stored_mib: int = Field(
        1024, ge=1, description="MiB of files a tenant may keep; a further upload gets 400."
    )
    max_requests: int = Field(50_000, ge=1, le=1_000_000, description="Most requests (lines) in one batch.")
    max_open_batches: int = Field(
        100, ge=1, description="Most batches of a tenant that are not ended; a further one gets 429."
    )
    retention_days: int = Field(
        30, ge=1, le=3650, description="Days that files, and batches that have ended, are kept."
    )
    max_parallel_lines: int = Field(
        32, ge=0, description="Lines that one worker works on at a time; 0: this server runs no batches."
    )
    max_engine_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share (0 to 1) of the engine's sequences in use above which no line is started.",
    )
    lease_s: float = Field(
        30.0,
        ge=1,
        le=600,
        description="Seconds after which another worker takes over the batch of one that is gone.",
    )


class StubSettings(Section):
    """The stub engine; no effect with `engine.kind: vllm`."""

    tokens_per_s: float = Field(50.0, gt=0, description="Output rate of each stream in tokens per second.")
    ttft_ms: float = Field(20.0, ge=0, description="Milliseconds from request to first token.")
    output_tokens: int = Field(
        64, ge=1, description="Natural length of an answer in tokens, where max_tokens allows it."
    )
    max_model_len: int = Field(32768, ge=1, description="Context length in tokens the stub claims.")
    start_delay_s: float = Field(0.0, ge=0, description="Seconds the stub takes to start, as a model would.")


class LogSettings(Section):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        "info", description="Least severe level that is logged."
    )
    format: Literal["auto", "json", "console"] = Field(
        "auto", description="`json`, `console`, or `auto`: console when stderr is a terminal, else json."
    )
