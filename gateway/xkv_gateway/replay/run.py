"""One replay from the connection to its outcome: opens the link, plays, says in one sentence what stopped it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xkv_gateway.binds import host_port, is_loopback
from xkv_gateway.errors import (
    CardUnavailableError,
    ConfigError,
    ExitCode,
    GatewayError,
    GatewayUnreachableError,
    RefusedError,
)
from xkv_gateway.replay.link import open_link
from xkv_gateway.replay.player import Player, PlayOptions
from xkv_gateway.replay.report import ReplayOutcome, TraceFacts
from xkv_gateway.replay.stats import ReplayStats
from xkv_gateway.replay.tenants import tenant_scopes
from xkv_rpc.errors import (
    BadReplyError,
    ConnectionResetByClientError,
    EndpointError,
    ErrorCode,
    GatewayUnavailableError,
    RegionRefusedError,
    RpcError,
    XkvRpcError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.replay.link import Link
    from xkv_gateway.replay.trace import Trace
    from xkv_rpc.doors import ClientKeys

WATCH_INTERVAL_S: Final = 1.0
START_ADVICE: Final = (
    "Start one with `xkv-gateway serve`, or name its control port with --host and --port, or its Unix socket with --socket; "
    "an endpoint for keys answers only with --key."
)


class ReplayInterruptedError(GatewayError):
    """Somebody stopped the replay before its end."""

    exit_code = ExitCode.FORCED


@dataclass(frozen=True, slots=True)
class Where:
    """Where the gateway listens."""

    host: str
    port: int
    unix_path: str | None = None
    """Its Unix socket; used instead of both."""

    @property
    def endpoint(self) -> str:
        """As the client takes it."""
        return f"tcp://{self}" if self.unix_path is None else f"ipc://{self.unix_path}"

    @property
    def is_this_host(self) -> bool:
        """Whether paths of the gateway's host mean the same here."""
        if self.unix_path is not None or self.host == "localhost":
            return True
        try:
            return is_loopback(self.host)
        except ValueError:
            return False

    def __str__(self) -> str:
        return self.unix_path or host_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What to play against whom, and how."""

    where: Where
    block_bytes: int
    namespace: str
    scope: bytes
    concurrency: int
    region: bool | None
    """True: shared memory or nothing; False: inline; None: shared memory where it is offered."""
    speed: float | None
    lease_ms: int
    timeout_ns: int
    """For one answer, and for how long one message may be turned away as busy."""
    tenants: int = 0
    """Over how many tenants the trace is split; 0: all of it is `scope`'s."""

    @property
    def scopes(self) -> list[bytes]:
        """Scopes of the tenants, by number."""
        return tenant_scopes(self.tenants) if self.tenants else [self.scope]

    keys: ClientKeys | None = None
    """For an endpoint with keys."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The outcome, and the error that ended the replay early, if one did."""

    outcome: ReplayOutcome
    failure: GatewayError | None


class _Progress:
    """What is known at every moment, also when the replay ends early."""

    def __init__(self) -> None:
        self.stats = ReplayStats()
        self.transfer = "none"
        self.begin_ns = 0


async def run_replay(
    plan: ReplayPlan, trace: Trace, on_progress: Callable[[ReplayStats], None], *, clock: Callable[[], int]
) -> ReplayResult:
    """Play `trace` as `plan` says. Failures of the gateway or of the way to it are part of the result."""
    progress = _Progress()
    progress.begin_ns = clock()
    failure: GatewayError | None = None
    try:
        await _play(plan, trace, progress, on_progress, clock)
    except* XkvRpcError as group:
        failure = _explain(_cause(group), plan, progress.stats)
    except* asyncio.CancelledError:
        # Somebody stopped it: what was measured so far is worth showing all the same.
        failure = ReplayInterruptedError(f"stopped after {progress.stats.requests} requests")
    outcome = ReplayOutcome(
        trace=TraceFacts(
            name=trace.name,
            requests=len(trace.requests),
            blocks=trace.blocks,
            distinct_blocks=trace.distinct_blocks(),
            leading_repeats=trace.leading_repeats(max(1, plan.tenants)),
        ),
        block_bytes=plan.block_bytes,
        namespace=plan.namespace,
        scopes=plan.scopes if plan.tenants else [],
        transfer=progress.transfer,
        concurrency=plan.concurrency,
        speed=plan.speed,
        stats=progress.stats,
        elapsed_ns=clock() - progress.begin_ns,
        problem=None if failure is None else str(failure),
    )
    return ReplayResult(outcome, failure)


