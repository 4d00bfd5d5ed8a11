"""Calls over Ray Serve handles that end: each has a deadline, and each error is one of the project's."""

import asyncio
import logging
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentResponse, DeploymentResponseGenerator

from engine import PitstopError, QueueFull
from serve_app.messages import TokenEvent
from serve_app.protocol.errors import INTERNAL_ERROR_MESSAGE, DeadlineExceeded, NoReplica, ReplicaLost

logger = logging.getLogger("ray.serve.pitstop")

T = TypeVar("T")


class HandleStream:
    """The token events of one request at another deployment.

    `close` is the one place that cancels: leaving a handle's stream in any other way lets the other side run on to its
    end. It may be called at any time and more than once, and does nothing after the last event.
    """

    def __init__(
        self,
        stream: DeploymentResponseGenerator[TokenEvent],
        *,
        timeout_s: float,
        opened_at: float | None = None,
        num_sequences: int = 1,
    ) -> None:
        """Takes a stream just opened; has to be called in the event loop that reads it.

        timeout_s counts from opened_at, a time of that loop; None is now. num_sequences: how many outputs it carries;
        it is over when all have ended.
        """
        self._stream = stream
        self._num_open = num_sequences
        self._timeout_s = timeout_s
        self._deadline = (asyncio.get_running_loop().time() if opened_at is None else opened_at) + timeout_s
        self._is_over = False
        self._timer: asyncio.Timeout | None = None
        self._interruption: PitstopError | None = None

    def __aiter__(self) -> "HandleStream":
        return self

    async def __anext__(self) -> TokenEvent:
        """Gives the next event; raises errors of the project only."""
        if self._is_over:
            raise StopAsyncIteration
        if self._interruption is not None:
            raise self._interruption
        clock = asyncio.timeout_at(self._deadline)
        try:
            async with clock:
                self._timer = clock
                event = await anext(self._stream)
        except StopAsyncIteration:
            self._is_over = True
            raise
        except Exception as error:
            if clock.expired():
                if self._interruption is not None:
                    raise self._interruption from None
                raise DeadlineExceeded(
                    f"the request took longer than {self._timeout_s:g} s and was cancelled; "
                    "ask for fewer tokens, or for more time: timeout in the request, limits.request_timeout_s for all"
                ) from None
            raise to_pitstop_error(error) from error
        finally:
            self._timer = None
        self._num_open -= sum(each.finish_reason is not None for each in (event, *event.more))
        self._is_over = self._num_open <= 0
        return event

    def interrupt(self, error: PitstopError) -> None:
        """Has the reader get this error, at once where it waits."""
        self._interruption = error
        if self._timer is not None:
            self._timer.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._stream.cancel()  # type: ignore[no-untyped-call]


async def call(response: DeploymentResponse[T], *, timeout_s: float, whom: str) -> T:
    """Gives the answer of one call; raises NoReplica when `whom` does not answer in time."""
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            return await response
    except Exception as error:
        if clock.expired():
            response.cancel()  # type: ignore[no-untyped-call]
            raise NoReplica(f"{whom} did not answer in {timeout_s:g} s") from None
        raise to_pitstop_error(error) from error


def to_pitstop_error(error: BaseException) -> PitstopError:
    """Gives the project's error behind what Ray raised; one that nobody expected is logged and becomes a plain one."""
    cause: Any = error
    # An error that crosses two deployments is wrapped twice.
    while isinstance(cause, RayTaskError) and cause.cause is not None:
        cause = cause.cause
    if isinstance(cause, PitstopError):
        return cause
    if isinstance(error, RayActorError):
        return ReplicaLost("the replica that answered this request died; send it again")
    if isinstance(error, DeploymentUnavailableError):
        return NoReplica("the deployment has failed; its log says why")
    if isinstance(error, BackPressureError):
        return QueueFull("too many requests wait; try again later")
    if isinstance(error, RequestCancelledError):
        return ReplicaLost("the request was cancelled from outside; send it again")
    logger.error("event=unexpected_error error=%s", type(cause).__name__, exc_info=error)
    return PitstopError(INTERNAL_ERROR_MESSAGE)
