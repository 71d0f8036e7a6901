"""Name servers that say nothing hold up neither a caller nor the end of a process."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from xkv_nvmeof.lookup import LOOKUPS_MAX, look_up

if TYPE_CHECKING:
    from collections.abc import Iterator

HANG_S = 60.0
PLACE = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 4420))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until this is set the name servers say nothing."""
    event = threading.Event()

    def getaddrinfo(_host: str, _port: int, **_how: Any) -> list[Any]:
        event.wait(HANG_S)
        return [PLACE]

    end_all()
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield event
    event.set()
    end_all()


def end_all() -> None:
    for thread in threading.enumerate():
        if thread.name == "name-lookup":
            thread.join(HANG_S)


def test_a_loop_ends_while_a_name_server_is_silent(answers: threading.Event) -> None:
    async def ask() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await look_up("card.example", 4420)

    asyncio.run(ask())
    assert not answers.is_set()


async def test_lookups_that_hang_are_few_and_end_with_the_silence(answers: threading.Event) -> None:
    waiting = [asyncio.create_task(look_up("card.example", 4420)) for _ in range(LOOKUPS_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="do not answer"):
        await look_up("card.example", 4420)
    answers.set()
    async with asyncio.timeout(HANG_S):
        assert await asyncio.gather(*waiting) == [[PLACE]] * LOOKUPS_MAX
        assert await look_up("card.example", 4420) == [PLACE]


async def test_a_name_that_stands_for_nothing_is_an_error() -> None:
    with pytest.raises(OSError, match=r"."):
        await look_up("name.invalid", 4420)
