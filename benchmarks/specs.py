"""What can be compared: names such as `lapilli:4` or `vllm-rust`, and the command that starts each."""

import json
import os
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from server.config import Settings

KINDS = ("lapilli", "vllm", "vllm-rust")
LOW_GPU_SHARE = 0.05
"""Share of the GPU that must be free when a KV cache size is given; more would keep a second server out."""
CPU_KV_CACHE_GIB = 2
"""Of each engine on CPU, unless told otherwise."""


class UnavailableError(Exception):
    """This server can't run here; the message is one line."""


@dataclass(frozen=True)
class Spec:
    """One server to compare: its kind and its number of front-end workers."""

    kind: str
    workers: int = 1

    @property
    def name(self) -> str:
        """As it was written: `lapilli`, `vllm:4`."""
        return self.kind if self.workers == 1 else f"{self.kind}:{self.workers}"


def parse(text: str) -> list[Spec]:
    """`lapilli,lapilli:4,vllm` as specs; raises ValueError with one clear line."""
    specs: list[Spec] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, workers = part.partition(":")
        if kind not in KINDS:
            raise ValueError(f"{part!r} is none of {', '.join(KINDS)} (with :N for N workers)")
        if workers and (not workers.isdecimal() or int(workers) < 1 or kind == "vllm-rust"):
            raise ValueError(f"{part!r}: {workers!r} is not a number of workers that {kind} can have")
        specs.append(Spec(kind, int(workers or 1)))
    if not specs:
        raise ValueError("no server is named")
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError("a server is named twice")
    return specs


@dataclass(frozen=True)
class EngineOptions:
    """The engine that all servers of one comparison run, each its own."""

    engine: str
    model: str
    """Folder of the model, or `demo` for the stub."""
    served_name: str
    on_gpu: bool = False
    dtype: str = "auto"
    dummy_weights: bool = False
    kv_cache_gib: float | None = None
    lapilli_flags: list[str] = field(default_factory=list)


def has_admin_port(spec: Spec) -> bool:
    """Whether this server tells of all its workers on a port of its own."""
    return spec.kind == "lapilli" and "admin" in Settings.model_fields


def command(spec: Spec, options: EngineOptions, port: int, admin_port: int) -> list[str]:
    """The command line that serves on 127.0.0.1:`port`; raises UnavailableError."""
    if spec.kind == "lapilli":
        admin = ["--admin.port", str(admin_port)] if has_admin_port(spec) else []
        return [sys.executable, "-m", "server", "serve", *admin, *_lapilli_flags(spec, options, port)]
    if options.engine == "stub":
        raise UnavailableError("vllm serve has no stub engine; use --engine vllm")
    if spec.kind == "vllm-rust" and not _has_rust_front_end():
        raise UnavailableError("this vLLM has no vllm-rs binary (the CPU wheel never has)")
    return [sys.executable, "-m", "benchmarks.vllm_serve", "serve", *_vllm_flags(spec, options, port)]


def environment(spec: Spec, options: EngineOptions, state: Path) -> dict[str, str]:
    """The server's environment; `state` is a folder for what it keeps."""
    changed = {"XDG_STATE_HOME": str(state)}
    if spec.kind != "lapilli":
        changed |= {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_USE_RUST_FRONTEND": "1" if spec.kind == "vllm-rust" else "0",
        }
    return os.environ | changed


def _lapilli_flags(spec: Spec, options: EngineOptions, port: int) -> list[str]:
    flags = ["--port", str(port), "--log-level", "warning", "--engine", options.engine]
    flags += ["--model", options.model, "--served-model-name", options.served_name]
    # Measured is what the server can do, not what a tenant may ask of it.
    flags += ["--limits.requests_per_s", "5000"]
    if spec.workers > 1:
        flags += ["--gateway.workers", str(spec.workers)]
    if spec.workers > 1 and "--limits.store" not in options.lapilli_flags:
        flags += ["--limits.store", "none"]
    if options.engine == "vllm":
        flags += ["--dtype", options.dtype]
        flags += ["--engine.args", _json({"load_format": "dummy"})] if options.dummy_weights else []
        flags += _kv_cache(options, "--engine.kv_cache_memory_gib", "--engine.gpu_memory_utilization", 1)
    return flags + options.lapilli_flags


def _vllm_flags(spec: Spec, options: EngineOptions, port: int) -> list[str]:
    flags = [options.model, "--served-model-name", options.served_name, "--dtype", options.dtype]
    flags += ["--host", "127.0.0.1", "--port", str(port)]
    # The one default that nobody who measures would leave; the Rust front end has no such log.
    flags += ["--disable-uvicorn-access-log"] if spec.kind == "vllm" else []
    flags += ["--api-server-count", str(spec.workers)] if spec.workers > 1 else []
    flags += ["--load-format", "dummy"] if options.dummy_weights else []
    flags += _kv_cache(options, "--kv-cache-memory-bytes", "--gpu-memory-utilization", 2**30)
    return flags if options.on_gpu else [*flags, "--enforce-eager"]  # as Lapilli does on CPU


def _kv_cache(options: EngineOptions, size_flag: str, share_flag: str, unit: int) -> list[str]:
    """Flags for the size of the KV cache; `unit` is how many of the size flag's units a GiB has."""
    size_gib = options.kv_cache_gib or (None if options.on_gpu else CPU_KV_CACHE_GIB)
    if size_gib is None:
        return []
    flags = [size_flag, str(int(size_gib * unit) if unit > 1 else size_gib)]
    return [*flags, share_flag, str(LOW_GPU_SHARE)] if options.on_gpu else flags


def _has_rust_front_end() -> bool:
    found = find_spec("vllm")
    folders = list(found.submodule_search_locations or []) if found is not None else []
    paths = [os.environ.get("VLLM_RUST_FRONTEND_PATH", ""), *(f"{folder}/vllm-rs" for folder in folders)]
    return any(path and os.access(path, os.X_OK) and Path(path).is_file() for path in paths)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
