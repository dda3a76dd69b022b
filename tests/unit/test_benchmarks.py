"""The pure parts of the benchmarks: names of servers, process sides, figures, shapes, outcomes."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import auth, figures, frontend, idle, latency, shapes, soak, specs
from benchmarks.clients import split
from benchmarks.load import Load, StreamResult
from benchmarks.open_loop import FailedError, HttpClient, Schedule, poisson, prompt, timed
from benchmarks.processes import Side, side
from benchmarks.soak_checks import gauge
from benchmarks.traffic import Seen, stream_outcome, whole_outcome
from benchmarks.wire import Connection, Target, request


def test_servers_are_named_with_their_workers() -> None:
    """Names come back as they were written; one worker is the plain name."""
    named = specs.parse("lapilli,lapilli:4, vllm ,vllm:4,vllm-rust")
    assert [spec.name for spec in named] == ["lapilli", "lapilli:4", "vllm", "vllm:4", "vllm-rust"]
    assert specs.parse("vllm:1")[0].name == "vllm"


@pytest.mark.parametrize("text", ["", "sglang", "lapilli:0", "vllm:x", "vllm-rust:2", "vllm,vllm:1"])
def test_a_wrong_server_name_is_an_error(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match=r"."):
        specs.parse(text)


def test_a_filled_key_cache_is_measured() -> None:
    """A thousand keys and their thousand tenants are held, and all of them are good."""
    found = asyncio.run(auth.key_cache(1000))
    assert 0.1 < found["mb"] < 3
    assert found["check_p50_us"] > 0


def _options(**changed: Any) -> specs.EngineOptions:
    return specs.EngineOptions(**({"engine": "vllm", "model": "/m", "served_name": "m"} | changed))


def test_one_lapilli_worker_passes_no_worker_flag() -> None:
    """The flag is there from two workers on."""
    assert "--gateway.workers" not in specs.command(specs.Spec("lapilli"), _options(), 1, 2)
    many = specs.command(specs.Spec("lapilli", 4), _options(), 1, 2)
    assert many[many.index("--gateway.workers") + 1] == "4"


def test_engines_on_one_gpu_get_the_same_cache() -> None:
    """Both servers are given the size, Lapilli in GiB and vLLM in bytes."""
    options = _options(on_gpu=True, kv_cache_gib=1.5, dummy_weights=True)
    ours = specs.command(specs.Spec("lapilli"), options, 1, 2)
    theirs = specs.command(specs.Spec("vllm", 4), options, 1, 2)
    assert ours[ours.index("--engine.kv_cache_memory_gib") + 1] == "1.5"
    assert theirs[theirs.index("--kv-cache-memory-bytes") + 1] == str(3 * 2**29)
    assert theirs[theirs.index("--api-server-count") + 1] == "4"
    assert json.loads(ours[ours.index("--engine.args") + 1]) == {"load_format": "dummy"}


def test_vllm_has_no_stub() -> None:
    """One clear reason, not a server that does not start."""
    with pytest.raises(specs.UnavailableError, match="stub"):
        specs.command(specs.Spec("vllm"), _options(engine="stub"), 1, 2)


@pytest.mark.parametrize(
    ("title", "parent", "expected"),
    [
        ("VLLM::EngineCore", "gateway", "engine"),
        ("VLLM::EngineCor VLLM::EngineCore_DP0", "gateway", "engine"),
        ("VLLM::Worker_TP0", "engine", "engine"),
        ("python -c from multiprocessing.resource_tracker import main;main(5)", "engine", "engine"),
        ("python -c from multiprocessing.resource_tracker import main;main(5)", "gateway", "gateway"),
        ("VLLM::APIServer_1", "gateway", "gateway"),
        ("vllm-rs /site/vllm/vllm-rs frontend --listen-fd 5", "gateway", "gateway"),
        ("lapilli-worker-2", "gateway", "gateway"),
        ("python -c from multiprocessing.forkserver import main; main(3)", "gateway", "gateway"),
        ("stub-engine-core", "gateway", "engine"),
        ("python -c from multiprocessing.spawn import spawn_main; spawn_main(1)", "gateway", "engine"),
    ],
)
def test_processes_are_told_apart_by_what_they_call_themselves(
    title: str, parent: Side, expected: Side
) -> None:
    """Engine: cores, workers and all below them; the rest is front end."""
    assert side(title, parent) == expected


def _result(started_at: float, ttft_s: float, gaps_s: list[float]) -> StreamResult:
    return StreamResult(
        status=200,
        done=True,
        tokens=len(gaps_s) + 1,
        frames=len(gaps_s) + 1,
        started_at=started_at,
        ttft_s=ttft_s,
        total_s=ttft_s + sum(gaps_s),
        gaps_s=gaps_s,
    )


def test_a_summary_spans_all_client_processes() -> None:
    """6 tokens from the first start at 10 s to the last end at 12 s; a failed request counts no token."""
    results = [_result(10.0, 0.5, [0.25, 0.25]), _result(11.0, 0.5, [0.1, 0.4]), StreamResult(503)]
    results[2].started_at = 11.0
    found = figures.summary(results, cpu_s=0.0006)
    assert found["tokens_per_s"] == pytest.approx(3.0)
    assert (found["requests"], found["ok"], found["tokens"]) == (3, 2, 6)
    assert found["gateway_cpu_us_per_token"] == pytest.approx(100.0)
    assert found["gateway_cpu_us_per_request"] == pytest.approx(300.0)
    assert found["tpot_p50_ms"] == pytest.approx(250.0)
    assert found["errors"] == ["status 503"]


def test_a_load_without_answers_has_figures_all_the_same() -> None:
    """No division by zero; what is not known is None."""
    found = figures.summary([StreamResult(0, error="ConnectionRefusedError")], 0.1)
    assert found["tokens_per_s"] == 0
    assert found["ttft_p50_ms"] is None
    assert figures.medians([found, found])["ttft_p50_ms"] is None


def test_percentiles_and_medians() -> None:
    """Nearest rank, milliseconds; the median over runs leaves out what is missing."""
    values = [number / 1000 for number in range(1, 101)]
    assert figures.percentile_ms(values, 0.5) == pytest.approx(51.0)
    assert figures.percentile_ms(values, 0.99) == pytest.approx(100.0)
    runs: list[dict[str, Any]] = [{"a": 1.0, "errors": ["x"]}, {"a": None, "errors": []}]
    runs.append({"a": 3.0, "errors": ["y"]})
    assert figures.medians(runs) == {"a": 2.0, "errors": ["x", "y"]}


def test_the_order_of_servers_moves_on() -> None:
    """Over as many rounds as there are servers each is first once."""
    assert [figures.rotated(["a", "b", "c"], by)[0] for by in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize(("streams", "requests"), [(1, 5), (7, 20), (512, 1024)])
def test_client_processes_share_the_load_exactly(streams: int, requests: int) -> None:
    """Streams and requests add up, no request number comes twice."""
    parts = split(Load("http://h:1", "k", "m", streams, requests, 8, 8, first_number=100), 6)
    assert len(parts) == min(6, streams)
    assert sum(part.streams for part in parts) == streams
    numbers = [n for part in parts for n in range(part.first_number, part.first_number + part.requests)]
    assert sorted(numbers) == list(range(100, 100 + requests))


def test_one_server_at_one_stream_count_has_its_figures_at_the_top() -> None:
    """The keys that docs/performance.md names."""
    streams = {"64": {"gateway_cpu_us_per_token": 53.0, "gateway_rss_mib": 635, "runs": []}}
    measured = {"lapilli": {"start_s": 20.0, "streams": streams}}
    top = frontend._single(measured)
    assert top == {"streams": 64, "start_s": 20.0, "gateway_cpu_us_per_token": 53.0, "gateway_rss_mib": 635}
    assert frontend._single(measured | {"vllm": measured["lapilli"]}) == {}


def test_a_shape_is_a_model_folder(tmp_path: Path) -> None:
    """Config of the shape, tokenizer files beside it, no weights."""
    tokenizer = tmp_path / "tok"
    tokenizer.mkdir()
    with pytest.raises(FileNotFoundError):
        shapes.make("qwen3-tiny", tokenizer, tmp_path)
    (tokenizer / "tokenizer.json").write_text("{}")
    folder = shapes.make("qwen3-0.6b", tokenizer, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (1024, 28)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "tokenizer.json"]


def test_gauges_are_summed_over_their_series() -> None:
    """With and without labels; a name that only begins alike does not count."""
    page = 'a{model="m"} 1.0\na{model="n"} 2.5\na_total 7\nb 0.0\n'
    assert gauge(page, "a") == pytest.approx(3.5)
    assert gauge(page, "b") == 0
    assert gauge(page, "c") is None


def test_outcomes() -> None:
    """A stream needs its end, an answer all its choices; a cut after a kill is put down to the kill."""
    assert stream_outcome(b"data: {}\n\ndata: [DONE]\n\n") == "ok"
    assert stream_outcome(b"data: {}\n\n") == "cut"
    assert stream_outcome(b'data: {"error": {}}\n\n') == "error event"
    assert whole_outcome(b'{"choices": [{}, {}]}', 2) == "ok"
    assert whole_outcome(b'{"choices": [{}]}', 2) == "1 choices"
    assert whole_outcome(b'{"choi', 1) == "cut"


def test_only_what_follows_a_kill_is_put_down_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cut before and after; a time-out is never excused."""
    seen = Seen()
    now = 100.0
    monkeypatch.setattr("benchmarks.traffic.time.monotonic", lambda: now)
    seen.note("chat", "cut")
    seen.kills_at.append(100.0)
    now = 103.0
    seen.note("chat", "cut")
    seen.note("chat", "timeout")
    seen.note("chat", "ok")
    assert seen.table() == {"chat": {"cut": 1, "cut after kill": 1, "ok": 1, "timeout": 1}}
    assert seen.unexplained() == 2


