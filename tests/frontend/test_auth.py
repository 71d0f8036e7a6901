from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.frontend.harness import (
    ACME,
    CHAT,
    HELLO,
    KEY_A,
    KEY_A2,
    KEY_B,
    Running,
    auth,
    id_of,
    raw_post,
    running_front,
    salt_of,
    sample_keys,
    status_of,
    talk,
    until,
)
from xkv_frontend.auth import (
    Caller,
    HookAuthenticator,
    KeysFileAuthenticator,
    TrustedHeaderAuthenticator,
    load_hook,
)
from xkv_frontend.clock import monotonic_ns
from xkv_frontend.core.keys import Keys, KeysFileError, empty_keys, format_keys, new_key, parse_keys
from xkv_frontend.core.names import TenantName, UserName
from xkv_frontend.core.policy import Identity
from xkv_frontend.core.refusal import Refusal
from xkv_frontend.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.frontend.fake_vllm import FakeVllm

BODY = b'{"messages": [{"role": "user", "content": "x"}]}'

NOBODY: dict[str, list[tuple[str, str]]] = {
    "nothing": [],
    "empty bearer": [("Authorization", "Bearer ")],
    "bearer alone": [("Authorization", "Bearer")],
    "basic": [("Authorization", "Basic dTpw")],
    "the key alone": [("Authorization", KEY_A)],
    "two keys": [("Authorization", f"Bearer {KEY_A}"), ("Authorization", f"Bearer {KEY_A}")],
    "two kinds of key": [("Authorization", f"Bearer {KEY_A}"), ("X-Api-Key", KEY_A)],
    "two blanks": [("Authorization", f"Bearer  {KEY_A}")],
    "a word behind": [("Authorization", f"Bearer {KEY_A} x")],
    "a tab behind": [("Authorization", f"Bearer {KEY_A}\tx")],
    "two keys in one": [("Authorization", f"Bearer {KEY_A},{KEY_B}")],
    "wrong first byte": [("Authorization", f"Bearer X{KEY_A[1:]}")],
    "wrong last byte": [("Authorization", f"Bearer {KEY_A[:-1]}X")],
    "too short": [("Authorization", f"Bearer {KEY_A[:-1]}")],
    "too long": [("Authorization", f"Bearer {KEY_A}X")],
    "other letters": [("Authorization", f"Bearer {KEY_A.upper()}")],
    "not ASCII": [("Authorization", "Bearer \xff\xfe")],
    "a tenant's name": [("Authorization", "Bearer acme"), ("X-Tenant", "acme")],
}


