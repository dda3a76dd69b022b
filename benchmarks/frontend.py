"""Front ends compared: throughput, TTFT, gaps, and the CPU time and memory that each front end takes.

    python -m benchmarks.frontend --engine stub --streams 64 --json
    python -m benchmarks.frontend --engine vllm --servers lapilli,lapilli:4,vllm,vllm:4,vllm-rust \\
        --streams 1,64,256 --repeats 3 --json

All servers run at once, each with an engine of its own, and get the same loads in turn (the others idle), in
an order that moves on with each round. Figures are medians over the rounds; `runs` holds each single one.

The engine core and the load generator are processes of their own, so `gateway_cpu_us_per_token` is the CPU
time (user and system) of all front-end processes of a server over the load, divided by the tokens it
delivered; benchmarks/processes.py says how they are told apart. A request's own cost (connection,
authentication, parsing, rendering) is measured in a second load of one-token answers and printed as
`gateway_cpu_us_per_request`; the cost per token has it still in.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine, shapes
from benchmarks.clients import clients, default_processes
from benchmarks.rounds import Plan, Rounds
from benchmarks.servers import all_started, end_on_sigterm
from benchmarks.specs import EngineOptions, parse
from server.sections import DEMO_MODEL, DEMO_MODEL_NAME

COLUMNS = (
    *("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "tpot_p50_ms"),
    *("gateway_cpu_us_per_token", "gateway_cpu_us_per_request", "gateway_cores", "gateway_rss_mib"),
)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Starts the servers, measures them, returns all figures; `folder` holds what the run makes."""
    options = _engine_options(args, folder)
    logs = args.log_dir or folder / "logs"
    plan = Plan(
        _stream_counts(args.streams, args.rounds),
        args.repeats,
        args.input_words,
        args.output_tokens,
        args.budget_s,
        args.runs_file,
    )
    with (
        clients(args.client_processes) as pool,
        all_started(args.servers, options, logs, together=args.start_together) as (servers, failed),
    ):
        rounds = Rounds(servers, pool, plan)
        if servers:
            rounds.run()
        measured = rounds.by_server()
    return {
        "benchmark": "frontend",
        "engine": args.engine,
        "model": args.model_shape or args.model,
        "input_words": args.input_words,
        "output_tokens": args.output_tokens,
        "repeats": args.repeats,
        "client_processes": args.client_processes,
        "machine": machine.facts(),
        "servers": measured,
        "failed": failed,
    } | _single(measured)


def _single(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run of one server at one stream count, to stand at the top level."""
    if len(measured) != 1:
        return {}
    (server,) = measured.values()
    if len(server["streams"]) != 1:
        return {}
    ((streams, figures),) = server["streams"].items()
    flat = {name: value for name, value in figures.items() if name != "runs"}
    return {"streams": int(streams), "start_s": server["start_s"]} | flat


def _engine_options(args: argparse.Namespace, folder: Path) -> EngineOptions:
    on_gpu = bool(machine.gpus())
    model, name, dtype = args.model, args.model, args.dtype
    if args.model_shape:
        tokenizer = args.tokenizer or _demo_folder()
        model, name = str(shapes.make(args.model_shape, tokenizer, folder)), args.model_shape
    elif args.model == DEMO_MODEL:
        name = DEMO_MODEL_NAME
        if args.engine == "vllm":
            model = str(_demo_folder())
            dtype = "float32" if dtype == "auto" and not on_gpu else dtype
    elif Path(args.model).is_dir():
        name = Path(args.model).resolve().name
    stub_rate = ["--stub.tokens_per_s", str(args.stub_tokens_per_s)] if args.engine == "stub" else []
    return EngineOptions(
        args.engine,
        model,
        name,
        on_gpu,
        dtype,
        dummy_weights=bool(args.model_shape),
        kv_cache_gib=args.kv_cache_gib,
        lapilli_flags=stub_rate + args.flags,
    )


def _demo_folder() -> Path:
    from server.demo_model import ensure_demo_model

    return Path(ensure_demo_model())


def _stream_counts(streams: list[int], rounds: list[int]) -> list[tuple[int, int]]:
    if len(rounds) == 1:
        rounds = rounds * len(streams)
    if len(rounds) != len(streams):
        raise SystemExit("--rounds takes one number, or one for each of --streams")
    return list(zip(streams, rounds, strict=True))


def table(result: dict[str, Any]) -> str:
    """The medians as text: a block for each stream count, a line for each server."""
    lines = ["front ends, {engine} engine, {model}, {output_tokens} tokens out".format(**result)]
    counts = {streams: None for server in result["servers"].values() for streams in server["streams"]}
    for streams in counts:
        lines += ["", f"{streams} streams".ljust(14) + "".join(name.rjust(len(name) + 2) for name in COLUMNS)]
        for name, server in result["servers"].items():
            if streams in server["streams"]:
                values = server["streams"][streams]
                lines.append(name.ljust(14) + "".join(str(values[c]).rjust(len(c) + 2) for c in COLUMNS))
    return "\n".join([*lines, *(f"{name}: {why}" for name, why in result["failed"].items())])


def main() -> None:
    """Command line."""
    args = _parser().parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, Path(folder))
    print(table(result))
    if args.json:
        print(json.dumps(result))
    if not result["servers"]:
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--servers", type=parse, default="lapilli", help="e.g. lapilli,lapilli:4,vllm,vllm:4,vllm-rust")
    add("--streams", type=_numbers, default="64", help="streams at a time; a comma list")
    add(
        "--rounds", type=_numbers, default="1", help="requests of each stream; one, or one for each --streams"
    )
    add("--repeats", type=int, default=1, help="runs of each server and stream count")
    add("--output-tokens", type=int, default=256)
    add("--input-words", type=int, default=64, help="64 words are about 97 tokens, 94 about 128")
    add("--client-processes", type=int, default=default_processes(), help="of the load generator")
    add("--budget-s", type=float, default=float("inf"), help="begin no further round after so many seconds")
    _add_engine_flags(parser)
    add("--log-dir", type=Path, help="keep the servers' logs here")
    add(
        "--runs-file", type=Path, help="append each run's figures to this file as it ends, one JSON line each"
    )
    add("--json", action="store_true", help="print one JSON object as the last line")
    add("flags", nargs="*", help="further flags of `lapilli serve`, after --")
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine", choices=["stub", "vllm"], default="stub", help="vllm serve has no stub")
    add("--stub-tokens-per-s", type=float, default=50.0, help="of each stream")
    add("--model", default=DEMO_MODEL, help="for --engine vllm")
    add("--model-shape", choices=sorted(shapes.SHAPES), help="a model of this shape with random weights")
    add("--tokenizer", type=Path, help="folder of the tokenizer for --model-shape; else the demo model's")
    add("--dtype", default="auto", help="of all engines")
    add("--kv-cache-gib", type=float, help="KV cache of each engine; needed where several share a GPU")
    add("--start-together", action="store_true", help="start all servers at once")


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError
    return numbers


if __name__ == "__main__":
    main()
