"""What the gateway does beside serving: signs of life for systemd, and reloads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import TYPE_CHECKING, Final

from xkv_gateway.errors import ConfigError
from xkv_gateway.logs import AUDIT, set_level
from xkv_gateway.sizes import format_size
from xkv_process.signals import listening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from xkv_gateway.config import Config
    from xkv_gateway.daemon.notify import Notifier
    from xkv_gateway.daemon.ports import Ports
    from xkv_gateway.service.status import Status

log = logging.getLogger(__name__)

STATUS_PERIOD_S: Final = 1.0
POLICIES: Final = ("eviction", "admission")
"""Tables of settings whose changes hold from a reload on."""
WATCHDOG_SHARE: Final = 3
"""Signs of life in the time in which one is expected: two may be late."""


async def keep_told(notifier: Notifier, status: Callable[[], Status]) -> None:
    """Feed the watchdog from this loop, and keep STATUS= current, until cancelled."""
    period_s = STATUS_PERIOD_S
    if notifier.watchdog_s:
        period_s = min(period_s, notifier.watchdog_s / WATCHDOG_SHARE)
    while True:
        notifier.alive()
        notifier.status(sentence(status()))
        await asyncio.sleep(period_s)


def sentence(status: Status) -> str:
    """Return the state in a line, for `systemctl status`."""
    card, usage = status.card, status.usage
    reason = f" ({card.reason})" if card.reason and card.state != "online" else ""
    return (
        f"{status.state}, card {card.state}{reason}, {usage.objects} objects, "
        f"{format_size(usage.capacity_bytes - usage.free_bytes)} of {format_size(usage.capacity_bytes)} in use"
    )


class Reloader:
    """Reads keys, tokens, [eviction], [admission] and the log level again, on SIGHUP; everything else waits for a restart.

    Args:
        config: the settings in effect.
        load: reads the settings again; None: they came from nowhere that can be read again.
        notifier: who is told.
    """

    def __init__(self, config: Config, load: Callable[[], Config] | None, notifier: Notifier) -> None:
        self._config = config
        self._load = load
        self._notifier = notifier
        self._ports: Ports | None = None
        self._adopt: Callable[[Config], None] | None = None
        self._serving = False
        self._stopping = False

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Listen to SIGHUP inside the block."""
        with listening(asyncio.get_running_loop(), {signal.SIGHUP: self.reload}):
            yield

    def opened(self, ports: Ports) -> None:
        """From now on there are keys and tokens."""
        self._ports = ports

    def joined(self, adopt: Callable[[Config], None]) -> None:
        """From now on there is something that [eviction] and [admission] are for; `adopt` lets those of a config hold."""
        self._adopt = adopt

    def ready(self) -> None:
        """From now on a reload ends by being ready."""
        self._serving = True
        self._notifier.ready()

    def stopping(self) -> None:
        """The end begins: nothing is read again, and nobody hears once more that all is ready."""
        self._stopping = True
        self._notifier.stopping()

    def reload(self) -> None:
        """Read again. What cannot be read stays as it was, and the log says so."""
        if self._stopping:
            return
        self._notifier.reloading()
        try:
            config = None if self._load is None else self._load()
            if self._ports is not None:
                self._ports.tokens.read()
            if config is not None:
                self._take(config)
            AUDIT.info("reloaded", extra={"event": "reload"})
        except ConfigError as error:
            log.error("not reloaded, everything stays as it was: %s", error)  # noqa: TRY400 - no trace: it is the operator's
        if self._ports is not None and self._ports.keys is not None:
            self._ports.keys.look()
        if self._serving:
            self._notifier.ready()

    def _take(self, config: Config) -> None:
        set_level(config.log.level)
        policies = {name: getattr(config, name) for name in POLICIES}
        if self._adopt is not None and any(
            getattr(self._config, name) != new for name, new in policies.items()
        ):
            self._adopt(config)
            self._config = self._config.model_copy(update=policies)
            AUDIT.info("the rules of eviction and admission have changed", extra={"event": "rules"})
        applied = self._config.model_copy(
            update={"log": config.log, "state_dir": config.state_dir or self._config.state_dir}
        )
        if applied.log.format != self._config.log.format or applied != config.model_copy(
            update={"state_dir": applied.state_dir}
        ):
            log.warning("other settings have changed too: they count after a restart")
