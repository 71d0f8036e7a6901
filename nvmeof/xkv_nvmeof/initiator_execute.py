"""Runs single commands on a queue of the host, each with its deadline."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xkv_nvmeof.blockdev import DataCorrupted
from xkv_nvmeof.host_command import Exchange, Outcome
from xkv_nvmeof.initiator_errors import command_failed, link_failed
from xkv_nvmeof.spec import FABRICS_OPCODE

if TYPE_CHECKING:
    from xkv_nvmeof.command import SubmissionEntry
    from xkv_nvmeof.initiator_link import QueueLink


@dataclass(frozen=True, slots=True)
class Answer:
    """A command that succeeded: dwords 0 and 1 of its completion, and its data."""

    result: int
    data: memoryview


async def execute(
    link: QueueLink,
    entry: SubmissionEntry,
    what: str,
    deadline_ns: int,
    *,
    send: bytes = b"",
    receive_bytes: int = 0,
    may_be_short: bool = False,
    connect: bool = False,
) -> Answer:
    """Run one command on `link`; a read whose data digest fails is repeated once.

    Args:
        link: the queue; ready, or for Connect in its place.
        entry: the command, with a command id of zero.
        what: its name, for errors.
        deadline_ns: when the queue is given up.
        send: its data for the controller.
        receive_bytes: how much the controller sends.
        may_be_short: it may send less, as its answer needs no more.
        connect: it is the Fabrics Connect.

    Raises:
        CommandFailed: the controller's status is not success.
        DataCorrupted: the data digest did not match twice.
        ConnectFailed: the connection ended before an answer came.
    """
    loop = asyncio.get_running_loop()
    data = memoryview(bytearray(receive_bytes))
    exchange = Exchange(
        bytearray(entry.to_bytes()),
        deadline_ns,
        receive=[data] if receive_bytes else (),
        receive_bytes=receive_bytes,
        send=[memoryview(send)] if send else (),
        send_bytes=len(send),
        may_be_short=may_be_short,
    )
    for _attempt in range(2):
        done: asyncio.Future[None] = loop.create_future()
        exchange.on_finish = lambda _exchange, done=done: done.done() or done.set_result(None)
        if link.core.failure is not None:
            raise link_failed(what, link.core.failure)
        fabrics = entry.opcode == FABRICS_OPCODE
        submit = link.submit_connect if connect else link.submit_fabrics if fabrics else link.submit
        submit(exchange)
        await done
        match exchange.outcome:
            case Outcome.COMPLETED:
                if exchange.status:
                    raise command_failed(what, exchange.status, do_not_retry=exchange.do_not_retry)
                return Answer(exchange.result, data[: exchange.received_bytes])
            case Outcome.CORRUPT:
                continue
            case _:
                raise link_failed(what, link.core.failure)
    raise DataCorrupted(f"{what}: the data digest did not match, twice")
