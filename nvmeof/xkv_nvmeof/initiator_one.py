"""The short way of a call that is one command, which could be sent at once.

Nearly every call is one of those, and nearly all of them succeed: then this is all there is of them. Whatever else becomes
of one - a status, a lost connection, a caller that is cancelled - makes an ordinary `Call` of it, which has that command in
flight. So the short way decides nothing, and ends as the long way would have done.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.host_command import Outcome
from xkv_nvmeof.initiator_calls import Call

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from xkv_nvmeof.host_command import Exchange
    from xkv_nvmeof.initiator_association import Association

_COMPLETED: Final = Outcome.COMPLETED


class OneCommand:
    """A call of one command that `association` is about to send; `future` is its conclusion.

    `otherwise` is what finishes a command of a `Call`.
    """

    __slots__ = ("_association", "_call", "_exchange", "_mutates", "_otherwise", "_what", "future")

    def __init__(
        self,
        what: str,
        exchange: Exchange,
        association: Association,
        future: asyncio.Future[None],
        otherwise: Callable[[Call, Association, Exchange], None],
        *,
        mutates: bool,
    ) -> None:
        self._what = what
        self._exchange = exchange
        self._association = association
        self.future = future
        self._otherwise = otherwise
        self._mutates = mutates
        self._call: Call | None = None
        exchange.on_finish = self._finished

    def _finished(self, exchange: Exchange) -> None:
        if exchange.outcome is _COMPLETED and not exchange.status:
            # Without this the three are a circle, which keeps the caller's buffers until the collector comes.
            exchange.on_finish = None
            future = self.future
            if not future.done():
                future.set_result(None)
        else:
            self._otherwise(self._as_call(), self._association, exchange)

    @property
    def pending(self) -> Call | None:
        """The call that this is from now on, unless its command has succeeded."""
        if self._call is None and self._exchange.outcome is not Outcome.PENDING:
            return None
        return self._as_call()

    def _as_call(self) -> Call:
        if self._call is None:
            exchange, association = self._exchange, self._association
            call = Call(self._what, iter(()), exchange.deadline_ns, self.future, mutates=self._mutates)
            call.in_flight[exchange] = association
            exchange.on_finish = partial(self._otherwise, call, association)
            self._call = call
        return self._call
