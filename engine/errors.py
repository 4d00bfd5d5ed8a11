"""Every error this project raises on purpose, in one tree.

PitstopError
├── InvalidRequest (ValueError)         the caller asked for something that cannot be done
│   ├── ContextLengthExceeded           prompt and new tokens do not fit the model or the cache
│   ├── DuplicateRequest                the id is in flight already
│   └── WeightVersionGone               the request is pinned to a weight version that is not the one served
├── QueueFull (RuntimeError)            too many requests wait; try again later
├── EngineStopped (RuntimeError)        the manager was stopped or destroyed, or has not started
├── EngineDead (RuntimeError)           the generation loop ended on an error it could not survive
├── UnsupportedModel (ValueError)       this architecture cannot be served
└── WeightsError (RuntimeError)
    ├── WeightsSourceError              the source is missing or cannot be read
    ├── WeightsInvalid                  a tensor is missing, extra, misshapen, of another dtype or not finite
    ├── SwapConflict                    other changes of the weights are in the way, or were faster
    ├── NotFinished                     requests that were to finish first did not, so nothing was changed
    └── WeightsLost                     neither the old nor the new weights are whole; the loop has ended
"""


class PitstopError(Exception):
    """Base of the tree. The message gives the value, the limit and the remedy."""


class InvalidRequest(PitstopError, ValueError):
    """A request that cannot be honoured; `param` names the offending parameter."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus `max_new_tokens` is longer than the model or the whole cache allows."""


class DuplicateRequest(InvalidRequest):
    """A request with this id is still in flight."""


class WeightVersionGone(InvalidRequest):
    """The request wants tokens of one weight version, and another one is served."""


class QueueFull(PitstopError, RuntimeError):
    """`max_queue_size` requests wait already."""

    def __init__(self, message: str, num_waiting: int = 0) -> None:
        super().__init__(message)
        self.num_waiting = num_waiting


class EngineStopped(PitstopError, RuntimeError):
    """The manager does not run (any more)."""


class EngineDead(PitstopError, RuntimeError):
    """The generation loop ended on an error; the message names it."""


class UnsupportedModel(PitstopError, ValueError):
    """The model cannot be served; the message says why."""


class WeightsError(PitstopError, RuntimeError):
    """New weights were not taken; the old ones go on serving."""


class WeightsSourceError(WeightsError):
    """The source of the weights is missing or unreadable."""


class WeightsInvalid(WeightsError):
    """A tensor of the source does not fit; `tensor` names it."""

    def __init__(self, message: str, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


class SwapConflict(WeightsError):
    """Another swap is under way, has changed what this one builds on, or has used its idempotency key; or the weights
    were changed again and again while they were read.
    """


class NotFinished(WeightsError):
    """Requests that were to finish before a pause did not in time; nothing was changed, and it may be tried again."""


class WeightsLost(WeightsError):
    """Weights were being replaced and the old ones cannot be brought back; nothing is generated any more."""
