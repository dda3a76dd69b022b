"""Limits: what may be set, how, and what is said to a wrong value."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth.principal import DEFAULT_LIMITS, Limits, Principal

BAD = {
    "name": ({"requests_per_hour": 1}, "no limit is called 'requests_per_hour'; known are requests_per_s, "),
    "low": ({"requests_per_s": 9}, "requests_per_s must be an integer from 10 to 5000, or null for no limit"),
    "high": ({"requests_per_s": 5001}, "requests_per_s must be an integer from 10 to 5000"),
    "zero": ({"tokens_per_min": 0}, "tokens_per_min must be an integer from 1 to "),
    "text": ({"tokens_per_day": "5"}, "tokens_per_day must be an integer"),
    "bool": ({"parallel_requests": True}, "parallel_requests must be an integer"),
    "float": ({"tokens_per_month": 1.5}, "tokens_per_month must be an integer"),
    "body": ({"max_body_bytes": 1000}, "max_body_bytes must be an integer from 1048576 to 67108864"),
}


@pytest.mark.parametrize(("values", "message"), BAD.values(), ids=BAD)
def test_bad_limits_are_told_in_one_line(values, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)) as caught:
        Limits.from_mapping(values)
    assert "\n" not in str(caught.value)


_counts = st.none() | st.integers(1, 2**53)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "requests_per_s": st.none() | st.integers(10, 5000),
            "requests_per_min": _counts,
            "tokens_per_min": _counts,
            "parallel_requests": _counts,
            "tokens_per_day": _counts,
            "tokens_per_month": _counts,
            "max_body_bytes": st.none() | st.integers(2**20, 2**26),
            "max_output_tokens": _counts,
        },
    )
)
def test_limits_survive_being_written_and_read(values):
    limits = Limits.from_mapping(values)
    assert Limits.from_mapping(limits.to_mapping()) == limits
    for name, value in values.items():
        assert getattr(limits, name) == value


_some = st.builds(Limits, st.none() | st.integers(10, 20), _counts, _counts, max_output_tokens=_counts)


@given(_some, _some)
def test_least_of_two_is_below_both(one, other):
    least = one.least(other)
    assert least == other.least(one) == least.least(one)
    for name in Limits.__slots__:
        pair = {getattr(one, name), getattr(other, name)} - {None}
        assert getattr(least, name) == (min(pair) if pair else None)


def test_defaults():
    assert Limits.from_mapping({}) == DEFAULT_LIMITS
    assert DEFAULT_LIMITS.requests_per_s == 100
    assert DEFAULT_LIMITS.to_mapping() == {}
    assert Limits(requests_per_s=None).to_mapping() == {"requests_per_s": None}


def test_salt_is_not_in_the_text_of_a_principal():
    assert "s3cret" not in repr(Principal("t", "k", "n", cache_salt="s3cret"))
