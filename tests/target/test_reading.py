"""What is declared, checked against itself and the storage networks; and what a target answers, read without trust."""

from __future__ import annotations

from typing import Any

import pytest

from tests.target.settings import AIO, HOST, MALLOC, NQN, STORAGE, wanted
from tests.target.test_plan import VARIANTS, VOLUME, carry_out, new_model, state_of
from xkv_gateway.config import TargetConfig
from xkv_gateway.errors import ConfigError, FabricRefusedError
from xkv_gateway.target import actual as read
from xkv_gateway.target.actual import UnreadableAnswerError
from xkv_gateway.target.desired import desired_of
from xkv_gateway.target.figures import Sample, count, rates_between, read_sample
from xkv_gateway.target.plan import plan

# --- the settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nqn": None}, "target.nqn"),
        ({"nqn": "nqn.2014-08.org.nvmexpress.discovery"}, "target.nqn"),
        ({"listeners": []}, "target.listeners"),
        ({"hosts": []}, "target.hosts"),
        ({"allow_any_host": True}, "target.hosts"),
        ({"hosts": [{"nqn": HOST}, {"nqn": HOST}]}, "there twice"),
        ({"tls": True}, "psk_file"),
        ({"bdev": {"kind": "aio", "name": "xkv-b"}}, "bdev.file"),
        ({"bdev": {**MALLOC, "file": "/f"}}, "bdev.file"),
        ({"bdev": {"kind": "nvme", "name": "xkv-b"}}, "bdev.pci"),
        ({"bdev": {"kind": "malloc", "name": "xkv-b"}}, "bdev.size"),
        ({"bdev": {**MALLOC, "size": (64 << 20) + 1}}, "whole blocks"),
        ({"bdev": {**AIO, "block_size": 520}}, "power of two"),
        ({"bdev": {**AIO, "name": "card"}}, "begins with xkv-"),
        ({"lvol": {"name": "xkv-card"}}, "lvol.size"),
        ({"lvol": {**VOLUME, "size": (1 << 20) + 1}}, "whole MiB"),
    ],
)
def test_settings_that_do_not_fit_together_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"target\.") as caught:
        wanted(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"listeners": ["127.0.6.1:4420"]}, {"rpc": "tcp://127.0.6.1:5260"}, {"listeners": ["[::1]:4420"]}],
)
def test_a_target_outside_of_the_storage_networks_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FabricRefusedError, match="outside of the storage networks"):
        wanted(**changes)


def test_a_credential_needs_a_directory_of_credentials() -> None:
    config = TargetConfig(
        rpc="/s",
        nqn=NQN,
        listeners=("127.0.5.1",),
        hosts=({"nqn": HOST, "dhchap_key_file": "key"},),  # type: ignore[arg-type]
        bdev=AIO,  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError, match="credential"):
        desired_of(config, STORAGE, None)
    paths = [key.path for key in wanted(hosts=[{"nqn": HOST, "dhchap_key_file": "key"}]).keys.values()]
    assert paths == ["/run/credentials/key"]


def test_no_path_of_a_key_is_shown() -> None:
    desired = wanted(**VARIANTS["keys"])
    text = repr(desired) + str([step.shown() for step in plan(desired, state_of(new_model())).steps])
    assert "/k/host" not in text
    assert "/k/target" not in text


# --- reading --------------------------------------------------------------------------------------------------------


NO_COUNTERS = (("bytes_read", -1), ("num_read_ops", 1e308), ("write_latency_ticks", float("inf")))


def iostat(field: str, number: float) -> dict[str, Any]:
    names = ("bytes_read", "bytes_written", "num_read_ops", "num_write_ops")
    bdev = dict.fromkeys((*names, "read_latency_ticks", "write_latency_ticks"), 0)
    assert read_sample({"ticks": 1, "tick_rate": 1, "bdevs": [bdev]})
    return {"ticks": 1, "tick_rate": 1, "bdevs": [{**bdev, field: number}]}


@pytest.mark.parametrize("value", [None, 7, "x", [], {}, [None], [[]], [{"nqn": 7}], [{"name": {}}]])
def test_answers_of_another_shape_are_no_facts(value: Any) -> None:
    read.read_pid(value)
    read.read_version(value)
    read.read_startup(value)
    readers = (read.read_methods, read.read_transport, read.read_keys, read.read_bdevs, read.read_stores)
    for reader in (*readers, lambda answer: read.read_subsystems(answer, answer)):
        if isinstance(value, list):
            assert not reader(value)
        else:
            with pytest.raises(UnreadableAnswerError):
                reader(value)
    for sample in (value, {"ticks": 1e999}, *(iostat(field, number) for field, number in NO_COUNTERS)):
        with pytest.raises(UnreadableAnswerError):
            read_sample(sample)
    assert count(value) == (len(value) if isinstance(value, list) else None)


def test_fields_that_are_missing_are_not_taken_for_differences() -> None:
    model = new_model()
    carry_out(wanted(), model)
    for entry in model.bdevs.values():
        del entry["uuid"], entry["driver_specific"], entry["claimed"]
    model.transports[0] = {"trtype": "tcp"}
    assert plan(wanted(), state_of(model)).right


def test_rates_come_from_two_samples_of_one_run_only() -> None:
    before = Sample(0, 1000, 0, 0, 0, 0, 0, 0)
    after = Sample(2000, 1000, 4_000_000, 0, 10, 0, 50, 0)
    rates = rates_between(before, after)
    assert rates is not None
    assert (rates.seconds, rates.read_bytes_per_s, rates.reads_per_s) == (2.0, 2_000_000.0, 5.0)
    assert (rates.read_latency_us, rates.write_latency_us) == (5000.0, None)
    assert rates_between(after, before) is None
    assert rates_between(after, after) is None
