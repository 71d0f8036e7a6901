from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests.service.fake_card import FakeCard, fake_sources
from xkv_gateway.binds import BindAddress
from xkv_gateway.service.admin import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
def card() -> FakeCard:
    return FakeCard()


@pytest.fixture
async def operator(card: FakeCard) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application over `card`, without a socket."""
    app = create_app(fake_sources(card=card), BindAddress("127.0.0.1", "127.0.0.1", 0))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client
