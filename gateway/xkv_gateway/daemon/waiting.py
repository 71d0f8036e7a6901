"""Attaches the card, and waits for one that nobody answers for: the target may boot later than the gateway.

What answers and is not right (another card, a refusal, a wrong key or name) ends the start: waiting would not make it right.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from xkv_gateway.errors import CardAwayError
from xkv_gateway.service.admin import AdminServer, guarded, open_to_all
from xkv_gateway.service.waiting import NoCardYetApp
from xkv_nvmeof.initiator_retry import Backoff, ReconnectLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from xkv_gateway.config import Config
    from xkv_gateway.daemon.notify import Notifier
    from xkv_gateway.daemon.ports import Ports
    from xkv_gateway.networks import StorageNetworks
    from xkv_gateway.target.attach import AttachedCard
    from xkv_rpc.calls import Handler

log = logging.getLogger(__name__)

PAUSE_MS: Final = (200, 2_000)
"""First and longest pause between two attempts."""
ATTEMPT_S: Final = 150.0
"""A controller may ask for 127 seconds until it is ready, and one that answers slowly has a deadline for each answer."""
MARGIN_S: Final = 30.0
"""The service manager hears of the next attempt so long before it loses patience."""
INDEX_S: Final = 300.0
"""What the start may take once the card is there."""


def waits(config: Config, notifier: Notifier) -> bool:
    """Return whether the start waits for its card."""
    how = config.card.wait
    return notifier.listens if how == "auto" else how == "always"


async def attach_when_there(
    attempt: Callable[[], Awaitable[AttachedCard]],
    answering: Callable[[Callable[[], str]], contextlib.AbstractAsyncContextManager[None]],
    notifier: Notifier,
    *,
    wait: bool,
    before: Callable[[], Awaitable[None]] | None,
    clock: Callable[[], int],
    entropy: Callable[[int], bytes],
) -> AttachedCard:
    """Return the card once there is one.

    Args:
        attempt: attaches it; raises CardAwayError where nobody answers.
        answering: given a function that tells why there is no card, has the ports answered for as long as that lasts.
        notifier: is told.
        wait: whether to wait at all.
        before: done before each further attempt: makes the target right, where the gateway looks after one.
        clock: monotonic nanoseconds.
        entropy: gives random bytes, for the pauses.

    Raises:
        GatewayError: it cannot be used.
    """
    try:
        return await _bounded(attempt)
    except CardAwayError as error:
        if not wait:
            advice = f"{error.advice} To wait for it instead: --card-wait always."
            raise CardAwayError(str(error), advice=advice) from None
        reason = str(error)
    began_ns, backoff, told = clock(), Backoff(*PAUSE_MS, entropy), ReconnectLog(log, clock)
    log.warning("the start waits for its card", extra={"event": "card-awaited"})
    async with answering(lambda: reason):
        while True:
            told.failure(reason)
            notifier.starting(ATTEMPT_S + MARGIN_S)
            notifier.status(f"waiting for the card: {reason}")
            await asyncio.sleep(backoff.next_s())
            if before is not None:
                await before()
            try:
                attached = await _bounded(attempt)
                break
            except CardAwayError as error:
                reason = str(error)
    log.info("the card is there, after %.1f s", (clock() - began_ns) / 1e9, extra={"event": "card-there"})
    notifier.starting(INDEX_S)
    notifier.status("opening the card")
    return attached


async def _bounded(attempt: Callable[[], Awaitable[AttachedCard]]) -> AttachedCard:
    try:
        async with asyncio.timeout(ATTEMPT_S):
            return await attempt()
    except TimeoutError:
        raise CardAwayError(
            f"the card is not there after {ATTEMPT_S:.0f} s: what answers for it is too slow",
            advice="Look at the target's load and at its log.",
        ) from None


@contextlib.asynccontextmanager
async def answer_without_card(
    ports: Ports, storage: StorageNetworks, service: Handler, reason: Callable[[], str]
) -> AsyncIterator[None]:
    """Have the admin port answered inside the block, and the control port until the gate opens, by those who have no card."""
    app = NoCardYetApp(reason)
    servers = [
        AdminServer(guarded(app, ports.admin_bind, ports.tokens.now, storage), ports.admin_listener.dup())
    ]
    if ports.admin_unix_listener is not None:
        servers.append(AdminServer(guarded(app, None), ports.admin_unix_listener.dup()))
    if ports.metrics_listener is not None:
        little = NoCardYetApp(lambda: "nobody answers for it")
        servers.append(AdminServer(open_to_all(little, storage), ports.metrics_listener.dup()))
    tasks = [asyncio.create_task(server.run(), name="waiting") for server in servers]
    ports.gate.stand_in(service)
    try:
        yield
    finally:
        for server in servers:
            server.stop()
        await asyncio.wait(tasks)
