"""The host's side of an authentication: one object a queue (Base 2.0, 8.13.5). Pure.

The shell sends what `begin` returns, receives, gives what came to `answer` (slow: off the event loop), sends the reply,
receives, gives that to `conclude`, and sends what that returns, if anything. Whatever fails raises
`AuthenticationFailed`, once; its `farewell` is to be sent to the controller when there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.dhchap import crypto
from xkv_nvmeof.dhchap.crypto import BadPublicValue, Group, Hash
from xkv_nvmeof.dhchap.messages import (
    EXPLANATIONS,
    Challenge,
    Explanation,
    Failure,
    MessageError,
    MessageId,
    Negotiate,
    Reply,
    Success1,
    Success2,
    message_id,
)
from xkv_nvmeof.dhchap.states import HOST_TABLE, HostEvent, HostState

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.dhchap.secret import DhchapSecret

ALL_HASHES: Final = (Hash.SHA_512, Hash.SHA_384, Hash.SHA_256)
ALL_GROUPS: Final = (
    Group.FFDHE8192,
    Group.FFDHE6144,
    Group.FFDHE4096,
    Group.FFDHE3072,
    Group.FFDHE2048,
    Group.NULL,
)


class Fault(Enum):
    """Whose key it was, or what else went wrong."""

    HOST_KEY = "the controller does not accept this host's key"
    CONTROLLER_KEY = "the controller does not prove that it knows the controller key"
    NOT_OFFERED = "host and controller allow nothing in common"
    PROTOCOL = "the controller breaks the authentication protocol"


class AuthenticationFailed(Exception):  # noqa: N818
    """The transaction is over. `farewell` is AUTH_Failure2 for the controller, where one is due."""

    def __init__(self, fault: Fault, detail: str, farewell: bytes | None = None) -> None:
        super().__init__(f"{fault.value} ({detail})" if detail else fault.value)
        self.fault = fault
        self.farewell = farewell


@dataclass(frozen=True, slots=True)
class HostKeys:
    """What this host proves itself with, and what it allows, the most wished for first.

    With `controller` the controller must prove itself too; one that does not is refused.
    """

    host: DhchapSecret
    controller: DhchapSecret | None = None
    hashes: tuple[Hash, ...] = ALL_HASHES
    groups: tuple[Group, ...] = ALL_GROUPS


@dataclass(frozen=True, slots=True)
class Authenticated:
    """How the two ends of a queue proved who they are; for status displays."""

    hash: str
    group: str
    """Of Diffie and Hellman; NULL: none."""
    both_ways: bool
    """Whether the controller proved itself, too."""


_NOT_OFFERED: Final = frozenset(
    {
        Explanation.PROTOCOL_NOT_USABLE,
        Explanation.CONCATENATION_MISMATCH,
        Explanation.HASH_NOT_USABLE,
        Explanation.GROUP_NOT_USABLE,
    }
)


class HostAuthentication:
    """One transaction. `nqns` are those of the host and of the subsystem; `transaction` is any number of 16 bits."""

    def __init__(
        self, keys: HostKeys, nqns: tuple[str, str], transaction: int, entropy: Callable[[int], bytes]
    ) -> None:
        self.state = HostState.NEW
        self._keys = keys
        self._nqns = nqns
        self._transaction = transaction
        self._entropy = entropy
        self._expected = b""
        """The response with which the controller proves itself; nothing when it need not."""
        self._challenge: Challenge | None = None

    def _step(self, event: HostEvent) -> None:
        self.state = HOST_TABLE[self.state, event]

    def begin(self) -> bytes:
        """Return AUTH_Negotiate."""
        self._step(HostEvent.NEGOTIATE)
        return Negotiate(self._transaction, self._keys.hashes, self._keys.groups).to_bytes()

    def answer(self, data: bytes) -> bytes:
        """Return the Reply to a Challenge.

        Raises:
            AuthenticationFailed: something else came, or the Challenge is not acceptable.
        """
        assert self.state is HostState.NEGOTIATED
        try:
            self._expect(MessageId.CHALLENGE, data)
            self._challenge = Challenge.from_bytes(data)
            reply = self._reply(self._challenge)
        except MessageError as error:
            raise self._broken(error) from None
        self._step(HostEvent.CHALLENGE)
        return reply.to_bytes()

    def conclude(self, data: bytes) -> bytes | None:
        """Judge Success1; return Success2 when the controller has proved itself, None when it need not.

        Raises:
            AuthenticationFailed: the controller refuses, or does not prove itself.
        """
        assert self.state is HostState.REPLIED
        try:
            self._expect(MessageId.SUCCESS1, data)
            success = Success1.from_bytes(data)
            if success.response and not self._expected:
                raise MessageError("a response that nobody asked for")  # noqa: TRY301 - one way for all refusals
        except MessageError as error:
            raise self._broken(error) from None
        if not self._expected:
            self._step(HostEvent.SUCCESS)
            return None
        if not crypto.same(success.response, self._expected):
            detail = "its response is wrong" if success.response else "it gives no response"
            raise self._failed(Fault.CONTROLLER_KEY, detail, Explanation.FAILED)
        self._step(HostEvent.SUCCESS)
        return Success2(self._transaction).to_bytes()

    @property
    def outcome(self) -> Authenticated:
        """How it was done, once `conclude` has returned."""
        assert self._challenge is not None
        hash_name, group = self._challenge.hash.name.replace("_", "-"), self._challenge.group.name
        return Authenticated(hash_name, group, both_ways=bool(self._expected))

    # ---- inside ----------------------------------------------------------------------------------------------

    def _reply(self, got: Challenge) -> Reply:
        keys, nqns, transaction = self._keys, self._nqns, self._transaction
        if got.hash not in keys.hashes:
            raise MessageError(f"{got.hash.name} was not offered", Explanation.HASH_NOT_USABLE)
        if got.group not in keys.groups:
            raise MessageError(f"{got.group.name} was not offered", Explanation.GROUP_NOT_USABLE)
        exponent = crypto.new_exponent(got.group, self._entropy)
        try:
            shared = crypto.shared_key(got.group, exponent, got.public)
        except BadPublicValue as error:
            raise MessageError(str(error)) from None
        response = crypto.host_response(
            got.hash, keys.host.key_of(nqns[0]), got.challenge, got.sequence, transaction, nqns, shared
        )
        public = crypto.public_value(got.group, exponent)
        if keys.controller is None:
            return Reply(transaction, response, 0, b"", public)
        challenge = self._entropy(got.hash.size_bytes)
        sequence = int.from_bytes(self._entropy(4), "little") or 1
        self._expected = crypto.controller_response(
            got.hash, keys.controller.key_of(nqns[1]), challenge, sequence, transaction, nqns, shared
        )
        return Reply(transaction, response, sequence, challenge, public)

    def _expect(self, wanted: MessageId, data: bytes) -> None:
        kind, transaction = message_id(data)
        if kind == MessageId.FAILURE1:
            raise self._refused(Failure.from_bytes(data).explanation)
        if kind != wanted:
            raise MessageError(f"message {kind:#06x} instead of {wanted.name}", Explanation.INCORRECT_MESSAGE)
        if transaction != self._transaction:
            raise MessageError(f"{wanted.name} of another transaction")

    def _refused(self, explanation: int) -> AuthenticationFailed:
        """AUTH_Failure1: what it means depends on how far we were."""
        text = EXPLANATIONS.get(explanation, f"explanation {explanation}")
        if explanation in _NOT_OFFERED:
            return self._failed(Fault.NOT_OFFERED, text, None)
        if explanation == Explanation.FAILED:
            return self._failed(Fault.HOST_KEY, "or it knows none of this host", None)
        return self._failed(Fault.PROTOCOL, f"it says: {text}", None)

    def _broken(self, error: MessageError) -> AuthenticationFailed:
        fault = Fault.NOT_OFFERED if error.explanation in _NOT_OFFERED else Fault.PROTOCOL
        return self._failed(fault, str(error), error.explanation)

    def _failed(self, fault: Fault, detail: str, told: Explanation | None) -> AuthenticationFailed:
        self._step(HostEvent.FAILURE)
        farewell = None if told is None else Failure(MessageId.FAILURE2, self._transaction, told).to_bytes()
        return AuthenticationFailed(fault, detail, farewell)