TARGET = Target("http://127.0.0.1:1", "k", "m")


def test_arrivals_are_random_and_repeatable() -> None:
    """The rate is as asked, the times are in order, the same number gives the same times and prompts."""
    schedule = poisson(100.0, 50.0, first_number=7)
    assert len(schedule.due_s) == pytest.approx(5000, rel=0.1)
    assert schedule.due_s == sorted(schedule.due_s)
    assert schedule == poisson(100.0, 50.0, first_number=7)
    assert schedule.due_s != poisson(100.0, 50.0, first_number=8).due_s
    assert prompt(3, 20) == prompt(3, 20) != prompt(4, 20)


def test_an_open_loop_waits_for_no_answer() -> None:
    """All requests are made while none has been answered; time counts from when each was due."""
    made: list[int] = []
    all_made = asyncio.Event()

    async def first_token(number: int) -> float:
        made.append(number)
        if len(made) == 3:
            all_made.set()
        await all_made.wait()
        if number == 11:
            raise FailedError
        return time.perf_counter()

    took = asyncio.run(timed(Schedule([0.0, 0.001, 0.002], first_number=10), first_token))
    assert made == [10, 11, 12]
    assert took[1] is None
    assert took[0] is not None
    assert took[0] >= 0.002


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"choices":[{"delta":{"content":" river"}}]}\n\n'


