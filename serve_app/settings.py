"""What an application is started with: `AppSettings`, the `args:` of the Serve config file.

The only module that reads the environment: the admin key, and the cores this process may use.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from engine import ContinuousBatchingConfig, WorkloadHints
from serve_app.bearer_keys import KeySource, parse_keys

DEFAULT_MODEL = "smollm2-135m-instruct"
ADMIN_KEY_VARIABLE = "PITSTOP_ADMIN_KEY"
ADMIN_KEY_FILE_VARIABLE = "PITSTOP_ADMIN_KEY_FILE"
API_KEYS_VARIABLE = "PITSTOP_API_KEYS"
API_KEYS_FILE_VARIABLE = "PITSTOP_API_KEYS_FILE"
BUCKET_NAMES = ("latency", "token_latency", "pause", "length")
DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")
"""What the engine serves on, as torch names it; torch itself knows a dozen others, and numbers up to 127."""
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")
CGROUP_V2_CPU = Path("/sys/fs/cgroup/cpu.max")


class Section(BaseModel):
    """One group of settings: never written to, and a misspelt name is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ReplicaSettings(Section):
    """How many engine replicas there are and what each may use.

    min, max: bounds of autoscaling, in replicas; equal bounds switch it off. One is the least that serves at once; with
        none the first request after a while waits until a replica has started.
    tensor_parallel_size: processes (ranks) that each replica's model is cut over, all on one machine: for a model that
        one GPU does not hold. Must divide the key-value heads of the model; 1 leaves the model whole.
    num_cpus: cores that Ray reserves for each rank; a half, so that two fit on one core beside Serve itself.
    num_gpus: GPUs that Ray reserves for each rank; 0 serves on the CPU.
    torch_threads: threads of one forward pass in each rank; None is the cores of this machine over all ranks of `max`
        replicas, at least one.
    max_ongoing_requests: requests that Serve hands to one replica. Far above what an engine holds, because Serve's own
        queue polls with back-off while the engine's does not; it also has to leave room for control calls.
    max_events_per_s: pieces of streams that one replica sends a second, at most: each costs Ray and the router about a
        millisecond of processor time, which the engine lacks on a small machine. Where many streams are open, several
        of their tokens then come together; a first token and an end are sent at once. None sends each by itself.
    graceful_shutdown_timeout_s: seconds a leaving replica has to finish its streams before they are cut. They go on at
        other replicas at once; where there is none they need as long as a request may take
        (`limits.request_timeout_s`).
    health_check_period_s, health_check_timeout_s: seconds; three failures in a row replace a replica.
    """

    min: int = Field(default=1, ge=0)
    max: int = Field(default=1, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.5, ge=0)
    num_gpus: float = Field(default=0, ge=0)
    torch_threads: int | None = Field(default=None, ge=1)
    max_ongoing_requests: int = Field(default=10_000, ge=16)
    max_events_per_s: float | None = Field(default=None, gt=0)
    graceful_shutdown_timeout_s: float = Field(default=600.0, ge=0)
    health_check_period_s: float = Field(default=5.0, gt=0)
    health_check_timeout_s: float = Field(default=30.0, gt=0)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"replicas.min is {self.min} and replicas.max is {self.max}; min must not be above max")
        if self.tensor_parallel_size > 1:
            self._check_ranks()
        return self

    def _check_ranks(self) -> None:
        if self.num_gpus not in (0, 1):
            raise ValueError(
                f"replicas.num_gpus is {self.num_gpus:g}, for each of {self.tensor_parallel_size} tensor parallel"
                " ranks; a rank drives one GPU whole, so it must be 1, or 0 on the CPU"
            )
        if not self.num_gpus and not self.num_cpus:
            raise ValueError(
                "replicas.num_cpus is 0; Ray places tensor parallel ranks by what they take, so it must be more"
            )

    @property
    def is_autoscaled(self) -> bool:
        return self.min != self.max

    @property
    def least_gpus(self) -> float:
        """GPUs that Ray reserves for `min` replicas together."""
        return self.min * self.tensor_parallel_size * self.num_gpus

    def threads(self) -> int:
        """Gives the torch threads of one rank on this machine."""
        return self.torch_threads or max(1, available_cores() // (self.max * self.tensor_parallel_size))


class AutoscalingSettings(Section):
    """When the fleet grows and shrinks. Whichever target needs the most replicas decides.

    target_first_token_s: seconds of queued prompts that a replica may have before another is asked for; what a reader
        accepts as a wait before the first word.
    target_token_time_s: seconds between two tokens of an answer, which bounds how many requests a replica should
        generate at once; faster than anybody reads.
    target_work_s: seconds of estimated work (queued and running, at the measured speed) one replica may have; about
        what a reader of a stream accepts as a wait.
    target_kv_usage: share of its cache that the requests of a replica may hold; the rest keeps it from preempting.
    target_utilisation: share of its time that a replica should be busy with what arrives, trend included.
    assumed_prefill_tokens_per_s, assumed_decode_tokens_per_s: tokens a second of a replica before it has measured
        itself; a small model on one CPU core.
    startup_s: seconds that a new replica takes until it serves; the trend of arrivals is followed so far ahead.
    upscale_delay_s: seconds the need has to last before a replica is added; long enough to ignore a single burst step.
    downscale_delay_s: seconds of too little work before one is removed; longer, because starting one costs seconds.
    idle_s: seconds without any request before the fleet goes to none, where `replicas.min` is 0.
    wake_timeout_s: seconds that a request waits for the first replica of a fleet that has none; then it gets 503.
    metrics_interval_s: seconds between the numbers a replica sends, and between the numbers of waiting requests.
    look_back_s: seconds after which a number of a silent replica is forgotten.
    """

    target_first_token_s: float = Field(default=2.0, gt=0)
    target_token_time_s: float = Field(default=0.2, gt=0)
    target_work_s: float = Field(default=10.0, gt=0)
    target_kv_usage: float = Field(default=0.9, gt=0, le=1)
    target_utilisation: float = Field(default=0.8, gt=0, le=1)
    assumed_prefill_tokens_per_s: float = Field(default=500.0, gt=0)
    assumed_decode_tokens_per_s: float = Field(default=100.0, gt=0)
    startup_s: float = Field(default=30.0, ge=0)
    upscale_delay_s: float = Field(default=2.0, ge=0)
    downscale_delay_s: float = Field(default=60.0, ge=0)
    idle_s: float = Field(default=300.0, ge=0)
    wake_timeout_s: float = Field(default=120.0, gt=0)
    metrics_interval_s: float = Field(default=0.5, gt=0)
    look_back_s: float = Field(default=2.0, gt=0)


class RoutingSettings(Section):
    """How requests find their replica.

    policy: prefix goes by the estimated time until the first token and the last, less what the replica has of the
        prompt in its cache; work does not look at caches; power_of_two takes the one with fewer requests of two at
        random, and round_robin one after the other, both for comparison.
    num_routers: replicas of the router itself; two keep the door open while one is replaced. One carries more than a
        thousand messages a second.
    stats_period_s: seconds between two reports of a replica's load to the routers; below 0.2 they come no faster and
        only cost Serve's controller more.
    max_told_prefixes: names of cached prefixes in such a report, four bytes each; the newest, and of long prefixes
        those at a few depths. 0 tells none.
    """

    policy: Literal["work", "prefix", "power_of_two", "round_robin"] = "prefix"
    num_routers: int = Field(default=1, ge=1)
    stats_period_s: float = Field(default=0.2, gt=0)
    max_told_prefixes: int = Field(default=512, ge=0, le=16384)


class ResumeSettings(Section):
    """What becomes of a request whose replica dies, falls silent or drains before it has ended.

    silent_after_s: seconds without a heartbeat after which a replica counts as silent, and its streams without news for
        as long go on elsewhere; three missed heartbeats (`weights.heartbeat_interval_s`).
    on_version_gone: where no replica serves the weights that drew a request's tokens so far: continue with those that
        are served (the answer's weight versions say so), wait for the old ones, or fail.
    version_wait_s: how long to wait for them.
    max_attempts: attempts in a row without a new token; then the request fails with what became of the last one.
        A replica that drains or has no place costs none.
    """

    silent_after_s: float = Field(default=3.0, gt=0)
    on_version_gone: Literal["continue", "wait", "fail"] = "continue"
    version_wait_s: float = Field(default=30.0, ge=0)
    max_attempts: int = Field(default=8, ge=1)


class WeightSettings(Section):
    """Deadlines of a weight swap, all in seconds, and where the committed version is kept.

    fetch_timeout_s: for fetching weights from a hub, before their swap has its turn; a model of 150 GB at 50 MB/s.
    stage_timeout_s: for reading and checking new weights on every replica; a slow shared disk needs minutes.
    commit_timeout_s: for the pause and the exchange on every replica; a step is short, so this only ends hangs.
    finish_timeout_s: for requests that a swap lets finish first, where it names no time of its own; then it is refused.
    lease_s: after which a replica that stands still for a swap, and has not voted, resumes without its controller.
    converge_timeout_s: after which a replica that is still behind the committed version is ended, so that Serve starts
        another at that version; long enough to read the weights again.
    drain_s: between leading requests away from a replica and pausing it, in a rolling swap; two reports to the routers.
    undo_folder: absolute path of a folder of each replica's machine, for what a swap overwrites where memory is too
        short to hold new weights beside the old ones; that swap reads them inside its pause. None refuses it, and
        tensor parallel ranks cannot do it.
    heartbeat_interval_s: between two reports of a replica to the controller.
    forget_after_s: after which a silent replica is no longer expected to answer; a few missed heartbeats.
    folder: absolute path of an existing folder for the manifest of committed versions, one for each application, on a
        disk that every machine which may run the controller sees. None keeps them in memory: they are lost when
        controller and replicas all end.
    history_versions: earlier versions that are remembered for rollback, beside the model the application was started
        with; sixteen are more than anybody tries by hand.
    store: absolute path of an existing folder for weights that come as tensors, on a disk that every replica sees; each
        application has a folder in it, for each manifest, or where `folder` is None for each Ray cluster: what an ended
        cluster left is for you to remove. None is `store` in `folder`, and without `folder` a temporary one of the
        controller's machine: replicas elsewhere cannot read that, and it may not outlive the machine.
    history_bytes: how much the store keeps in all; the oldest versions go first, and the committed one never. 64 GiB is
        a hundred versions of a small model, one of a large one.
    session_bytes: how much swap sessions that are open may have sent together; a trainer that sends without end must
        not fill a disk that others use.
    """

    fetch_timeout_s: float = Field(default=3600.0, gt=0)
    stage_timeout_s: float = Field(default=600.0, gt=0)
    commit_timeout_s: float = Field(default=60.0, gt=0)
    finish_timeout_s: float = Field(default=300.0, gt=0)
    lease_s: float = Field(default=10.0, gt=0)
    converge_timeout_s: float = Field(default=300.0, gt=0)
    drain_s: float = Field(default=0.5, ge=0)
    undo_folder: str | None = Field(default=None, min_length=1)
    heartbeat_interval_s: float = Field(default=1.0, gt=0)
    forget_after_s: float = Field(default=5.0, gt=0)
    folder: str | None = None
    history_versions: int = Field(default=16, ge=1)
    store: str | None = Field(default=None, min_length=1)
    history_bytes: int = Field(default=64 * 2**30, ge=0)
    session_bytes: int = Field(default=2**40, ge=1)

    @field_validator("folder", "store", "undo_folder")
    @classmethod
    def _check_folder(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not Path(value).is_absolute():
            raise ValueError(f"weights.{info.field_name} is {value!r}; it must be absolute, as other processes use it")
        return value

    def store_folder(self, application: str, *, owner: str) -> Path:
        """Gives the folder of the store; see `store`. owner: who has the history of what is kept there."""
        if self.store is None and self.folder is not None:
            return Path(self.folder) / "store"
        # One for each application of each history, as each removes what it needs no more.
        name = f"{quote(application, safe='')}-{owner}"
        if self.store is not None:
            return Path(self.store) / name
        return Path(tempfile.gettempdir()) / f"pitstop-store-{os.getuid()}-{name}"

    @property
    def named_folders(self) -> dict[str, str]:
        """The folders that have to be there, by the names of their settings."""
        named = {"folder": self.folder, "store": self.store, "undo_folder": self.undo_folder}
        return {f"weights.{name}": place for name, place in named.items() if place is not None}

    @property
    def is_store_durable(self) -> bool:
        """Whether the store is where the user said, and not a temporary folder of one machine."""
        return self.store is not None or self.folder is not None


class MetricsSettings(Section):
    """What `GET /metrics` and Ray's metrics agent show.

    buckets: other upper bounds of histograms, ascending, in place of those of `serve_app/metrics.py`: `latency` and
        `token_latency` of requests and tokens, `pause` of swaps, in seconds; `length` of prompts and answers, in
        tokens.
    ray_interval_s: seconds between two copies to Ray's metrics agent, which itself reports every ten; None sends none.
    """

    buckets: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    ray_interval_s: float | None = Field(default=5.0, ge=1)

    @field_validator("buckets")
    @classmethod
    def _check_buckets(cls, value: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        for name, bounds in value.items():
            if name not in BUCKET_NAMES:
                raise ValueError(
                    f"metrics.buckets.{name} is not a setting; it must be one of {', '.join(BUCKET_NAMES)}"
                )
            if not bounds or list(bounds) != sorted(set(bounds)) or bounds[0] <= 0:
                raise ValueError(f"metrics.buckets.{name} is {list(bounds)}; bounds must be positive and ascending")
        return value


class LimitSettings(Section):
    """What one application takes on at most.

    max_queued_requests: requests that may wait in one replica's engine; then callers get 429. Never unlimited here.
    max_queued_tokens: tokens of prompts and expected answers that may wait in line at a router; a tenant with less than
        its share of them may go beyond, up to twice as many. A million are half an hour of a replica on a small GPU.
    request_timeout_s: seconds a request may take in all, streaming included; its own `timeout` may be shorter.
    version_wait_s: seconds a request waits for the weight version it asks for at least, its own time permitting; 0
        refuses it at once. A swap of a small model takes a second, and a trainer that asks for the next version asks
        shortly before its commit.
    max_body_bytes: size of an HTTP body; 8 MiB is far above any prompt that fits a model.
    max_json_depth: levels of a body; a JSON schema inside of one has a dozen.
    max_choices: answers of one request, `n` for each of its prompts; OpenAI takes 128.
    max_tenant_requests: requests that one tenant may have under way at a router; None is as many as it likes. A tenant
        is what the file of keys says, else the request's `user`; requests of neither share one.
    max_tenant_queued_tokens: tokens of prompts that one tenant may have waiting there; None is any number. A single
        request may always wait.
    max_stop_strings: entries of `stop`; OpenAI takes 4, and each is compared at every token.
    max_listed: entries of logit_bias, of bad_words and of stop_token_ids.
    max_text_characters: of a text that may have more tokens than the model's length: one to tokenize, or a prompt that
        truncate_prompt_tokens cuts; 4 a token of that length where this is more. A million are 1 s of a core.
    max_prompt_logprobs: log-probabilities of prompts in one answer, in all of its choices: a million are 70 MB of JSON,
        or the 20 most likely tokens of a prompt of 47,000.
    """

    max_queued_requests: int = Field(default=512, ge=1)
    max_queued_tokens: int = Field(default=1_000_000, ge=1)
    request_timeout_s: float = Field(default=600.0, gt=0)
    version_wait_s: float = Field(default=30.0, ge=0)
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    max_json_depth: int = Field(default=64, ge=8)
    max_choices: int = Field(default=128, ge=1, le=1024)
    max_tenant_requests: int | None = Field(default=None, ge=1)
    max_tenant_queued_tokens: int | None = Field(default=None, ge=1)
    max_stop_strings: int = Field(default=16, ge=1)
    max_listed: int = Field(default=1024, ge=1)
    max_text_characters: int = Field(default=1_000_000, ge=1024)
    max_prompt_logprobs: int = Field(default=1_000_000, ge=1)


class AppSettings(Section):
    """One application, whole.

    model: a local folder, a hub id, or the name of the default model (see `model_store`).
    served_model_name: the name clients use; None is the last part of `model`.
    dtype: "auto" takes the checkpoint's on a GPU and float32 on a CPU.
    device: "auto" is the GPU when there is one, else the CPU; or "cpu", "cuda" or "cuda:0" by name.
    max_model_len: tokens of prompt and output together; None is what the model and the cache allow.
    seed: makes requests without a seed repeatable; None draws one at every start.
    trust_remote_code: run code that comes with the model; off, because it is somebody else's code.
    engine: knobs of the engine.
    workload_hints: what is known of the traffic; sizes the cache.
    tool_parser: how the model writes calls of tools; None is what its chat template shows. With hermes, tools are told
        in the system message where the template knows none.
    reasoning_parser: think takes reasoning in <think> tags out of the answer, none leaves all in it; None is what the
        chat template shows.
    admin_key_file: file holding the admin key; the environment's PITSTOP_ADMIN_KEY and PITSTOP_ADMIN_KEY_FILE win.
    api_keys_file: file of keys for users, one a line, each with the name of its tenant behind it where it has one; the
        environment's PITSTOP_API_KEYS (with commas between them) and PITSTOP_API_KEYS_FILE win. Files are read again
        when they change. Without keys everybody may ask.
    cors_origins: web pages that may call the API from a browser, as "https://example.org"; none by default, "*" is all.
        Browsers name a page by scheme, host and port alone, so that nothing else would ever match.
    """

    model: str = Field(default=DEFAULT_MODEL, min_length=1)
    served_model_name: str | None = Field(default=None, min_length=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field(default="auto", min_length=1)
    max_model_len: int | None = Field(default=None, ge=1)
    seed: int | None = None
    trust_remote_code: bool = False
    tool_parser: Literal["hermes", "llama3_json", "mistral"] | None = None
    reasoning_parser: Literal["think", "none"] | None = None
    engine: ContinuousBatchingConfig = Field(default_factory=ContinuousBatchingConfig)
    workload_hints: WorkloadHints = Field(default_factory=WorkloadHints)
    replicas: ReplicaSettings = Field(default_factory=ReplicaSettings)
    autoscaling: AutoscalingSettings = Field(default_factory=AutoscalingSettings)
    routing: RoutingSettings = Field(default_factory=RoutingSettings)
    resume: ResumeSettings = Field(default_factory=ResumeSettings)
    weights: WeightSettings = Field(default_factory=WeightSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    admin_key_file: str | None = Field(default=None, min_length=1)
    api_keys_file: str | None = Field(default=None, min_length=1)
    cors_origins: list[str] = Field(default_factory=list)

    @field_validator("engine", mode="before")
    @classmethod
    def _read_engine(cls, value: Any) -> Any:
        # A strict dataclass takes no mapping from its parent, and a config file has nothing else to give.
        if not isinstance(value, Mapping):
            return value
        for name in value:
            if not isinstance(name, str):
                raise ValueError(f"engine.{name} is not a setting")
        return ContinuousBatchingConfig(**value)

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if value != "auto" and DEVICE.fullmatch(value) is None:
            raise ValueError(f"device is {value!r}; it must be auto, cpu, cuda, or one GPU by its number as cuda:0")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: list[str]) -> list[str]:
        for index, origin in enumerate(value):
            if origin != "*" and ORIGIN.fullmatch(origin) is None:
                raise ValueError(
                    f"cors_origins.{index} is {origin!r}; it must be * or scheme, host and maybe port without a path,"
                    " such as https://example.org"
                )
        return value

    @model_validator(mode="after")
    def _check_undo_folder(self) -> Self:
        if self.weights.undo_folder is not None and self.replicas.tensor_parallel_size > 1:
            raise ValueError(
                f"weights.undo_folder is {self.weights.undo_folder!r} with replicas.tensor_parallel_size"
                f" {self.replicas.tensor_parallel_size}; ranks stage new weights beside the old ones and"
                " never read them inside a pause, so leave it out"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name under which clients ask for the model."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def weight_layout(self) -> str:
        """How replicas hold the weights: digests made under another layout cannot be compared."""
        return f"{self.dtype} on {self.device} over {self.replicas.tensor_parallel_size}"

    @property
    def engine_config(self) -> ContinuousBatchingConfig:
        """The engine's knobs with what this application adds: its seed, and a queue that is never unlimited."""
        return replace(
            self.engine,
            seed=self.seed if self.engine.seed is None else self.engine.seed,
            max_queue_size=self.engine.max_queue_size or self.limits.max_queued_requests,
        )

    def admin_key(self) -> str | None:
        """Gives the admin key, the first of several, or None where none is configured.

        Raises ValueError for a key file that cannot be read, and for a key that is too short or that clients could not
        send: each encodes what is not ASCII in its own way.
        """
        return next(iter(parse_keys(self.admin_keys(), what="admin key")), None)

    def admin_keys(self) -> KeySource:
        """Gives where the keys of the admin routes are."""
        text, path = _key_place(ADMIN_KEY_VARIABLE, ADMIN_KEY_FILE_VARIABLE, self.admin_key_file)
        return KeySource(text, path, has_tenants=False)

    def api_keys(self) -> KeySource:
        """Gives where the keys of users are."""
        text, path = _key_place(API_KEYS_VARIABLE, API_KEYS_FILE_VARIABLE, self.api_keys_file)
        return KeySource(text.replace(",", "\n"), path)


def parse_settings(values: Mapping[str, Any]) -> AppSettings:
    """Gives settings from the `args:` of a config file; raises ValueError with one sentence naming what is wrong."""
    try:
        return AppSettings.model_validate(dict(values))
    except ValidationError as error:
        problems = [_describe(problem) for problem in error.errors(include_url=False)]
        raise ValueError("settings: " + "; ".join(problems)) from None


def inherited_environment(*, defaults: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Gives a child's environment: this process's, with `defaults` where it has nothing, and with `added`."""
    return {**defaults, **os.environ, **added}


def available_cores() -> int:
    """Gives the whole cores this process may use: its affinity, cut by a container's quota; at least one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _cgroup_cores(affinity)))


def _cgroup_cores(fallback: int) -> int:
    try:
        quota, period = CGROUP_V2_CPU.read_text().split()
        return fallback if quota == "max" else int(quota) // int(period)
    except (OSError, ValueError):
        return fallback


def _key_place(variable: str, file_variable: str, path: str | None) -> tuple[str, str | None]:
    text = os.environ.get(variable, "").strip()
    return text, None if text else os.environ.get(file_variable) or path


def _describe(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place} is not a setting"
    if problem["type"] in ("model_type", "dataclass_type", "dataclass_exact_type"):
        return f"{place} is {problem['input']!r}; it must be a mapping of settings"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{place} is {problem['input']!r}; {problem['msg'][0].lower()}{problem['msg'][1:]}"
