"""Transactions recorded with SPDK's target: its messages are understood, and ours come out as they went out then."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path

import gmpy2
import pytest

from tests.nvmeof.dhchap.exchange import Counted
from xkv_nvmeof.dhchap.crypto import BadPublicValue, Group, Hash, prime, public_value, shared_key
from xkv_nvmeof.dhchap.host import HostAuthentication, HostKeys
from xkv_nvmeof.dhchap.messages import Challenge, Reply, Success1
from xkv_nvmeof.dhchap.secret import DhchapSecret

RECORDED = json.loads((Path(__file__).parents[2] / "golden" / "nvme-dhchap.json").read_text())
NQNS = RECORDED["host_nqn"], RECORDED["subsystem_nqn"]
TRANSACTIONS = RECORDED["transactions"]


@pytest.mark.parametrize("recorded", TRANSACTIONS, ids=[one["seed"] for one in TRANSACTIONS])
def test_the_host_says_what_it_said_to_spdk(recorded: dict[str, str]) -> None:
    kind, group = Hash[recorded["hash"]], Group[recorded["group"]]
    host = DhchapSecret.parse(RECORDED["host_key"])
    keys = HostKeys(host, DhchapSecret.parse(RECORDED["controller_key"]), (kind,), (group,))
    entropy = Counted(recorded["seed"])
    jitter = 1  # the device draws once before it connects its first queue, or not at all
    challenge, success = (
        bytes.fromhex(recorded[name]).ljust(4096, b"\0") for name in ("challenge", "success")
    )
    transaction = int.from_bytes(challenge[4:6], "little")
    while int.from_bytes(entropy(2), "little") != transaction:
        jitter += 1
        assert jitter < 4
    session = HostAuthentication(keys, NQNS, transaction, entropy)
    session.begin()
    assert session.answer(challenge).hex() == recorded["reply"]
    assert session.conclude(success) is not None


def test_the_responses_follow_from_the_specification_written_down_anew() -> None:
    """Base 2.0, 8.13.5.4: HMAC(transformed key, C, S, T_ID, SC_C, "HostHost", NQN of host, 0, NQN of subsystem)."""
    recorded = next(one for one in TRANSACTIONS if one["group"] == "NULL")
    challenge = Challenge.from_bytes(bytes.fromhex(recorded["challenge"]).ljust(64, b"\0"))
    reply = Reply.from_bytes(bytes.fromhex(recorded["reply"]), Hash.SHA_256, Group.NULL)
    success = Success1.from_bytes(bytes.fromhex(recorded["success"]).ljust(64, b"\0"))
    host, card = (name.encode() for name in NQNS)
    key = DhchapSecret.parse(RECORDED["host_key"]).key_of(NQNS[0])
    head = challenge.sequence.to_bytes(4, "little") + challenge.transaction.to_bytes(2, "little") + b"\0"
    text = challenge.challenge + head + b"HostHost" + host + b"\0" + card
    assert hmac.new(key, text, hashlib.sha256).digest() == reply.response
    key = DhchapSecret.parse(RECORDED["controller_key"]).key_of(NQNS[1])
    head = reply.sequence.to_bytes(4, "little") + reply.transaction.to_bytes(2, "little") + b"\0"
    text = reply.challenge + head + b"Controller" + card + b"\0" + host
    assert hmac.new(key, text, hashlib.sha256).digest() == success.response


@pytest.mark.parametrize("group", [group for group in Group if group])
def test_the_groups_are_safe_primes_of_the_right_length(group: Group) -> None:
    p = prime(group)
    assert p.bit_length() == group.size_bytes * 8
    assert (
        p.to_bytes(group.size_bytes, "big")
        .hex()
        .startswith("ffffffffffffffffadf85458a2bb4a9aafdc5620273d3cf1")
    )
    assert p & (1 << 64) - 1 == (1 << 64) - 1
    assert gmpy2.is_prime(p, 2)
    assert gmpy2.is_prime((p - 1) // 2, 2)


@pytest.mark.parametrize("group", [Group.FFDHE2048, Group.FFDHE8192])
def test_both_sides_come_to_the_same_key_of_full_length(group: Group) -> None:
    one, other = 0xABCDEF << 200 | 5, 0x123456 << 200 | 7
    key = shared_key(group, one, public_value(group, other))
    assert key == shared_key(group, other, public_value(group, one))
    assert key == pow(2, one * other, prime(group)).to_bytes(group.size_bytes, "big")


def test_a_public_value_in_the_null_group_is_refused() -> None:
    with pytest.raises(BadPublicValue):
        shared_key(Group.NULL, 0, b"\2")
