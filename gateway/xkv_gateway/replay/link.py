"""The way to the gateway: one connection, and one of two ways for the bytes.

With a region the payloads lie in memory shared with the gateway; inline they travel inside the messages. Both take
the payloads of a store from the slots of a window, and both say where the loaded blocks lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

from xkv_gateway.errors import CardUnavailableError, ConfigError
from xkv_gateway.replay.windows import WINDOW_BYTES, WindowPool, plan_windows
from xkv_gateway.sizes import format_size
from xkv_rpc.client import AsyncClient, ClientOptions, Region
from xkv_rpc.errors import RegionRefusedError, RpcError
from xkv_rpc.messages import CardState, LoadStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from xkv_gateway.replay.run import ReplayPlan
    from xkv_gateway.replay.windows import Window, WindowPlan
    from xkv_rpc.messages import HelloReply, LookupReply

CLIENT_NAME: Final = "xkv-gateway replay"
NS_PER_MS: Final = 1_000_000
CONNECT_TIMEOUT_MS: Final = 2_000
CALLS_MAX: Final = 1024
"""Above what windows and requests at the same time can have in flight: a ping never waits for a slot."""
PING_TIMEOUT_MS: Final = 10_000
"""A gateway that does not answer a ping for so long is gone, or as good as."""


class Link(ABC):
    """An open connection to a gateway, for one replay."""

    transfer: str
    """How the bytes travel: `region` or `inline`."""

    def __init__(self, client: AsyncClient, plan: ReplayPlan, hello: HelloReply, windows: WindowPool) -> None:
        self._client = client
        self._plan = plan
        self.keys_max = hello.limits.keys
        self.windows = windows

    async def lookup(self, scope: bytes, keys: list[bytes], lease_ms: int) -> LookupReply:
        """Ask how many leading keys are held, with a lease on them."""
        return await self._client.lookup(self._plan.namespace, scope, keys, lease_ms=lease_ms)

    async def ping(self) -> None:
        """Find out that the gateway is there.

        Raises:
            GatewayUnavailableError: it is not.
        """
        with suppress(RpcError):  # whoever refuses, answers
            await self._client.ping(timeout_ms=min(self._plan.timeout_ns // NS_PER_MS, PING_TIMEOUT_MS))

    async def release(self, lease: bytes) -> None:
        """Give a lease back."""
        await self._client.release(lease)

    @abstractmethod
    async def load(
        self, scope: bytes, keys: list[bytes], lease: bytes | None, window: Window
    ) -> tuple[list[str], list[memoryview | None]]:
        """Load the keys: a status for each, and where its bytes lie if the status is `ok`."""

    @abstractmethod
    async def store(self, scope: bytes, keys: list[bytes], window: Window) -> list[str]:
        """Store the payloads that lie in the first slots of the window: a status for each key."""


class RegionLink(Link):
    """Bytes through memory that the gateway shares."""

    transfer = "region"

    def __init__(
        self, client: AsyncClient, plan: ReplayPlan, hello: HelloReply, windows: WindowPool, region: Region
    ) -> None:
        super().__init__(client, plan, hello, windows)
        self._token = region.token

    async def load(
        self, scope: bytes, keys: list[bytes], lease: bytes | None, window: Window
    ) -> tuple[list[str], list[memoryview | None]]:
        """Load into the slots of the window."""
        count = len(keys)
        lengths = [self._plan.block_bytes] * count
        result = await self._client.load_into(
            self._plan.namespace,
            scope,
            keys,
            self._token,
            window.offsets[:count],
            lengths,
            lease=lease,
        )
        blocks = [
            slot[:size] if status is LoadStatus.OK and size is not None else None
            for slot, status, size in zip(window.slots, result.statuses, result.sizes, strict=False)
        ]
        return [status.value for status in result.statuses], blocks

    async def store(self, scope: bytes, keys: list[bytes], window: Window) -> list[str]:
        """Store from the slots of the window."""
        count = len(keys)
        sizes = [self._plan.block_bytes] * count
        statuses = await self._client.store_from(
            self._plan.namespace, scope, keys, sizes, self._token, window.offsets[:count]
        )
        return [status.value for status in statuses]


class InlineLink(Link):
    """Bytes inside the messages."""

    transfer = "inline"

    async def load(
        self,
        scope: bytes,
        keys: list[bytes],
        lease: bytes | None,
        window: Window,  # noqa: ARG002 - the interface's
    ) -> tuple[list[str], list[memoryview | None]]:
        """Load; the blocks lie in the reply, the window is only the permit to have it in flight."""
        result = await self._client.load(self._plan.namespace, scope, keys, lease=lease)
        return [status.value for status in result.statuses], result.payloads

    async def store(self, scope: bytes, keys: list[bytes], window: Window) -> list[str]:
        """Store the slots of the window; they are not touched before the call has ended."""
        payloads = window.slots[: len(keys)]
        statuses = await self._client.store(self._plan.namespace, scope, keys, payloads)
        return [status.value for status in statuses]


@asynccontextmanager
async def open_link(plan: ReplayPlan, *, clock: Callable[[], int]) -> AsyncIterator[Link]:
    """Connect, and attach a region where the plan and the gateway allow it.

    Raises:
        ConfigError: blocks of this size, or a region, are not to be had from this gateway.
        CardUnavailableError: the gateway has no card to play on.
        XkvRpcError: the gateway does not answer.
    """
    options = ClientOptions(
        timeout_ms=plan.timeout_ns // NS_PER_MS,
        connect_timeout_ms=CONNECT_TIMEOUT_MS,
        calls_max=CALLS_MAX,
        keys=plan.keys,
    )
    async with AsyncClient(plan.where.endpoint, options, clock=clock) as client:
        hello = await client.hello(CLIENT_NAME)
        _check(plan, hello)
        region = await _attach(client, plan, hello)
        if region is None:
            windows = _inline_windows(plan, hello)
            try:
                yield InlineLink(client, plan, hello, windows)
            finally:
                windows.close()
            return
        with region:
            windows = WindowPool(_region_plan(plan, hello), region.view)
            try:
                yield RegionLink(client, plan, hello, windows, region)
            finally:
                windows.close()


def _check(plan: ReplayPlan, hello: HelloReply) -> None:
    if plan.block_bytes > hello.limits.object_bytes:
        raise ConfigError(
            f"--block-bytes: the gateway takes objects of {format_size(hello.limits.object_bytes)} at most"
        )
    if hello.card.state is not CardState.ONLINE:
        raise CardUnavailableError(
            f"the gateway's card is {hello.card.state.value}: there is nothing to replay against",
            advice="`xkv-gateway status` says why.",
        )


def _region_plan(plan: ReplayPlan, hello: HelloReply) -> WindowPlan:
    return plan_windows(
        plan.block_bytes,
        keys_max=hello.limits.keys,
        message_bytes_max=max(plan.block_bytes, WINDOW_BYTES),
        concurrency=plan.concurrency,
    )


async def _attach(client: AsyncClient, plan: ReplayPlan, hello: HelloReply) -> Region | None:
    """Attach a region, or None where bytes go inline: asked for, or shared memory was only a preference."""
    # The path in `hello` is one of the gateway's host; here the same path may lead to another gateway.
    if plan.region is False or (plan.region is None and not plan.where.is_this_host):
        return None
    try:
        return await client.attach_region(_region_plan(plan, hello).buffer_bytes, client=CLIENT_NAME)
    except RegionRefusedError as error:
        if plan.region:
            raise ConfigError(f"--region: {error}") from None
        return None


def _inline_windows(plan: ReplayPlan, hello: HelloReply) -> WindowPool:
    inline_bytes = hello.limits.inline_bytes
    if plan.block_bytes > inline_bytes:
        raise ConfigError(
            f"--block-bytes: the gateway takes {format_size(inline_bytes)} in a message at most; use --region"
        )
    windows = plan_windows(
        plan.block_bytes,
        keys_max=hello.limits.keys,
        message_bytes_max=inline_bytes,
        concurrency=plan.concurrency,
    )
    return WindowPool(windows, memoryview(bytearray(windows.buffer_bytes)))
