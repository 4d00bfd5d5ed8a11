"""The entry points, as functions that take the model first, and as methods for a model that wants them."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from engine.config import ContinuousBatchingConfig
from engine.errors import InvalidRequest, QueueFull
from engine.manager import ContinuousBatchingManager
from engine.ownership import ownership_of
from engine.request import (
    FinishReason,
    GenerationOutput,
    RequestStatus,
    SamplingParams,
    WorkloadHints,
)
from engine.submission import sequence_ids

_CACHED_MANAGER = "_pitstop_manager"


def init_continuous_batching(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: WorkloadHints | None = None,
) -> ContinuousBatchingManager:
    """Gives a manager for the model, not started; the one kept by an earlier `persistent_manager=True` if there is one.

    Raises UnsupportedModel, and InvalidRequest for configs that cannot be honoured or differ from the kept manager's.
    """
    kept = _kept(model)
    if kept is None:
        return ContinuousBatchingManager(model, generation_config, continuous_batching_config, workload_hints)
    for name, wanted, present in (
        ("generation_config", generation_config, kept.generation_config),
        (
            "continuous_batching_config",
            continuous_batching_config,
            kept.continuous_batching_config,
        ),
    ):
        if wanted is not None and wanted != present:
            raise InvalidRequest(
                f"the model keeps a manager with another {name}; call destroy_cached_continuous_batching_manager first",
                name,
            )
    return kept


@contextmanager
def continuous_batching_context_manager(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: WorkloadHints | None = None,
) -> Iterator[ContinuousBatchingManager]:
    """Runs a manager for the length of a `with` block; leaving it finishes what was submitted.

    block, timeout: how leaving waits, as in `ContinuousBatchingManager.stop`. When the body raises, requests still in
    flight are ended at once. persistent_manager: leave the manager running, kept on the model. Weights that are changed
    between two such blocks count as a new version.
    """
    manager = init_continuous_batching(model, generation_config, continuous_batching_config, workload_hints)
    if manager.is_running():
        manager.notice_changes()
    if warmup:
        manager.warmup()
    if not manager.is_running():
        manager.start()
    try:
        yield manager
    except BaseException:
        if not persistent_manager:
            manager.stop(block=block, timeout=timeout, hard_stop=True)
        raise
    if persistent_manager:
        manager.remember_weights()
        _keep(model, manager)
        return
    manager.stop(block=block, timeout=timeout)
    manager.destroy()


def generate_batch(
    model: PreTrainedModel,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    *,
    max_new_tokens: int | None = None,
    sampling: SamplingParams | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generation_fields: Any,
) -> dict[str, GenerationOutput]:
    """Generates for every prompt; gives the last output of each by request id, in the order of the prompts.

    Of several sequences a prompt, the one with the plain id comes last, as in transformers. A prompt that is refused or
    fails is there too, with status FAILED and its `error`; it does not touch the others. tokenizer: needed by stop
    strings alone. generation_fields: fields of GenerationConfig, laid over `generation_config` as `generate` does it;
    any other name is a TypeError. Of several tensor parallel ranks all call it; the driver has the results.

    Calls from several threads come in turn, or share the manager that the model keeps. Raises InvalidRequest while a
    manager that was made in another way runs the model.
    """
    generation_config = _with_fields(generation_config, generation_fields)
    if len(inputs) == 0:
        return {}
    lengths = [len(ids) for ids in inputs if isinstance(ids, Sized)]
    hints = WorkloadHints(
        max_prompt_length=max(lengths, default=0),
        max_generated_length=max_new_tokens or 0,
    )
    results: dict[str, GenerationOutput] = {}
    with (
        _turn(model),
        continuous_batching_context_manager(
            model,
            generation_config,
            continuous_batching_config=continuous_batching_config,
            persistent_manager=persistent_manager,
            warmup=warmup,
            workload_hints=hints if max_new_tokens else None,
        ) as manager,
    ):
        if not manager.is_driver:
            return {}
        num_sequences = (sampling.num_return_sequences if sampling else None) or manager.num_return_sequences
        total = len(inputs) * num_sequences
        with tqdm(total=total, disable=not progress_bar, desc="requests", unit="request") as bar:
            pending: deque[str] = deque()
            collect = partial(_collect, manager, pending, results, bar)
            for input_ids in inputs:
                request_id = manager.new_request_id()
                family = sequence_ids(request_id, num_sequences)
                error = _submit(
                    manager,
                    collect,
                    input_ids=input_ids,
                    request_id=request_id,
                    max_new_tokens=max_new_tokens,
                    record_timestamps=record_timestamps,
                    sampling=sampling,
                    tokenizer=tokenizer,
                )
                fallback = error or "the manager stopped before it ended"
                results.update({name: _failed(name, input_ids, fallback) for name in family})
                if error is None:
                    pending.extend(family)
                else:
                    bar.update(len(family))
            while collect():
                pass
    return results


def destroy_cached_continuous_batching_manager(model: PreTrainedModel) -> None:
    """Stops and drops the manager that the model keeps, if it keeps one."""
    manager = _kept(model)
    if manager is not None:
        manager.destroy()
    vars(model).pop(_CACHED_MANAGER, None)


class ContinuousMixin:
    """The entry points as methods: mix it into a model class, or give them to one model with `enable`."""

    init_continuous_batching = init_continuous_batching
    continuous_batching_context_manager = continuous_batching_context_manager
    generate_batch = generate_batch
    destroy_cached_continuous_batching_manager = destroy_cached_continuous_batching_manager


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Gives this model the methods of `ContinuousMixin`, in place of transformers' own; returns it."""
    methods: dict[str, Any] = {
        name: function for name, function in vars(ContinuousMixin).items() if not name.startswith("__")
    }
    for name, function in methods.items():
        setattr(model, name, MethodType(function, model))
    return model


