"""A front end in the loop of the test, on a free port of loopback, before a fake vLLM; and clients that speak raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx

from xkv_frontend.accesslog import AccessLog
from xkv_frontend.auth import KeysFileAuthenticator
from xkv_frontend.clock import monotonic_ns
from xkv_frontend.core.keys import Keys, format_keys, parse_keys
from xkv_frontend.core.names import Scope, ScopeIds, TenantName, UserName
from xkv_frontend.core.policy import Policy
from xkv_frontend.core.salt import Salter, Secret
from xkv_frontend.front import Front, Parts
from xkv_frontend.metrics import Metrics
from xkv_frontend.protocol import FrontProtocol
from xkv_frontend.server import bind, make_server
from xkv_frontend.upstream import Upstream, UpstreamOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tests.frontend.fake_vllm import FakeVllm
    from xkv_frontend.auth import Authenticator
    from xkv_frontend.core.routes import Version

SECRET: Final = bytes(range(32))
SALTER: Final = Salter(Secret(SECRET), "prod")
KEY_A: Final = "key-of-tenant-a-0123456789abcdef"
KEY_A2: Final = "second-key-of-a-0123456789abcdef"
KEY_B: Final = "key-of-tenant-b-0123456789abcdef"
KEY_ALICE: Final = "key-of-alice-in-a-0123456789abcd"
ACME: Final = TenantName("acme")
BETA: Final = TenantName("beta")
CHAT: Final = "/v1/chat/completions"
HELLO: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "hello"}]}
DEADLINE_S: Final = 60.0


def salt_of(tenant: str) -> str:
    salt = SALTER.salt(Scope.TENANT, ScopeIds(TenantName(tenant)))
    assert salt is not None
    return salt


def sample_keys() -> Keys:
    keys = Keys(bytes(range(16)), {})
    for tenant, key, user in (
        (ACME, KEY_A, None),
        (ACME, KEY_A2, None),
        (BETA, KEY_B, None),
        (ACME, KEY_ALICE, UserName("alice")),
    ):
        keys = keys.add(tenant, key, os.urandom, user)
    return keys


def id_of(keys: Keys, key: str) -> str:
    return keys.table()[keys.digest(key.encode())].id


@dataclass(slots=True)
class Running:
    """A front end that serves."""

    front: Front
    port: int
    metrics: Metrics
    client: httpx.AsyncClient
    keys_file: Path
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, body: Any, *, key: str = KEY_A, path: str = CHAT, **more: Any) -> httpx.Response:
        return await self.client.post(path, json=body, headers=auth(key), **more)

    def rewrite_keys(self, change: Callable[[Keys], Keys]) -> None:
        self.keys_file.write_text(format_keys(change(parse_keys(self.keys_file.read_text()))))
        self.front.refresh()


def auth(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def running_front(
    fake: FakeVllm,
    folder: Path,
    *,
    policy: Policy | None = None,
    salter: Salter = SALTER,
    authenticator: Authenticator | None = None,
    version: Version | None = None,
    protocol: type[asyncio.Protocol] = FrontProtocol,
    authorization: bytes | None = None,
) -> AsyncIterator[Running]:
    keys_file = folder / "keys"
    keys_file.write_text(format_keys(sample_keys()))
    keys_file.chmod(0o600)
    log: list[str] = []
    metrics = Metrics()
    parts = Parts(
        policy or Policy(),
        salter,
        authenticator or KeysFileAuthenticator(keys_file, monotonic_ns),
        metrics,
        AccessLog(log.append, lambda: 0),
        monotonic_ns,
        os.urandom,
    )
    upstream = Upstream(
        UpstreamOptions(b"http", b"127.0.0.1", fake.port, authorization, version), monotonic_ns
    )
    front = Front(parts, upstream)
    listener = bind("127.0.0.1", 0, "--port")
    port = listener.getsockname()[1]
    # The protocol without uvicorn's own loop around it, which starts and ends in tenths of a second.
    server = make_server(front, connections_max=4096, protocol=protocol)
    server.config.load()
    state = server.server_state
    accepting = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=server.config, server_state=state, app_state={}),  # type: ignore[call-arg]
        sock=listener,
    )
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=DEADLINE_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        ) as client:
            yield Running(front, port, metrics, client, keys_file, log)
    finally:
        accepting.close()
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=DEADLINE_S)


async def talk(
    port: int, *pieces: bytes, seconds: float = DEADLINE_S, begun: asyncio.Event | None = None
) -> bytes:
    """Send bytes as they are, and return everything until the other side closes; `begun`: when the first bytes came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(seconds):
            for piece in pieces:
                writer.write(piece)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
            answer = b""
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(65536):
                    answer += piece
                    if begun is not None:
                        begun.set()
            return answer
    finally:
        writer.close()


def raw_post(
    body: bytes, *headers: str, path: str = CHAT, key: str = KEY_A, length: int | None = None
) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:80]
    return int(answer[9:12])


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = DEADLINE_S
) -> None:
    """Give the loop turns until `condition` holds; the deadline only detects hangs."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - conditions of other parties
            await asyncio.sleep(0.002)