async def _play(
    plan: ReplayPlan,
    trace: Trace,
    progress: _Progress,
    on_progress: Callable[[ReplayStats], None],
    clock: Callable[[], int],
) -> None:
    async with open_link(plan, clock=clock) as link:
        progress.transfer = link.transfer
        options = PlayOptions(
            block_bytes=plan.block_bytes,
            lease_ms=plan.lease_ms,
            concurrency=plan.concurrency,
            speed=plan.speed,
            busy_timeout_ns=plan.timeout_ns,
            scopes=plan.scopes,
        )
        player = Player(link, options, progress.stats, clock=clock)
        progress.begin_ns = clock()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_watch(link))
            await player.play(trace, on_progress)
            watch.cancel()


async def _watch(link: Link) -> None:
    """Ping the gateway while the replay runs, so that one that went away is noticed long before a call times out."""
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        await link.ping()


def _cause(group: BaseExceptionGroup[XkvRpcError]) -> XkvRpcError:
    """Pick the failure that the others follow from: giving up a connection fails all calls that are on it."""
    leaves: list[XkvRpcError] = []
    groups = [group]
    while groups:
        for error in groups.pop().exceptions:
            if isinstance(error, BaseExceptionGroup):
                groups.append(error)
            else:
                leaves.append(error)
    return min(leaves, key=lambda error: isinstance(error, ConnectionResetByClientError))


def _explain(error: XkvRpcError, plan: ReplayPlan, stats: ReplayStats) -> GatewayError:
    where = str(plan.where)
    after = f" after {stats.requests} requests" if stats.requests else ""
    if isinstance(error, RpcError):
        return _explain_refusal(error, where, after)
    if isinstance(error, EndpointError | RegionRefusedError):
        return ConfigError(str(error))
    if isinstance(error, GatewayUnavailableError):
        gone = (
            f"the gateway at {where} went away{after}" if stats.requests else f"no gateway answers at {where}"
        )
        return GatewayUnreachableError(f"{gone}: {error}", advice=START_ADVICE)
    if isinstance(error, BadReplyError):
        return GatewayUnreachableError(
            f"what answers at {where} is not a gateway: {error}", advice="Name the control port with --port."
        )
    return GatewayError(f"{where}: {error}")


REFUSALS: Final[dict[ErrorCode, tuple[type[GatewayError], str]]] = {
    ErrorCode.CARD_OFFLINE: (CardUnavailableError, "`xkv-gateway status` says why the card is offline."),
    ErrorCode.RECOVERING: (
        CardUnavailableError,
        "The gateway reads the card's journal; try again in a moment.",
    ),
    ErrorCode.DRAINING: (GatewayUnreachableError, "The gateway is being stopped."),
    ErrorCode.BUSY: (GatewayUnreachableError, "The gateway stayed busy; try a lower --concurrency."),
    ErrorCode.TOO_LARGE: (ConfigError, "Choose smaller --block-bytes."),
    ErrorCode.UNAUTHORIZED: (ConfigError, ""),
    ErrorCode.FORBIDDEN: (RefusedError, "`xkv-gateway keys list` says which namespaces a key may touch."),
}
"""What a refused message means for the command. A code that is not here is a bug, of the gateway or of the replay."""


def _explain_refusal(error: RpcError, where: str, after: str) -> GatewayError:
    kind, advice = REFUSALS.get(error.code, (GatewayError, ""))
    return kind(f"the gateway at {where} refused{after}: {error}", advice=advice)
