"""Asking the gateway what it holds, without ever holding up the engine's scheduler.

Lookups run in a few threads. The scheduler waits a moment for an answer, a bounded time for all requests of one step together,
and asks again in the next step. A gateway that does not answer costs one request its time limit; then the circuit is open and
everybody else goes on at once, until a probe is due.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from xkv_rpc.errors import BadReplyError, CircuitOpenError, GatewayUnavailableError, RpcError, XkvRpcError
from xkv_rpc.messages import LookupMode
from xkv_rpc.session import Breaker, BreakerState
from xkv_vllm_connector.groups import Kind
from xkv_vllm_connector.keys import key_of, stem_of
from xkv_vllm_connector.matching import longest_hit, prefix_hit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_rpc.errors import ErrorCode
    from xkv_rpc.messages import LookupReply
    from xkv_vllm_connector.ahead import Question
    from xkv_vllm_connector.groups import Geometry

_NS_PER_MS: Final = 1_000_000
KEYS_MAX: Final = 4096
"""Keys of one request to the gateway."""
THREADS: Final = 2
QUEUE_MAX: Final = 64
"""Questions under way, once a step has waited as long as it may; further ones are asked in later steps."""
BACKOFF_MIN_NS: Final = 100 * _NS_PER_MS
BACKOFF_MAX_NS: Final = 5000 * _NS_PER_MS


class LookupClient(Protocol):
    """What is used of the blocking client."""

    def lookup(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_ms: int = 0,
        timeout_ms: int | None = None,
    ) -> LookupReply:
        """Ask which keys are held."""

    def release(self, lease: bytes, *, timeout_ms: int | None = None) -> None:
        """End a lease."""

    def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to one lookup.

    Attributes:
        chunks: Chunks from the start of the sequence that the hit ends with.
        leases: For each, the chunk after the last that it covers; in order.
        answered: Whether the gateway answered.
    """

    chunks: int
    leases: list[tuple[int, bytes]]
    answered: bool


