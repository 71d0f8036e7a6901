from __future__ import annotations

import asyncio
import itertools
import json
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.frontend.harness import KEY_A, KEY_A2, KEY_B, Running, running_front
from xkv_frontend import probing
from xkv_frontend.clock import monotonic_ns
from xkv_frontend.core.names import Scope, ScopeIds
from xkv_frontend.core.policy import Policy, TenantPolicy
from xkv_frontend.core.salt import Salter, Secret
from xkv_frontend.core.verdict import Judgement, Observation, Step, Verdict, judge
from xkv_frontend.errors import ConfigError, UnreachableError
from xkv_frontend.probing import usage_of
from xkv_frontend.verify import VerifyOptions, observe, private_document

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.frontend.fake_vllm import FakeVllm

SECRET = bytes(range(100, 132))


class SaltSwitchedOff(Salter):
    """A build in which the front end forgets what it is for."""

    def salt(self, scope: Scope, ids: ScopeIds, request_id: bytes = b"") -> str | None:
        return None


class OneSaltForAll(Salter):
    def salt(self, scope: Scope, ids: ScopeIds, request_id: bytes = b"") -> str | None:
        return "the-same"


class SaltThatChanges(Salter):
    def __init__(self) -> None:
        super().__init__(Secret(SECRET), "prod")
        self._numbers = itertools.count()

    def salt(self, scope: Scope, ids: ScopeIds, request_id: bytes = b"") -> str | None:
        return f"{ids.tenant}-{next(self._numbers)}"


async def judged(front: Running, *, restart: FakeVllm | None = None, **more: Any) -> Judgement:
    options: dict[str, Any] = {"run_id": "7", "lines": 60, "settle_s": 0} | more
    if restart is None:
        seen = await observe(
            VerifyOptions(front.url, KEY_A, KEY_B, KEY_A2, **options), monotonic_ns, lambda _: None
        )
        return judge(seen)
    async with restarter(restart) as command:
        seen = await observe(
            VerifyOptions(
                front.url,
                KEY_A,
                KEY_B,
                KEY_A2,
                restart_command=command,
                health_url=f"{restart.url}/health",
                **options,
            ),
            monotonic_ns,
            lambda _: None,
        )
    return judge(seen)


