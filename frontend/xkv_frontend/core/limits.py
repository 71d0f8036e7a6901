"""Limits of a tenant: requests a second (a bucket of tokens) and requests in flight. Time is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_frontend.core.refusal import Code, Refusal, retry_after

if TYPE_CHECKING:
    from xkv_frontend.core.names import TenantName
    from xkv_frontend.core.policy import TenantPolicy

SECOND_NS: Final = 1_000_000_000
TENANTS_MAX: Final = 100_000
"""Buckets kept; beyond, full buckets of tenants without requests in flight are forgotten (they would be full again)."""
CONCURRENCY_RETRY_S: Final = 1.0
BODY_BYTES_IN_FLIGHT_MAX: Final = 1 << 30
"""Bytes of bodies that are being received, of all tenants together; a body counts as announced, else as it comes."""


class _Account:
    __slots__ = ("filled_ns", "in_flight", "tokens")

    def __init__(self, tokens: float, now_ns: int) -> None:
        self.tokens = tokens
        self.filled_ns = now_ns
        self.in_flight = 0


class Limiter:
    """The accounts of all tenants, and the limit of all together."""

    def __init__(self, in_flight_max: int) -> None:
        self._accounts: dict[TenantName, _Account] = {}
        self._in_flight_max = in_flight_max
        self.in_flight = 0
        """Requests of all tenants."""

    def take(self, tenant: TenantName, rules: TenantPolicy, now_ns: int) -> None:
        """Admit one request of `tenant`; every success is followed by one `give_back`.

        Raises:
            Refusal: `busy`, `too_many_requests` or `rate_limited`; nothing was taken.
        """
        if self.in_flight >= self._in_flight_max:
            raise Refusal(
                Code.BUSY, "too many requests are running", headers=retry_after(CONCURRENCY_RETRY_S)
            )
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= TENANTS_MAX:
                self._forget()
            account = self._accounts[tenant] = _Account(float(rules.burst), now_ns)
        if account.in_flight >= rules.concurrency:
            message = "too many requests of this tenant are running"
            raise Refusal(Code.TOO_MANY_REQUESTS, message, headers=retry_after(CONCURRENCY_RETRY_S))
        if rules.requests_per_s is not None:
            elapsed_s = (now_ns - account.filled_ns) / SECOND_NS
            account.tokens = min(float(rules.burst), account.tokens + elapsed_s * rules.requests_per_s)
            account.filled_ns = now_ns
            if account.tokens < 1:
                wait_s = (1 - account.tokens) / rules.requests_per_s
                raise Refusal(Code.RATE_LIMITED, "too many requests a second", headers=retry_after(wait_s))
            account.tokens -= 1
        account.in_flight += 1
        self.in_flight += 1

    def give_back(self, tenant: TenantName) -> None:
        """A request that was admitted has ended."""
        account = self._accounts[tenant]
        assert account.in_flight > 0
        account.in_flight -= 1
        self.in_flight -= 1

    def in_flight_of(self, tenant: TenantName) -> int:
        """Return the requests of a tenant that run."""
        account = self._accounts.get(tenant)
        return account.in_flight if account else 0

    def _forget(self) -> None:
        for name in [name for name, account in self._accounts.items() if account.in_flight == 0]:
            del self._accounts[name]


class BodyBudget:
    """Memory for bodies on their way in."""

    def __init__(self, bytes_max: int = BODY_BYTES_IN_FLIGHT_MAX) -> None:
        self._bytes_max = bytes_max
        self.taken_bytes = 0

    def take(self, count: int) -> None:
        """Take room for `count` bytes more.

        Raises:
            Refusal: `busy`; nothing was taken.
        """
        if self.taken_bytes + count > self._bytes_max:
            raise Refusal(
                Code.BUSY, "too many large requests at once", headers=retry_after(CONCURRENCY_RETRY_S)
            )
        self.taken_bytes += count

    def give_back(self, count: int) -> None:
        """Give back what was taken."""
        assert 0 <= count <= self.taken_bytes
        self.taken_bytes -= count
