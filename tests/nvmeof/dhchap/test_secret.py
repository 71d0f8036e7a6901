"""Secrets: their form, what is refused, and that nothing shows them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import traceback
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_nvmeof.dhchap.crypto import Hash
from xkv_nvmeof.dhchap.secret import DhchapSecret, SecretFormatError, new_dhchap_secret

NQN = "nqn.2026-01.org.example:host"


def text_of(secret: bytes, number: int = 0, crc: int | None = None) -> str:
    tail = (zlib.crc32(secret) if crc is None else crc).to_bytes(4, "little")
    return f"DHHC-1:{number:02x}:{base64.b64encode(secret + tail).decode()}:"


@pytest.mark.parametrize("size", [32, 48, 64])
def test_a_secret_that_is_not_transformed_is_the_key(size: int) -> None:
    secret = os.urandom(size)
    assert DhchapSecret.parse(f" {text_of(secret)}\n").key_of(NQN) == secret


@pytest.mark.parametrize("kind", list(Hash))
def test_a_transformed_secret_gives_each_owner_another_key(kind: Hash) -> None:
    secret = os.urandom(32)
    parsed = DhchapSecret.parse(text_of(secret, kind))
    name = {1: "sha256", 2: "sha384", 3: "sha512"}[kind]
    assert parsed.key_of(NQN) == hmac.new(secret, NQN.encode() + b"NVMe-over-Fabrics", name).digest()
    assert parsed.key_of(NQN) != parsed.key_of(NQN + "2")


@pytest.mark.parametrize("kind", [None, *Hash])
def test_a_new_secret_is_read_back(kind: Hash | None) -> None:
    parsed = DhchapSecret.parse(new_dhchap_secret(kind, os.urandom))
    assert parsed.transform is kind
    assert len(parsed.key_of(NQN)) == (kind.size_bytes if kind else 32)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "DHHC-1",
        "DHHC-1:00::",
        "DHHC-2:00:AAAA:",
        "DHHC-1:0:AAAA:",
        text_of(bytes(32))[:-1],
        text_of(bytes(32), 4),
        text_of(bytes(31)),
        text_of(bytes(65)),
        text_of(bytes(32), crc=1),
        text_of(bytes(32)) + ":",
        "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
    ],
)
def test_what_is_no_secret_is_refused(text: str) -> None:
    with pytest.raises(SecretFormatError):
        DhchapSecret.parse(text)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_secret_is_refused_and_not_shown(data: st.DataObject) -> None:
    text = text_of(hashlib.sha256(b"secret").digest(), 1)
    at = data.draw(st.integers(0, len(text) - 1))
    with_other = data.draw(st.sampled_from("AZaz09+/=:-%\x00é"))
    damaged = text[:at] + with_other + text[at + 1 :]
    try:
        parsed = DhchapSecret.parse(damaged)
    except SecretFormatError as error:
        shown = "".join(traceback.format_exception_only(error))
        assert damaged[10:18] not in shown
    else:
        assert damaged == text or at in (8, 51, 58) or parsed.transform is not Hash.SHA_256


def test_nothing_shows_a_secret() -> None:
    secret = os.urandom(32)
    parsed = DhchapSecret.parse(text_of(secret))
    for shown in (repr(parsed), str(parsed), f"{parsed}", repr([parsed])):
        assert shown.strip("[]") == "DhchapSecret(...)"
