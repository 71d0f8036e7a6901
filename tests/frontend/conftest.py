from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.frontend.fake_vllm import FakeVllm, fake_vllm
from tests.frontend.harness import Running, running_front

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def fake() -> AsyncIterator[FakeVllm]:
    async with fake_vllm() as one:
        yield one


@pytest.fixture
async def front(fake: FakeVllm, tmp_path: Path) -> AsyncIterator[Running]:
    async with running_front(fake, tmp_path) as one:
        yield one
