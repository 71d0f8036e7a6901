from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

from xkv_gateway.replay.generate import BLOCK_TOKENS, PACKAGED, BlockIds, TraceGenerator, main
from xkv_gateway.replay.trace import read_trace

if TYPE_CHECKING:
    from pathlib import Path


def test_the_packaged_trace_is_what_its_generator_writes(tmp_path: Path) -> None:
    main(tmp_path / "again.gz")
    # The text, not the compressed bytes: those differ between versions of zlib.
    assert gzip.decompress(PACKAGED.read_bytes()) == gzip.decompress((tmp_path / "again.gz").read_bytes())


def test_another_seed_gives_another_trace() -> None:
    assert TraceGenerator(1).lines() != TraceGenerator(2).lines()


def test_the_packaged_trace_is_small_and_looks_like_conversations() -> None:
    trace = read_trace(PACKAGED)
    distinct = trace.distinct_blocks()
    assert 200 < len(trace.requests) < 1000
    assert distinct * 64 * 1024 < 2**30, "its payload at 64 KiB a block fits any soft card"
    assert 0.3 < trace.leading_repeats() / trace.blocks < 0.8
    for request in trace.requests:
        assert len(request.hash_ids) == -(-request.input_tokens // BLOCK_TOKENS)
        assert len(set(request.hash_ids)) == len(request.hash_ids)


def test_equal_ids_have_equal_ids_before_them() -> None:
    before: dict[int, int] = {}
    for request in read_trace(PACKAGED).requests:
        parent = -1
        for hash_id in request.hash_ids:
            assert before.setdefault(hash_id, parent) == parent
            parent = hash_id


def test_a_block_cut_short_is_another_block_than_the_full_one() -> None:
    ids = BlockIds()
    assert ids.of_prompt([("a", BLOCK_TOKENS + 10)]) == [0, 1]
    assert ids.of_prompt([("a", BLOCK_TOKENS + 10), ("b", BLOCK_TOKENS)]) == [0, 2, 3]
    assert ids.of_prompt([("a", BLOCK_TOKENS)]) == [0]
    assert ids.of_prompt([("b", BLOCK_TOKENS)]) == [4]
