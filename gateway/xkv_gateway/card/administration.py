"""What an operator may see and change on a running card: the contract between the engine's side and the admin port.

`operator.Operator` implements it. All methods are called from the loop; what is not a coroutine is cheap and never blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from xkv_gateway.core.counters import Counters
    from xkv_gateway.core.tenancy import (
        EvictionRules,
        NamespaceInfo,
        Page,
        ScopeInfo,
        TenantCounters,
        TenantInfo,
    )
    from xkv_gateway.core.types import Usage


class AdministrationError(Exception):
    """A change that was refused; nothing was changed. The operator's to handle; `code` is the machine-readable name."""

    code: ClassVar[str] = "refused"


class NameTaken(AdministrationError):  # noqa: N818 - a fact, not a failure
    """Another tenant has that name. HTTP 409."""

    code: ClassVar[str] = "name_taken"


class BadTenant(AdministrationError):  # noqa: N818
    """A name, a scope or a limit that no tenant can have: `field` says which. HTTP 422."""

    code: ClassVar[str] = "bad_tenant"

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class TooManyTenants(AdministrationError):  # noqa: N818
    """The ledger of this card holds no more tenants and wipes. HTTP 507."""

    code: ClassVar[str] = "too_many_tenants"


class WipeStage(Enum):
    """How far a wipe is."""

    BEGUN = "begun"
    """Invisible; not certain yet to survive a crash."""
    DURABLE = "durable"
    """... and certain. Extents are deallocated as leases and I/O end."""
    DONE = "done"
    """Everything deallocated and read back; also on the card."""
    FAILED = "failed"
    """The card went away for good before the end; the next start goes on with it."""


class Verification(Enum):
    """How it was verified that the bytes are gone."""

    DEALLOCATED = "deallocated, read back as zeroes"
    """The device promises zeroes after deallocation, and gave them."""
    ZEROED = "zeroes written, read back, deallocated where possible"
    NOTHING = "nothing to verify"


@dataclass(frozen=True, slots=True)
class WipeProgress:
    """One wipe at one moment; `ns wipe` shows it while it runs, and its last value is the report."""

    ident: int
    """LSN of its record: names the wipe on this card for ever."""
    namespace: str
    scope: bytes | None
    """None: all scopes."""
    stage: WipeStage
    objects: int
    """Objects that became invisible."""
    payload_bytes: int
    erased_bytes: int
    """Whole units that were deallocated or zeroed, and read back as zeroes."""
    left_bytes: int
    """Whole units that are still to be erased."""
    waiting_bytes: int
    """... of which so many wait for the end of a lease or of an I/O."""
    verification: Verification
    resumed: bool
    """Begun by an earlier run: objects and payload bytes count only what this run found left."""
    began_ns: int
    """Monotonic."""
    ended_ns: int | None


class Wipe(Protocol):
    """A wipe under way."""

    @property
    def progress(self) -> WipeProgress:
        """A snapshot, at any time, also after the end."""
        ...

    async def durable(self) -> None:
        """Return once the wipe is certain to survive a crash. Raises CardOffline if the run ends before."""
        ...

    async def run(self) -> WipeProgress:
        """Return the report when it is done (or FAILED). May be awaited by anybody, any number of times; leaving is harmless."""
        ...


class Administration(Protocol):
    """The running card, for its operator.

    Every change raises CardOffline or CardRecovering (`card.store`) while the card cannot be written to (HTTP 503), and JournalFull
    while the journal must be relieved first (HTTP 503, retry). A change returns when it is durable: in the journal and in the ledger.
    """

    @property
    def rules(self) -> EvictionRules:
        """The configured rules."""
        ...

    @property
    def tenants_known(self) -> bool:
        """Whether the quotas are certainly complete. If not, no scope without a quota loses anything for having none."""
        ...

    @property
    def au_bytes(self) -> int:
        """Bytes of an allocation unit: all charges are multiples of it."""
        ...

    def usage(self) -> Usage:
        """Where the units are."""
        ...

    def counters(self) -> Counters:
        """The engine's counters: evictions by cause, over_quota, ..."""
        ...

    def counters_of_former(self) -> TenantCounters:
        """What was counted for tenants under names that are gone; it is in `counters`, too."""
        ...

    # --- tenants --------------------------------------------------------------------------------------------

    def tenant(self, scope: bytes) -> TenantInfo:
        """One tenant by scope, also if it is neither registered nor holds anything."""
        ...

    def tenant_named(self, name: str) -> TenantInfo | None:
        """One tenant by the operator's name."""
        ...

    def tenants(self, cursor: int = 0, count: int = 1000) -> Page[TenantInfo]:
        """Registered tenants (a limit, a name or both) in the order of their registration; at most 1000 a page."""
        ...

    def usage_of_unnamed(self) -> tuple[int, int]:
        """Objects and charged bytes of all scopes without a name together: the `other` of the metrics."""
        ...

    async def set_limit(self, scope: bytes, limit_bytes: int) -> TenantInfo:
        """Set the quota of a scope (0: it may store nothing). Its name stays as it is.

        Raises:
            BadTenant, TooManyTenants.
        """
        ...

    async def clear_limit(self, scope: bytes) -> bool:
        """Take the quota away; from the next cycle on the scope counts as unregistered. Its name stays.

        Returns:
            Whether it had one.
        """
        ...

    async def set_tenant(self, name: str, scope: bytes, limit_bytes: int | None) -> TenantInfo:
        """Name a scope and set its quota (None: named, without one). A name that it had before is given up.

        Raises:
            BadTenant, NameTaken, TooManyTenants.
        """
        ...

    async def remove_tenant(self, name: str) -> bool:
        """Take name and quota away. What it holds stays, under the rule for unregistered scopes from the next cycle on.

        Returns:
            Whether there was one.
        """
        ...

    async def confirm_tenants(self) -> None:
        """The operator says that the quotas are complete, after damage took some away."""
        ...

    # --- namespaces -----------------------------------------------------------------------------------------

    def namespaces(self, cursor: int = 0, count: int = 1000) -> Page[NamespaceInfo]:
        """Namespaces that hold something or have a rule; at most 1000 a page."""
        ...

    def namespace(self, name: str) -> NamespaceInfo | None:
        """One namespace; None: nothing is held there, and it has no rule."""
        ...

    def scopes_of(self, namespace: str, cursor: int = 0, count: int = 1000) -> Page[ScopeInfo]:
        """Scopes within a namespace; at most 1000 a page."""
        ...

    async def set_ttl(self, namespace: str, idle_s: int | None, total_s: int | None) -> NamespaceInfo:
        """Let objects of a namespace live so long since their last use, and since they were stored (0: for ever; None: as before).

        Raises:
            BadTenant, TooManyTenants.
        """
        ...

    # --- wipes ----------------------------------------------------------------------------------------------

    def wipe(self, namespace: str, scope: bytes | None) -> Wipe:
        """Begin to wipe a namespace, or one scope in it: invisible when this returns, whatever is read or written meanwhile.

        Raises:
            TooManyTenants: too many wipes are under way.
        """
        ...

    def wipes(self) -> list[WipeProgress]:
        """Wipes that are under way, and the last few that have ended."""
        ...
