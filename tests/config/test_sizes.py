from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_gateway.sizes import SIZE_MAX_BYTES, exact_size, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("65536", 65536),
        ("64KiB", 65536),
        ("64 kib", 65536),
        ("16GiB", 16 << 30),
        ("5GB", 5 * 10**9),
        ("1TiB", 1 << 40),
        ("1.5GiB", 3 << 29),
        (" 7B ", 7),
        (str(SIZE_MAX_BYTES), SIZE_MAX_BYTES),
    ],
)
def test_a_size_is_understood(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


NOT_SIZES = (
    "",
    "GiB",
    "-1",
    "+1",
    "1 2",
    "1GiBs",
    "1XB",
    "0x10",
    "1e3",
    "1_000",
    "nan",
    "inf",
    "1..5GiB",
    "1.5",
    "0.3KiB",
    "9223372036854775808",
    "8388608TiB",
    "9" * 400,
    "\N{FULLWIDTH DIGIT ONE}GiB",
)


@pytest.mark.parametrize("text", NOT_SIZES)
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_size(text)


@settings(derandomize=True, max_examples=200)
@given(st.integers(0, SIZE_MAX_BYTES))
def test_an_exact_size_is_read_back_exactly(size_bytes: int) -> None:
    assert parse_size(exact_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (16 << 30, "16 GiB"), (1 << 41, "2 TiB")],
)
def test_a_size_is_shown_in_the_largest_fitting_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