@dataclass(frozen=True, slots=True, eq=False)
class _Holder:
    """Of the manager that a model keeps; a copy holds none, as a manager has threads and runs the one model."""

    manager: ContinuousBatchingManager | None = None

    def __reduce__(self) -> tuple[type["_Holder"], tuple[()]]:
        return _Holder, ()


def _keep(model: PreTrainedModel, manager: ContinuousBatchingManager) -> None:
    setattr(model, _CACHED_MANAGER, _Holder(manager))


def _kept(model: PreTrainedModel) -> ContinuousBatchingManager | None:
    """Gives the manager that the model keeps and that can still be used."""
    manager = getattr(model, _CACHED_MANAGER, _Holder()).manager
    # A shallow copy of a model has the holder of the model itself.
    return None if manager is None or manager.model is not model or manager.is_destroyed else manager


@contextmanager
def _turn(model: PreTrainedModel) -> Iterator[None]:
    """Inside, no other thread makes a manager to generate with; where the model keeps one, all of them share it."""
    with ExitStack() as held:
        held.enter_context(ownership_of(model).turn)
        if _kept(model) is not None:
            held.close()
        yield


def _with_fields(config: GenerationConfig | None, fields: dict[str, Any]) -> GenerationConfig | None:
    if fields.get("cache_implementation") == "paged":
        # `generate` calls with what it was called with: its prompts stand there a second time.
        fields.pop("input_ids", None)
    merged = GenerationConfig() if config is None else deepcopy(config)
    for name in fields:
        if not hasattr(merged, name):
            raise TypeError(f"generate_batch() got an unexpected keyword argument {name!r}")
    merged.update(**fields)
    return merged if fields else config


def _submit(manager: ContinuousBatchingManager, make_room: Callable[[], bool], **arguments: Any) -> str | None:
    """Adds a request, after earlier ones have ended where the queue is full; gives the error of a refused one."""
    while True:
        try:
            manager.add_request(**arguments)
        except InvalidRequest as error:
            return str(error)
        except QueueFull:
            if not make_room():
                raise
        else:
            return None


def _collect(
    manager: ContinuousBatchingManager, pending: deque[str], results: dict[str, GenerationOutput], bar: "tqdm[Any]"
) -> bool:
    """Waits for the oldest request that has not ended; False when there is none."""
    if not pending:
        return False
    output = manager.get_result(pending[0])
    if output is not None:
        results[pending[0]] = output
    pending.popleft()
    bar.update()
    return True


def _failed(request_id: str, prompt_ids: Sequence[int], error: str) -> GenerationOutput:
    return GenerationOutput(
        request_id=request_id,
        prompt_ids=prompt_ids,
        error=error,
        status=RequestStatus.FAILED,
        finish_reason=FinishReason.FAILED,
    )
