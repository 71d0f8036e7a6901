"""Tasks of which the first to end ends all."""

from __future__ import annotations

import asyncio


async def until_one_ends(*works: object) -> None:
    """Run until one of them ends, then end the others; raise what it raised."""
    tasks = [asyncio.ensure_future(work) for work in works]  # type: ignore[call-overload]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
