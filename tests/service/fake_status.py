"""A status source with made-up figures: what the admin port is given by the daemon."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xkv_gateway.service.status import (
    AddressStatus,
    CardStatus,
    JournalStatus,
    RecoveryStatus,
    RunStatus,
    SoftCardStatus,
    Status,
    UsageStatus,
)

STATUS = Status(
    version="1.2.3",
    pid=42,
    uptime_s=3.5,
    state="serving",
    warm=False,
    state_dir="/state",
    addresses=AddressStatus("127.0.0.1:1", None, "127.0.0.1:2", "/state/regions.sock"),
    card=CardStatus(
        url="soft:/state/card.img",
        state="online",
        reason="",
        state_age_s=1.0,
        size_bytes=1 << 30,
        block_bytes=4096,
        volatile_write_cache=True,
        nqn="nqn.2014-08.com.example:soft",
        nsid=1,
        nguid="00" * 16,
        uuid="00" * 16,
        model="soft card",
        serial="1",
        connection={"io_queues": 2},
        soft_card=SoftCardStatus(pid=43, restarts=1),
        run=RunStatus("00" * 16, "label", 5, "owned", 0.0, "held"),
        recovery=RecoveryStatus(7, 6, 2, 8192, 0.25, 1, ["checkpoint A: damaged"]),
        journal=JournalStatus(1 << 20, 4096, 3, 12288, 2, 7, 500),
    ),
    usage=UsageStatus(1000, 500, 100, 300, 60, 40, 7, 100, 2, 30),
    cache={"hits": 3, "misses": 4},
    requests={"lookup": 5},
    errors={"busy": 1},
    transport={"replies_dropped": 2},
    device={"read_bytes": 12, "write_bytes": 13},
)


@dataclass
class FakeSource:
    """Returns `current`, or raises a bug."""

    current: Status = STATUS
    broken: bool = False

    def status(self) -> Status:
        if self.broken:
            raise ZeroDivisionError("a bug")
        return self.current

    def go_offline(self, reason: str) -> None:
        card = replace(self.current.card, state="offline", reason=reason)
        self.current = replace(self.current, card=card)
