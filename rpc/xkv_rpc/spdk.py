"""SPDK's JSON-RPC, from a loop that is never held up.

The `spdk` package's client builds and sends the requests. It blocks, does not reconnect, takes any answer for its own, counts
processor time as its timeout and parses a long answer once for each part that arrives. So every call has a thread and a
connection of its own, one deadline by the clock, and its answer is received here. Whatever goes wrong ends the connection with
the call: nothing of it is left to be taken for the answer to the next one.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import logging
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from spdk.rpc.client import JSONRPCClient

from xkv_rpc.addresses import SpdkAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "SpdkAddress",
    "SpdkBrokenError",
    "SpdkBusyError",
    "SpdkClient",
    "SpdkError",
    "SpdkRefusedError",
    "SpdkTimeoutError",
    "SpdkTooLargeError",
    "SpdkUnreachableError",
]

CONNECTIONS_MAX: Final = 4
"""Calls at a time; a target takes 64 connections in all, and others need some."""
CALLS_MAX: Final = 1024
"""Calls that run or wait."""
REQUEST_BYTES_MAX: Final = 32 << 10
"""A target resets the connection of a longer one."""
REPLY_BYTES_MAX: Final = 64 << 20
TIMEOUT_MS: Final = 5_000
LATE_MS: Final = 100
"""So much longer than its deadline a call may take: its own thread tells what is known, unless it has not come to that."""
_CLOSED: Final = "the client is closed"
_CHUNK_BYTES: Final = 256 << 10
_TAIL_BYTES: Final = 16
_SILENT: Final = logging.CRITICAL + 1


class SpdkError(Exception):
    """A call failed. `method` says which; the message holds nothing that the other side sent but its own words."""

    def __init__(self, method: str, message: str) -> None:
        super().__init__(f"{method}: {message}")
        self.method = method


class SpdkUnreachableError(SpdkError):
    """There is no target, or no way to it: nothing was done. `denied`: this user may not talk to it."""

    def __init__(self, method: str, message: str, *, denied: bool = False) -> None:
        super().__init__(method, message)
        self.denied = denied


class SpdkTimeoutError(SpdkError):
    """No answer in time: whether it was done is not known."""


class SpdkBrokenError(SpdkError):
    """The connection ended, or what came is no answer to this call: whether it was done is not known."""


class SpdkRefusedError(SpdkError):
    """The target said no.

    Its codes are coarse (-32602 also stands for "there is one already"): look at the state, not at them.
    """

    def __init__(self, method: str, code: int | None, message: str) -> None:
        super().__init__(method, message)
        self.code = code


class SpdkTooLargeError(SpdkError):
    """The request is longer than a target takes: it was not sent."""


class SpdkBusyError(SpdkError):
    """Too many calls wait already: it was not sent."""


def _one_by_one(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object. That it is Python which does it lets other threads run inside of a long answer."""
    return dict(pairs)


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_one_by_one)


class _Connection(JSONRPCClient):  # type: ignore[misc] # the package has no types
    """One connection for one call; `deadline_ns` ends every wait."""

    def __init__(self, address: SpdkAddress, clock: Callable[[], int], deadline_ns: int) -> None:
        self._clock = clock
        self._deadline_ns = deadline_ns
        # It would log the requests, with a handler more for each connection.
        logger = logging.getLogger(f"JSONRPCClient({address.host})")
        logger.setLevel(_SILENT)
        super().__init__(address.host, address.port, log_level=_SILENT)
        logger.handlers.clear()

    def _connect(self, addr: str, port: int | None) -> None:
        sock = socket.socket(socket.AF_UNIX) if port is None else None
        if sock is None:
            sock = socket.create_connection((addr, port), self._remaining_s())
        else:
            try:
                sock.settimeout(self._remaining_s())
                sock.connect(addr)
            except BaseException:
                sock.close()
                raise
        self.sock = sock

    def _remaining_s(self) -> float:
        remaining_ns = self._deadline_ns - self._clock()
        if remaining_ns <= 0:
            raise TimeoutError
        return remaining_ns / 1e9

    def exchange(self, method: str, params: Mapping[str, Any] | None) -> Any:
        """Send one request, return its result."""
        request_id = self.add_request(method, params)
        if len(json.dumps(self._reqs[0], indent=2)) >= REQUEST_BYTES_MAX:
            raise SpdkTooLargeError(method, f"the request is longer than {REQUEST_BYTES_MAX} bytes")
        self.sock.settimeout(self._remaining_s())
        self.flush()
        response = self._receive(method)
        if not isinstance(response, dict) or response.get("id") != request_id:
            raise SpdkBrokenError(method, "the answer belongs to another call")
        error = response.get("error")
        if error is not None:
            code = error.get("code") if isinstance(error, dict) else None
            words = error.get("message") if isinstance(error, dict) else error
            raise SpdkRefusedError(method, code if isinstance(code, int) else None, _plain(words))
        if "result" not in response:
            raise SpdkBrokenError(method, "the answer holds neither a result nor an error")
        return response["result"]

    def _receive(self, method: str) -> Any:
        buffer = bytearray()
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        while True:
            self.sock.settimeout(self._remaining_s())
            chunk = self.sock.recv(_CHUNK_BYTES)
            buffer += chunk
            if len(buffer) > REPLY_BYTES_MAX:
                raise SpdkBrokenError(method, f"the answer is longer than {REPLY_BYTES_MAX} bytes")
            # While more is there already, it cannot be the end: a long answer is parsed once.
            ended = not chunk
            if ended or (_may_be_whole(buffer) and not poll.poll(0)):
                with contextlib.suppress(json.JSONDecodeError):
                    return _decode(method, buffer)
            if ended:
                raise SpdkBrokenError(method, f"the connection ended after {len(buffer)} bytes of the answer")

    def abort(self) -> None:
        """End every wait, from another thread."""
        self._deadline_ns = 0
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        if self.sock is not None:
            self.sock.close()


