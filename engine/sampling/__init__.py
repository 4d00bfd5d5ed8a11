"""From logits to tokens: every row by its own parameters, whatever else is in the batch."""

from engine.sampling.counter import uniform
from engine.sampling.drawn_step import DrawnRows, DrawnStep, NewTokens
from engine.sampling.prompt_scores import score_prompts
from engine.sampling.row_sampler import RowSampler
from engine.sampling.sampler import Draw, SampleResult, SamplingRow, draw
from engine.sampling.stop_strings import StopStrings

__all__ = [
    "Draw",
    "DrawnRows",
    "DrawnStep",
    "NewTokens",
    "RowSampler",
    "SampleResult",
    "SamplingRow",
    "StopStrings",
    "draw",
    "score_prompts",
    "uniform",
]
