"""Lines of batches: any bytes are a request or a fault, and what is written can be read."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.batches.lines import (
    Checker,
    LineFault,
    LineTooLong,
    answer_line,
    numbered_lines,
    read_line,
    undone_line,
)

CHAT = "/v1/chat/completions"
GOOD = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}}


def text(**changes):
    return json.dumps(GOOD | changes).encode()


async def collect(chunks, max_bytes=10**6):
    async def source():
        for chunk in chunks:
            yield chunk

    return [item async for item in numbered_lines(source(), max_bytes)]


def test_a_good_line_keeps_its_body_as_it_was_written():
    body = b'{"x" : 1.0, "x": 2}'
    line = read_line(b'{"custom_id":"a","method":"POST","url":"%b","body":%b}' % (CHAT.encode(), body), CHAT)
    assert bytes(line.body) == body


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'"text"', "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"\xef\xbb\xbf{}", "invalid_json_line", None),
        (text(body={"x": float("nan")}), "invalid_json_line", None),
        (b"{}", "missing_required_parameter", "custom_id"),
        (text(custom_id=1), "missing_required_parameter", "custom_id"),
        (text(custom_id=""), "invalid_custom_id", "custom_id"),
        (text(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (text(method="GET"), "invalid_method", "method"),
        (text(url="/v1/completions"), "mismatched_url", "url"),
        (text(body=[1]), "invalid_body", "body"),
        (text(body=None), "invalid_body", "body"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "body"}).encode(),
         "missing_required_parameter", "body"),
        (b"[" * 100_000, "invalid_json_line", None),
    ],
)  # fmt: skip
def test_faults(line, code, param):
    with pytest.raises(LineFault) as fault:
        read_line(line, CHAT)
    assert (fault.value.code, fault.value.param) == (code, param)


@given(
    st.binary()
    | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps).map(str.encode)
)
def test_any_bytes_are_a_request_or_a_fault(line):
    with pytest.raises(LineFault):
        read_line(line, CHAT)


@given(st.text(min_size=1, max_size=40), st.integers(1, 10**6), st.integers(100, 599))
def test_what_is_written_can_be_read(custom_id, number, status):
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        return
    answer = json.loads(answer_line("batch_ab", number, custom_id, status, "r1", b'{"x":[1]}'))
    assert answer == {
        "id": f"batch_req_ab_{number}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": "r1", "body": {"x": [1]}},
        "error": None,
    }
    undone = json.loads(undone_line("batch_ab", number, custom_id, "batch_expired", "Late."))
    assert undone == answer | {"response": None, "error": {"code": "batch_expired", "message": "Late."}}


@given(st.lists(st.sampled_from([b"a", b"bc", b"", b"  ", b"d\r"]), max_size=12), st.data())
def test_lines_are_the_same_however_the_file_is_cut(lines, data):
    whole = b"\n".join(lines)
    places = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    cuts = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    expected = [(n, line.strip()) for n, line in enumerate(lines, 1) if line.strip()]
    assert asyncio.run(collect(cuts)) == expected


def test_a_long_line_is_told_by_its_number_before_it_is_whole():
    for chunks in ([b"ok\n" + b"x" * 11], [b"ok\n" + b"x" * 11 + b"\nok"]):
        with pytest.raises(LineTooLong) as error:
            asyncio.run(collect(chunks, max_bytes=10))
        assert error.value.number == 2


def test_the_checker_tells_duplicates_and_stops():
    checker = Checker(CHAT, max_requests=500)
    for number, custom_id in enumerate("abca", 1):
        checker.add(number, text(custom_id=custom_id))
    assert [fault.shown() for fault in checker.faults] == [
        {"code": "duplicate_custom_id", "line": 4, "param": "custom_id",
         "message": "'custom_id' is the same as on an earlier line."}
    ]  # fmt: skip
    assert checker.total == 4
    for number in range(99):
        assert not checker.full
        checker.add(number, b"{")
    assert checker.full
    few = Checker(CHAT, max_requests=1)
    few.add(1, text())
    few.add(2, text(custom_id="b"))
    assert few.full
    assert few.faults[0].code == "too_many_requests"
