"""The generator of the packaged trace: conversations of several turns over a few shared system prompts.

`python -m xkv_gateway.replay.generate [PATH]` writes the file again; the same seed gives the same bytes of text.

A prompt is a list of segments (system prompt, document, user message, answer, ...). It is cut into blocks of 512
tokens; a block's id stands for its content and all blocks before it, and ids are numbered in the order in which
they are first seen, as production traces do. The last block of a prompt is mostly cut short, so
it has an id of its own, and the next turn of the conversation has another block in its place.
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

BLOCK_TOKENS: Final = 512
SEED: Final = 20_260_101
CONVERSATIONS: Final = 160
TURNS_MAX: Final = 8
PROMPT_TOKENS_MAX: Final = 24_000
ARRIVAL_SPAN_MS: Final = 900_000
SYSTEM_PROMPT_TOKENS: Final = (1_800, 3_100, 4_700, 900)
DOCUMENT_TOKENS: Final = (6_200, 9_400, 12_500)
"""Documents that several conversations ask about, put right after the system prompt."""

SHARED_DOCUMENT_SHARE: Final = 0.15
OWN_TEXT_SHARE: Final = 0.45
"""Conversations that begin with a long text of their own."""

PACKAGED: Final = Path(__file__).resolve().parent.parent / "data" / "conversations.jsonl.gz"

Segment = tuple[str, int]
"""What it is (equal names: equal text) and its length in tokens."""


class BlockIds:
    """Gives each block, told by its parent and its content, an id in the order of first sight."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[tuple[str, int, int], ...]], int] = {}

    def of_prompt(self, segments: list[Segment]) -> list[int]:
        """Cut a prompt into blocks of `BLOCK_TOKENS` tokens and return their ids."""
        ids: list[int] = []
        parent = -1
        for content in _blocks(segments):
            parent = self._ids.setdefault((parent, content), len(self._ids))
            ids.append(parent)
        return ids


def _blocks(segments: list[Segment]) -> list[tuple[tuple[str, int, int], ...]]:
    blocks: list[tuple[tuple[str, int, int], ...]] = []
    current: list[tuple[str, int, int]] = []
    room = BLOCK_TOKENS
    for name, length in segments:
        start = 0
        while start < length:
            stop = min(length, start + room)
            current.append((name, start, stop))
            room -= stop - start
            start = stop
            if not room:
                blocks.append(tuple(current))
                current, room = [], BLOCK_TOKENS
    if current:
        blocks.append(tuple(current))
    return blocks


@dataclass(slots=True)
class Conversation:
    """One conversation while it grows."""

    number: int
    turns_left: int
    turn: int = 0
    segments: list[Segment] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Length of the prompt so far."""
        return sum(length for _, length in self.segments)


class TraceGenerator:
    """Draws a trace from one seed. Uses only `Random.random()`, whose sequence Python guarantees."""

    def __init__(self, seed: int = SEED) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a reproducible sequence is the point
        self._ids = BlockIds()

    def lines(self) -> list[str]:
        """Return the lines of the trace, without line ends."""
        waiting: list[tuple[int, int]] = []
        conversations = [self._conversation(number) for number in range(CONVERSATIONS)]
        for conversation in conversations:
            heapq.heappush(waiting, (self._between(0, ARRIVAL_SPAN_MS), conversation.number))
        lines: list[str] = []
        while waiting:
            now_ms, number = heapq.heappop(waiting)
            conversation = conversations[number]
            line, output_tokens = self._turn(conversation, now_ms)
            lines.append(line)
            if conversation.turns_left and conversation.tokens < PROMPT_TOKENS_MAX:
                # 20 ms a token to answer, then the person reads and types.
                pause_ms = 20 * output_tokens + self._between(3_000, 90_000)
                heapq.heappush(waiting, (now_ms + pause_ms, number))
        return lines

    def _between(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low))

    def _skewed(self, low: int, high: int) -> int:
        """Mostly small, sometimes large: as lengths of messages are."""
        share = self._random.random()
        return low + int(share * share * share * (high - low))

    def _conversation(self, number: int) -> Conversation:
        conversation = Conversation(number, turns_left=1 + self._skewed(0, TURNS_MAX))
        system = self._skewed(0, len(SYSTEM_PROMPT_TOKENS))
        conversation.segments.append((f"system-{system}", SYSTEM_PROMPT_TOKENS[system]))
        kind = self._random.random()
        if kind < SHARED_DOCUMENT_SHARE:
            document = self._skewed(0, len(DOCUMENT_TOKENS))
            conversation.segments.append((f"document-{document}", DOCUMENT_TOKENS[document]))
        elif kind < SHARED_DOCUMENT_SHARE + OWN_TEXT_SHARE:
            conversation.segments.append((f"text-{number}", self._between(2_000, 16_000)))
        return conversation

    def _turn(self, conversation: Conversation, now_ms: int) -> tuple[str, int]:
        question = (f"question-{conversation.number}-{conversation.turn}", self._skewed(20, 6_000))
        answer = (f"answer-{conversation.number}-{conversation.turn}", self._skewed(30, 1_500))
        conversation.segments.append(question)
        fields = {
            "timestamp": now_ms,
            "input_length": conversation.tokens,
            "output_length": answer[1],
            "hash_ids": self._ids.of_prompt(conversation.segments),
        }
        conversation.segments.append(answer)
        conversation.turn += 1
        conversation.turns_left -= 1
        return json.dumps(fields), answer[1]


def main(path: Path) -> None:
    """Write the packaged trace to `path`."""
    text = "".join(f"{line}\n" for line in TraceGenerator().lines())
    # No time stamp and no name in the header: the same text gives the same file.
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGED)
