"""All endpoints of a server: those without keys are served by the `listener`, those with keys by libzmq's ROUTER."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_rpc.listener import PEER_PREFIX, Listener, serves
from xkv_rpc.transport import FRAME_SLACK_BYTES, Router
from xkv_rpc.zmtp_peer import PeerBounds, Room

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_rpc.calls import Buffer, Tracking
    from xkv_rpc.doors import Door, Knock, Visit
    from xkv_rpc.messages import Limits, PeerId
    from xkv_rpc.transport import Received, SendOutcome


class Endpoints:
    """Binds, sends, and closes; `judge` is asked about each handshake, None: whoever reaches an endpoint is served."""

    def __init__(
        self,
        limits: Limits,
        partial_bytes_max: int,
        on_message: Callable[[Received], None],
        judge: Callable[[Knock], Visit] | None,
    ) -> None:
        self._payload_bytes_max = max(limits.object_bytes, limits.inline_bytes)
        self._payloads_max = limits.keys
        self._judge = judge
        most_bytes = self._payload_bytes_max + FRAME_SLACK_BYTES
        bounds = PeerBounds(most_bytes, most_bytes, limits.keys)
        self._listener = Listener(bounds, Room(partial_bytes_max), on_message, judge)
        self.router: Router | None = None
        """The socket for endpoints with keys, where there is one; to be drained by hand."""

    def bind(self, doors: Sequence[Door]) -> list[str]:
        """Bind all, and accept; returns them with the ports that were really bound.

        Raises:
            EndpointError: One cannot be bound; close what was.
        """
        if not all(map(serves, doors)):
            assert self._judge is not None, "keys that nobody checks"
            self.router = Router(
                payload_bytes_max=self._payload_bytes_max, payloads_max=self._payloads_max, guarded=True
            )
            assert self.router.porter is not None
            # Who judges is at the door before there is one.
            self.router.porter.start(self._judge)
        bound = []
        for door in doors:
            if serves(door):
                bound.append(self._listener.bind(door))
            else:
                assert self.router is not None
                bound.append(self.router.bind(door))
        self._listener.start()
        return bound

    def send(
        self, peer: PeerId, header: bytes, payloads: Sequence[Buffer]
    ) -> tuple[SendOutcome, Tracking | None]:
        """Send one message to a peer, or say why not. Payloads must not change until the tracker is done."""
        if peer.startswith(PEER_PREFIX):
            return self._listener.send(peer, header, payloads)
        assert self.router is not None
        return self.router.send(peer, header, payloads)

    async def stop(self) -> None:
        """Neither accept nor read any more without keys; return once all that has come there was handed on."""
        await self._listener.stop()

    async def aclose(self, linger_ms: int) -> None:
        """Close; what was sent may still leave until then, and with keys until `terminate`, for at most `linger_ms`."""
        if self.router is not None:
            self.router.close(linger_ms)
        await self._listener.aclose(linger_ms)

    def terminate(self) -> None:
        """End what needs a thread to wait for it. Blocks for at most the linger time."""
        if self.router is not None:
            self.router.terminate()
