"""Buckets of tensors in Ray's object store."""

from collections.abc import Iterable, Mapping
from itertools import chain

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from torch import Tensor

from engine import WeightsSourceError
from serve_app.weights.tensor_pieces import TensorPiece, cut_buckets

GET_TIMEOUT_S = 60.0
"""For a bucket to come from another machine; at most some hundred megabytes."""
WRITE_BYTES = 2**26


def load_bucket(reference: "ObjectRef[object]") -> Iterable[TensorPiece]:
    """Gives what lies there: pieces as they were put, without a copy, or named tensors cut into pieces. Blocks."""
    try:
        content = ray.get(reference, timeout=GET_TIMEOUT_S)
    except RayError as error:
        raise WeightsSourceError(
            f"a bucket is not in Ray's object store any more ({type(error).__name__}); its trainer may have ended"
        ) from error
    if isinstance(content, Mapping):
        return chain.from_iterable(cut_buckets(content, bucket_bytes=WRITE_BYTES))
    items = list(content) if isinstance(content, list | tuple) else []
    if items and all(isinstance(item, TensorPiece) for item in items):
        return items
    if items and all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor) for item in items):
        return chain.from_iterable(cut_buckets(items, bucket_bytes=WRITE_BYTES))
    raise WeightsSourceError(
        f"an object of type {type(content).__name__} is no weights; put a dict of names and tensors"
    )
