"""From logits to tokens: every row by its own parameters, whatever else is in the batch."""

from engine.sampling.counter import uniform
from engine.sampling.row_sampler import RowSampler
from engine.sampling.sampler import SampleResult, SamplingRow, sample
from engine.sampling.stop_strings import StopStrings

__all__ = ["RowSampler", "SampleResult", "SamplingRow", "StopStrings", "sample", "uniform"]
