"""Makes a fresh queue pair a queue of a controller: Connect, and authentication where it is asked for (Base 6.3, 8.13.2)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from xkv_nvmeof import builders
from xkv_nvmeof.blockdev import CommandFailed, DeviceError
from xkv_nvmeof.command import ConnectCommand, ConnectData
from xkv_nvmeof.dhchap.host import AuthenticationFailed, Fault, HostAuthentication
from xkv_nvmeof.dhchap.messages import MESSAGE_BYTES_MAX
from xkv_nvmeof.host_settings import ConnectionLost
from xkv_nvmeof.initiator_errors import AuthenticationRefused, ConnectRefused, ConnectUnanswered
from xkv_nvmeof.initiator_execute import execute
from xkv_nvmeof.spec import (
    CONNECT_DATA_BYTES,
    DISCOVERY_NQN,
    AuthenticationRequirement,
    ConnectAttribute,
    Status,
    status_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.dhchap.host import Authenticated, HostKeys
    from xkv_nvmeof.initiator_link import QueueLink
    from xkv_nvmeof.initiator_options import InitiatorOptions


async def fabrics_connect(
    link: QueueLink,
    options: InitiatorOptions,
    deadline_ns: int,
    *,
    nqn: str,
    qid: int,
    cntlid: int,
    entries: int,
    keep_alive_ms: int,
    entropy: Callable[[int], bytes],
) -> int:
    """Send Connect on a fresh queue pair, authenticate, and return the controller id (Base 6.3).

    Raises:
        ConnectRefused: with the controller's status.
        ConnectUnanswered: it has no room now.
        AuthenticationRefused: one of the two does not prove itself.
        ConnectFailed: the connection ended.
    """
    attributes = 0 if options.sq_flow_control else ConnectAttribute.DISABLE_SQ_FLOW_CONTROL
    command = ConnectCommand(0, qid, entries - 1, keep_alive_ms, attributes)
    data = ConnectData(options.host_id, cntlid, nqn, options.host_nqn).to_bytes()
    assert len(data) == CONNECT_DATA_BYTES
    what = f"Connect of queue {qid}"
    try:
        answer = await execute(link, command.to_entry(), what, deadline_ns, send=data, connect=True)
    except CommandFailed as failed:
        status = failed.status_code_type << 8 | failed.status_code
        message = f"{what} refused: {status_name(status)}{_CONNECT_HINTS.get(status, '')}"
        if status == Status.CONNECT_CONTROLLER_BUSY:
            # It may still keep the connections of a host that is gone.
            raise ConnectUnanswered(message) from None
        raise ConnectRefused(message, status=status) from None
    requirement = AuthenticationRequirement(answer.result >> 16 & AuthenticationRequirement.ALL)
    await _authenticate_if_due(link, options, deadline_ns, nqn, f"queue {qid}", requirement, entropy)
    return answer.result & 0xFFFF


_CONNECT_HINTS: Final[dict[int, str]] = {
    Status.CONNECT_INVALID_HOST: ": the subsystem does not allow this host NQN",
    Status.CONNECT_INVALID_PARAMETERS: ": there is no such subsystem, or it does not like a parameter",
    Status.CONNECT_CONTROLLER_BUSY: ": the controller has no room for another connection",
}


async def _authenticate_if_due(
    link: QueueLink,
    options: InitiatorOptions,
    deadline_ns: int,
    nqn: str,
    what: str,
    requirement: AuthenticationRequirement,
    entropy: Callable[[int], bytes],
) -> None:
    """Authenticate where the controller asks for it, or this host must know who the controller is.

    Raises:
        AuthenticationRefused: as `authenticate`, or it cannot be done.
    """
    keys = options.dhchap
    if requirement & AuthenticationRequirement.SECURE_CHANNEL:
        raise AuthenticationRefused(
            f"{what}: the controller wants a secure channel (TLS), which this host does not speak",
            fault=Fault.NOT_OFFERED,
        )
    if requirement & AuthenticationRequirement.TRANSACTION:
        if keys is None:
            raise AuthenticationRefused(
                f"{what}: the controller requires authentication (DH-HMAC-CHAP), and this host has no key",
                fault=Fault.HOST_KEY,
            )
        nqns = (options.host_nqn, nqn)
        link.authenticated = await authenticate(link, keys, nqns, entropy, what, deadline_ns)
    elif keys is not None and keys.controller is not None and nqn != DISCOVERY_NQN:
        # Whoever wants to pass for the controller would only have to ask for nothing.
        raise AuthenticationRefused(
            f"{what}: there is a controller key, and the controller does not take part in authentication",
            fault=Fault.CONTROLLER_KEY,
        )


async def authenticate(
    link: QueueLink,
    keys: HostKeys,
    nqns: tuple[str, str],
    entropy: Callable[[int], bytes],
    what: str,
    deadline_ns: int,
) -> Authenticated:
    """Prove this host's identity on `link`, and see the controller's proven where there is a key for that; return how.

    `nqns` are those of the host and of the subsystem; `what` names the queue.

    Raises:
        AuthenticationRefused: which says whose key is wrong, or what else is.
        ConnectFailed: the connection ended, or no answer came in time.
    """
    session = HostAuthentication(keys, nqns, int.from_bytes(entropy(2), "little"), entropy)
    try:
        await _send(link, session.begin(), what, deadline_ns)
        challenge = await _receive(link, what, deadline_ns)
        # Large groups take tens of milliseconds, which nothing else may wait for.
        await _send(link, await asyncio.to_thread(session.answer, challenge), what, deadline_ns)
        last = session.conclude(await _verdict(link, what, deadline_ns))
        if last is not None:
            await _send(link, last, what, deadline_ns)
        return session.outcome  # noqa: TRY300 - the end of the happy path
    except AuthenticationFailed as failed:
        if failed.farewell is not None:
            # The controller may be gone already; what went wrong is known all the same.
            with contextlib.suppress(DeviceError):
                await _send(link, failed.farewell, what, deadline_ns)
        raise AuthenticationRefused(f"{what}: {failed}", fault=failed.fault) from None


async def _send(link: QueueLink, message: bytes, what: str, deadline_ns: int) -> None:
    entry = builders.authentication_send(0, len(message))
    await execute(link, entry, f"Authentication Send on {what}", deadline_ns, send=message)


async def _verdict(link: QueueLink, what: str, deadline_ns: int) -> bytes:
    """Return what the controller thinks of this host's answer."""
    try:
        return await _receive(link, what, deadline_ns)
    except ConnectUnanswered:
        if isinstance(link.core.failure, ConnectionLost):
            # Linux's target takes the connection away together with its verdict, which is then often not sent.
            detail = "it ended the connection when it had the answer"
            raise AuthenticationFailed(Fault.HOST_KEY, detail) from None
        raise


async def _receive(link: QueueLink, what: str, deadline_ns: int) -> bytes:
    entry = builders.authentication_receive(0, MESSAGE_BYTES_MAX)
    name = f"Authentication Receive on {what}"
    size = MESSAGE_BYTES_MAX
    return bytes((await execute(link, entry, name, deadline_ns, receive_bytes=size, may_be_short=True)).data)
