"""What a replica observes of each request."""

from prometheus_client.parser import text_string_to_metric_families

from engine import FinishReason, GenerationOutput, RequestStatus
from serve_app.messages import GenerateRequest
from serve_app.metrics import REPLICA_METRICS, Recorder
from serve_app.request_timer import RequestTimer
from serve_app.streams import TokenStream


async def observed(*outputs: GenerationOutput) -> dict[str, float]:
    """The counts and sums of the histograms that have any, after each output was read on its own."""
    recorder = Recorder(REPLICA_METRICS)
    stream = TokenStream(GenerateRequest("a", [1, 2, 3]), replica_id="r")
    timer = RequestTimer(recorder, stream, replica="0")
    for output in outputs:
        stream.deliver(output)
        timer.take(await stream.read())
    return {
        sample.name.removeprefix("pitstop_"): sample.value
        for family in text_string_to_metric_families(recorder.expose())
        for sample in family.samples
        if sample.name.endswith(("_count", "_sum")) and sample.value > 0
    }


async def test_every_histogram_of_a_request_is_observed() -> None:
    found = await observed(
        GenerationOutput("a", new_tokens=[7], created_time=10.0, lifespan=(10.5, -1.0)),
        GenerationOutput(
            "a",
            new_tokens=[8, 9],
            status=RequestStatus.FINISHED,
            finish_reason=FinishReason.STOP,
            lifespan=(10.5, 12.0),
        ),
    )
    counts = {name.removesuffix("_count") for name, value in found.items() if name.endswith("_count") and value == 1}
    assert counts == {
        "replica_first_token_seconds",
        "inter_token_seconds",
        "replica_generation_seconds",
        "time_per_output_token_seconds",
        "replica_queue_seconds",
        "request_prompt_tokens",
        "request_generated_tokens",
    }
    assert (found["replica_queue_seconds_sum"], found["request_prompt_tokens_sum"]) == (0.5, 3)
    assert found["request_generated_tokens_sum"] == 3


async def test_a_request_that_ends_without_a_token_has_no_token_times() -> None:
    cancelled = GenerationOutput("a", status=RequestStatus.CANCELLED, finish_reason=FinishReason.CANCELLED)
    counts = {name for name in await observed(cancelled) if name.endswith("_count")}
    assert counts == {
        "replica_generation_seconds_count",
        "request_prompt_tokens_count",
        "request_generated_tokens_count",
    }
