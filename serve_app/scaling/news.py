"""Carries the reports of the autoscaling policy from Serve's controller to the weight controller.

The policy must never wait, so a thread sends what is latest: one for all applications.
"""

import asyncio
import logging
import threading
import time
from typing import Any

from ray import serve

from serve_app.scaling_report import ScalingReport

logger = logging.getLogger("ray.serve.pitstop")

RECEIVER = "WeightController"
LOOK_INTERVAL_S = 0.25
REPEAT_S = 5.0
"""After which the same is said again, as the weight controller may have been started anew."""
SEND_TIMEOUT_S = 5.0
SILENT_S = 60.0
"""A policy that was not asked for so long belongs to an application that is gone."""


class ScalingNews:
    """The latest report of an application on its way. `tell` may be called from any thread and never waits."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._sent: ScalingReport | None = None
        self._sent_at = float("-inf")
        self._told_at = float("-inf")
        self._is_heard = True
        self._latest: ScalingReport | None = None

    def tell(self, report: ScalingReport) -> None:
        """Has a report sent; one that was not sent yet is overtaken."""
        self._latest, self._told_at = report, time.monotonic()
        with _lock:
            _carried.add(self)
            if not _threads:
                _threads.append(threading.Thread(target=_carry, name="scaling-news", daemon=True))
                _threads[0].start()

    async def send_news(self) -> None:
        """Sends the latest report where it is news, or was not said for a while; never raises."""
        report, now = self._latest, time.monotonic()
        if report is None or not (_is_news(report, self._sent) or now - self._sent_at >= REPEAT_S):
            return
        self._sent_at = now
        try:
            await self._send(report)
            self._sent, self._is_heard = report, True
        except Exception as error:  # noqa: BLE001  # Ray raises many kinds; it is said again soon
            if self._is_heard:
                logger.warning("event=scaling_news_failed error=%r", error)
            self._is_heard = False

    @property
    def is_silent(self) -> bool:
        """Whether its policy was not asked for so long that its application must be gone."""
        return time.monotonic() - self._told_at > SILENT_S

    async def _send(self, report: ScalingReport) -> None:
        # Looked up each time, because the application may have been deployed anew; Serve keeps handles.
        handle: Any = serve.get_deployment_handle(RECEIVER, self._application)
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await handle.note_scaling.remote(report)


def _is_news(report: ScalingReport, sent: ScalingReport | None) -> bool:
    return sent is None or (report.changes, report.needed, report.reason, report.num_failures) != (
        sent.changes,
        sent.needed,
        sent.reason,
        sent.num_failures,
    )


_lock = threading.Lock()
_carried: set[ScalingNews] = set()
_threads: list[threading.Thread] = []
"""At most one, for ever: Serve keeps its handles for the whole process, each bound to the event loop it was made in."""


def _carry() -> None:
    asyncio.run(_send_all())


async def _send_all() -> None:
    while True:
        with _lock:
            _carried.difference_update([news for news in _carried if news.is_silent])
            carried = list(_carried)
        for news in carried:
            await news.send_news()
        await asyncio.sleep(LOOK_INTERVAL_S)
