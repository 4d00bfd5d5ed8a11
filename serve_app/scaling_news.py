"""Carries the reports of the autoscaling policy from Serve's controller to the weight controller.

The policy must never wait, so a thread of its own sends what is latest. It ends by itself when the policy is asked no
more.
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
    """The latest report on its way. `tell` may be called from any thread and never waits."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._latest: ScalingReport | None = None
        self._told_at = 0.0
        self._thread: threading.Thread | None = None

    def tell(self, report: ScalingReport) -> None:
        """Has a report sent; one that was not sent yet is overtaken."""
        self._latest, self._told_at = report, time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="scaling-news", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._send_all())

    async def _send_all(self) -> None:
        sent: ScalingReport | None = None
        sent_at, is_heard = float("-inf"), True
        while time.monotonic() - self._told_at < SILENT_S:
            report = self._latest
            if report is not None and (_is_news(report, sent) or time.monotonic() - sent_at >= REPEAT_S):
                sent_at = time.monotonic()
                try:
                    await self._send(report)
                    sent, is_heard = report, True
                except Exception as error:  # noqa: BLE001  # Ray raises many kinds; it is said again soon
                    if is_heard:
                        logger.warning("event=scaling_news_failed error=%r", error)
                    is_heard = False
            await asyncio.sleep(LOOK_INTERVAL_S)

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
