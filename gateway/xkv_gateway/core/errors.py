"""What the engine raises, and who is at fault.

class               at fault   code            when
UnknownLease        client     unknown_lease   a lease that ended, never was, or can no longer be kept
UnknownTicket       client     unknown_ticket  a ticket that ended, or never was
StalePlan           shell      stale_plan      a plan that was already ended, or never was
IllegalTransition   engine     internal        a pair of state and event that the table does not know
BrokenInvariant     engine     internal        an audit found totals that do not follow from the entries
"""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    """Base of all errors of the engine; `code` is the machine-readable name."""

    code: ClassVar[str] = "internal"


class UnknownLease(EngineError):  # noqa: N818 - named after the code that the client sees
    """The lease ended, never was, or covers an object that is doomed. The client's to handle."""

    code: ClassVar[str] = "unknown_lease"


class UnknownTicket(EngineError):  # noqa: N818 - as above
    """The ticket ended or never was. The client's to handle."""

    code: ClassVar[str] = "unknown_ticket"


class StalePlan(EngineError):  # noqa: N818 - a fact about the plan, not a failure of the engine
    """A plan was ended twice. The shell's fault; nothing was changed."""

    code: ClassVar[str] = "stale_plan"


class IllegalTransition(EngineError):  # noqa: N818 - as above
    """A state met an event that the table does not list. A bug in the engine."""


class BrokenInvariant(EngineError):  # noqa: N818 - as above
    """An audit found totals that do not follow from the entries. A bug in the engine."""
