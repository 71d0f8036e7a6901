"""Reading a trace of block hashes, strictly.

One JSON object a line, plain or gzip (told by its first bytes, not by its name):

    timestamp       milliseconds since the start of the trace; never goes backwards
    input_length    tokens of the prompt
    output_length   tokens of the answer
    hash_ids        ids of the prompt's blocks (of 512 tokens), in order; two equal ids stand for two blocks
                    with equal content *and* equal blocks before them

Fields beyond these are ignored. Everything else that is not as described is one `TraceError` that names
the file, the line and the field: a trace that is played half-right gives figures that mean nothing.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from xkv_gateway.replay.tenants import tenant_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import BufferedIOBase
    from pathlib import Path


MAX_LINE_BYTES: Final = 8 * 1024 * 1024
"""A line of a million-block prompt is shorter; what is longer is not a trace."""

MAX_BLOCKS_PER_REQUEST: Final = 1_000_000
MAX_REQUESTS: Final = 10_000_000
MAX_UINT64: Final = 2**64 - 1
GZIP_BEGINS: Final = b"\x1f"
"""No JSON begins so. A pipe need not have given more than a byte yet."""


class TraceError(Exception):
    """The trace cannot be read. The text says where and what; `line` is 1-based (0: the file as a whole)."""

    def __init__(self, path: object, line: int, problem: str, *, field: str | None = None) -> None:
        place = f"{path}, line {line}" if line else f"{path}"
        named = f"field {field!r}: " if field is not None else ""
        super().__init__(f"{place}: {named}{problem}")
        self.line = line
        self.field = field


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of the trace."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace, checked."""

    name: str
    requests: Sequence[TraceRequest]

    @property
    def blocks(self) -> int:
        """How many blocks all prompts have, repeated ones included."""
        return sum(len(request.hash_ids) for request in self.requests)

    def distinct_blocks(self) -> int:
        """How many different blocks the prompts have."""
        return len({hash_id for request in self.requests for hash_id in request.hash_ids})

    def leading_repeats(self, tenants: int = 1) -> int:
        """How many leading blocks of the prompts were seen in earlier prompts of the same tenant.

        These are the hits of a cold, boundless cache.
        """
        all_seen: dict[int, set[int]] = {}
        repeats = 0
        for request in self.requests:
            seen = all_seen.setdefault(tenant_of(request.hash_ids, tenants), set())
            repeats += next(
                (n for n, hash_id in enumerate(request.hash_ids) if hash_id not in seen),
                len(request.hash_ids),
            )
            seen.update(request.hash_ids)
        return repeats


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Read a trace whole, or its first `limit` requests.

    Raises:
        TraceError: the file cannot be read, or a line (among those read) is not as the format says.
    """
    requests: list[TraceRequest] = []
    previous_ms: float = 0
    try:
        with _open(path) as stream:
            for number, line in _lines(path, stream):
                if limit is not None and len(requests) >= limit:
                    break
                if len(requests) >= MAX_REQUESTS:
                    raise TraceError(path, number, f"more than {MAX_REQUESTS} requests")
                request = _Line(path, number, line).parse()
                if request.timestamp_ms < previous_ms:
                    raise TraceError(path, number, "is before the line above's", field="timestamp")
                previous_ms = request.timestamp_ms
                requests.append(request)
    except FileNotFoundError:
        raise TraceError(path, 0, "no such file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        # The decompressor reads ahead, so the break is after the last good line, not at a known one.
        raise TraceError(
            path, len(requests) + 1, f"the compressed file is cut short or damaged ({error})"
        ) from None
    except OSError as error:
        raise TraceError(path, 0, f"cannot be read: {error.strerror or error}") from None
    if not requests and limit != 0:
        raise TraceError(path, 0, "holds no request")
    return Trace(path.name, requests)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BufferedIOBase]:
    """Open a trace, once: what a pipe has given is not given again."""
    with path.open("rb") as file:
        zipped = file.peek(1)[:1] == GZIP_BEGINS
        with gzip.GzipFile(fileobj=file) if zipped else file as stream:
            yield stream


def _lines(path: Path, stream: BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(path, number, f"is longer than {MAX_LINE_BYTES} bytes")
        yield number, line


class _Line:
    """One line on its way to a `TraceRequest`."""

    def __init__(self, path: Path, number: int, line: bytes) -> None:
        self._path = path
        self._number = number
        self._line = line

    def parse(self) -> TraceRequest:
        fields = self._object()
        return TraceRequest(
            timestamp_ms=self._milliseconds(fields),
            input_tokens=self._uint(fields, "input_length"),
            output_tokens=self._uint(fields, "output_length"),
            hash_ids=self._hash_ids(fields),
        )

    def _error(self, problem: str, field: str | None = None) -> TraceError:
        return TraceError(self._path, self._number, problem, field=field)

    def _object(self) -> dict[str, Any]:
        try:
            text = self._line.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error("is not UTF-8 text") from None
        if not text.strip():
            raise self._error("is empty")
        try:
            value = json.loads(text, object_pairs_hook=self._unique, parse_constant=self._constant)
        except json.JSONDecodeError as error:
            raise self._error(f"is not JSON ({error.msg} at column {error.colno})") from None
        except RecursionError:
            raise self._error("is nested too deeply") from None
        except ValueError:
            raise self._error("holds a number with too many digits") from None
        if not isinstance(value, dict):
            raise self._error("is not a JSON object")
        return value

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise self._error("occurs twice", twice)
        return fields

    def _constant(self, name: str) -> float:
        raise self._error(f"{name} is not a JSON number")

    def _value(self, fields: dict[str, Any], field: str) -> Any:
        try:
            return fields[field]
        except KeyError:
            raise self._error("is missing", field) from None

    def _uint(self, fields: dict[str, Any], field: str) -> int:
        value = self._value(fields, field)
        # `True` is an int to isinstance, and not one to the format.
        if type(value) is not int or not 0 <= value <= MAX_UINT64:
            raise self._error(f"must be an integer from 0 to 2^64-1, not {_shown(value)}", field)
        return value

    def _milliseconds(self, fields: dict[str, Any]) -> float:
        value = self._value(fields, "timestamp")
        if type(value) not in {int, float} or not 0 <= value <= MAX_UINT64:
            raise self._error(
                f"must be a number of milliseconds, 0 or more, not {_shown(value)}", "timestamp"
            )
        return value  # type: ignore[no-any-return]  # an int or a float, as just checked

    def _hash_ids(self, fields: dict[str, Any]) -> Sequence[int]:
        value = self._value(fields, "hash_ids")
        if not isinstance(value, list):
            raise self._error(f"must be a list of integers, not {_shown(value)}", "hash_ids")
        if len(value) > MAX_BLOCKS_PER_REQUEST:
            raise self._error(f"has more than {MAX_BLOCKS_PER_REQUEST} ids", "hash_ids")
        for position, item in enumerate(value):
            if type(item) is not int or not 0 <= item <= MAX_UINT64:
                raise self._error(
                    f"item {position} must be an integer from 0 to 2^64-1, not {_shown(item)}", "hash_ids"
                )
        return array("Q", value)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
