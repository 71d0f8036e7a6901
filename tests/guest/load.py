"""Runs in the guest: stores and loads until a file appears, whatever happens to the card; says what became of it all.

`python load.py PORT PROGRESS END`: PROGRESS gets the numbers of calls that succeeded and that were answered with an error.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

from xkv_rpc.client import Client, ClientOptions
from xkv_rpc.errors import RpcError
from xkv_rpc.messages import LoadStatus, StoreStatus

PAYLOAD_BYTES = 40_000
KEYS_A_CALL = 4
KEYS = 400
"""They come around again, so that what was stored before the loss is loaded after it too."""
TIMEOUT_MS = 120_000
PATIENCE_S = 20


def payload(number: int) -> bytes:
    return number.to_bytes(4, "little") * (PAYLOAD_BYTES // 4)


def keys_of(numbers: list[int]) -> list[bytes]:
    return [b"%d" % number for number in numbers]


class Load:
    """Remembers what was acknowledged."""

    def __init__(self, endpoint: str) -> None:
        options = ClientOptions(timeout_ms=TIMEOUT_MS, connect_timeout_ms=TIMEOUT_MS)
        self.client = Client(endpoint, options)
        self.stored: dict[int, str] = {}
        """Keys that were acknowledged, and how."""
        self.said: Counter[str] = Counter()
        self.wrong = 0
        self.longest_s = 0.0

    def call(self, at: int) -> None:
        """Store some, and load some that were stored."""
        numbers = [(at * KEYS_A_CALL + index) % KEYS for index in range(KEYS_A_CALL)]
        for step in (self._store, self._load):
            began = time.monotonic()
            try:
                step(numbers)
            except RpcError as error:
                self.said[error.code.value] += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def _store(self, numbers: list[int]) -> None:
        results = self.client.store("", b"", keys_of(numbers), [payload(number) for number in numbers])
        for number, status in zip(numbers, results, strict=True):
            self.said[f"store {status.value}"] += 1
            if status in {StoreStatus.STORED, StoreStatus.EXISTS}:
                self.stored[number] = f"{self.stored.get(number, '')} {status.value} at {self.said.total()}"

    def _load(self, numbers: list[int]) -> None:
        result = self.client.load("", b"", keys_of(numbers))
        for number, status, data in zip(numbers, result.statuses, result.payloads, strict=True):
            self.said[f"load {status.value}"] += 1
            if status is LoadStatus.OK and (data is None or bytes(data) != payload(number)):
                self.wrong += 1

    def progress(self) -> str:
        """Return how many keys were stored, or found stored, and how many errors there were."""
        good = self.said["store stored"] + self.said["store exists"]
        return f"{good} {self.said.total() - good - self.said['load ok'] - self.said['load miss']}"

    def check(self) -> list[str]:
        """Return what was acknowledged and is not there now, and what became of it.

        While the gateway is not certain that the card is still its own, it answers with misses: that passes, a loss does not.
        """
        missing = []
        for number in sorted(self.stored):
            give_up_at = time.monotonic() + PATIENCE_S
            while (status := self._status(number)) != "ok":
                if time.monotonic() >= give_up_at:
                    missing.append(f"{number}: {self.stored[number]}, now {status}")
                    break
                time.sleep(0.1)
        return missing

    def _status(self, number: int) -> str:
        try:
            result = self.client.load("", b"", keys_of([number]))
        except RpcError as error:
            return error.code.value
        (status,), (data,) = result.statuses, result.payloads
        return "wrong" if status is LoadStatus.OK and bytes(data or b"") != payload(number) else status.value


def main(port: str, progress: str, end: str) -> None:
    load, at = Load(f"tcp://127.0.0.1:{port}"), 0
    while not Path(end).exists():
        load.call(at)
        at += 1
        Path(f"{progress}.new").write_text(f"{load.progress()}\n")
        Path(f"{progress}.new").replace(progress)
    report = {"said": load.said, "wrong": load.wrong, "longest_s": load.longest_s, "missing": load.check()}
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
