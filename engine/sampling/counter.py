"""Random numbers without state: a pure function of a seed and a position.

The generator is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014): its
output function is applied to the seed, and once more to the position-th state of the stream that starts there.
"""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
"""The odd integer nearest to 2**64 over the golden ratio: SplitMix64's increment."""
_UNIT = 2.0**-53
"""A double holds 53 bits; all of them are used."""


def uniform(seed: int, position: int) -> float:
    """Gives a number in [0, 1), the same for the same pair on every machine; `seed` counts modulo 2**64."""
    start = _mix(seed & _MASK)
    return (_mix((start + _GAMMA * (position + 1)) & _MASK) >> 11) * _UNIT


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
