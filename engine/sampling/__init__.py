"""From logits to tokens: every row by its own parameters, whatever else is in the batch."""

from engine.sampling.counter import uniform
from engine.sampling.sampler import SampleResult, SamplingRow, sample

__all__ = ["SampleResult", "SamplingRow", "sample", "uniform"]
