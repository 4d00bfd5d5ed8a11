"""How much one tenant may have under way: requests, and tokens of prompts that wait for their first answer."""

from collections import Counter

from serve_app.protocol.errors import TenantLimit
from serve_app.settings import LimitSettings


class Tenants:
    """Counts what each tenant has under way at one router. For one event loop; a tenant with nothing costs nothing."""

    def __init__(self, limits: LimitSettings) -> None:
        self._max_requests = limits.max_tenant_requests
        self._max_queued_tokens = limits.max_tenant_queued_tokens
        self._requests: Counter[str] = Counter()
        self._queued_tokens: Counter[str] = Counter()

    def enter(self, tenant: str, *, num_tokens: int) -> "TenantPlace":
        """Gives a place for one request with so many tokens of prompts; raises TenantLimit where there is none."""
        requests, queued = self._requests[tenant], self._queued_tokens[tenant]
        if self._max_requests is not None and requests >= self._max_requests:
            raise TenantLimit(
                f"this tenant has {requests} requests under way, which is its limit; retry later", requests
            )
        if self._max_queued_tokens is not None and queued and queued + num_tokens > self._max_queued_tokens:
            raise TenantLimit(
                f"this tenant has {queued} prompt tokens waiting and sends {num_tokens}; together they may be"
                f" {self._max_queued_tokens}, retry later",
                requests,
            )
        self._requests[tenant] += 1
        self._queued_tokens[tenant] += num_tokens
        return TenantPlace(self._requests, self._queued_tokens, tenant, num_tokens)


class TenantPlace:
    """One request of a tenant; `begin` and `leave` may be called more than once."""

    def __init__(self, requests: Counter[str], queued_tokens: Counter[str], tenant: str, num_tokens: int) -> None:
        self._requests = requests
        self._queued_tokens = queued_tokens
        self._tenant = tenant
        self._num_tokens = num_tokens
        self._has_left = False

    def begin(self) -> None:
        """Its prompts wait no more."""
        _take(self._queued_tokens, self._tenant, self._num_tokens)
        self._num_tokens = 0

    def leave(self) -> None:
        """It is over."""
        self.begin()
        if not self._has_left:
            self._has_left = True
            _take(self._requests, self._tenant, 1)


def _take(counts: Counter[str], tenant: str, number: int) -> None:
    counts[tenant] -= number
    if counts[tenant] <= 0:
        del counts[tenant]
