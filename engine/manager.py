"""The handle to one persistent generation loop: submit, read, cancel, pause, change weights."""

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from time import perf_counter
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from engine.attention.choice import choose_flash
from engine.attention.flash import FlashKernels, find_flash
from engine.compilation import compile_options
from engine.config import ContinuousBatchingConfig, ResolvedConfig
from engine.constraint import TokenConstraint
from engine.errors import EngineStopped, InvalidRequest, WeightsError, WeightVersionGone
from engine.follower import FollowerLoop
from engine.generation_defaults import generation_defaults
from engine.graphs import CudaGraphs, GraphMaker
from engine.host_memory import free_host_bytes
from engine.live_weights import LiveWeights, ParkedLoop, StagingRequest
from engine.loop import GenerationLoop, Runner, StopMode
from engine.metrics import EngineStats
from engine.model import check_supported
from engine.model_runner import ModelRunner, probe_layers
from engine.openmp import release_helpers
from engine.outbox import Outbox
from engine.ownership import ownership_of
from engine.packed_weights import pack_weights
from engine.parallel import DriverRunner, disable_graph_mixing, rank_group_of
from engine.patience import Patience
from engine.profiling import measured_step_bytes
from engine.rank_weights import RankWeights
from engine.request import GenerationOutput, SamplingParams, WorkloadHints
from engine.sampling import RowSampler, StopStrings
from engine.scheduler import Scheduler
from engine.sizing import free_bytes_on, resolve_config
from engine.step_budget import StepBudget
from engine.step_thread import StepThread
from engine.submission import RequestFactory
from engine.weights import Paths, StagedWeights

EXIT_JOIN_S = 5.0
"""How long the interpreter waits at its end for the step in progress."""
KNOWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")

logger = logging.getLogger(__name__)


