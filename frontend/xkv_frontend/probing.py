"""What the two tools share: asking a server, with or without a key; restarting vLLM and waiting for it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx

from xkv_frontend.core.sse import EventReader, StreamTooLargeError
from xkv_frontend.errors import ConfigError, UnreachableError

if TYPE_CHECKING:
    from xkv_frontend.clock import Clock

REQUEST_S: Final = 3600.0
"""A prompt of thousands of lines on a CPU takes long."""
CONNECT_S: Final = 5.0
POLL_S: Final = 0.25
RESTART_S_DEFAULT: Final = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request told."""

    prompt_tokens: int | None
    cached_tokens: int | None
    first_ns: int
    """From sending to the first event (streaming) or to the whole answer."""


def count(value: Any) -> int | None:
    """Return a count of tokens; everything that is not one is None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def usage_of(document: Any) -> tuple[int | None, int | None]:
    """Return prompt tokens and cached tokens of an answer, None where it does not say."""
    usage = document.get("usage") if isinstance(document, dict) else None
    if not isinstance(usage, dict):
        return None, None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return count(usage.get("prompt_tokens")), count(cached)


class Prober:
    """Sends prompts to /v1/completions."""

    def __init__(self, client: httpx.AsyncClient, clock: Clock, model: str, max_tokens: int) -> None:
        self._client = client
        self._clock = clock
        self._model = model
        self._max_tokens = max_tokens

    async def ask(self, url: str, key: str | None, prompt: str) -> Answer:
        """Send a prompt and wait for the whole answer.

        Raises:
            UnreachableError: No answer, or not 200.
        """
        began_ns = self._clock()
        body = self._body(prompt)
        try:
            response = await self._client.post(f"{url}/v1/completions", json=body, headers=headers(key))
            document = response.json() if response.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, ValueError) as error:
            raise UnreachableError(f"{url}: no usable answer: {type(error).__name__}") from None
        if document is None:
            raise UnreachableError(f"{url} answered {response.status_code}: {response.text[:300]}")
        return Answer(*usage_of(document), self._clock() - began_ns)

    async def time_first(self, url: str, key: str | None, prompt: str) -> Answer:
        """Send a prompt, and measure the time to the first event of the stream.

        Raises:
            UnreachableError: No answer, not 200, or a stream without an event.
        """
        body = {**self._body(prompt), "stream": True, "stream_options": {"include_usage": True}}
        reader, events, first_ns = EventReader(), list[bytes](), None
        began_ns = self._clock()
        try:
            async with self._client.stream(
                "POST", f"{url}/v1/completions", json=body, headers=headers(key)
            ) as response:
                async for piece in response.aiter_raw():
                    found = reader.feed(piece) if response.status_code == httpx.codes.OK else [piece]
                    if found and first_ns is None:
                        first_ns = self._clock() - began_ns
                    events += found
        except (httpx.HTTPError, StreamTooLargeError) as error:
            raise UnreachableError(f"{url}: no usable answer: {type(error).__name__}") from None
        if response.status_code != httpx.codes.OK or first_ns is None:
            text = b"".join(events)[:300].decode("utf-8", "replace")
            raise UnreachableError(f"{url} answered {response.status_code}: {text}")
        return Answer(*_usage_of_events(events), first_ns)

    def _body(self, prompt: str) -> dict[str, Any]:
        return {"model": self._model, "prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0}


def _usage_of_events(events: list[bytes]) -> tuple[int | None, int | None]:
    for event in reversed(events):
        try:
            document = json.loads(event)
        except ValueError:
            continue
        if isinstance(document, dict) and document.get("usage"):
            return usage_of(document)
    return None, None


def headers(key: str | None) -> dict[str, str]:
    """Return the headers of a caller."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


def new_client() -> httpx.AsyncClient:
    """Return a client that goes where it is told: no proxies of the environment, no redirects."""
    timeout = httpx.Timeout(REQUEST_S, connect=CONNECT_S)
    return httpx.AsyncClient(timeout=timeout, trust_env=False, follow_redirects=False)


async def first_model(client: httpx.AsyncClient, url: str, key: str | None) -> str:
    """Return the first model that a server offers.

    Raises:
        UnreachableError: It offers none, or does not answer.
    """
    try:
        response = await client.get(f"{url}/v1/models", headers=headers(key))
        if response.status_code != httpx.codes.OK:
            advice = ": is the key right?" if response.status_code in {401, 403} else ""
            raise UnreachableError(f"{url}/v1/models answered {response.status_code}{advice}")
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise UnreachableError(f"{url}/v1/models: no usable answer: {type(error).__name__}") from None


async def restart(
    client: httpx.AsyncClient, command: str, health_url: str, key: str | None, timeout_s: float
) -> None:
    """Run the command, which ends when the old vLLM is gone, and wait until `health_url` answers 200.

    Raises:
        ConfigError: The command fails.
        UnreachableError: vLLM does not come back in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            process = await asyncio.create_subprocess_shell(command, stdin=asyncio.subprocess.DEVNULL)
            try:
                code = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
            if code != 0:
                raise ConfigError(f"the restart command failed with exit code {code}")
            while not await _healthy(client, health_url, key):  # noqa: ASYNC110 - another process
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise UnreachableError(f"vLLM was not back within {timeout_s:.0f} s") from None


async def _healthy(client: httpx.AsyncClient, url: str, key: str | None) -> bool:
    try:
        response = await client.get(url, headers=headers(key), timeout=CONNECT_S)
    except httpx.HTTPError:
        return False
    return response.status_code == httpx.codes.OK
