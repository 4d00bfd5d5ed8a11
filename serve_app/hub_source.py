"""Weights from the hub, fetched once by the controller into a folder."""

from dataclasses import replace

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from engine import WeightsSourceError
from serve_app.messages import WeightSource

WANTED_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json")


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
