"""Every way in which a call, a bind or an attach can fail; who is at fault; what the number outside is.

`ERRORS` is the one table of the protocol's error codes (PROTOCOL.md repeats it, and a test compares the two). Facts are
fields of the exceptions; no one ever has to read a message to find out what happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import ClassVar, Final


class Fault(Enum):
    """Who has to change something before the same request can succeed."""

    CLIENT = "client"
    SERVER = "server"
    MOMENT = "moment"
    """Nobody: the same request may succeed later."""


class ErrorCode(StrEnum):
    """`error.code` of a reply, as on the wire."""

    BAD_REQUEST = "bad_request"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNKNOWN_OP = "unknown_op"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    TOO_LARGE = "too_large"
    BUSY = "busy"
    DRAINING = "draining"
    CARD_OFFLINE = "card_offline"
    RECOVERING = "recovering"
    UNKNOWN_LEASE = "unknown_lease"
    UNKNOWN_TICKET = "unknown_ticket"
    UNKNOWN_REGION = "unknown_region"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """What an error code stands for outside of the control protocol."""

    fault: Fault
    exit_code: int
    """Exit status of a command line tool that ends with this error."""
    http_status: int
    retryable: bool
    """The same request, sent again later and unchanged, may succeed."""


ERRORS: Final[dict[ErrorCode, ErrorInfo]] = {
    ErrorCode.BAD_REQUEST: ErrorInfo(Fault.CLIENT, 10, 400, retryable=False),
    ErrorCode.UNSUPPORTED_VERSION: ErrorInfo(Fault.CLIENT, 11, 400, retryable=False),
    ErrorCode.UNKNOWN_OP: ErrorInfo(Fault.CLIENT, 12, 400, retryable=False),
    ErrorCode.UNAUTHORIZED: ErrorInfo(Fault.CLIENT, 13, 401, retryable=False),
    ErrorCode.FORBIDDEN: ErrorInfo(Fault.CLIENT, 14, 403, retryable=False),
    ErrorCode.TOO_LARGE: ErrorInfo(Fault.CLIENT, 15, 413, retryable=False),
    ErrorCode.BUSY: ErrorInfo(Fault.MOMENT, 16, 503, retryable=True),
    ErrorCode.DRAINING: ErrorInfo(Fault.MOMENT, 17, 503, retryable=True),
    ErrorCode.CARD_OFFLINE: ErrorInfo(Fault.MOMENT, 18, 503, retryable=True),
    ErrorCode.RECOVERING: ErrorInfo(Fault.MOMENT, 19, 503, retryable=True),
    ErrorCode.UNKNOWN_LEASE: ErrorInfo(Fault.CLIENT, 20, 404, retryable=False),
    ErrorCode.UNKNOWN_TICKET: ErrorInfo(Fault.CLIENT, 21, 404, retryable=False),
    ErrorCode.UNKNOWN_REGION: ErrorInfo(Fault.CLIENT, 22, 404, retryable=False),
    ErrorCode.INTERNAL: ErrorInfo(Fault.SERVER, 23, 500, retryable=False),
}


class XkvRpcError(Exception):
    """Base of everything that this package raises on purpose."""

    exit_code: int = 1
    """Exit status of a command line tool that ends with this error."""


class RpcError(XkvRpcError):
    """A request was refused: what the server answers, and what a client raises for that answer.

    Attributes:
        code: The code of the reply.
        message: One sentence for a person; carries no key, lease, token or other secret.
        field: The field of the request that is at fault, or None.
        retry_after_ms: How long to wait before it is worth trying again, or None.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, field: str | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(code.value, message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.exit_code = ERRORS[code].exit_code

    def __str__(self) -> str:
        where = f" ({self.field})" if self.field is not None else ""
        return f"{self.code.value}{where}: {self.message}"

    @property
    def info(self) -> ErrorInfo:
        """The row of `ERRORS` of this error's code."""
        return ERRORS[self.code]


# --- what a client raises when there is no answer ---------------------------------------------------------


class GatewayUnavailableError(XkvRpcError):
    """The gateway did not answer, or is known not to: take it for a miss and go on (R10)."""

    exit_code = 30


class GatewayUnreachableError(GatewayUnavailableError):
    """No connection could be made. The request was certainly not carried out."""


class KeyRefusedError(GatewayUnreachableError):
    """The endpoint does not know the client's key, or is not the gateway with the expected one. Nothing was sent."""


class CallTimeoutError(GatewayUnavailableError):
    """The deadline passed without a reply. Whether the request was carried out is unknown."""


class ConnectionLostError(GatewayUnavailableError):
    """The connection ended before the reply. Whether the request was carried out is unknown."""


class ConnectionResetByClientError(GatewayUnavailableError):
    """The connection was given up because of another call on it. Whether the request was carried out is unknown."""


class CircuitOpenError(GatewayUnavailableError):
    """An earlier call failed and the next probe is not due: nothing was sent.

    Attributes:
        retry_after_ns: Nanoseconds until the next call will probe the gateway.
    """

    def __init__(self, retry_after_ns: int) -> None:
        super().__init__(f"the gateway was unavailable; next probe in {retry_after_ns // 1_000_000} ms")
        self.retry_after_ns = retry_after_ns


class TooManyCallsError(GatewayUnavailableError):
    """Every connection (or call slot) of this client was in use until the deadline. Nothing was sent."""


class ClientClosedError(XkvRpcError):
    """The client was closed, before the call or during it."""


class BadReplyError(XkvRpcError):
    """The server sent a reply that the protocol does not allow. A bug of the server, or a server of something else."""

    exit_code = 31


# --- endpoints and sockets --------------------------------------------------------------------------------


class EndpointError(XkvRpcError):
    """An endpoint cannot be used; nothing is bound.

    Attributes:
        address: The endpoint or path, as it was given.
        errno: What the kernel said, 0 where it was not asked.
    """

    exit_code = 40
    reason: ClassVar[str] = "cannot be bound"

    def __init__(self, address: str, detail: str = "", *, errno: int = 0) -> None:
        super().__init__(f"{address}: {self.reason}{': ' if detail else ''}{detail}")
        self.address = address
        self.errno = errno


class AddressInUseError(EndpointError):
    """Another process serves this address."""

    exit_code = 41
    reason = "is in use by another process"


class BadEndpointError(EndpointError):
    """The address is not one that can be served or connected to."""

    exit_code = 42
    reason = "is not a usable address"


class SocketPathTooLongError(EndpointError):
    """The path of a Unix socket has more bytes than the kernel takes."""

    exit_code = 43
    reason = "is too long for the path of a Unix socket"


class NotASocketError(EndpointError):
    """Something that is not a socket lies at the path; it is never deleted."""

    exit_code = 44
    reason = "exists and is not a socket"


class RegionRefusedError(XkvRpcError):
    """A region could not be attached: refused by the gateway, or the gateway's socket is gone."""

    exit_code = 45