def _may_be_whole(buffer: bytearray) -> bool:
    """Tell whether it is worth to look for the end: a short answer may have anything behind it."""
    return len(buffer) <= _CHUNK_BYTES or buffer[-_TAIL_BYTES:].rstrip().endswith(b"}")


def _decode(method: str, buffer: bytearray) -> Any:
    """Return the first value in the buffer. Raises JSONDecodeError: it is not whole yet, or none."""
    try:
        # A character may have come in part.
        text = codecs.getincrementaldecoder("utf-8")().decode(buffer)
        return _DECODER.raw_decode(text.lstrip())[0]
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError:
        raise SpdkBrokenError(method, "the answer is not UTF-8") from None
    except ValueError:
        raise SpdkBrokenError(method, "the answer holds a number that is none") from None
    except RecursionError:
        raise SpdkBrokenError(method, "the answer is nested too deeply") from None


def _plain(words: object) -> str:
    """Return the other side's words fit for a log: short, one line."""
    text = str(words)[:300]
    return "".join(character if character.isprintable() else " " for character in text)


class SpdkClient:
    """Calls a target. Calls of one client run side by side, up to CONNECTIONS_MAX.

    Args:
        address: where the target is.
        clock: monotonic nanoseconds.
        timeout_ms: deadline of a call, its wait for a connection included.
    """

    def __init__(
        self, address: SpdkAddress, *, clock: Callable[[], int], timeout_ms: int = TIMEOUT_MS
    ) -> None:
        self.address = address
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._pool = ThreadPoolExecutor(CONNECTIONS_MAX, thread_name_prefix="spdk-rpc")
        self._open: set[_Connection] = set()
        self._calls = 0
        self._closed = threading.Event()

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout_ms: int | None = None
    ) -> Any:
        """Call a method; return its result as JSON's types.

        Raises:
            SpdkError: the subclass says what is known about its effect.
        """
        if self._closed.is_set():
            raise SpdkUnreachableError(method, _CLOSED)
        if self._calls >= CALLS_MAX:
            raise SpdkBusyError(method, f"{CALLS_MAX} calls wait already")
        timeout_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        deadline_ns = self._clock() + timeout_ms * 1_000_000
        self._calls += 1
        future = self._pool.submit(self._call, method, params, deadline_ns)
        try:
            async with asyncio.timeout((timeout_ms + LATE_MS) / 1000):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if future.cancelled():
                raise SpdkBusyError(method, "other calls took all its time: it was not sent") from None
            raise SpdkTimeoutError(method, f"{self.address} did not answer in time") from None
        finally:
            self._calls -= 1

    def _call(self, method: str, params: Mapping[str, Any] | None, deadline_ns: int) -> Any:
        """Make one call, in a thread of the pool."""
        if self._closed.is_set():
            raise SpdkUnreachableError(method, _CLOSED)
        try:
            connection = _Connection(self.address, self._clock, deadline_ns)
        except TimeoutError:
            raise SpdkUnreachableError(method, f"{self.address} did not accept in time") from None
        except OSError as error:
            message, denied = f"{self.address}: {error.strerror or error}", isinstance(error, PermissionError)
            raise SpdkUnreachableError(method, message, denied=denied) from None
        self._open.add(connection)
        try:
            if self._closed.is_set():
                connection.abort()
            return connection.exchange(method, params)
        except TimeoutError:
            raise SpdkTimeoutError(method, f"{self.address} did not answer in time") from None
        except OSError as error:
            raise SpdkBrokenError(method, f"the connection ended: {error.strerror or error}") from None
        finally:
            self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        """End the calls that run; those that wait, and later ones, fail without being made. Idempotent, does not wait."""
        self._closed.set()
        self._pool.shutdown(wait=False)
        for connection in list(self._open):
            connection.abort()
