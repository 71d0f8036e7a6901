"""A worker's way to the gateway's bytes: shared memory where it is offered, and never the same memory after an open end."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.connector.rig import connector, gateway
from tests.connector.test_engine import end_in_order, prompt, request
from tests.rpc.harness import DictService, wait_until
from xkv_rpc.client import Client
from xkv_rpc.messages import StoreStatus
from xkv_rpc.regions import RegionLimits
from xkv_vllm_connector.channel import ALIGNMENT, INLINE_BYTES_MAX, Channel, ChannelError

if TYPE_CHECKING:
    from tests.rpc.harness import Served
    from xkv_rpc.regions import RegionServer

STAGING = 1 << 20
LEFT_MS = 20_000


def channel(served: Served, staging_bytes: int = STAGING) -> Channel:
    one = Channel(Client(served.endpoint), "ns", staging_bytes, time.monotonic_ns)
    one.ready(LEFT_MS)
    return one


@pytest.mark.parametrize("regions", [True, False])
def test_what_is_stored_is_loaded(*, regions: bool) -> None:
    with gateway(regions=regions) as (service, served):
        one = channel(served)
        assert one.inline != regions
        sizes = [1, ALIGNMENT, ALIGNMENT + 1]
        keys = [b"a", b"b", b"c"]
        assert one.missing(b"s", keys, LEFT_MS) == [True, True, True]
        places = one.places(sizes)
        for number, place in enumerate(places):
            place.view[:] = bytes([number + 1]) * len(place.view)
        assert one.store(b"s", keys, places, LEFT_MS) == [StoreStatus.STORED] * 3
        assert service.objects["ns", b"s", b"b"] == b"\2" * ALIGNMENT
        assert one.missing(b"s", [*keys, b"d"], LEFT_MS) == [False, False, False, True]
        views = one.load(b"s", keys, sizes, None, LEFT_MS)
        assert [bytes(view) for view in views] == [bytes([n + 1]) * size for n, size in enumerate(sizes)]
        with pytest.raises(ChannelError) as caught:
            one.load(b"s", [b"a"], [2], None, LEFT_MS)
        assert not caught.value.unavailable
        with pytest.raises(ChannelError):
            one.load(b"t", keys, sizes, None, LEFT_MS)
        del places, views
        one.close()


def test_a_call_takes_as_many_objects_as_fit_and_at_least_one() -> None:
    with gateway() as (_, served):
        one = channel(served)
        assert one.fit([ALIGNMENT] * 1000) == STAGING // ALIGNMENT
        assert one.fit([STAGING + 1, 1]) == 1
        with pytest.raises(ChannelError, match="staging_bytes"):
            one.places([STAGING + 1])
        one.close()
    with gateway(regions=False) as (_, served):
        inline = channel(served)
        assert inline.fit([INLINE_BYTES_MAX // 2] * 10) == 2
        inline.close()


def test_a_region_that_is_refused_leaves_the_messages() -> None:
    with gateway() as (service, served):
        _regions(service).limits = RegionLimits(region_bytes=STAGING - 1)
        one = channel(served)
        assert one.inline
        one.close()


def test_a_gateway_that_does_not_answer_is_away_and_one_that_refuses_is_not() -> None:
    with gateway() as (_, served):
        one = channel(served)
    with pytest.raises(ChannelError) as caught:
        one.missing(b"", [b"a"], 200)
    assert caught.value.unavailable
    one.close()


def test_after_the_gateway_was_exchanged_the_region_is_a_new_one_and_no_load_fails() -> None:
    service = DictService()
    length = 41
    with gateway(service) as (_, served), connector(service, served) as rig:
        rig.engine.run(request(prompt(length)))
        wait_until(lambda: not rig.workers[0]._load_channel.inline, "the region is attached")
        # The gateway's side of every region ends, as it does when it is restarted.
        served.run(lambda: [client.cancel() for client in list(_regions(service)._clients)])
        wait_until(lambda: not rig.workers[0]._load_channel._region.attached, "the region has ended")
        asked = request(prompt(length))
        rig.engine.run(asked)
        assert asked.external_total == 40
        assert rig.count("loads_failed") == 0
        end_in_order(rig)


def _regions(service: DictService) -> RegionServer:
    assert service.regions is not None
    return service.regions


def test_the_connector_brings_nothing_but_pyzmq_and_msgpack_into_an_engine() -> None:
    program = (
        "import sys, xkv_vllm_connector.assembly;"
        "files = {name.partition('.')[0]: getattr(module, '__file__', None) or '' for name, module in sys.modules.items()"
        " if '.' not in name};"
        "print(sorted(name for name, file in files.items() if 'site-packages' in file and not name.startswith('_')))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert {"msgpack", "zmq"} == set(ast.literal_eval(found))