@asynccontextmanager
async def restarter(fake: FakeVllm) -> AsyncIterator[str]:
    """Yield a command that restarts `fake`, which lives in this process: it knocks at a port and waits for the answer."""

    async def knock(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await fake.restart()
        writer.close()

    server = await asyncio.start_server(knock, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    program = f"import socket; socket.create_connection(('127.0.0.1', {port})).recv(1)"
    try:
        yield f'{sys.executable} -I -c "{program}"'
    finally:
        server.close()


async def test_tenants_that_are_kept_apart_pass_before_and_after_a_restart(
    front: Running, fake: FakeVllm
) -> None:
    judgement = await judged(front, restart=fake)
    assert judgement.verdict is Verdict.ISOLATED
    assert "after the restart" in judgement.sentences[1]
    assert fake.restarts == 1


async def test_without_a_restart_it_says_that_the_card_was_not_looked_at(front: Running) -> None:
    judgement = await judged(front)
    assert judgement.verdict is Verdict.ISOLATED
    assert "not restarted" in judgement.sentences[1]


@pytest.mark.parametrize("build", [SaltSwitchedOff, OneSaltForAll])
async def test_a_front_end_without_salts_fails(fake: FakeVllm, tmp_path: Path, build: type[Salter]) -> None:
    async with running_front(fake, tmp_path, salter=build(Secret(SECRET), "prod")) as front:
        judgement = await judged(front, restart=fake)
    assert judgement.verdict is Verdict.BROKEN
    assert "got around" in judgement.sentences[0]


async def test_a_policy_of_one_cache_for_all_fails(fake: FakeVllm, tmp_path: Path) -> None:
    async with running_front(fake, tmp_path, policy=Policy(TenantPolicy(scope=Scope.NONE))) as front:
        assert (await judged(front)).verdict is Verdict.BROKEN


async def test_salts_that_change_fail(fake: FakeVllm, tmp_path: Path) -> None:
    async with running_front(fake, tmp_path, salter=SaltThatChanges()) as front:
        judgement = await judged(front)
    assert judgement.verdict is Verdict.BROKEN
    assert "changes from request to request" in judgement.sentences[0]


async def test_without_prefix_caching_it_fails_since_nothing_was_seen(front: Running, fake: FakeVllm) -> None:
    fake.cache.enabled = False
    judgement = await judged(front, restart=fake)
    assert judgement.verdict is Verdict.BROKEN


async def test_a_card_that_gives_nothing_back_fails(front: Running, fake: FakeVllm) -> None:
    fake.cache.uses_card = False
    judgement = await judged(front, restart=fake)
    assert judgement.verdict is Verdict.BROKEN
    assert "the card was not written" in judgement.sentences[0]


async def test_counts_that_are_not_told_are_never_a_pass(front: Running, fake: FakeVllm) -> None:
    fake.tells_cached = False
    judgement = await judged(front)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "--enable-prompt-tokens-details" in judgement.sentences[0]


async def test_a_prompt_that_was_asked_before_shows_nothing(front: Running) -> None:
    await judged(front)
    assert (await judged(front)).verdict is Verdict.INCONCLUSIVE
    assert (await judged(front, run_id="8")).verdict is Verdict.ISOLATED


async def test_a_key_that_is_refused_or_a_server_that_is_not_there_ends_it(front: Running) -> None:
    with pytest.raises(UnreachableError):
        await observe(VerifyOptions(front.url, "wrong", KEY_B, KEY_A2, "1"), monotonic_ns, lambda _: None)
    with pytest.raises(UnreachableError):
        await observe(
            VerifyOptions("http://127.0.0.1:1", KEY_A, KEY_B, KEY_A2, "1"), monotonic_ns, lambda _: None
        )


async def test_a_restart_that_fails_or_never_ends_is_an_error() -> None:
    async with probing.new_client() as client:
        with pytest.raises(ConfigError, match="exit code 3"):
            await probing.restart(client, "exit 3", "http://127.0.0.1:1/health", None, 10)
        with pytest.raises(UnreachableError, match="not back"):
            await probing.restart(client, "true", "http://127.0.0.1:1/health", None, 0.3)


def test_the_prompt_is_lines_that_nobody_else_would_send() -> None:
    assert private_document(2, "") == (
        "Line 1: a private document of tenant A.\nLine 2: a private document of tenant A."
    )
    assert private_document(1, "x").startswith("Run x.\n")


@pytest.mark.parametrize(
    "usage",
    [None, {}, [], {"prompt_tokens_details": None}, {"prompt_tokens_details": {}}]
    + [{"prompt_tokens_details": {"cached_tokens": value}} for value in (None, True, -1, "5", 1.0)],
)
def test_only_a_count_is_a_count(usage: Any) -> None:
    assert usage_of(json.loads(json.dumps({"usage": usage})))[1] is None


@pytest.mark.parametrize("missing", list(Step)[:4])
def test_a_step_that_is_missing_is_inconclusive_but_a_leak_is_a_leak(missing: Step) -> None:
    good = {
        Step.FIRST: 0, Step.AGAIN: 95, Step.COLLEAGUE: 95, Step.OTHER: 0, Step.AGAIN_RESTARTED: 95, Step.OTHER_RESTARTED: 0,
    }  # fmt: skip
    seen = [Observation(step, 100, cached) for step, cached in good.items() if step is not missing]
    assert judge(seen).verdict is Verdict.INCONCLUSIVE
    seen[-1] = Observation(Step.OTHER_RESTARTED, 100, 16)
    assert judge(seen).verdict is Verdict.BROKEN
