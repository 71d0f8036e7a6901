"""A target is made what it shall be, whatever fails in between, and kept so; nothing of it ever holds the loop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.target.fake_spdk import FakeSpdk, fake_spdk
from tests.target.model_spdk import METHODS, ModelVolumes
from tests.target.settings import NQN, OTHER, wanted
from tests.target.test_plan import VARIANTS, VOLUME
from xkv_gateway.errors import ExitCode, TargetAwayError, TargetError, TargetRefusedError
from xkv_gateway.target import spdk
from xkv_gateway.target.keeping import UNDONE_MAX, TargetKeeper, TargetState
from xkv_rpc.spdk import SpdkClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from xkv_gateway.target.desired import DesiredTarget

HANG_S: Final = 60.0


class Target:
    """A scripted target whose process can be another one."""

    def __init__(self, fake: FakeSpdk, model: ModelVolumes) -> None:
        self.fake = fake
        self.model = model

    async def die(self) -> None:
        await self.fake.stop()

    async def come_back(self) -> None:
        self.model = self.model.restarted()
        self.fake.handle = self.model.handle
        await self.fake.start()

    @property
    def changes(self) -> list[str]:
        """Methods called that change something."""
        reads = ("get_", "_get", "framework_wait", "wait_for_examine", "spdk_get")
        return [method for method, _ in self.fake.calls if not any(word in method for word in reads)]


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    model = ModelVolumes()
    async with fake_spdk(tmp_path / "s", model.handle) as fake, asyncio.timeout(HANG_S):
        yield Target(fake, model)


@pytest.fixture
async def client(target: Target) -> AsyncIterator[SpdkClient]:
    from_path = wanted(rpc=str(target.fake.path)).rpc
    client = SpdkClient(from_path, clock=time.monotonic_ns, timeout_ms=10_000)
    yield client
    client.close()


# --- applying -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "existing"])
async def test_a_target_is_made_and_made_again_without_a_change(
    target: Target, client: SpdkClient, variant: str
) -> None:
    desired = wanted(**VARIANTS[variant])
    assert await spdk.apply(client, desired, may_erase=True)
    assert len(target.model.subsystems[NQN]["listeners"]) == len(desired.listeners)
    before = len(target.changes)
    assert await spdk.apply(client, desired) == ()
    assert len(target.changes) == before


@pytest.mark.parametrize("variant", ["keys", "volume", "tls"])
async def test_whichever_step_fails_nobody_reaches_a_half_of_it_and_the_next_time_goes_on(
    tmp_path: Path, variant: str
) -> None:
    desired = wanted(**VARIANTS[variant])
    whole = ModelVolumes()
    path = tmp_path / "s"
    async with fake_spdk(path, whole.handle) as fake, asyncio.timeout(HANG_S):
        client = SpdkClient(wanted(rpc=str(path)).rpc, clock=time.monotonic_ns, timeout_ms=10_000)
        steps = await spdk.apply(client, desired, may_erase=True)
        for method in dict.fromkeys(step.method for step in steps):
            model = ModelVolumes()
            fake.handle = model.handle
            model.fail_next[method] = [False, False]
            with pytest.raises(TargetError, match=method):
                await spdk.apply(client, desired, may_erase=True)
            if method != "nvmf_subsystem_add_listener":
                assert not model.subsystems.get(NQN, {"listeners": []})["listeners"]
            await spdk.apply(client, desired, may_erase=True)
            assert (model.subsystems, model.keys) == (whole.subsystems, whole.keys)
            assert model.bdevs == whole.bdevs
            # What was refused and done all the same, as when another hand was quicker, is seen at the next look.
            model = ModelVolumes()
            fake.handle = model.handle
            model.fail_next[method] = [True]
            await spdk.apply(client, desired, may_erase=True)
            assert (model.subsystems, model.keys) == (whole.subsystems, whole.keys)
        client.close()


async def test_a_store_is_made_only_when_somebody_said_so(target: Target, client: SpdkClient) -> None:
    desired = wanted(lvol=VOLUME)
    with pytest.raises(TargetRefusedError, match="only when asked for") as caught:
        await spdk.apply(client, desired)
    assert caught.value.exit_code is ExitCode.REFUSED
    assert not target.model.stores_on
    assert await spdk.apply(client, desired, may_erase=True)


async def test_a_step_without_effect_ends_it(target: Target, client: SpdkClient) -> None:
    target.model.files["/srv/card.img"] = 1 << 20
    bdev = {"kind": "aio", "name": "xkv-bdev0", "file": "/srv/card.img", "size": 64 << 20}
    with pytest.raises(TargetError, match="had no effect") as caught:
        await spdk.apply(client, wanted(bdev=bdev))
    assert "Has the file that size" in caught.value.advice


async def test_any_number_of_applications_at_once_ends_in_one_target(
    target: Target, client: SpdkClient
) -> None:
    desired = wanted()
    await asyncio.gather(*(spdk.apply(client, desired) for _ in range(20)))
    assert len(target.model.subsystems[NQN]["listeners"]) == 1
    assert target.fake.connections_most <= 4


@pytest.mark.parametrize("answer", [7, None, "x", {"a": 1}])
@pytest.mark.parametrize("method", ["nvmf_get_subsystems", "bdev_get_bdevs", "keyring_get_keys"])
async def test_an_answer_that_cannot_be_understood_is_not_an_empty_target(
    target: Target, client: SpdkClient, method: str, answer: Any
) -> None:
    handle = target.model.handle
    target.fake.handle = lambda called, params: answer if called == method else handle(called, params)
    with pytest.raises(TargetAwayError, match=method):
        await spdk.apply(client, wanted())
    assert not target.changes


async def test_every_call_is_one_that_spdk_knows(target: Target, client: SpdkClient) -> None:
    for settings in VARIANTS.values():
        if settings.get("bdev", {}).get("kind") == "existing":
            continue
        target.model = ModelVolumes()
        target.fake.handle = target.model.handle
        await spdk.apply(client, wanted(**settings), may_erase=True)
    for method, params in target.fake.calls:
        known = METHODS[method]
        assert set(known["required"]) <= set(params) <= {*known["required"], *known["optional"]}


# --- keeping --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def keeper(target: Target) -> AsyncIterator[TargetKeeper]:
    keeper = keeper_of(wanted(rpc=str(target.fake.path)))
    yield keeper
    keeper.close()


def keeper_of(desired: DesiredTarget) -> TargetKeeper:
    return TargetKeeper(desired, interval_s=0.01, clock=time.monotonic_ns, entropy=os.urandom)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)


async def test_a_restarted_target_is_made_anew_the_card_is_hurried_and_the_log_says_so(
    target: Target, keeper: TargetKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    hurried: list[int] = []
    keeper.on_made = lambda: hurried.append(target.model.pid)
    with caplog.at_level(logging.INFO):
        await keeper.first()
        assert keeper.state is TargetState.RIGHT
        run = asyncio.create_task(keeper.run())
        await target.die()
        await until(lambda: keeper.state is TargetState.AWAY)
        await target.come_back()
        await until(lambda: keeper.state is TargetState.RIGHT)
        run.cancel()
    assert target.model.subsystems[NQN]["listeners"]
    assert hurried == [1000, 1001]
    assert keeper.remade == 2
    for words in (
        "is away",
        "was restarted: process 1001, before 1000",
        "listen on 127.0.5.1:4420",
        "after 6 steps",
    ):
        assert words in caplog.text


async def test_a_target_that_restarts_unseen_is_noticed_by_its_pid(
    target: Target, keeper: TargetKeeper
) -> None:
    await keeper.first()
    run = asyncio.create_task(keeper.run())
    await asyncio.sleep(0.05)
    target.model = target.model.restarted()
    target.fake.handle = target.model.handle
    await until(lambda: bool(target.model.subsystems))
    run.cancel()


async def test_a_hand_in_the_target_is_undone_at_the_next_look(target: Target, keeper: TargetKeeper) -> None:
    await keeper.first()
    run = asyncio.create_task(keeper.run())
    await asyncio.sleep(0.02)
    target.model.subsystems[NQN]["allow_any_host"] = True
    keeper.nudge()
    await until(lambda: not target.model.subsystems[NQN]["allow_any_host"])
    run.cancel()


async def test_two_gateways_that_undo_each_others_work_slow_down_and_say_so(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    rpc = str(target.fake.path)
    one = keeper_of(wanted(rpc=rpc))
    other = keeper_of(wanted(rpc=rpc, hosts=[{"nqn": OTHER}]))
    pauses = []
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            for keeper in (one, other):
                keeper.nudge()
                pauses.append(await keeper._once())
    assert one.state is other.state is TargetState.WRONG
    assert caplog.text.count("does another gateway declare this target differently?") == 2
    assert max(pauses[:4]) < 0.1
    assert min(pauses[-4:]) > 4
    other.close()
    # Alone again, it is right with the second look.
    for _ in range(2):
        one.nudge()
        await one._once()
    assert one.state is TargetState.RIGHT
    one.close()


async def test_while_the_work_is_undone_the_loss_of_the_card_hurries_nothing(
    target: Target, keeper: TargetKeeper
) -> None:
    for _ in range(UNDONE_MAX + 1):
        keeper.nudge()
        await keeper._once()
        target.model.subsystems[NQN]["allow_any_host"] = True
    run = asyncio.create_task(keeper.run())
    await until(lambda: keeper._undone > UNDONE_MAX)
    calls = len(target.fake.calls)
    for _ in range(20):
        keeper.nudge()
        await asyncio.sleep(0.002)
    assert len(target.fake.calls) == calls
    run.cancel()


async def test_a_target_that_cannot_be_made_right_is_left_alone_and_told_once(
    target: Target, keeper: TargetKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    target.model._nvmf_create_subsystem(NQN, serial_number="S", model_number="theirs")
    with caplog.at_level(logging.WARNING):
        await keeper.first()
        for _ in range(3):
            assert await keeper._once() > 0
    assert keeper.state is TargetState.WRONG
    assert "somebody else's" in keeper.reason
    assert len(caplog.records) == 1
    assert not target.changes


async def test_a_target_that_hangs_holds_nobody(
    target: Target, keeper: TargetKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    await keeper.first()
    run = asyncio.create_task(keeper.run())

    async def hangs(_: dict[str, Any], __: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(HANG_S)
        return True

    target.fake.script = hangs
    keeper.nudge()
    turns = 0
    while keeper.state is TargetState.RIGHT:
        await asyncio.sleep(0.005)
        turns += 1
    assert keeper.state is TargetState.AWAY
    assert turns > 20, "the loop went on"
    calls = len(target.fake.calls)
    await until(lambda: len(target.fake.calls) > calls)  # the next one hangs as well
    run.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert run.done(), "without a wait for the call that hangs"
    keeper.close()


async def test_the_pauses_grow_and_are_bounded(tmp_path: Path) -> None:
    keeper = keeper_of(wanted(rpc=str(tmp_path / "nobody")))
    pauses = [await keeper._once() for _ in range(12)]
    assert 0.05 <= pauses[0] <= 0.1
    assert max(pauses) <= 1.0
    assert min(pauses[5:]) >= 0.5
    keeper.close()
