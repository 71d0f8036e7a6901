"""How long a hit is: never a partial chunk, never the last token, never more than every group of every rank has."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.connector.rig import FULL, GEMMA, HASH_TOKENS, MODELS, connector, gateway
from tests.connector.test_engine import end_in_order, prompt, request
from tests.rpc.harness import DictService
from xkv_rpc.messages import Lookup, LookupMode, LookupReply
from xkv_vllm_connector.groups import Geometry, GroupFacts, Kind, UnsupportedModelError, plan_groups
from xkv_vllm_connector.keys import HEAD
from xkv_vllm_connector.lookups import KEYS_MAX
from xkv_vllm_connector.matching import chunks_wanted, longest_hit

if TYPE_CHECKING:
    from xkv_rpc.server import Call

CHUNK = 8


@pytest.mark.parametrize("model", MODELS)
def test_for_every_length_and_every_local_hit_the_sum_is_whole_chunks_and_leaves_a_token(model: str) -> None:
    lengths = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 10 * CHUNK, 10 * CHUNK + 5)
    with gateway() as (service, served):
        with connector(service, served, MODELS[model]) as first:
            first.engine.run(request(prompt(10 * CHUNK + 6)))
        for length in lengths:
            for local in range(0, length, 2 * CHUNK):
                with connector(service, served, MODELS[model]) as rig:
                    asked = request(prompt(10 * CHUNK + 6)[:length], local_tokens=local)
                    rig.engine.run(asked)
                    end_in_order(rig)
                    # The mini engine checks the rest. With recurrent states, only the last boundary of a prompt is kept.
                    most = (length - 1) // CHUNK * CHUNK
                    assert local + asked.external <= most or asked.external == 0
                    if model in {"full", "gemma", "llama4"}:
                        assert asked.external == max(0, most - local)


@pytest.mark.parametrize("stored", [0, 1, 3, 5])
def test_a_stored_prefix_is_used_as_far_as_it_goes(stored: int) -> None:
    with gateway() as (service, served):
        with connector(service, served) as first:
            first.engine.run(request(prompt(stored * CHUNK + 1)))
        with connector(service, served) as second:
            asked = request(prompt(5 * CHUNK + 3))
            second.engine.run(asked)
            assert asked.external == stored * CHUNK


def drop(
    service: object, *, group: int | None = None, rank: int | None = None, chunk: int | None = None
) -> int:
    objects = service.objects  # type: ignore[attr-defined]
    victims = []
    for identity in objects:
        _, has_group, has_rank, has_chunk = HEAD.unpack_from(identity[2])
        wanted = ((group, has_group), (rank, has_rank), (chunk, has_chunk))
        if all(want is None or want == have for want, have in wanted):
            victims.append(identity)
    for identity in victims:
        del objects[identity]
    return len(victims)


def test_a_hole_in_one_rank_ends_the_hit_of_all() -> None:
    with gateway() as (service, served):
        with connector(service, served, ranks=4) as first:
            first.engine.run(request(prompt(10 * CHUNK + 1)))
        assert drop(service, rank=2, chunk=5) == 1
        with connector(service, served, ranks=4) as second:
            asked = request(prompt(10 * CHUNK + 1))
            second.engine.run(asked)
            assert asked.external == 5 * CHUNK
            end_in_order(second)


@pytest.mark.parametrize(
    ("model", "group"), [("gemma", 0), ("gemma", 2), ("qwen", 0), ("qwen", 3), ("llama4", 1)]
)
def test_without_one_groups_part_there_is_no_hit_at_that_boundary(model: str, group: int) -> None:
    with gateway() as (service, served):
        with connector(service, served, MODELS[model]) as first:
            first.engine.run(request(prompt(10 * CHUNK + 1)))
        assert drop(service, group=group) > 0
        with connector(service, served, MODELS[model]) as second:
            asked = request(prompt(10 * CHUNK + 1))
            second.engine.run(asked)
            assert asked.external == 0
            end_in_order(second)


class Leasing(DictService):
    """Grants another lease with each answer, as a gateway does."""

    def __init__(self) -> None:
        super().__init__()
        self.granted = 0

    def _lookup(self, call: Call, request: Lookup) -> None:
        if request.mode is not LookupMode.PREFIX or not request.lease_ms:
            super()._lookup(call, request)
            return
        found = [self.objects.get((request.ns, request.scope, key)) for key in request.keys]
        sizes = [len(value) for value in takewhile(lambda value: value is not None, found) if value]
        self.granted += 1
        call.reply(LookupReply(len(sizes), [*sizes], self.granted.to_bytes(16, "big"), request.lease_ms))


@pytest.mark.parametrize("beyond", [1, 5, 40])
def test_groups_whose_hit_needs_several_leases_are_loaded_whole(beyond: int) -> None:
    groups = tuple(GroupFacts(number, Kind.FULL, 4, FULL[0].block_bytes) for number in range(3))
    ranks = 8
    # More than one question, so a lease for each; the last ends within one message of what the first covers.
    chunks = KEYS_MAX // (len(groups) * ranks) + beyond
    with gateway(Leasing()) as (service, served):
        with connector(service, served, groups, ranks=ranks) as first:
            first.engine.run(request(prompt(chunks * CHUNK + 1)))
            first.engine.settle()
        with connector(service, served, groups, ranks=ranks) as second:
            asked = request(prompt(chunks * CHUNK + 1))
            second.engine.run(asked)
            assert asked.external_total == chunks * CHUNK
            assert second.count("loads_failed") == 0
            end_in_order(second)


def test_workers_with_the_same_bytes_store_them_once_and_all_load_them() -> None:
    with gateway() as (service, served):
        with connector(service, served, ranks=4, replicas=2) as first:
            first.engine.run(request(prompt(4 * CHUNK + 1)))
            end_in_order(first)
        assert len(service.objects) == 4 * 2
        with connector(service, served, ranks=4, replicas=2) as second:
            asked = request(prompt(4 * CHUNK + 1))
            second.engine.run(asked)
            assert asked.external == 4 * CHUNK
            assert second.count("chunks_loaded") == 4 * 4


def brute(geometry: Geometry, held: list[bool], first: int, end: int) -> int:
    """The definition, read aloud."""
    ranks, parts = len(geometry.ranks), geometry.parts_per_chunk

    def there(chunk: int, number: int) -> bool:
        at = (chunk - first) * parts + number * ranks
        return all(held[at : at + ranks])

    best = first
    for boundary in range(first + 1, end + 1):
        if all(
            there(chunk, number)
            for number, group in enumerate(geometry.groups)
            for chunk in range(max(first, group.first_needed(boundary)), boundary)
        ):
            best = boundary
    return best


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    data=st.data(), model=st.sampled_from(sorted(MODELS)), ranks=st.integers(1, 3), first=st.integers(0, 3)
)
def test_the_longest_hit_is_the_longest_boundary_that_everybody_can_serve(
    data: st.DataObject, model: str, ranks: int, first: int
) -> None:
    geometry = plan_groups(MODELS[model], CHUNK, HASH_TOKENS, tuple(range(ranks)))
    end = first + data.draw(st.integers(0, 6))
    size = (end - first) * geometry.parts_per_chunk
    held = data.draw(st.lists(st.sampled_from([True, True, True, False]), min_size=size, max_size=size))
    assert longest_hit(geometry, held, first, end) == brute(geometry, held, first, end)


@given(total=st.integers(0, 200), computed=st.integers(0, 200), hashes=st.integers(0, 50))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_what_is_asked_for_lies_beyond_what_is_computed_and_before_the_last_token(
    total: int, computed: int, hashes: int
) -> None:
    geometry = plan_groups(GEMMA, CHUNK, HASH_TOKENS, (0,))
    first, end = chunks_wanted(geometry, total, computed, hashes)
    if first != end:
        assert first * CHUNK <= computed < end * CHUNK <= total - 1
        assert end * geometry.hashes_per_chunk <= hashes


def test_the_chunk_is_rounded_up_to_the_blocks_of_all_groups() -> None:
    def chunk(size: int, *blocks: int, kind: Kind = Kind.FULL) -> int:
        facts = tuple(GroupFacts(number, kind, block, 10) for number, block in enumerate(blocks))
        return plan_groups(facts, size, 4, (0,)).chunk_tokens

    assert chunk(128, 16) == 128
    assert chunk(128, 128) == 128
    assert chunk(100, 16) == 112
    assert chunk(1, 16, 24) == 48
    assert chunk(128, 544) == 544
    # A state is kept at the last block boundary of a prompt only: a longer chunk would miss it.
    assert chunk(128, 64, kind=Kind.STATE) == 64


def test_attention_chunks_that_are_no_multiple_of_chunk_size_cannot_be_kept() -> None:
    with pytest.raises(UnsupportedModelError, match="chunk_size"):
        plan_groups((GroupFacts(0, Kind.CHUNKED, 4, 10, 20),), 8, 4, (0,))
    with pytest.raises(UnsupportedModelError):
        plan_groups((), 8, 4, (0,))


@pytest.mark.parametrize(
    ("reach", "kept", "chunks"), [(1, 1, 1), (4, 1, 1), (5, 2, 1), (8, 2, 1), (9, 2, 2), (1023, 2, 128)]
)
def test_of_a_window_as_many_blocks_are_kept_as_it_reaches(reach: int, kept: int, chunks: int) -> None:
    (group,) = plan_groups((GroupFacts(0, Kind.WINDOW, 4, 10, reach),), 8, 4, (0,)).groups
    assert (group.kept_blocks, group.reach_chunks, group.object_bytes) == (kept, chunks, 10 * kept)
