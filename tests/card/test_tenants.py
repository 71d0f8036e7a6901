"""Tenants on a card: quotas over restarts, ledgers that are damaged, power failures at every command of a change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.card.runs import Bench
from tests.card.tenant_runs import A, B, Failing, Served, damage, serve
from xkv_gateway.card.administration import BadTenant, NameTaken, TooManyTenants
from xkv_gateway.card.register import WIPES_MAX
from xkv_gateway.card.structure import BLOCK_BYTES
from xkv_gateway.card.table_file import FileKind
from xkv_gateway.card.table_read import decode_ends

if TYPE_CHECKING:
    from xkv_gateway.card.layout import Region

UNIT = 64 << 10


def test_a_quota_holds_after_a_kill_and_after_an_orderly_end() -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        info = await served.operator.set_limit(A, 3 * UNIT)
        assert (info.limit_bytes, info.name) == (3 * UNIT, None)
        await served.operator.set_tenant("b", B, None)
        assert await served.save([b"%d" % i for i in range(5)], b"x") == ["stored"] * 3 + ["over_quota"] * 2
        for orderly in (False, True, False):
            if orderly:
                assert await served.stop()
            else:
                await served.kill()
            served = await serve(bench)
            tenant = served.operator.tenant(A)
            assert (tenant.limit_bytes, tenant.held.objects, tenant.held.charged_bytes) == (
                3 * UNIT,
                3,
                3 * UNIT,
            )
            assert served.operator.tenant_named("b") is not None
            assert await served.save([b"1", b"2", b"5", b"6", b"7", b"8"], b"x") == [
                "exists", "exists", "stored", "over_quota", "over_quota", "over_quota",
            ]  # fmt: skip
            assert await served.load([b"1", b"2", b"5"]) == [b"x"] * 3
            # Back to what it was.
            await served.operator.clear_limit(A)
            await served.operator.set_limit(A, 3 * UNIT)
            assert await served.save([b"1", b"2", b"0"], b"x") == ["exists", "exists", "stored"]
        await served.kill()

    Bench().play(work)


def test_what_was_taken_out_does_not_come_back() -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        await served.operator.set_tenant("a", A, 5 * UNIT)
        await served.run.session.checkpointer.write()  # type: ignore[union-attr]
        assert await served.operator.remove_tenant("a")
        assert not await served.operator.remove_tenant("a")
        for _ in range(3):
            await served.kill()
            served = await serve(bench)
            assert served.operator.tenants().total == 0
        assert await served.stop()
        served = await serve(bench)
        assert served.operator.tenants().total == 0
        await served.kill()

    Bench().play(work)


def test_names_are_unique_and_move_with_their_tenants() -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        operator = served.operator
        await operator.set_tenant("one", A, UNIT)
        with pytest.raises(NameTaken):
            await operator.set_tenant("one", B, UNIT)
        await operator.set_tenant("two", A, UNIT)
        await operator.set_tenant("one", B, 0)
        await operator.set_limit(A, 2 * UNIT)
        await served.kill()
        served = await serve(bench)
        listed = served.operator.tenants()
        assert {(t.name, t.scope, t.limit_bytes) for t in listed.items} == {
            ("two", A, 2 * UNIT),
            ("one", B, 0),
        }
        assert await served.save([b"k"], b"", B) == ["over_quota"]
        await served.kill()

    Bench().play(work)


@pytest.mark.parametrize(
    ("name", "scope", "limit"),
    [
        ("", A, 1), (" a", A, 1), ("a/b", A, 1), ("scope:00", A, 1), ("_default", A, 1), ("x" * 65, A, 1),
        ("a\n", A, 1), ("\ud800", A, 1), ("a", b"s" * 33, 1), ("a", A, -1), ("a", A, 1 << 63),
    ],
)  # fmt: skip
def test_what_no_tenant_can_be_is_refused_and_changes_nothing(name: str, scope: bytes, limit: int) -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        before = served.run.session.engine.last_lsn
        with pytest.raises(BadTenant):
            await served.operator.set_tenant(name, scope, limit)
        assert served.run.session.engine.last_lsn == before
        await served.kill()

    Bench().play(work)


def test_changes_that_come_together_share_a_ledger() -> None:
    async def work(bench: Bench) -> None:
        import asyncio  # noqa: PLC0415

        served = await serve(bench)
        await asyncio.gather(*(served.operator.set_limit(b"%d" % i, i) for i in range(200)))
        assert served.operator.tenants().total == 200
        keeper = served.run.session.keeper
        assert keeper is not None
        assert keeper.register.ledgers_written < 5
        await served.kill()

    Bench().play(work)


# --- damage -----------------------------------------------------------------------------------------------


def newest_ledger(bench: Bench, served: Served) -> tuple[Region, Region]:
    """The newest ledger's region, and the other."""
    layout = served.layout
    regions = (layout.ledger_a, layout.ledger_b)
    ages = []
    for region in regions:
        facts = decode_ends(
            bench.medium.read(region.offset_bytes, BLOCK_BYTES),
            bench.medium.read(region.end_bytes - BLOCK_BYTES, BLOCK_BYTES),
            region_bytes=region.length_bytes,
            card_uuid=served.run.session.superblock.stamp.card_uuid,
            kind=FileKind.LEDGER,
        )
        ages.append(0 if facts is None else facts.identity.sequence)
    return regions if ages[0] > ages[1] else (regions[1], regions[0])


