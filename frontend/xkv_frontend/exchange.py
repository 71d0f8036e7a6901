"""One request and its answer: what is known of it, and how it ends when the client goes away or its key is revoked."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Self

from xkv_frontend.core.refusal import Code, Refusal

if TYPE_CHECKING:
    from types import TracebackType

    from starlette.types import Receive, Scope

    from xkv_frontend.core.heads import Head
    from xkv_frontend.core.limits import BodyBudget
    from xkv_frontend.core.policy import Identity
    from xkv_frontend.core.routes import Route

BODY_TIMEOUT_S: Final = 60.0
SEND_STALL_NS: Final = 300_000_000_000
"""How long a client may take none of what is sent to it."""
LINGER_S: Final = 1.0
LINGER_BYTES_MAX: Final = 8 << 20


class Outcome(StrEnum):
    """How a request ended."""

    DONE = "done"
    REFUSED = "refused"
    CLIENT_GONE = "client_gone"
    REVOKED = "revoked"
    TRUNCATED = "truncated"
    """The upstream broke off after its answer had begun."""
    STALLED = "stalled"
    FAILED = "failed"


class ClientGoneError(Exception):
    """The client has closed its connection."""


@dataclass(slots=True)
class Exchange:
    """What is known of a request while it runs; it becomes a line of the access log."""

    id: str
    began_ns: int
    head: Head | None = None
    route: Route | None = None
    identity: Identity | None = None
    scope: str = ""
    status: int = 0
    outcome: Outcome = Outcome.DONE
    code: str = ""
    received_bytes: int = 0
    sent_bytes: int = 0
    first_ns: int | None = None
    body_read: bool = False
    stream: bool = False
    body: list[bytes] = field(default_factory=list)
    """What goes to the upstream, one item; taken out when it is sent, so that nothing holds it while a stream runs."""

    @property
    def response_started(self) -> bool:
        """Whether an answer has begun."""
        return self.status != 0


async def read_body(receive: Receive, exchange: Exchange, bytes_max: int, budget: BodyBudget) -> bytes:
    """Return the whole body.

    Raises:
        Refusal: `too_large`, judged by the announced length before anything is read; `busy`; `body_timeout`.
        ClientGoneError: It ends early.
    """
    assert exchange.head is not None
    announced = exchange.head.length or 0
    if announced > bytes_max:
        raise too_large(bytes_max)
    budget.take(announced)
    taken = announced
    pieces: list[bytes] = []
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                piece = message.get("body", b"")
                exchange.received_bytes += len(piece)
                if exchange.received_bytes > bytes_max:
                    raise too_large(bytes_max)
                if exchange.received_bytes > taken:
                    budget.take(exchange.received_bytes - taken)
                    taken = exchange.received_bytes
                pieces.append(piece)
                if not message.get("more_body", False):
                    exchange.body_read = True
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except TimeoutError:
        raise Refusal(Code.BODY_TIMEOUT, "the body took too long") from None
    finally:
        budget.give_back(taken)


def too_large(bytes_max: int) -> Refusal:
    """Return the refusal of a body over the limit."""
    return Refusal(Code.TOO_LARGE, f"the body may have at most {bytes_max} bytes")


async def linger(receive: Receive) -> None:
    """Take what a refused client still sends, for a moment: closing at once would destroy the answer on its way."""
    taken = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while taken < LINGER_BYTES_MAX:
                message = await receive()
                taken += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


class Lifeline:
    """Ends a block of code when the client goes away or the request is called off; as a context manager around it.

    `ended` then says why; the cancellation goes no further.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.ended: Outcome | None = None
        self.sending_since_ns: int | None = None
        """Since when the client has not taken what is being sent to it."""
        self.answered = False
        """Set with the last piece of the answer: from then on a client that goes away has got everything."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._task is not None
        assert self._watcher is not None
        self._watcher.cancel()
        ended, task, self._task = self.ended, self._task, None
        if ended is None or kind is None:
            if ended is not None:
                task.uncancel()
            return False
        return task.uncancel() == 0 and issubclass(kind, asyncio.CancelledError)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(Outcome.CLIENT_GONE)

    def end(self, why: Outcome) -> None:
        """Cancel what runs inside the block, if it still runs and was not ended before."""
        if self.ended is None and self._task is not None and not self.answered:
            self.ended = why
            self._task.cancel()


def path_text(scope: Scope) -> str:
    """Return the path of a request as it came."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogatepass")
    return raw.decode("latin-1")
