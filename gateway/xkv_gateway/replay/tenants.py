"""How a trace is split over tenants: by the second block of a prompt.

Traces begin every prompt with the same few blocks, and go on differently from the second one on. So prompts that share more
than their beginning (the turns of a conversation) are one tenant's, and nothing is lost by the split but the beginning, which each tenant
stores for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_rpc import scope_of

if TYPE_CHECKING:
    from collections.abc import Sequence

TENANTS_MAX: Final = 10_000


def tenant_of(hash_ids: Sequence[int], tenants: int) -> int:
    """Return the number of a prompt's tenant, from 0: its second block (its only one where it has no second) modulo `tenants`."""
    return hash_ids[min(1, len(hash_ids) - 1)] % tenants if hash_ids else 0


def tenant_scopes(tenants: int) -> list[bytes]:
    """Return the scopes of `tenants` tenants: those of the salts `replay-0`, `replay-1`, ..."""
    return [scope_of(f"replay-{number}") for number in range(tenants)]