async def two_ledgers(bench: Bench) -> Served:
    served = await serve(bench)
    await served.operator.set_tenant("a", A, 4 * UNIT)
    await served.operator.set_limit(B, 2 * UNIT)
    await served.save([b"1", b"2"], b"x", A)
    return served


@pytest.mark.parametrize("where", ["header", "chunk", "closing", "all"])
def test_a_damaged_ledger_costs_nothing_while_the_journal_is_whole(where: str) -> None:
    async def work(bench: Bench) -> None:
        served = await two_ledgers(bench)
        newest, other = newest_ledger(bench, served)
        await served.kill()
        at = {
            "header": 0,
            "chunk": BLOCK_BYTES + 300,
            "closing": newest.length_bytes - BLOCK_BYTES,
            "all": 0,
        }[where]
        damage(bench, newest.offset_bytes + at)
        if where == "all":
            damage(bench, other.offset_bytes + BLOCK_BYTES + 300)
        served = await serve(bench)
        assert served.run.session.recovery.damage
        assert served.operator.tenants_known
        assert {t.scope: t.limit_bytes for t in served.operator.tenants().items} == {A: 4 * UNIT, B: 2 * UNIT}
        await served.operator.set_limit(B, 3 * UNIT)
        await served.kill()
        served = await serve(bench)
        assert served.operator.tenant(B).limit_bytes == 3 * UNIT
        await served.kill()

    Bench().play(work)


@pytest.mark.parametrize("where", ["header", "chunk", "closing"])
def test_behind_a_damaged_ledger_a_run_writes_a_whole_one_before_anybody_changes_anything(where: str) -> None:
    async def work(bench: Bench) -> None:
        served = await two_ledgers(bench)
        newest, _ = newest_ledger(bench, served)
        await served.kill()
        at = {"header": 0, "chunk": BLOCK_BYTES + 300, "closing": newest.length_bytes - BLOCK_BYTES}[where]
        damage(bench, newest.offset_bytes + at)
        served = await serve(bench)
        assert served.run.session.recovery.damage
        keeper = served.run.session.keeper
        assert keeper is not None
        while not keeper.register.ledgers_written:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
        await served.kill()
        served = await serve(bench)
        assert served.run.session.recovery.damage == []
        assert {t.scope: t.limit_bytes for t in served.operator.tenants().items} == {A: 4 * UNIT, B: 2 * UNIT}
        await served.kill()

    Bench().play(work)


def lose_the_journal(bench: Bench, served: Served) -> None:
    """Damage every batch but the first."""
    journal = served.layout.journal
    for at in range(BLOCK_BYTES, 256 << 10, BLOCK_BYTES):
        damage(bench, journal.offset_bytes + at)