class ContinuousBatchingManager:
    """Thread-safe. While it runs, the model belongs to it; inside `pause()` to whoever holds the pause.

    Making, warming up and starting one raise InvalidRequest while another one runs the model.

    Made by `init_continuous_batching`, `continuous_batching_context_manager` or `generate_batch`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
        *,
        flash: FlashKernels | None = None,
        graphs: GraphMaker | None = None,
    ) -> None:
        """flash: the kernels of flash attention; None takes flash-attn's where it is installed and the GPU runs it.

        graphs: what captures steps; None takes CUDA's on a GPU.
        """
        check_supported(model)
        self.model = model
        self._place = model.dtype, model.device
        self._ownership = ownership_of(model)
        self._pauses_of_thread = threading.local()
        self.generation_config = generation_config
        self.continuous_batching_config = continuous_batching_config or ContinuousBatchingConfig()
        self.workload_hints = workload_hints
        own_config = model.generation_config or GenerationConfig()
        defaults = generation_defaults(own_config, generation_config)
        self.num_return_sequences = defaults.sampling.num_return_sequences or 1
        self._stop_strings = StopStrings()
        self._sampler = RowSampler(
            model,
            drop_foreign=self.continuous_batching_config.drop_unsupported_processors,
            stop_strings=self._stop_strings,
        )
        with self._ownership.claim(self):
            self._layers = probe_layers(model)
        self._ranks = rank_group_of(model, timeout_s=self.continuous_batching_config.cpu_group_timeout)
        if self._ranks is not None and self.continuous_batching_config.disable_nccl_graph_mixing:
            disable_graph_mixing(model.device)
        self._rank_weights = RankWeights(model, self._ranks) if self._ranks is not None else None
        self._compiling = compile_options(
            self.continuous_batching_config,
            model.device,
            fallback=getattr(generation_config or own_config, "compile_config", None),
        )
        free_bytes = free_host_bytes()
        self._packed = pack_weights(
            model,
            wanted=self.continuous_batching_config.pack_weights,
            free_bytes=free_bytes,
            is_compiled=self._compiling is not None,
        )
        chosen = choose_flash(
            flash or find_flash(model.device), self.continuous_batching_config, self._layers, dtype=model.dtype
        )
        self._flash = None if isinstance(chosen, str) else chosen
        self._graphs = graphs or (CudaGraphs(model.device) if model.device.type == "cuda" else None)
        self.config: ResolvedConfig = resolve_config(
            self.continuous_batching_config,
            model,
            self._layers,
            workload_hints,
            num_sharers=self._ranks.num_on_machine if self._ranks is not None else 1,
            free_bytes=None if self._packed is None else max(0, free_bytes - self._packed.size_bytes),
            no_flash=chosen if isinstance(chosen, str) else None,
            no_graphs=self._why_no_graphs(),
            is_cut=self._ranks is not None,
            measure=self._measure if model.device.type == "cuda" and self._ranks is None else None,
        )
        if self._ranks is not None:
            # Each rank sees other free memory; all of them need the same blocks.
            self.config = self._ranks.same(self.config)
        self._factory = RequestFactory(
            self.config,
            defaults=defaults,
            accepts_keywords=self.continuous_batching_config.per_request_processors,
        )
        self._lock = threading.Lock()
        self._outbox = Outbox()
        self._weights = LiveWeights(
            model,
            ranks=self._ranks,
            packed=self._packed,
            # Captured graphs hold the addresses of the weights.
            in_place=any(self.config.use_cuda_graph),
            free_bytes=lambda: free_bytes_on(model.device),
        )
        self._was_training = model.training
        self.is_destroyed = False
        self._thread: threading.Thread | None = None
        self._end: weakref.finalize[..., ContinuousBatchingManager] | None = None
        self._driver_runner: DriverRunner | None = None
        with self._ownership.claim(self):
            self._loop = self._weights.loop = self._make_loop()
        self._needs_new_loop = False

    # Life

    def start(self) -> None:
        """Starts the generation thread; a second call only warns. Works again after `stop` and after a crash.

        Where the weights were changed since it was stopped, it starts a new weight version, as leaving a pause does.
        Raises InvalidRequest while another manager runs the model, and WeightsError where the model has another dtype
        or device than it had for `__init__`.
        """
        with self._lock, self._ownership.claim(self):
            if self.is_destroyed:
                raise EngineStopped("the manager was destroyed; make a new one")
            self._weights.raise_if_lost()
            self._check_place()
            if self.is_running():
                logger.warning("manager is already running")
                return
            if self._needs_new_loop or self._loop.fatal_error is not None:
                self._loop = self._weights.loop = self._make_loop()
            self._needs_new_loop = True
            self._was_training = self.model.training
            self.model.eval()
            has_new_structure = self._take_up_weights()
            if self._thread is not None and (has_new_structure or self._weights.were_changed()):
                self._weights.change_version(None, in_flight="keep")
            release_helpers()
            self._loop.mark_started()
            self._thread = threading.Thread(target=self._loop.run, name="pitstop-generation", daemon=True)
            self._thread.start()
            self._ownership.mark_running(self, self._thread)
            # A daemon thread ends anywhere, so at exit (or when nobody holds the manager) it is asked to end first.
            if self._end is not None:
                self._end.detach()  # it holds the loop before this one, and with it a whole cache
            self._end = weakref.finalize(self, _end_thread, self._loop, self._thread)

    def is_running(self) -> bool:
        """True while the generation thread is alive."""
        return self._thread is not None and self._thread.is_alive() and self._loop.is_running

    @property
    def is_stopping(self) -> bool:
        """True once it was asked to stop; its thread may have ended by now."""
        return self._loop.is_stopping

    @property
    def lends_to_this_thread(self) -> bool:
        """True where the calling thread holds a pause, so that the model is its own to run."""
        return getattr(self._pauses_of_thread, "count", 0) > 0

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Ends the thread: what was submitted is finished first, or with `hard_stop` ended FAILED with what it has.
        Whoever holds a `ParkedLoop` loses it.

        With `block` it waits for at most `timeout` seconds; a loop that needs longer goes on to its end by itself. The
        prefix cache is dropped at the next start unless `keep_for_next_session`.
        """
        if self.lends_to_this_thread:
            raise RuntimeError("stop() was called inside this thread's own pause(); leave the pause first")
        if self._thread is None:
            logger.warning("manager was never started")
            return
        if self.is_running():
            self._weights.remember()
        self._loop.stop(StopMode.HARD if hard_stop else StopMode.FLUSH)
        self._weights.end_parks()
        if block:
            self.join(perf_counter(), timeout)
        self._needs_new_loop = not keep_for_next_session

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Waits for the thread to end, for `timeout` seconds at most; `stop_trigger_time` is when it was asked to."""
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning(
                "manager still finishes its requests waited_s=%.1f",
                perf_counter() - stop_trigger_time,
            )
            return
        logger.info("manager stopped took_s=%.2f", perf_counter() - stop_trigger_time)
        self.model.train(self._was_training)

    def destroy(self) -> None:
        """Stops at once, for good. Safe to call again."""
        self.is_destroyed = True
        if self._thread is not None:
            self.stop(hard_stop=True)

    def switch_to_cb_friendly_attn(
        self,
        model: PreTrainedModel,
        auto_switch_to_flash: bool = True,  # noqa: ARG002  # of the config it counts; a model has nothing to switch
    ) -> None:
        """Checks that the engine can stand in for the model's attention; nothing of the model is changed.

        The engine takes over for the length of each forward pass and gives back what it found, so there is nothing to
        switch and nothing to restore. Raises ValueError for an implementation that it does not know.
        """
        implementation = model.config._attn_implementation
        if implementation not in KNOWN_ATTENTION:
            raise ValueError(f"attention {implementation!r} is not one of {', '.join(KNOWN_ATTENTION)}")

    def warmup(self) -> None:
        """Compiles the model and captures CUDA graphs, where that is configured; the first steps would have to."""
        if self.is_running():
            with self.pause(weights_changed=False):
                self._runner.warm_up()
        else:
            with self._ownership.claim(self):
                self._runner.warm_up()

    # Requests

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        sampling: SamplingParams | None = None,
        cache_salt: str | None = None,
        hints: WorkloadHints | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        constraint: TokenConstraint | None = None,
        weight_version: int | None = None,
        resumed: Sequence[Sequence[int] | None] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str | None:
        """Submits one prompt and gives its id. All checks happen here; one terminal output follows.

        Of several tensor parallel ranks only the driver takes requests; the others give None.

        With `num_return_sequences` n in `sampling`, the further outputs come under the ids `<id>__child#0` to
        `<id>__child#<n - 2>`; cancelling <id> cancels them all. Of `hints`, tenant, priority and waited_s count here: a
        smaller priority goes first. tokenizer: the model's, which stop strings need; it makes those of the model's own
        config apply too. constraint: what the output has to follow, in a state that is the request's own from here on;
        further outputs get a fork of it. weight_version: the one version that may sample its tokens; when another takes
        its place before the request has begun, it ends with the reason `weight_version_gone`. resumed: the tokens that
        each output has already, its own first, then those of `__child#0` and on; None for one that has ended, of which
        nothing is heard. The request goes on as if it had never stopped, given the same seed and the same weights.
        logit_processor_kwargs: fields of `SamplingParams` that choose the tokens, where `per_request_processors` is
        set.

        Raises WeightVersionGone when `weight_version` is not the one served, InvalidRequest (and its other kinds),
        QueueFull, EngineStopped, EngineDead. Allowed before `start()` and inside `pause()`: the request then waits.
        """
        if not self.is_driver:
            return None
        merged = self._factory.merge(sampling, max_new_tokens, eos_token_id, logit_processor_kwargs)
        request = self._factory.make(
            input_ids,
            request_id=request_id,
            sampling=merged,
            cache_salt=cache_salt,
            hints=hints,
            has_tokenizer=tokenizer is not None,
            constraint=constraint,
            pinned_version=self._checked_pin(weight_version),
        )
        members = [request, *request.children] if resumed is None else self._factory.resume(request, resumed)
        for member in members:
            self._stop_strings.prepare(member, tokenizer)
            member.streaming, member.record_timestamps = streaming, record_timestamps
            member.needs_processors |= self._sampler.sees_tokens
            self._sampler.catch_up(member)
        self._loop.submit([request] if resumed is None else members, max_waiting=self.config.max_queue_size)
        return request.request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """Submits several prompts in their order and gives their ids; raises at the first that is refused."""
        added = (
            self.add_request(
                ids,
                max_new_tokens=max_new_tokens,
                streaming=streaming,
                record_timestamps=record_timestamps,
                tokenizer=tokenizer,
                **logit_processor_kwargs,
            )
            for ids in inputs
        )
        return [request_id for request_id in added if request_id is not None]

    @property
    def is_driver(self) -> bool:
        """True on the rank that takes requests; always, where the model is not cut over ranks."""
        return self._ranks is None or self._ranks.is_driver

    def new_request_id(self) -> str:
        """Gives an id that no other request of this manager gets from it."""
        return self._factory.new_id()

    def cancel_request(self, request_id: str, *, alone: bool = False) -> None:
        """Ends a request by the end of the step in progress, with a terminal output CANCELLED; ignores unknown ids.

        alone: the other samples of its prompt go on.
        """
        self._loop.cancel(request_id, alone=alone)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Waits up to `timeout` seconds (None: without limit) for an output, of one request or of any.

        None after the timeout, and at once when nothing is stored and the manager does not run.
        """
        return self._outbox.take(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs of all requests as they come, until the manager stops and all were read."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Outputs of one request, the terminal one last; ends early only when the manager does."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Sends each output of a request to `callback`, run in the calling asyncio loop, until the terminal one.

        To miss nothing, register first and add the request then. Raises RuntimeError outside of a running loop and
        DuplicateRequest when the id has a handler.
        """
        self._outbox.register(request_id, callback, asyncio.get_running_loop())

    def forget_result_handler(self, request_id: str) -> None:
        """Drops the handler of a request that `add_request` refused."""
        self._outbox.forget(request_id)

    # Weights

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends a request that names no end tokens itself."""
        return self._factory.eos_token_ids

    @property
    def weight_version(self) -> int:
        """The version that the next step samples from; starts at 1."""
        return self._weights.version

    @contextmanager
    def pause(self, *, weights_changed: bool = True) -> Iterator[None]:
        """Holds the loop between two steps so that the caller may use the model or change its weights in place.

        Nothing is lost: requests keep their place and their keys and values, new ones may be added and wait. Leaving
        starts a new weight version, so that no prefix computed before is found again, unless `weights_changed` is
        False. Re-entrant, and several threads may hold it; generation resumes when the last one leaves. All tensor
        parallel ranks have to enter it. Raises EngineStopped when the manager does not run.
        """
        self._enter_pause()
        self._share_pause()
        try:
            if not weights_changed:
                yield
                return
            with self._weights.changing():
                try:
                    yield
                finally:
                    self._take_up_weights()
                    self._weights.change_version(None, in_flight="keep")
        finally:
            try:
                release_helpers()
            finally:
                self._leave_pause()

    paused = pause

    def remember_weights(self) -> None:
        """Notes what the weights are, for `notice_changes`; `stop` does it for the next `start`."""
        self._weights.remember()

    def notice_changes(self) -> None:
        """Starts a new weight version where the owner of the model has changed the weights since, without a pause.

        Tensor parallel ranks cannot tell by themselves that they all have to pause, and do nothing.
        """
        if self._ranks is None and self._weights.were_changed():
            with self.pause():
                logger.info("weights were changed between two calls")

    def stage_weights(
        self,
        path: Paths,
        *,
        cast: bool = False,
        partial: bool = False,
        memory: str = "auto",
        undo_folder: str | PathLike[str] | None = None,
    ) -> StagedWeights:
        """Gives the weights in a folder of safetensors, checked and ready for `commit_weights`.

        As the function `stage_weights`; on tensor parallel ranks the driver calls it, and every rank stages its part.
        Where one cannot, none keeps any and its error is raised. Blocks while the folder is read; generation goes on.

        memory: "beside" holds the new weights in memory beside the old ones. "inside" checks all of them and holds
        none: the commit reads them again, inside the pause, and keeps what it overwrites in a file in `undo_folder`
        until it is done. "auto" does that where memory is short, and raises WeightsError where there is then no
        `undo_folder`.
        """
        return self._weights.stage(StagingRequest(path, cast, partial, memory, undo_folder))

    def prepare_weights(self, staged: StagedWeights) -> None:
        """Makes what depends on staged weights, beside generation; `commit_weights` does it where nobody has."""
        self._weights.prepare(staged)

    def weight_digests(self) -> dict[str, str]:
        """Gives a digest of each parameter as it is served, to be compared with those of `StagedWeights`.

        Reads all weights, beside generation. On tensor parallel ranks the driver calls it. Raises SwapConflict when
        commits come between again and again.
        """
        return self._weights.digests()

    def probe_weights(self, staged: StagedWeights, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Gives, of each prompt, the log-probability of each token but the first under staged weights.

        Runs beside generation, in the caller's thread, on a second set of modules; the model is not touched. What is
        not finite, or far from what is expected, is the caller's to judge. Raises InvalidRequest for a prompt that
        the model cannot read, and WeightsError where the weights are not in memory or cut over ranks.
        """
        return self._weights.probe(staged, [self._factory.checked_prompt(prompt) for prompt in prompts])

    def park(
        self,
        *,
        timeout_s: float | None = None,
        in_flight: str = "keep",
        pinned: str = "finish",
        patience: Patience | None = None,
    ) -> ParkedLoop:
        """Holds the loop between two steps, across calls and threads, until `resume()` of what it gives.

        in_flight: "finish" lets requests that have begun finish first, while those that wait are held back; else they
        stay as they are, and the commit deals with them. pinned: "finish" does so with the requests pinned to a weight
        version, "end" leaves them to the commit, which ends them. timeout_s bounds all of this waiting: WeightsError is
        raised, and nothing is held; so it is when another thread ends `patience` meanwhile. On tensor parallel ranks
        the driver parks all. Raises EngineStopped when the manager does not run; `stop()` ends a park.
        """
        return self._weights.park(
            timeout_s=self._wait_of_this_thread(timeout_s), in_flight=in_flight, pinned=pinned, patience=patience
        )

    def settle(
        self,
        *,
        timeout_s: float | None = None,
        in_flight: str = "keep",
        pinned: str = "finish",
        patience: Patience | None = None,
    ) -> ParkedLoop:
        """Lets requests finish as `park` does, while the loop goes on, and holds others of their kind back until then.

        What it gives parks with its `park`, at the next step boundary, or lets them begin with `resume`. One of
        in_flight and pinned is "finish".
        """
        return self._weights.settle(
            timeout_s=self._wait_of_this_thread(timeout_s), in_flight=in_flight, pinned=pinned, patience=patience
        )

    def commit_weights(
        self,
        staged: StagedWeights,
        *,
        version: int | None = None,
        in_flight: str = "keep",
        pinned: str = "finish",
        finish_timeout_s: float | None = None,
    ) -> float:
        """Exchanges the weights at a step boundary and gives the seconds that generation stood still for it.

        in_flight: "keep" lets running requests go on over their keys and values, "recompute" computes those anew,
        "abort" ends the requests CANCELLED, "finish" lets those that have begun finish on the old weights first while
        the others wait. pinned: "finish" does so with running requests that are pinned to a version, "end" ends them
        with the reason `weight_version_gone`, as those that wait. finish_timeout_s: how long to wait for a step
        boundary and for requests to finish; after it WeightsError is raised. version: above the present one; None
        counts up by one. When the exchange fails, the old weights are back before generation resumes, and the error is
        raised.
        """
        self.prepare_weights(staged)
        release_helpers()
        parked = self.park(timeout_s=finish_timeout_s, in_flight=in_flight, pinned=pinned)
        try:
            parked.commit(staged, version=version)
        finally:
            paused_s = parked.resume()
        return paused_s

    # Numbers

    def stats(self) -> EngineStats:
        """The numbers as of the last step; cheap."""
        return self._loop.stats()

    def cached_prefixes(self, limit: int) -> list[bytes]:
        """Gives the names of prefixes that the cache holds under the present weights, newest first; cheap.

        They are names as `prefix_digests` gives them: of every block where that is `limit` at most, else of the newest
        blocks at some depths.
        """
        return self._loop.cached_prefixes(limit)

    def check_health(self) -> None:
        """Raises EngineDead when the loop ended on an error or hangs in a step."""
        self._loop.check_health()

    # Inside

    def _wait_of_this_thread(self, timeout_s: float | None) -> float | None:
        # In its own pause, whatever does not stand still already never will while it waits.
        return 0.0 if self.lends_to_this_thread else timeout_s

    def _measure(self, num_tokens: int, num_rows: int) -> int:
        with self._ownership.claim(self):
            return measured_step_bytes(self.model, num_tokens=num_tokens, num_rows=num_rows)

    def _make_loop(self) -> GenerationLoop | FollowerLoop:
        ranks = self._ranks
        runner = self._runner = ModelRunner(
            self.model,
            self.config,
            self._layers,
            self._sampler,
            packed=self._packed,
            flash=self._flash,
            graphs=self._graphs,
            compiling=self._compiling,
            is_driver=self.is_driver,
            all_agree=bool if ranks is None else ranks.all_agree,
        )
        if ranks is not None and self._rank_weights is not None and not ranks.is_driver:
            return FollowerLoop(runner=runner, ranks=ranks, weights=self._rank_weights)
        scheduler = Scheduler(self.config)
        scheduler.version = self._weights.version
        self._driver_runner = None if ranks is None else DriverRunner(runner, ranks)
        return GenerationLoop(
            scheduler=scheduler,
            runner=self._in_its_place(runner),
            outbox=self._outbox,
            budget=StepBudget(
                max_batch_tokens=self.config.max_batch_tokens,
                target_step_s=self.config.target_step_s,
            ),
            depth=self.config.steps_in_flight,
        )

    def _in_its_place(self, runner: ModelRunner) -> Runner:
        if self._driver_runner is not None:
            return self._driver_runner
        return StepThread(runner) if self.config.steps_in_flight > 1 else runner

    def _take_up_weights(self) -> bool:
        """Makes anew what depends on the weights: they may have changed in place, which no address shows, or moved.

        Gives whether modules are others as well. Raises WeightsError where the model was cast or moved to another
        device, and nothing is generated any more: the cache and the copies are of what it was.
        """
        try:
            self._check_place()
        except WeightsError as error:
            self._loop.fail(error)
            raise
        has_new_structure = self._runner.follow_structure()
        if self._packed is not None:
            self._packed.refresh(all_of_them=True)
        self._runner.forget_moved_weights()
        return has_new_structure

    def _check_place(self) -> None:
        place = self.model.dtype, self.model.device
        if place != self._place:
            raise WeightsError(
                f"the model is {place[0]} on {place[1]} now and was {self._place[0]} on {self._place[1]}, which may not"
                " change under a manager; change it back and start() again, or make a new manager"
            )

    def _why_no_graphs(self) -> str | None:
        if self._ranks is not None:
            return "the model is cut over tensor parallel ranks, which would have to capture in step"
        return f"the device is {self.model.device.type}" if self._graphs is None else None

    def _enter_pause(self) -> None:
        self._loop.acquire_pause()
        self._pauses_of_thread.count = getattr(self._pauses_of_thread, "count", 0) + 1

    def _share_pause(self) -> None:
        if self._driver_runner is not None:
            self._driver_runner.share_pause()

    def _leave_pause(self) -> None:
        self._pauses_of_thread.count -= 1
        self._loop.release_pause()

    def _checked_pin(self, version: int | None) -> int | None:
        if version is not None and type(version) is not int:
            raise InvalidRequest(f"weight_version is {version!r}; it must be an integer", "weight_version")
        if version in (None, self.weight_version):
            return version
        raise WeightVersionGone(
            f"the request is pinned to weight version {version}, and {self.weight_version} is served; pin that one, or"
            " none",
            "weight_version",
        )


def _end_thread(loop: GenerationLoop | FollowerLoop, thread: threading.Thread) -> None:
    loop.stop(StopMode.HARD)
    if thread is not threading.current_thread():
        thread.join(EXIT_JOIN_S)
