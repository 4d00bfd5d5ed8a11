"""Reinforcement learning in the style of GRPO, with rollouts from a Pitstop fleet.

    python examples/grpo.py                 # two CPU cores, about two minutes

Each step asks the fleet for several answers to every prompt, scores them, takes a few gradient steps on a clipped
policy loss, and swaps the new weights into all replicas while they serve. The policy is a tiny Llama over letters, made
up below, and the reward is the share of vowels in what it writes: with a model and a reward of yours, `main` and
`train` stay as they are.
"""

import argparse
import asyncio
import logging
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from time import perf_counter

import ray
import torch
from ray import serve
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from engine import SamplingParams
from serve_app.app import build_app
from serve_app.client import Completion, Pitstop, connect
from serve_app.settings import parse_settings

PROMPTS = ["the race", "a fast l", "one pit ", "new tyre"]
GROUP_SIZE = 16
"""Answers to one prompt: an answer is good or bad beside the others of its group."""
NUM_NEW_TOKENS = 24
NUM_EPOCHS = 2
"""Gradient steps on the rollouts of one step."""
LEARNING_RATE = 3e-3
CLIP = 0.2


def main() -> None:
    """Starts a fleet of two replicas on this machine, and trains."""
    parser = argparse.ArgumentParser(description="Reinforcement learning with rollouts from a Pitstop fleet.")
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        make_model(folder)
        replicas = {"min": 2, "max": 2, "torch_threads": 1}
        # Weights that come as tensors are kept there, for replicas that start later; here, until the end.
        settings = parse_settings({"model": folder, "replicas": replicas, "weights": {"store": folder}})
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
        try:
            # Rollouts come over the Python handle, so no port is opened.
            serve.start(proxy_location="Disabled")
            serve.run(build_app(settings), name="pitstop")
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            asyncio.run(train(model, connect("pitstop"), steps))
        finally:
            serve.shutdown()
            ray.shutdown()


async def train(model: PreTrainedModel, llm: Pitstop, steps: int) -> None:
    """Runs the loop and prints a line for each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    version = (await llm.status()).committed.version
    for step in range(1, steps + 1):
        started_at = perf_counter()
        rollouts = await draw_rollouts(llm, version)
        rewards = torch.tensor([reward_of(rollout.text) for rollout in rollouts])
        drawn_at = perf_counter()
        parity = update(model, optimizer, rollouts, advantages_of(rewards))
        updated_at = perf_counter()
        async with llm.swap(label=f"step {step}") as swap:
            await swap.put(model.named_parameters())
        version = swap.result.version
        served = {span.version for rollout in rollouts for span in rollout.weight_versions}
        print(
            f"step {step:3}  reward {rewards.mean():.3f}  weights {sorted(served)}  parity {parity:.1e}"
            f"  rollouts {drawn_at - started_at:.1f} s  update {updated_at - drawn_at:.1f} s"
            f"  swap to {version} {perf_counter() - updated_at:.1f} s",
            flush=True,
        )


async def draw_rollouts(llm: Pitstop, version: int) -> list[Completion]:
    """Gives the answers, those to one prompt next to each other, from the weights of the last swap or later."""
    sampling = SamplingParams(
        temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NUM_NEW_TOKENS, eos_token_ids=(), logprobs=True
    )
    prompts = [prompt for prompt in PROMPTS for _ in range(GROUP_SIZE)]
    rollouts = []
    for output in await llm.generate_batch(prompts, sampling, min_weight_version=version):
        if not isinstance(output, Completion):
            raise output
        rollouts.append(output)
    return rollouts


def reward_of(text: str) -> float:
    """Gives the share of vowels."""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """Gives how much better each answer is than the others of its group, in their standard deviations."""
    groups = rewards.view(-1, GROUP_SIZE)
    deviations = groups - groups.mean(dim=1, keepdim=True)
    return (deviations / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollouts: Sequence[Completion], advantages: torch.Tensor
) -> float:
    """Improves the policy; gives the mean difference between its log-probabilities and those of the rollouts before."""
    # Prompts and answers have one length each here, so that nothing has to be padded.
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids for rollout in rollouts])
    drawn = torch.tensor([rollout.logprobs for rollout in rollouts])
    parity = 0.0
    for epoch in range(NUM_EPOCHS):
        logprobs = logprobs_of(model, ids, num_answer_tokens=drawn.shape[1])
        if epoch == 0:
            parity = float((logprobs.detach() - drawn).abs().mean())
        ratios = (logprobs - drawn).exp()
        gains = torch.minimum(ratios * advantages[:, None], ratios.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
        optimizer.zero_grad()
        (-gains.mean()).backward()
        optimizer.step()
    return parity


def logprobs_of(model: PreTrainedModel, ids: torch.Tensor, *, num_answer_tokens: int) -> torch.Tensor:
    """Gives the log-probability of each token of the answers, by one plain forward pass."""
    logits = model(ids).logits[:, -num_answer_tokens - 1 : -1]
    return logits.log_softmax(dim=-1).gather(-1, ids[:, -num_answer_tokens:, None])[:, :, 0]


def make_model(folder: str) -> None:
    """Writes a tiny random Llama that knows the letters a to z and the space."""
    letters = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyzĠ")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(letters) + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=len(letters),
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
