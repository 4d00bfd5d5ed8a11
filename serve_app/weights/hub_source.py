"""Weights from the hub, fetched once by the controller into a folder."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from engine import WeightsSourceError
from serve_app.messages import WeightSource

MAX_FETCHES = 4
"""At once; more wait for one of them."""
WANTED_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json")


class HubFetches:
    """Downloads in threads of their own: one that hangs keeps nobody else from a thread. One event loop only.

    A download cannot be ended. Whoever asks again for what is still on its way waits for that one.
    """

    def __init__(self, fetch: Callable[[WeightSource], WeightSource]) -> None:
        """fetch: `fetch_from_hub`."""
        self._fetch = fetch
        self._threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="hub")
        self._running: dict[WeightSource, asyncio.Future[WeightSource]] = {}

    async def fetch(self, source: WeightSource, *, timeout_s: float) -> WeightSource:
        """Gives the source with its folder. Raises WeightsSourceError, also after timeout_s."""
        fetching = self._running.get(source)
        if fetching is None:
            fetching = asyncio.get_running_loop().run_in_executor(self._threads, self._fetch, source)
            self._running[source] = fetching
            fetching.add_done_callback(partial(self._ended, source))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(fetching)
        except TimeoutError:
            raise WeightsSourceError(
                f"{source} was not fetched from the hub within {timeout_s:g} s; it goes on meanwhile: try again, or "
                "raise weights.fetch_timeout_s"
            ) from None

    def _ended(self, source: WeightSource, fetching: "asyncio.Future[WeightSource]") -> None:
        self._running.pop(source, None)
        if not fetching.cancelled():
            # Asked for here, so that an error nobody waits for any more is not reported as never retrieved.
            fetching.exception()


def fetch_from_hub(source: WeightSource) -> WeightSource:
    """Gives the source with the folder it was fetched to; blocks for the download, and is quick where it is cached.

    The folder is that of the revision's commit, so later pushes do not change it. Replicas on other machines need to
    see the hub's cache. Raises WeightsSourceError.
    """
    assert source.hub is not None
    try:
        folder = snapshot_download(source.hub, revision=source.revision, allow_patterns=list(WANTED_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsSourceError(f"{source} cannot be fetched from the hub: {reason}") from error
    return replace(source, path=folder)