@pytest.mark.parametrize("name", NOBODY)
async def test_whoever_is_not_known_gets_one_answer_and_reaches_nothing(
    front: Running, fake: FakeVllm, name: str
) -> None:
    lines = [
        f"POST {CHAT} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(BODY)}",
    ]
    lines += [f"{key}: {value}" for key, value in NOBODY[name]]
    answer = await talk(front.port, "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + BODY)
    assert status_of(answer) == 401
    assert answer.partition(b"\r\n\r\n")[2] == (
        b'{"error": {"message": "a valid API key is needed", "type": "xkv_frontend", "code": "unauthorized"}}'
    )
    assert fake.connections == 0


async def test_a_tenant_in_a_header_or_body_is_ignored(front: Running, fake: FakeVllm) -> None:
    headers = auth(KEY_A) | {"x-tenant": "beta", "x-cache-salt": "mine", "openai-organization": "beta"}
    assert (await front.client.post(CHAT, json={**HELLO, "user": "beta"}, headers=headers)).status_code == 200
    assert fake.requests[0].json["cache_salt"] == salt_of("acme")


async def test_keys_of_one_tenant_share_its_salt_and_the_second_form_of_the_header_works(
    front: Running, fake: FakeVllm
) -> None:
    await front.post(HELLO, key=KEY_A)
    await front.post(HELLO, key=KEY_A2)
    await front.client.post(CHAT, json=HELLO, headers={"x-api-key": KEY_A})
    assert {request.json["cache_salt"] for request in fake.requests} == {salt_of("acme")}
    assert len(fake.requests) == 3


async def test_a_revoked_key_ends_at_once_also_in_the_middle_of_a_stream(
    front: Running, fake: FakeVllm
) -> None:
    async def endless(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ndata\r\n")
        await asyncio.Event().wait()

    fake.script = endless
    begun = [asyncio.Event(), asyncio.Event()]
    streams = [
        asyncio.create_task(talk(front.port, raw_post(BODY, key=key), begun=one))
        for key, one in zip((KEY_A, KEY_A2), begun, strict=True)
    ]
    await until(lambda: all(one.is_set() for one in begun))
    revoked = id_of(parse_keys(front.keys_file.read_text()), KEY_A)
    front.rewrite_keys(lambda keys: keys.revoke(revoked))
    answer = await streams[0]
    assert not answer.endswith(b"0\r\n\r\n"), "it must not look like a stream that ended well"
    assert not streams[1].done()
    fake.script = None
    assert (await front.post(HELLO, key=KEY_A)).status_code == 401
    assert (await front.post(HELLO, key=KEY_A2)).status_code == 200
    streams[1].cancel()


async def test_a_removed_key_is_gone_and_a_new_one_works_without_a_restart(
    front: Running, fake: FakeVllm
) -> None:
    new = "a-new-key-of-acme-0123456789abcdef"
    front.rewrite_keys(lambda _: sample_keys().add(ACME, new, os.urandom))
    assert (await front.post(HELLO, key=new)).status_code == 200
    front.rewrite_keys(lambda _: empty_keys(os.urandom))
    assert (await front.post(HELLO, key=new)).status_code == 401


async def test_two_changes_at_once_forget_no_removal(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = sample_keys()
    path.write_text(format_keys(keys))
    authenticator = KeysFileAuthenticator(path, lambda: 0)
    removed = id_of(keys, KEY_A)
    path.write_text(
        format_keys(Keys(keys.salt, {name: key for name, key in keys.records.items() if name != removed}))
    )
    authenticator.refresh()
    path.write_text(format_keys(Keys(keys.salt, {})))
    assert authenticator.refresh() == keys.records.keys()
    path.write_text(format_keys(keys))
    assert not authenticator.refresh()


async def test_a_file_that_cannot_be_read_changes_nothing(
    front: Running, caplog: pytest.LogCaptureFixture
) -> None:
    for broken in ("", "nonsense", "xkv-frontend-keys 1\nkey x y z active\n"):
        front.keys_file.write_text(broken)
        front.front.refresh()
        assert (await front.post(HELLO)).status_code == 200
    front.keys_file.unlink()
    front.front.refresh()
    assert (await front.post(HELLO)).status_code == 200
    assert "stay in force" in caplog.text


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(format_keys(sample_keys()))
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="lets others"):
        KeysFileAuthenticator(path, monotonic_ns)
    path.chmod(0o644)
    assert KeysFileAuthenticator(path, monotonic_ns).tenants() == {"acme", "beta"}


def test_a_file_of_keys_holds_no_key_and_is_read_as_it_was_written() -> None:
    keys = sample_keys()
    text = format_keys(keys)
    assert parse_keys(text) == keys
    assert not any(key in text for key in (KEY_A, KEY_A2, KEY_B))
    assert parse_keys("# a comment\n\n" + text.replace("\n", "   # x\n")) == keys
    other = empty_keys(os.urandom).add(ACME, KEY_A, os.urandom)
    assert other.digest(KEY_A.encode()) != keys.digest(KEY_A.encode()), (
        "files do not tell that they hold the same key"
    )
    assert len(new_key(os.urandom)) == 47


@pytest.mark.parametrize(
    "text",
    ["", "xkv-frontend-keys 2\n", "xkv-frontend-keys 1\n", "xkv-frontend-keys 1\nsalt 00\n",
     "xkv-frontend-keys 1\nsalt " + "0" * 32 + "\nsalt " + "0" * 32 + "\n",
     *(f"xkv-frontend-keys 1\nsalt {'0' * 32}\nkey {line}\n" for line in (
         "abcd acme " + "0" * 63 + " active", "abcd acme " + "0" * 64 + " maybe", "abcd a|b " + "0" * 64 + " active",
         "abcd _default " + "0" * 64 + " active", "a acme " + "0" * 64 + " active", "abcd acme " + "0" * 64,
         "abcd acme " + "0" * 64 + " active\nkey abcd acme " + "1" * 64 + " active",
         "abcd acme " + "0" * 64 + " active\nkey abce beta " + "0" * 64 + " active"))],
)  # fmt: skip
def test_a_file_with_a_wrong_line_is_refused_as_a_whole(text: str) -> None:
    with pytest.raises(KeysFileError):
        parse_keys(text)


def test_weak_keys_are_not_taken() -> None:
    for key in ("short", "x" * 23, "with blank " + "x" * 30, "x" * 513, "ä" * 30, "x\n" * 20):
        with pytest.raises(KeysFileError):
            sample_keys().add(ACME, key, os.urandom)
    with pytest.raises(KeysFileError, match="already"):
        sample_keys().add(ACME, KEY_A, os.urandom)


async def test_the_time_of_a_wrong_key_says_nothing_about_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(format_keys(sample_keys()))
    authenticator = KeysFileAuthenticator(path, monotonic_ns)
    callers = {
        name: Caller([(b"authorization", f"Bearer {key}".encode())], None, "POST", CHAT)
        for name, key in (("first", "X" + KEY_A[1:]), ("last", KEY_A[:-1] + "X"))
    }
    times: dict[str, list[int]] = {"first": [], "last": []}
    for _ in range(2000):
        for name, caller in callers.items():
            began = time.perf_counter_ns()
            with pytest.raises(Refusal):
                await authenticator.identify(caller)
            times[name].append(time.perf_counter_ns() - began)
    first, last = (statistics.median(times[name]) for name in ("first", "last"))
    # Equal but for noise; the bound only catches a comparison that stops early by orders of magnitude.
    assert 0.5 < first / last < 2


# --- a hook ---------------------------------------------------------------------------------------------------------


def caller(*headers: tuple[bytes, bytes], peer: str | None = "127.0.0.1") -> Caller:
    return Caller(headers, peer, "POST", CHAT)


async def status_of_hook(hook: Any, timeout_s: float = 5) -> int:
    try:
        await HookAuthenticator(hook, timeout_s).identify(caller())
    except Refusal as refusal:
        return refusal.status
    return 200


async def test_a_hook_may_be_plain_or_async() -> None:
    async def later(_: Caller) -> Identity:
        return Identity(ACME)

    assert await status_of_hook(later) == 200
    assert await status_of_hook(lambda _: Identity(ACME, UserName("u"))) == 200
    assert await status_of_hook(lambda asked: later(asked)) == 200  # noqa: PLW0108 - plain, and returns a coroutine


async def test_a_hook_that_fails_hangs_or_says_nonsense_lets_nobody_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(_: Caller) -> Identity:
        raise RuntimeError("with-a-secret")

    async def hanging(_: Caller) -> Identity:
        await asyncio.Event().wait()
        raise AssertionError

    assert await status_of_hook(lambda _: None) == 401
    assert await status_of_hook(failing) == 503
    assert await status_of_hook(hanging, 0.01) == 503
    for nonsense in (
        "acme",
        5,
        Identity(TenantName("a|b")),
        Identity(TenantName("")),
        Identity(ACME, UserName("a|b")),
    ):
        assert await status_of_hook(lambda _, value=nonsense: value) == 503
    assert "RuntimeError" in caplog.text
    assert "with-a-secret" not in caplog.text


def test_a_hook_is_named_by_module_and_function() -> None:
    assert callable(load_hook("os.path:join"))
    for wrong in ("os.path", "os.path:", ":x", "no_such_module:x", "os:nothing", "os:name"):
        with pytest.raises(ConfigError):
            load_hook(wrong)


# --- a header from a named peer -------------------------------------------------------------------------------------


async def test_a_header_is_believed_from_a_named_peer_only(fake: FakeVllm, tmp_path: Path) -> None:
    for peers, status in ((frozenset({"127.0.0.1"}), 200), (frozenset({"10.0.0.1"}), 401)):
        authenticator = TrustedHeaderAuthenticator("X-Tenant", peers, "X-User")
        async with running_front(fake, tmp_path, authenticator=authenticator) as front:
            answer = await front.client.post(CHAT, json=HELLO, headers={"x-tenant": "acme"})
            assert answer.status_code == status
            assert (await front.client.post(CHAT, json=HELLO)).status_code == 401
    assert [request.json["cache_salt"] for request in fake.requests] == [salt_of("acme")]


@pytest.mark.parametrize(
    "headers",
    [[], [(b"x-tenant", b"")], [(b"x-tenant", b"a|b")], [(b"x-tenant", b"a"), (b"x-tenant", b"a")], [(b"x-tenant", b"\xff")],
     [(b"x-tenant", b"_default")], [(b"x_tenant", b"acme")], [(b"x-tenant", b"acme"), (b"x-user", b"a|b")],
     [(b"x-tenant", b"acme"), (b"x-user", b"a"), (b"x-user", b"b")]],
)  # fmt: skip
async def test_a_header_that_is_not_one_good_name_is_nobody(headers: list[tuple[bytes, bytes]]) -> None:
    authenticator = TrustedHeaderAuthenticator("X-Tenant", frozenset({"127.0.0.1"}), "X-User")
    with pytest.raises(Refusal) as caught:
        await authenticator.identify(caller(*headers))
    assert caught.value.status == 401
    good = await authenticator.identify(caller((b"x-tenant", b"acme"), (b"x-user", b"u")))
    assert good == Identity(ACME, UserName("u"), "header")
    with pytest.raises(Refusal):
        await authenticator.identify(caller((b"x-tenant", b"acme"), peer=None))