@pytest.mark.parametrize(
    ("status", "frames", "good"),
    [(b"200 OK", ROLE + WORD, True), (b"200 OK", ROLE, False), (b"503 No", WORD, False)],
)
def test_a_stream_without_a_token_has_failed(status: bytes, frames: bytes, good: bool) -> None:
    """The connection stays open for the next request; an empty first frame is no token."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 " + status + b"\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n" % len(frames) + frames + b"\r\n0\r\n\r\n")

    async def ask_twice() -> list[float | None]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = HttpClient(Target(f"http://127.0.0.1:{port}", "k", "m"), 3, 1)
            took = await timed(Schedule([0.0, 0.05], 1), client.first_token)
            client.close()
            return took

    assert [seconds is not None for seconds in asyncio.run(ask_twice())] == [good, good]


def test_added_latency_is_the_difference_of_percentiles() -> None:
    """Failed requests are counted and have no time; without any answer nothing is known."""
    row = latency.added(http=[0.030, 0.031, 0.040, None], bare=[0.028, 0.029, 0.030, 0.030])
    assert (row["requests"], row["http_failed"], row["bare_failed"]) == (4, 1, 0)
    assert (row["added_p50_ms"], row["added_p99_ms"]) == (pytest.approx(1.0), pytest.approx(10.0))
    assert latency.added(http=[None], bare=[0.1])["added_p50_ms"] is None


def test_idle_figures_are_growth() -> None:
    """Each against the memory before, in MiB; the share of one connection in KiB."""

    def memory(mib: float) -> dict[str, float]:
        return {"rss_mib": mib, "pss_mib": mib / 2}

    found = idle.figures(1024, memory(100), memory(120), memory(130), memory(110))
    assert (found["growth_rss_mib"], found["growth_pss_mib"]) == (20, 10)
    assert (found["growth_rss_asked_again_mib"], found["growth_rss_closed_mib"]) == (30, 10)
    assert found["per_connection_kib"] == 20


@pytest.mark.parametrize("kind", ["health", "chat"])
def test_an_idle_connection_asks_to_stay(kind: str) -> None:
    """HTTP/1.1 stays open unless told; the other benchmarks tell it to close."""
    assert b"connection:" not in idle.ask_of(TARGET, kind).lower()
    assert b"Connection: close" in request(TARGET, "/health", b"", method="GET")


def test_an_answer_ends_where_it_says() -> None:
    """Two answers on one connection are told apart by their lengths."""

    async def answers() -> list[tuple[int, bytes]]:
        reader = asyncio.StreamReader()
        reader.feed_data(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        reader.feed_data(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        connection = Connection(reader, None)  # type: ignore[arg-type]
        return [await connection.answer(), await connection.answer()]

    assert asyncio.run(answers()) == [(200, b"ok"), (404, b"")]


def test_a_soak_has_a_client_slot_for_each_kill() -> None:
    """Or the engine would be started again in the middle; the user's own flags come last and win."""
    args = soak._parser().parse_args(["--minutes", "30", "--kill-every-s", "45", "--", "--log-level", "info"])
    flags = soak.options(args).lapilli_flags
    assert int(flags[flags.index("--engine.spare_client_slots") + 1]) > 30 * 60 / 45
    assert flags[-2:] == ["--log-level", "info"]