class Lookups:
    """Questions to the gateway, asked in threads of their own."""

    def __init__(
        self,
        client: LookupClient,
        geometry: Geometry,
        fingerprint: bytes,
        namespace: str,
        *,
        lease_ms: int,
        timeout_ms: int,
        step_wait_ms: int,
        clock: Callable[[], int],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._geometry = geometry
        self._namespace = namespace
        self._lease_ms = lease_ms
        self._timeout_ms = timeout_ms
        self._step_wait_ns = step_wait_ms * _NS_PER_MS
        self._wait_left_ns = self._step_wait_ns
        self._clock = clock
        self._say = say
        self._stems: list[bytes] = []
        self._first_stem: bytes | None = None
        self.renew(fingerprint)
        # Answers that nobody waits for any more come in their own thread.
        self._breaker_lock = threading.Lock()
        self._breaker = Breaker(backoff_min_ns=BACKOFF_MIN_NS, backoff_max_ns=BACKOFF_MAX_NS)
        self._why = ""
        """Why the last question had no answer."""
        self._refusals: set[ErrorCode] = set()
        self._under_way: list[Future[Found]] = []
        self._crowded = False
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="xkv-lookup")

    def renew(self, fingerprint: bytes) -> None:
        """Ask for keys with this fingerprint from now on."""
        geometry = self._geometry
        self._stems = [
            stem_of(fingerprint, group.group_id, rank) for group in geometry.groups for rank in geometry.ranks
        ]
        full = next((group for group in geometry.groups if group.kind is Kind.FULL), None)
        self._first_stem = None if full is None else stem_of(fingerprint, full.group_id, geometry.ranks[0])

    @property
    def glances(self) -> bool:
        """Whether there is one object that every hit needs: without it, `glance` is of no use."""
        return self._first_stem is not None

    @property
    def available(self) -> bool:
        """Whether the gateway answered when it was last asked."""
        return self._breaker.state is BreakerState.CLOSED

    @property
    def crowded(self) -> bool:
        """Whether the gateway is slow and has enough to answer: do not ask more in this step."""
        if not self._crowded and self._wait_left_ns <= 0 and len(self._under_way) >= QUEUE_MAX:
            self._under_way = [asked for asked in self._under_way if not asked.done()]
            self._crowded = len(self._under_way) >= QUEUE_MAX
        return self._crowded

    def begin(
        self, scope: bytes, hashes: Sequence[bytes], computed_chunks: int, end: int
    ) -> Future[Found] | None:
        """Ask for the chunks from `computed_chunks` to `end`; None: the gateway is away, do without."""
        with self._breaker_lock:
            try:
                self._breaker.admit(self._clock())
            except CircuitOpenError:
                return None
        # Called while the engine's own list cannot change; the threads must not read it later.
        per_chunk = self._geometry.hashes_per_chunk
        mine = [hashes[(chunk + 1) * per_chunk - 1] for chunk in range(computed_chunks, end)]
        asked = self._threads.submit(self._ask, self._stems, scope, mine, computed_chunks)
        if len(self._under_way) >= QUEUE_MAX:
            self._under_way = [one for one in self._under_way if not one.done()]
        self._under_way.append(asked)
        return asked

    def wait(self, asked: Future[Found]) -> Found | None:
        """Get the answer; None: not yet, ask again in the next step."""
        if not self.done(asked):
            return None
        found = asked.result()
        self.heard(answered=found.answered)
        return found

    def done(self, asked: Future[Any]) -> bool:
        """Wait for an answer as long as this step may still wait; whether it is there."""
        if asked.done():
            return True
        if self._wait_left_ns <= 0:
            return False
        began_ns = self._clock()
        with contextlib.suppress(NotYetError):
            asked.exception(self._wait_left_ns / 1e9)
        self._wait_left_ns -= self._clock() - began_ns
        return asked.done()

    @property
    def patient(self) -> bool:
        """Whether this step may still wait for answers."""
        return self._wait_left_ns > 0

    def glance(self, questions: Sequence[Question]) -> Future[list[bool] | None]:
        """Ask of many prompts at once whether the card has a certain chunk of each."""
        return self._threads.submit(self._glance, self._first_stem, questions)

    def glanced(self, asked: Future[list[bool] | None]) -> list[bool] | None:
        """Take the answer, which is there: whether the chunk is held, one each; None: the gateway said nothing."""
        held = asked.result()
        if held is None:
            self.heard(answered=False)
        return held

    def heard(self, *, answered: bool) -> None:
        """Note that the gateway answered, or did not."""
        if answered and self.available:
            return
        with self._breaker_lock:
            before = self._breaker.state
            if not answered:
                self._breaker.failed(self._clock())
            elif before is not BreakerState.CLOSED:
                self._breaker.succeeded()
        if not answered and before is BreakerState.CLOSED:
            why = f" ({self._why})" if self._why else ""
            self._say(
                f"the gateway does not answer{why}: requests are computed without the card until it does"
            )
        elif answered and before is not BreakerState.CLOSED:
            self._say("the gateway answers again")

    def step_ends(self) -> None:
        """The next step has its own time for waiting."""
        self._wait_left_ns = self._step_wait_ns
        self._crowded = False

    def forget(self, asked: Future[Found]) -> None:
        """Nobody waits for this answer any more; what it leases is let go."""
        if not asked.cancel():
            asked.add_done_callback(self._drop)
        elif self._breaker.state is BreakerState.PROBING:
            self.heard(answered=False)

    def _drop(self, asked: Future[Found]) -> None:
        found = asked.result()
        self.heard(answered=found.answered)
        for _, lease in found.leases:
            self._release(lease)

    def release(self, leases: Sequence[tuple[int, bytes]]) -> None:
        """Let go of leases, some time soon."""
        if leases and self.available:
            for _, lease in leases:
                with contextlib.suppress(RuntimeError):  # shut down: they end by themselves
                    self._threads.submit(self._release, lease)

    def close(self) -> None:
        """Ask nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _release(self, lease: bytes) -> None:
        with contextlib.suppress(XkvRpcError):
            self._client.release(lease, timeout_ms=self._timeout_ms)

    def _glance(self, stem: bytes | None, questions: Sequence[Question]) -> list[bool] | None:
        """Ask a message a tenant. Runs in a thread."""
        assert stem is not None
        keys = [key_of(stem, question.chunk, question.block_hash) for question in questions]
        wanted: dict[bytes, dict[bytes, bool]] = {}
        for question, key in zip(questions, keys, strict=True):
            wanted.setdefault(question.scope, {})[key] = False
        try:
            for scope, mine in wanted.items():
                reply = self._client.lookup(
                    self._namespace, scope, list(mine), mode=LookupMode.EACH, timeout_ms=self._timeout_ms
                )
                mine.update((key, size is not None) for key, size in zip(mine, reply.sizes, strict=True))
        except XkvRpcError as error:
            # Refused: for now there is nothing to be had.
            return [False] * len(questions) if self._is_answer(error) else None
        return [wanted[question.scope][key] for question, key in zip(questions, keys, strict=True)]

    def _is_answer(self, error: XkvRpcError) -> bool:
        """Whether the gateway refused, as opposed to being away; each kind of refusal is said once. Runs in a thread."""
        if isinstance(error, GatewayUnavailableError | BadReplyError):
            self._why = str(error)
            return False
        if isinstance(error, RpcError) and error.code not in self._refusals:
            self._refusals.add(error.code)
            self._say(f"the gateway refuses to be asked, {error}; this is not said again")
        return True

    def _ask(self, stems: list[bytes], scope: bytes, hashes: list[bytes], first: int) -> Found:
        """Ask batch by batch, until one is not held whole. Runs in a thread."""
        batch = max(1, KEYS_MAX // self._geometry.parts_per_chunk)
        prefix = self._geometry.prefix_only
        held: list[bool] = []
        leases: list[tuple[int, bytes]] = []
        end = first
        try:
            for at in range(0, len(hashes), batch):
                chunk = first + at
                keys = [
                    key_of(stem, chunk + ahead, block_hash)
                    for ahead, block_hash in enumerate(hashes[at : at + batch])
                    for stem in stems
                ]
                reply = self._client.lookup(
                    self._namespace,
                    scope,
                    keys,
                    mode=LookupMode.PREFIX if prefix else LookupMode.EACH,
                    lease_ms=self._lease_ms,
                    timeout_ms=self._timeout_ms,
                )
                if reply.lease is not None:
                    leases.append((chunk + min(batch, len(hashes) - at), reply.lease))
                if prefix:
                    end = chunk + prefix_hit(self._geometry, reply.hits)
                    if reply.hits < len(keys):
                        break
                else:
                    held += [size is not None for size in reply.sizes]
        except XkvRpcError as error:
            for _, lease in leases:
                self._release(lease)
            return Found(0, [], answered=self._is_answer(error))
        if not prefix:
            end = longest_hit(self._geometry, held, first, first + len(hashes))
        if end <= first:
            for _, lease in leases:
                self._release(lease)
            return Found(0, [], answered=True)
        return Found(end, leases, answered=True)
