"""Joins the host's and the controller's side of an authentication."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xkv_nvmeof.dhchap.controller import ControllerAuthentication, ControllerKeys
from xkv_nvmeof.dhchap.host import (
    ALL_GROUPS,
    ALL_HASHES,
    AuthenticationFailed,
    HostAuthentication,
    HostKeys,
)
from xkv_nvmeof.dhchap.secret import DhchapSecret, new_dhchap_secret
from xkv_nvmeof.dhchap.states import HostState

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.dhchap.crypto import Group, Hash

NQNS = "nqn.2026-01.org.example:host", "nqn.2026-01.org.example:card"


class Counted:
    """Bytes that look random and are the same in each run."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._calls = 0

    def __call__(self, size: int) -> bytes:
        self._calls += 1
        return hashlib.shake_256(f"{self._seed}/{self._calls}".encode()).digest(size)


def secret(name: str) -> DhchapSecret:
    return DhchapSecret.parse(new_dhchap_secret(None, Counted(name)))


HOST, CARD, OTHER = secret("host"), secret("card"), secret("other")


def host_keys(
    host: DhchapSecret = HOST,
    controller: DhchapSecret | None = None,
    hashes: tuple[Hash, ...] = ALL_HASHES,
    groups: tuple[Group, ...] = ALL_GROUPS,
) -> HostKeys:
    return HostKeys(host, controller, hashes, groups)


def card_keys(
    host: DhchapSecret = HOST,
    controller: DhchapSecret | None = CARD,
    hashes: tuple[Hash, ...] = ALL_HASHES,
    groups: tuple[Group, ...] = ALL_GROUPS,
) -> ControllerKeys:
    return ControllerKeys(host, Counted("controller"), controller, hashes, groups)


@dataclass
class Exchange:
    """One transaction; `damage(number, message)` may change each message on its way."""

    host_keys: HostKeys
    card_keys: ControllerKeys
    damage: Callable[[int, bytes], bytes] = lambda _number, message: message
    messages: list[bytes] = field(default_factory=list)
    failure: AuthenticationFailed | None = None

    def __post_init__(self) -> None:
        self.host = HostAuthentication(self.host_keys, NQNS, 7, Counted("exchange"))
        self.card = ControllerAuthentication(self.card_keys, NQNS)

    def run(self) -> Exchange:
        try:
            self._send(self.host.begin())
            self._send(self.host.answer(self._receive()))
            last = self.host.conclude(self._receive())
            if last is not None:
                self._send(last)
        except AuthenticationFailed as failed:
            self.failure = failed
            if failed.farewell is not None:
                self._send(failed.farewell)
        return self

    @property
    def both_done(self) -> bool:
        return self.host.state is HostState.DONE and self.card.done

    def _pass(self, message: bytes) -> bytes:
        message = self.damage(len(self.messages), message)
        self.messages.append(message)
        return message

    def _send(self, message: bytes) -> None:
        message = self._pass(message)
        if not self.card.done:  # then the queue is open, and its gate takes no more of this
            self.card.take(message)

    def _receive(self) -> bytes:
        return self._pass(self.card.give()) + bytes(16)
