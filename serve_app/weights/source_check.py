"""Weights that the controller checks by itself, where no replica runs that could."""

import asyncio
from collections.abc import Awaitable, Callable

from engine import InvalidRequest, WeightsError, check_weights
from serve_app.messages import StagedDetails, SwapOrder, WeightSource
from serve_app.model_store import resolve_model
from serve_app.settings import AppSettings
from serve_app.weights.hub_source import fetch_from_hub
from serve_app.weights.two_phase_swap import Checked


class CheckAlone:
    """Verifies a source against the configuration of the model, one tensor in memory at a time."""

    def __init__(self, settings: AppSettings, *, count_running: Callable[[], Awaitable[int]]) -> None:
        self._settings = settings
        self._count_running = count_running

    async def __call__(self, order: SwapOrder) -> Checked | None:
        """Gives what the source holds; None where replicas run, which have to stage it. Raises as staging does.

        Raises InvalidRequest for probes, which only a replica can run.
        """
        if await self._count_running() > 0:
            return None
        if order.probes is not None:
            # They run the model, for which the controller has neither the device nor the memory.
            raise InvalidRequest(
                "no replica runs, and probes need one: send a request first, which starts one, or leave probes out",
                "probes",
            )
        timeout_s = self._settings.weights.stage_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(self._check, order)
        except TimeoutError:
            raise WeightsError(
                f"no replica runs, and the controller did not read the weights within {timeout_s:g} s; raise "
                "weights.stage_timeout_s"
            ) from None

    def _check(self, order: SwapOrder) -> Checked:
        model = resolve_model(self._settings.model)
        source = order.source
        under = [_folder_of(model)] if source is None or source.on_model else []
        paths = [*under, *(source.folders if source is not None else ())]
        found = check_weights(
            model,
            paths,
            dtype=self._settings.dtype,
            device=self._settings.device,
            cast=order.cast,
            changes=order.changes.folders if order.changes is not None else (),
            cast_changes=order.changes is not None and order.changes.cast,
            trust_remote_code=self._settings.trust_remote_code,
        )
        # Ranks hold parts, whose digests only they can make.
        is_whole = self._settings.replicas.tensor_parallel_size == 1
        digests = dict(found.digests) if is_whole else {}
        return Checked(found.digest if is_whole else "", found.num_bytes, StagedDetails(digests, list(found.unchanged)))


def _folder_of(model: str) -> str:
    """Gives the folder of a model that may be a hub's."""
    return model if model.startswith("/") else fetch_from_hub(WeightSource(hub=model)).path
