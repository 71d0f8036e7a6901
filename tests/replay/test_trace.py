from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_gateway.replay import trace as trace_module
from xkv_gateway.replay.trace import Trace, TraceError, TraceRequest, read_trace

GOOD = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}


def line(**changes: Any) -> bytes:
    fields = {**GOOD, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode() + b"\n"


def written(tmp_path: Path, data: bytes, name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_a_plain_trace_and_a_gzipped_one_read_the_same_whatever_their_names(tmp_path: Path) -> None:
    data = line() + line(timestamp=5.5, hash_ids=[1, 2**64 - 1]) + line(timestamp=6, hash_ids=[])
    plain = read_trace(written(tmp_path, data, "a.gz"))
    zipped = read_trace(written(tmp_path, gzip.compress(data), "b.jsonl"))
    assert list(plain.requests) == list(zipped.requests)
    assert [list(request.hash_ids) for request in plain.requests] == [[1, 2], [1, 2**64 - 1], []]
    assert plain.blocks == 4
    assert plain.distinct_blocks() == 3


@pytest.mark.parametrize("zipped", [False, True])
def test_a_trace_is_read_from_a_pipe_that_gives_it_piece_by_piece(*, zipped: bool) -> None:
    data = line() * 300
    reading, writing = os.pipe()

    def write() -> None:
        with open(writing, "wb", buffering=0) as pipe:  # noqa: PTH123 - a descriptor
            rest = gzip.compress(data) if zipped else data
            pipe.writelines((rest[:1], rest[1:2], rest[2:]))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert len(read_trace(Path(f"/dev/fd/{reading}")).requests) == 300
    finally:
        os.close(reading)
        writer.join()


def test_the_last_line_needs_no_line_end(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, line() + line().rstrip())).requests) == 2


def test_a_limit_reads_only_the_first_requests_and_not_what_is_wrong_behind_them(tmp_path: Path) -> None:
    path = written(tmp_path, line() + line() + b"nonsense\n")
    assert len(read_trace(path, limit=2).requests) == 2
    with pytest.raises(TraceError, match="line 3"):
        read_trace(path, limit=3)


def test_fields_that_are_not_known_are_ignored(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, line(chat_id=4, type="text"))).requests) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timestamp", ...),
        ("timestamp", -1),
        ("timestamp", "5"),
        ("timestamp", True),
        ("timestamp", None),
        ("timestamp", 4),
        ("input_length", ...),
        ("input_length", 1.0),
        ("input_length", -1),
        ("output_length", ...),
        ("output_length", 2**64),
        ("output_length", [1]),
        ("hash_ids", ...),
        ("hash_ids", None),
        ("hash_ids", {"0": 1}),
        ("hash_ids", [1, True]),
        ("hash_ids", [1, "2"]),
        ("hash_ids", [1, -2]),
        ("hash_ids", [1.0]),
        ("hash_ids", [2**64]),
        ("hash_ids", [[1]]),
    ],
)
def test_a_bad_field_is_named_with_its_file_and_line(tmp_path: Path, field: str, value: Any) -> None:
    path = written(tmp_path, line() + line(**{field: value}))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert (caught.value.line, caught.value.field) == (2, field)
    assert str(caught.value).startswith(f"{path}, line 2: field '{field}': ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 160


@pytest.mark.parametrize(
    "bad",
    [
        b"\n",
        b"   \n",
        b"{\n",
        b"[]\n",
        b"7\n",
        b"\xff\xfe{}\n",
        b"\xef\xbb\xbf" + line(),
        line().rstrip() + line(),
        b"[" * 100_000 + b"\n",
        b'{"timestamp": ' + b"9" * 5000 + b"}\n",
        line().replace(b"5,", b"NaN,"),
        line().replace(b"5,", b"Infinity,"),
        line().replace(b"5,", b"1e999,"),
    ],
)
def test_what_is_not_one_object_a_line_is_refused_with_its_line(tmp_path: Path, bad: bytes) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(written(tmp_path, line() + line() + bad))
    assert caught.value.line == 3


def test_a_field_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="'hash_ids': occurs twice"):
        read_trace(written(tmp_path, line().replace(b"}", b', "hash_ids": []}')))


def test_a_compressed_file_that_is_cut_short_or_damaged_is_refused(tmp_path: Path) -> None:
    data = gzip.compress(b"".join(line(hash_ids=list(range(n, n + 99))) for n in range(400)))
    broken = bytearray(data)
    broken[len(data) // 2] ^= 0xFF
    for damaged in (data[: len(data) // 2], data[:-4], bytes(broken), data[:2]):
        with pytest.raises(TraceError, match=r"cut short or damaged|line \d+"):
            read_trace(written(tmp_path, damaged))


def test_no_file_a_folder_and_an_empty_file_are_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere: no such file$"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(written(tmp_path, b""))


def test_a_line_beyond_the_bound_is_refused_without_reading_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "MAX_LINE_BYTES", 200)
    with pytest.raises(TraceError, match="line 2: is longer than 200 bytes"):
        read_trace(written(tmp_path, line() + line(hash_ids=list(range(100)))))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=12))
def test_leading_repeats_is_the_count_of_leading_blocks_that_a_set_has_seen(prompts: list[list[int]]) -> None:
    trace = Trace("t", [TraceRequest(0, 0, 0, prompt) for prompt in prompts])
    seen: set[int] = set()
    expected = 0
    for prompt in prompts:
        for hash_id in prompt:
            if hash_id not in seen:
                break
            expected += 1
        seen.update(prompt)
    assert trace.leading_repeats() == expected
