"""The controller's side of an authentication: one object a queue (Base 2.0, 8.13.5). Pure.

The shell gives what Authentication Send brings to `take` and answers Authentication Receive with `give`; both may be slow
and belong off the event loop. Refusals are no exceptions: they are what `give` returns next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xkv_nvmeof.dhchap import crypto
from xkv_nvmeof.dhchap.crypto import BadPublicValue, Group, Hash
from xkv_nvmeof.dhchap.host import ALL_GROUPS, ALL_HASHES
from xkv_nvmeof.dhchap.messages import (
    Challenge,
    Explanation,
    Failure,
    MessageError,
    MessageId,
    Negotiate,
    Reply,
    Success1,
    message_id,
)
from xkv_nvmeof.dhchap.states import CONTROLLER_TABLE, ControllerEvent, ControllerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.dhchap.secret import DhchapSecret


@dataclass(frozen=True, slots=True)
class ControllerKeys:
    """The secret that hosts must know, the one with which the controller proves itself, and what is allowed.

    Of hashes and groups the first one that the host offers too is used.
    """

    host: DhchapSecret
    entropy: Callable[[int], bytes]
    controller: DhchapSecret | None = None
    hashes: tuple[Hash, ...] = ALL_HASHES
    groups: tuple[Group, ...] = ALL_GROUPS


class ControllerAuthentication:
    """The authentication of one queue. `nqns` are those of the host and of the subsystem."""

    def __init__(self, keys: ControllerKeys, nqns: tuple[str, str]) -> None:
        self.state = ControllerState.NEGOTIATE
        self._keys = keys
        self._nqns = nqns
        self._transaction = 0
        self._hash = keys.hashes[0]
        self._group = Group.NULL
        self._exponent = 0
        self._challenge = b""
        self._sequence = 0
        self._proof = b""
        self._explanation = Explanation.INCORRECT_MESSAGE

    @property
    def done(self) -> bool:
        """Whether the host has proved itself."""
        return self.state is ControllerState.DONE

    @property
    def failed(self) -> bool:
        """Whether it failed and the host was told: the queue is over."""
        return self.state is ControllerState.FAILED

    def _step(self, event: ControllerEvent) -> None:
        self.state = CONTROLLER_TABLE[self.state, event]

    def take(self, data: bytes) -> None:
        """Take what the host sent."""
        state = self.state
        try:
            kind, transaction = message_id(data)
            if state is ControllerState.NEGOTIATE and kind == MessageId.NEGOTIATE:
                self._transaction = transaction
                self._negotiate(Negotiate.from_bytes(data))
                self._step(ControllerEvent.NEGOTIATED)
            elif transaction != self._transaction:
                raise MessageError("a message of another transaction")  # noqa: TRY301 - one way for all refusals
            elif state is ControllerState.REPLY and kind == MessageId.REPLY:
                self._judge(Reply.from_bytes(data, self._hash, self._group))
                self._step(ControllerEvent.PROVED)
            elif state is ControllerState.SUCCESS2 and kind == MessageId.SUCCESS2:
                self._step(ControllerEvent.CONFIRMED)
            elif state is ControllerState.SUCCESS2 and kind == MessageId.FAILURE2:
                self._step(ControllerEvent.GIVEN_UP)
            else:
                raise MessageError(f"message {kind:#06x} while {state.value}", Explanation.INCORRECT_MESSAGE)  # noqa: TRY301
        except MessageError as error:
            self._explanation = error.explanation
            self._step(ControllerEvent.REFUSED)

    def give(self) -> bytes:
        """Return the message for the host."""
        match self.state:
            case ControllerState.CHALLENGE:
                message = self._make_challenge()
                self._step(ControllerEvent.CHALLENGED)
                return message.to_bytes()
            case ControllerState.SUCCESS1:
                self._step(ControllerEvent.ANSWERED if self._proof else ControllerEvent.ACCEPTED)
                return Success1(self._transaction, self._hash.size_bytes, self._proof).to_bytes()
            case ControllerState.FAILURE1:
                pass
            case _:
                self._explanation = Explanation.INCORRECT_MESSAGE
                self._step(ControllerEvent.REFUSED)
        self._step(ControllerEvent.TOLD)
        return Failure(MessageId.FAILURE1, self._transaction, self._explanation).to_bytes()

    # ---- inside ----------------------------------------------------------------------------------------------

    def _negotiate(self, got: Negotiate) -> None:
        if got.concatenation:
            raise MessageError(
                "secure channel concatenation is not spoken", Explanation.CONCATENATION_MISMATCH
            )
        kind = next((one for one in self._keys.hashes if one in got.hashes), None)
        if kind is None:
            raise MessageError("no hash in common", Explanation.HASH_NOT_USABLE)
        group = next((one for one in self._keys.groups if one in got.groups), None)
        if group is None:
            raise MessageError("no group in common", Explanation.GROUP_NOT_USABLE)
        self._hash, self._group = kind, group

    def _make_challenge(self) -> Challenge:
        entropy = self._keys.entropy
        self._exponent = crypto.new_exponent(self._group, entropy)
        self._challenge = entropy(self._hash.size_bytes)
        self._sequence = int.from_bytes(entropy(4), "little") or 1
        public = crypto.public_value(self._group, self._exponent)
        return Challenge(self._transaction, self._hash, self._group, self._sequence, self._challenge, public)

    def _judge(self, got: Reply) -> None:
        keys, nqns, transaction = self._keys, self._nqns, self._transaction
        try:
            shared = crypto.shared_key(self._group, self._exponent, got.public)
        except BadPublicValue as error:
            raise MessageError(str(error)) from None
        key = keys.host.key_of(nqns[0])
        expected = crypto.host_response(
            self._hash, key, self._challenge, self._sequence, transaction, nqns, shared
        )
        if not crypto.same(got.response, expected):
            raise MessageError("the response of the host is wrong", Explanation.FAILED)
        if not got.challenge:
            return
        if keys.controller is None:
            raise MessageError("the host asks for a proof that there is no key for", Explanation.FAILED)
        self._proof = crypto.controller_response(
            self._hash,
            keys.controller.key_of(nqns[1]),
            got.challenge,
            got.sequence,
            transaction,
            nqns,
            shared,
        )
