"""Spreads the commands of calls over the I/O queues of the associations that are up; the rest waits, bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.blockdev import DeviceError, DeviceOffline, OutcomeUnknown
from xkv_nvmeof.host_command import NO_DEADLINE, Outcome
from xkv_nvmeof.host_settings import DeadlinePassed
from xkv_nvmeof.initiator_calls import Call
from xkv_nvmeof.initiator_errors import DeviceBusy
from xkv_nvmeof.initiator_one import OneCommand
from xkv_nvmeof.multipath import Access, Echoes, changes, choose, speaks_of_the_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from xkv_nvmeof.blockdev import DeviceCounters
    from xkv_nvmeof.host_command import Exchange
    from xkv_nvmeof.initiator_association import Association
    from xkv_nvmeof.initiator_link import QueueLink
    from xkv_nvmeof.initiator_options import InitiatorOptions

_NS_PER_MS = 1_000_000
_COMPLETED: Final = Outcome.COMPLETED
_MOVES_MAX = 8
"""So often a command goes from one path to another before its failure counts."""
SHARED_WRITE_BYTES: Final = 32 * 1024
"""Writes from this size on share the first link with room ..."""
SHARED_LOAD_BYTES: Final = 3 * 512 * 1024
"""... while no more than this is in flight there."""


ASKS_MAX: Final = 8
"""Each answer that gives no access makes the answers of before doubtful, so many times in a row."""


class Dispatcher:
    """Owns the calls that wait. While there is no association every call is refused at once.

    With several associations a command that one of them lost, or that its controller refused because of the path, goes again by
    another, if doing it twice does not matter; and nobody changes what it changes until the first copy certainly is over.
    """

    def __init__(self, options: InitiatorOptions, clock: Callable[[], int], counters: DeviceCounters) -> None:
        self._options = options
        self._clock = clock
        self._counters = counters
        self._timeout_ns = options.command_timeout_ms * _NS_PER_MS
        self.incarnation = 0
        """Grows when one that was used is not used any more: what it was told to write may be lost with its controller."""
        self._paths: dict[Association, Access] = {}
        self._chosen: tuple[Association, ...] = ()
        """Those that are used."""
        self._links: list[tuple[QueueLink, Association]] = []
        self._alternatives = False
        """Whether a command that one association loses can go by another."""
        self._asks_left = 0
        """How often the others are still asked before it is believed that nobody gives access."""
        self._asked: set[Association] = set()
        """Those that are about to tell what access there is: while there are some, calls wait."""
        self._echoes = Echoes()
        self._waiting: deque[Call] = deque()
        self._reason = "not connected yet"

    def attach(self, association: Association, access: Access = Access.OPTIMIZED) -> None:
        """Use `association` from now on, as far as `access` lets it; called again when that changes."""
        self._paths[association] = access
        self._asked.discard(association)
        association.expire_waiting = self.expire
        for link in association.links:
            link.on_room = self._pump
        self._choose()
        if association not in self._chosen:
            self._ask_the_others(association)
        self._settle(association, f"the controller gives no access to the namespace ({access.name})")
        self._pump()

    def ask(self, association: Association) -> None:
        """The access of `association` is being read anew; `attach` will tell."""
        if association in self._paths:
            self._asked.add(association)

    def detach(self, association: Association, reason: str) -> None:
        """Send nothing more by `association`, because of `reason`; without any other what waits fails at once."""
        self._paths.pop(association, None)
        self._asked.discard(association)
        self._reason = reason
        self._choose()
        self._ask_the_others(association)
        self._settle(association, reason)

    def _ask_the_others(self, association: Association) -> None:
        """Nobody can be used, as far as was told: the others may be by now, and the event that says so on its way."""
        if self._links or not self._asks_left:
            return
        self._asks_left -= 1
        for other in self._paths:
            if other is not association and other.reports_access and other.on_access is not None:
                other.on_access()

    def _settle(self, association: Association, reason: str) -> None:
        """When nothing can be sent any more, nor soon: what waits fails."""
        if self.usable:
            return
        self._reason = reason
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.association_ended(association, reason)

    def refuse(self, reason: str) -> None:
        """While nothing can be sent: this is why."""
        self._reason = reason

    @property
    def usable(self) -> bool:
        """Whether anything can be sent, or will be known soon."""
        return bool(self._links or self._asked)

    def _choose(self) -> None:
        before, self._chosen = self._chosen, tuple(choose(self._paths))
        chosen = self._chosen
        if chosen:
            self._asks_left = ASKS_MAX
        self.incarnation += any(association not in chosen for association in before)
        self._links = [(link, association) for association in chosen for link in association.links]
        self._alternatives = len(chosen) > 1
        for call in list(self._waiting):
            if call.only is not None and call.only not in chosen:
                self._waiting.remove(call)
                call.association_ended(call.only, self._reason)

    async def run_by_each(self, what: str, command: Callable[[], Exchange]) -> None:
        """Run a command that changes nothing by each association that is used. What one that ends meanwhile made of them is no matter.

        Raises:
            DeviceError: as the block device contract says.
        """
        chosen = self._chosen
        if len(chosen) > 1:
            results = await asyncio.gather(
                *(self.run(what, iter((command(),)), mutates=False, only=each) for each in chosen),
                return_exceptions=True,
            )
            failures = [
                (each, result)
                for each, result in zip(chosen, results, strict=True)
                if isinstance(result, BaseException)
            ]
            for each, failure in failures:
                if each in self._chosen:
                    self._counters.errors += 1
                    raise failure
            if len(failures) < len(chosen):
                return
        await self.run_one(what, command(), mutates=False)

    async def run(
        self, what: str, commands: Iterator[Exchange], *, mutates: bool, only: Association | None = None
    ) -> None:
        """Run the commands of one call; with `only`, by that association, or not at all.

        Raises:
            DeviceError: as the block device contract says.
        """
        if not self.usable or (only is not None and only not in self._chosen):
            self._counters.errors += only is None
            raise DeviceOffline(f"{what}: {self._reason}")
        if len(self._waiting) >= self._options.max_waiting_calls:
            self._counters.errors += 1
            raise DeviceBusy(f"{what}: {len(self._waiting)} calls wait already")
        now_ns = self._clock()
        deadline_ns = now_ns + self._timeout_ns
        if mutates and self._echoes.any(now_ns):
            commands = await self._after_echoes(what, commands, deadline_ns)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        call = Call(what, commands, deadline_ns, future, mutates=mutates, only=only)
        waiting = self._waiting
        waiting.append(call)
        if len(waiting) == 1:
            self._pump()
        try:
            await future
        except DeviceError:
            self._counters.errors += only is None
            raise
        except asyncio.CancelledError:
            await self._cancel(call)
            raise

    async def run_one(self, what: str, exchange: Exchange, *, mutates: bool) -> None:
        """As `run`, of a call of one command: the short way where nothing speaks against sending it at once."""
        now_ns = self._clock()
        if not (self._waiting or self._alternatives or (mutates and self._echoes.any(now_ns))):
            best = self._link_for(exchange.send_bytes)
            if best is not None:
                link, association = best
                exchange.deadline_ns = now_ns + self._timeout_ns
                one = OneCommand(
                    what, exchange, association, link.loop.create_future(), self._finished, mutates=mutates
                )
                link.submit(exchange)
                try:
                    await one.future
                except DeviceError:
                    self._counters.errors += 1
                    raise
                except asyncio.CancelledError:
                    call = one.pending
                    if call is not None:
                        await self._cancel(call)
                    raise
                return
        await self.run(what, iter((exchange,)), mutates=mutates)

    async def _after_echoes(
        self, what: str, commands: Iterator[Exchange], deadline_ns: int
    ) -> Iterator[Exchange]:
        """Return the commands once none of them changes what a command of old may still write.

        Raises:
            OutcomeUnknown: that is after the deadline: nothing was sent.
            DeviceOffline: there is no association any more.
        """
        listed = list(commands)
        blocks = [one for exchange in listed for one in changes(exchange) or ()]
        settles_at_ns = self._echoes.settled_at_ns(blocks)
        if settles_at_ns >= deadline_ns:
            self._counters.errors += 1
            reason = "a write that was lost with its path may still arrive there"
            raise OutcomeUnknown(f"{what}: {reason}", settles_at_ns=settles_at_ns)
        if settles_at_ns:
            await asyncio.sleep(max(0, settles_at_ns - self._clock()) / 1e9)
            if not self.usable:
                self._counters.errors += 1
                raise DeviceOffline(f"{what}: {self._reason}")
        return iter(listed)

    async def _cancel(self, call: Call) -> None:
        """Return when the buffers of `call` are not touched any more.

        Reads are abandoned at once. What may change the namespace gets a short time to conclude, since its buffers
        may be half-sent and its effect is better known than not; then its association ends.
        """
        call.give_up_buffers()
        call.future = asyncio.get_running_loop().create_future()
        # The caller is gone; nobody else is to be told, whenever it ends.
        call.future.add_done_callback(_take_note)
        call.stop(None)
        if call.mutates and not call.concluded:
            try:
                async with asyncio.timeout(self._options.cancel_grace_ms / 1000):
                    await call.future
            except (TimeoutError, asyncio.CancelledError):
                for association in set(call.in_flight.values()):
                    association.end(DeadlinePassed(f"{call.what}: cancelled and not concluded in time"))

    def _pump(self) -> None:
        """Send as many waiting commands as there is room for, a command of each call in turn."""
        waiting = self._waiting
        while waiting:
            best = self._link_for(waiting[0].next_send_bytes, waiting[0].only)
            if best is None:
                return
            call = waiting.popleft()
            if not call.waiting:
                continue
            link, association = best
            exchange = call.take(association)
            if call.waiting:
                waiting.append(call)
            exchange.on_finish = partial(self._finished, call, association)
            if self._alternatives:
                # A path that swallows it must be found out in time for another one.
                now_ns = self._clock()
                exchange.deadline_ns = now_ns + max(1, (call.deadline_ns - now_ns) // 2)
            link.submit(exchange)

    def _link_for(
        self, send_bytes: int, only: Association | None = None
    ) -> tuple[QueueLink, Association] | None:
        """Return the link with room where the least is queued; but larger writes share one, up to a bound.

        By bytes, so that what is small does not queue behind what is large. The data of writes that share a link
        leaves in fewer system calls, which are most of what a write costs.
        """
        best = None
        least_bytes = 0
        for pair in self._links:
            if only is not None and pair[1] is not only:
                continue
            core = pair[0].core
            load_bytes = core.load_bytes
            if (best is None or load_bytes < least_bytes) and core.room:
                best, least_bytes = pair, load_bytes
                if send_bytes >= SHARED_WRITE_BYTES and load_bytes + send_bytes <= SHARED_LOAD_BYTES:
                    break
        return best

    def _finished(self, call: Call, association: Association, exchange: Exchange) -> None:
        if exchange.outcome is _COMPLETED and not exchange.status:
            if call.finished(exchange) and call not in self._waiting:
                self._waiting.append(call)
            return
        if exchange.outcome is _COMPLETED and speaks_of_the_path(exchange.status):
            self._doubt(association)
        if self._goes_again(call, exchange):
            if exchange.outcome is Outcome.LOST:
                self._echoes.add(changes(exchange) or (), association.settles_at_ns)
            call.again(exchange)
            waits = True
        else:
            waits = call.finished(exchange)
        if waits and call not in self._waiting:
            self._waiting.append(call)

    def _doubt(self, association: Association) -> None:
        """A controller speaks of the path: use another until it has told what access there is."""
        if self._paths.get(association) not in (Access.OPTIMIZED, Access.NON_OPTIMIZED):
            return
        if self._alternatives or association.reports_access:
            self._paths[association] = Access.CHANGE
            self._asked.add(association)
            self._choose()
        if association.on_access is not None:
            association.on_access()

    def _goes_again(self, call: Call, exchange: Exchange) -> bool:
        """Tell whether a command that is over goes by another association."""
        if not self.usable or call.stopped or call.only is not None or exchange.moves >= _MOVES_MAX:
            return False
        if self._clock() >= call.deadline_ns:
            return False
        match exchange.outcome:
            case Outcome.NEVER_SENT:
                return True
            case Outcome.LOST:
                return changes(exchange) is not None
            case Outcome.COMPLETED:
                return speaks_of_the_path(exchange.status)
            case _:
                return False

    def expire(self, now_ns: int) -> int:
        """Give up waiting calls whose deadline has passed; return the next deadline among them."""
        for call in [call for call in self._waiting if call.deadline_ns <= now_ns]:
            self._waiting.remove(call)
            call.stop(DeviceBusy(f"{call.what}: no room in the queues before the deadline"))
        return min((call.deadline_ns for call in self._waiting), default=NO_DEADLINE)


def _take_note(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
