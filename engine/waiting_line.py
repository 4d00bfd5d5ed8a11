"""In which order waiting requests are taken up, and who gives way when memory runs out.

Whatever the order, a request is overtaken by at most MAX_OVERTAKEN later ones while it is the oldest in line; so with
k older ones before it, it waits for at most (k + 1) * MAX_OVERTAKEN admissions.
"""

import heapq
from collections.abc import Iterable, Iterator
from typing import Literal

from engine.active_request import ActiveRequest, Arrival

MAX_OVERTAKEN = 256
"""Large enough that an order is an order, small enough that a request of low priority still ends today."""
DECODE_WEIGHT = 2
"""A generated token counts as two prompt tokens for its tenant, as in the paper."""
MAX_REMEMBERED_TENANTS = 10_000

Order = Literal["arrival", "priority", "fair"]


class WaitingLine:
    """The requests without blocks.

    "arrival": first come, first served. "priority": the smallest `priority` first, then by arrival. "fair": the tenant
    who got the fewest tokens first, then by arrival (virtual token counter, Sheng et al. 2024, arXiv:2401.00588).
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._members: dict[str, ActiveRequest] = {}
        self._by_arrival: list[tuple[Arrival, str]] = []
        self._by_priority: list[tuple[int, Arrival, str]] = []
        self._by_tenant: dict[str | None, list[tuple[Arrival, str]]] = {}
        self._tenants: list[tuple[float, Arrival, str | None]] = []
        self._served: dict[str | None, float] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members

    def __iter__(self) -> Iterator[ActiveRequest]:
        """All of them, oldest first."""
        return iter(sorted(self._members.values(), key=lambda request: request.arrival))

    def unordered(self) -> Iterable[ActiveRequest]:
        """All of them, as they come."""
        return self._members.values()

    def get(self, request_id: str) -> ActiveRequest | None:
        return self._members.get(request_id)

    def push(self, request: ActiveRequest) -> None:
        """Puts a request in line; one that comes back takes the place its arrival gives it."""
        self._members[request.request_id] = request
        heapq.heappush(self._by_arrival, (request.arrival, request.request_id))
        if self._order == "priority":
            heapq.heappush(self._by_priority, (request.priority, request.arrival, request.request_id))
        if self._order == "fair":
            self._push_tenant(request)

    def remove(self, request: ActiveRequest) -> None:
        """Takes a request out; its entries in the heaps are skipped later."""
        del self._members[request.request_id]

    def head(self) -> ActiveRequest | None:
        """Gives the request to be taken up next, without taking it."""
        oldest = self._oldest()
        if oldest is None or self._order == "arrival" or oldest.num_overtaken >= MAX_OVERTAKEN:
            return oldest
        return self._most_urgent() if self._order == "priority" else self._least_served()

    def admit(self, request: ActiveRequest) -> None:
        """Takes the head out because it runs now; counts it against the oldest where that one was passed over."""
        oldest = self._oldest()
        if oldest is not None and oldest is not request:
            oldest.num_overtaken += 1
        self.remove(request)

    def charge(self, request: ActiveRequest, *, num_prompt: int = 0, num_generated: int = 0) -> None:
        """Counts tokens as served to the tenant of a request."""
        if self._order == "fair":
            served = self._served.get(request.tenant, 0.0)
            self._served[request.tenant] = served + num_prompt + DECODE_WEIGHT * num_generated

    def rank(self, request: ActiveRequest) -> tuple[int, Arrival]:
        """Who of the running ones gives way: the greatest."""
        return (request.priority if self._order == "priority" else 0, request.arrival)

    def _oldest(self) -> ActiveRequest | None:
        while self._by_arrival:
            arrival, request_id = self._by_arrival[0]
            request = self._members.get(request_id)
            if request is not None and request.arrival == arrival:
                return request
            heapq.heappop(self._by_arrival)
        return None

    def _most_urgent(self) -> ActiveRequest | None:
        while self._by_priority:
            _, arrival, request_id = self._by_priority[0]
            request = self._members.get(request_id)
            if request is not None and request.arrival == arrival:
                return request
            heapq.heappop(self._by_priority)
        return None

    def _push_tenant(self, request: ActiveRequest) -> None:
        tenant = request.tenant
        queue = self._by_tenant.setdefault(tenant, [])
        if not queue:
            # A tenant that was away may not save up: it starts level with the least served one in line.
            least = self._served[self._tenants[0][2]] if self._least_served() is not None else 0.0
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
            self._forget_level_tenants(least)
            heapq.heappush(self._tenants, (self._served[tenant], request.arrival, tenant))
        heapq.heappush(queue, (request.arrival, request.request_id))

    def _forget_level_tenants(self, least: float) -> None:
        """Drops who would start at `least` anyway, so that names of tenants do not pile up."""
        if len(self._served) > MAX_REMEMBERED_TENANTS:
            kept = {name: served for name, served in self._served.items() if served > least or name in self._by_tenant}
            self._served = kept

    def _least_served(self) -> ActiveRequest | None:
        while self._tenants:
            served, arrival, tenant = self._tenants[0]
            queue = self._by_tenant[tenant]
            while queue and not self._is_member(queue[0]):
                heapq.heappop(queue)
            if not queue:
                heapq.heappop(self._tenants)
                del self._by_tenant[tenant]
            elif served != self._served[tenant]:
                heapq.heapreplace(self._tenants, (self._served[tenant], arrival, tenant))
            else:
                return self._members[queue[0][1]]
        return None

    def _is_member(self, entry: tuple[Arrival, str]) -> bool:
        request = self._members.get(entry[1])
        return request is not None and request.arrival == entry[0]
