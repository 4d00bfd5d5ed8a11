"""How far log-probabilities of rollouts are from those of a trainer's own forward pass over the same tokens.

    python -m benchmarks.parity

The rollouts are drawn at temperature 1 from prompts that share a prefix, all at once, through chunked prefill and the
prefix cache; half-way the weights are swapped. The trainer is a second copy of the model, loaded by transformers, one
plain forward pass a sequence, with the weights of the version that drew each token. How far the trainer is from itself,
when it computes four sequences in one batch, is the measure of what can be expected.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from time import sleep

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.workload import default_model
from engine import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationOutput, SamplingParams, load_model

SHARED_TOKENS = 64
"""Of every prompt; whole pages, so that all but the first prompts find them in the cache."""
MAX_BATCH_TOKENS = 128
"""Below the longest prompt, so that it is computed in chunks."""
CHANGE = 0.02
"""By which the second version's weights differ, in parts of their spread: a large step of a trainer."""
BATCH = 4
"""Sequences that the trainer computes together to be compared with itself."""
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Differences:
    """Between rollout and trainer, over all tokens drawn under one version, in nats."""

    version: int
    absolute: torch.Tensor
    num_cached_tokens: int
    trainers_own: float
    """Mean, between the trainer's forward pass over one sequence and over a batch of them."""

    @property
    def mean(self) -> float:
        return float(self.absolute.mean())

    @property
    def largest(self) -> float:
        return float(self.absolute.max())


def main() -> None:
    """Prints a table, a line for each version and dtype."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a folder or hub id; the default model when not given")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each")
    parser.add_argument("--dtype", choices=DTYPES, help="both when not given")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"Load of the machine at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("\n| dtype | in flight at the swap | version | tokens | mean difference | largest | the trainer's own mean |")
    print("|---|---|---|---|---|---|---|")
    for dtype in [arguments.dtype] if arguments.dtype else DTYPES:
        for in_flight in ("recompute", "keep"):
            for found in measure(
                arguments.model or default_model(),
                dtype=dtype,
                in_flight=in_flight,
                num_prompts=arguments.prompts,
                num_new_tokens=arguments.tokens,
            ):
                print(
                    f"| {dtype} | {in_flight} | {found.version} | {len(found.absolute)} | {found.mean:.1e} |"
                    f" {found.largest:.1e} | {found.trainers_own:.1e} |",
                    flush=True,
                )


def measure(
    path: str, *, dtype: str, in_flight: str, num_prompts: int, num_new_tokens: int, longest_prompt: int = 256
) -> list[Differences]:
    """Gives the differences of the tokens drawn before the swap, and of those drawn after it."""
    trainers = [_trainer(path, dtype), _trainer(path, dtype)]
    _change(trainers[1])
    with TemporaryDirectory() as folder:
        trainers[1].save_pretrained(folder)
        prompts = draw_prompts(trainers[0].config.vocab_size, num_prompts, longest_prompt)
        outputs = _rollouts(load_model(path, dtype=dtype), folder, prompts, in_flight, num_new_tokens)
    return [_differences(outputs, trainer, version) for version, trainer in enumerate(trainers, start=1)]


def draw_prompts(vocab_size: int, num_prompts: int, longest: int) -> list[list[int]]:
    """Gives random ids after a prefix that all share, in lengths spread evenly."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(vocab_size, (SHARED_TOKENS,), generator=generator).tolist()
    lengths = torch.linspace(SHARED_TOKENS + 1, longest, num_prompts).long() - SHARED_TOKENS
    return [shared + torch.randint(vocab_size, (int(n),), generator=generator).tolist() for n in lengths]


def trainer_logprobs(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Gives the log-probability of each token after the prompt, by one plain forward pass."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        # The last token predicts nothing that was drawn.
        logits_TV = model(ids).logits[0, len(prompt) - 1 : -1]
    return logits_TV.float().log_softmax(dim=-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def batched_logprobs(model: PreTrainedModel, outputs: Sequence[GenerationOutput]) -> list[torch.Tensor]:
    """Gives the same for several sequences by one forward pass, padded on the right, as trainers batch them."""
    rows = [torch.tensor([*output.prompt_ids, *output.generated_tokens]) for output in outputs]
    with torch.inference_mode():
        # Under causal attention what stands on the right is not seen, so that no mask is needed.
        logits_BTV = model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits
    found = []
    for logits_TV, output in zip(logits_BTV, outputs, strict=True):
        start, tokens = len(output.prompt_ids) - 1, torch.tensor(output.generated_tokens)
        logprobs_TV = logits_TV[start : start + len(tokens)].float().log_softmax(dim=-1)
        found.append(logprobs_TV.gather(-1, tokens[:, None])[:, 0])
    return found


def _rollouts(
    model: PreTrainedModel, folder: str, prompts: Sequence[list[int]], in_flight: str, num_new_tokens: int
) -> list[GenerationOutput]:
    """Draws all answers, the weights swapped for those in the folder when a third of the tokens are there.

    The first prompt alone comes first, so that the others find what they share with it.
    """
    config = ContinuousBatchingConfig(page_size=16, num_blocks=1024, max_batch_tokens=MAX_BATCH_TOKENS)
    sampling = SamplingParams(
        temperature=1.0, top_k=0, top_p=1.0, seed=1, max_new_tokens=num_new_tokens, eos_token_ids=(), logprobs=True
    )
    manager = ContinuousBatchingManager(model, continuous_batching_config=config)
    manager.start()
    try:
        first = _result(manager, manager.add_request(prompts[0], sampling=sampling))
        before = manager.stats().generated_tokens_total
        staged = manager.stage_weights(folder)
        ids = [manager.add_request(prompt, sampling=sampling) for prompt in prompts[1:]]
        while manager.stats().generated_tokens_total - before < len(ids) * num_new_tokens / 3:
            sleep(0.001)
        manager.commit_weights(staged, in_flight=in_flight)
        late = _result(manager, manager.add_request(prompts[0], sampling=sampling))
        return [first, *(_result(manager, request_id) for request_id in ids), late]
    finally:
        manager.stop(hard_stop=True)


def _result(manager: ContinuousBatchingManager, request_id: str | None) -> GenerationOutput:
    output = manager.get_result(request_id)
    assert output is not None
    assert output.error is None, output.error
    return output


def _differences(outputs: Sequence[GenerationOutput], trainer: PreTrainedModel, version: int) -> Differences:
    parts, num_cached_tokens = [], 0
    for output in outputs:
        spans = [span for span in output.weight_versions if span.version == version]
        if not spans:
            continue
        num_cached_tokens += output.num_cached_tokens
        expected = trainer_logprobs(trainer, output.prompt_ids, output.generated_tokens)
        difference = (torch.tensor(output.logprobs) - expected).abs()
        parts += [difference[span.start : span.end] for span in spans]
    own = [
        (together - trainer_logprobs(trainer, output.prompt_ids, output.generated_tokens)).abs()
        for together, output in zip(batched_logprobs(trainer, outputs[:BATCH]), outputs[:BATCH], strict=True)
    ]
    return Differences(version, torch.cat(parts), num_cached_tokens, float(torch.cat(own).mean()))


def _trainer(path: str, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


def _change(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                noise = torch.randn(weights.shape, generator=generator).to(weights.dtype)
                weights.add_(noise * (CHANGE * weights.float().std()).to(weights.dtype))


if __name__ == "__main__":
    main()