def test_a_ledger_brings_the_quotas_back_when_the_journal_is_lost() -> None:
    async def work(bench: Bench) -> None:
        served = await two_ledgers(bench)
        lose_the_journal(bench, served)
        await served.kill()
        for _ in range(3):
            served = await serve(bench)
            assert served.operator.tenants_known
            assert {t.scope: t.limit_bytes for t in served.operator.tenants().items} == {
                A: 4 * UNIT,
                B: 2 * UNIT,
            }
            await served.operator.set_limit(b"c", 1)
            await served.operator.clear_limit(b"c")
            await served.kill()

    Bench().play(work)


def test_quotas_that_damage_may_have_taken_away_are_unknown_until_the_operator_confirms() -> None:
    async def work(bench: Bench) -> None:
        served = await two_ledgers(bench)
        await served.run.session.checkpointer.write()  # type: ignore[union-attr]
        await served.run.session.checkpointer.write()  # type: ignore[union-attr]
        await served.save([b"3"], b"x", A)
        layout = served.layout
        await served.kill()
        for region in (layout.ledger_a, layout.ledger_b, layout.checkpoint_a, layout.checkpoint_b):
            damage(bench, region.offset_bytes + BLOCK_BYTES + 300)
        served = await serve(bench)
        assert not served.operator.tenants_known
        # It is still so after a restart, although everything that is known is whole on the card again.
        await served.operator.set_limit(B, UNIT)
        assert await served.stop()
        served = await serve(bench)
        assert not served.operator.tenants_known
        assert served.operator.tenant(B).limit_bytes == UNIT
        await served.operator.confirm_tenants()
        await served.kill()
        served = await serve(bench)
        assert served.operator.tenants_known
        await served.kill()

    Bench().play(work)


def test_a_power_failure_at_any_command_of_a_change_leaves_the_old_quota_or_the_new_one() -> None:
    async def before(served: Served) -> None:
        await served.operator.set_tenant("a", A, 4 * UNIT)
        await served.operator.set_limit(B, UNIT)

    async def during(served: Served, told: list[str]) -> None:
        await served.operator.set_limit(A, 5 * UNIT)
        told.append("set")
        await served.operator.clear_limit(B)
        told.append("cleared")
        await served.operator.remove_tenant("a")
        told.append("removed")

    async def after(served: Served, told: list[str]) -> None:
        a, b = served.operator.tenant(A), served.operator.tenant(B)
        assert served.operator.tenants_known
        possible = [(4, "a", 1), (5, "a", 1), (5, "a", None), (None, None, None)]
        found = (a.limit_bytes and a.limit_bytes // UNIT, a.name, b.limit_bytes and b.limit_bytes // UNIT)
        assert found in possible[len(told) :], f"{found} after {told}"

    history = Failing(before, during, after)
    history.play(step=1, survivors=2)
    assert history.cuts > 20


def test_a_ledger_that_is_full_refuses_one_more_tenant_and_takes_it_when_another_went() -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        keeper = served.run.session.keeper
        assert keeper is not None
        quotas = served.run.session.engine.quotas
        for number in range(keeper.register.tenants_max):
            quotas.set(b"%d" % number, number, f"tenant number {number}")
        served.run.store.changed()
        await served.operator.set_limit(b"0", 7)
        for number in range(WIPES_MAX):
            served.operator.wipe(f"n{number}", None)
        with pytest.raises(TooManyTenants):
            served.operator.wipe("one more", None)
        with pytest.raises(TooManyTenants):
            await served.operator.set_limit(b"one more", 1)
        await served.operator.set_limit(b"1", 8)
        assert await served.operator.remove_tenant("tenant number 2")
        assert (await served.operator.set_limit(b"one more", 1)).limit_bytes == 1
        total = served.operator.tenants().total
        await served.kill()
        served = await serve(bench)
        assert served.operator.tenants().total == total == keeper.register.tenants_max
        await served.kill()

    Bench().play(work)
