"""From scores to weights of attention, in the compiler's own language: of a loop with bounds it makes no vectors."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from engine.jit import LEAST_EXPONENT, LOG2_E, POWER_OF_TWO
from engine.matrix_tiles import FLOAT, LANE, LANES, VECTOR, arrays_of, load, looped, spread, store, vector_function

INTEGERS = ir.VectorType(LANE, LANES)
HIDDEN = -1e30
"""A score so low that it counts for nothing."""
EXPONENT_BIAS, EXPONENT_SHIFT = 127, 23
"""Of float32: 2^n is n + 127 from the 23rd bit on."""


@intrinsic
def weigh_row(
    typing: Any,  # noqa: ARG001  # the compiler looks at names and number of what it is given
    scores: Any,
    at: Any,  # noqa: ARG001
    low: Any,  # noqa: ARG001
    high: Any,  # noqa: ARG001
    count: Any,  # noqa: ARG001
    most: Any,  # noqa: ARG001
) -> Any:
    """Compiled, turns scores into e^(score - most), and those before `low` and from `high` on into 0.

    most: the highest so far; NaN counts as none. Gives it anew, and the sum of the weights. scores: flat, of float32.
    count: how many there are, a multiple of LANES and not 0.
    """
    index, pair = types.int64, types.UniTuple(types.float32, 2)  # type: ignore[no-untyped-call]
    return pair(scores, index, index, index, index, types.float32), _emit


def _emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    _, at, low, high, count, most = arguments
    (scores,) = (array.data for array in arrays_of(context, builder, signature, arguments))
    first = builder.gep(scores, [at])
    bounds = [spread(builder, builder.trunc(bound, LANE)) for bound in (low, high)]
    larger = vector_function(builder, "maxnum", 2)

    def find_most(at: Any, held: list[Any]) -> list[Any]:
        place = builder.gep(first, [at])
        hidden = ir.Constant(VECTOR, [HIDDEN] * LANES)
        seen = builder.select(_are_seen(builder, at, bounds), load(builder, place), hidden)
        store(builder, seen, place)
        return [builder.call(larger, [held[0], seen])]

    (found,) = looped(builder, count, [spread(builder, most)], find_most)
    most = _over_lanes(builder, found, lambda one, other: builder.call(larger, [one, other]))
    everywhere = spread(builder, most)

    def weigh(at: Any, held: list[Any]) -> list[Any]:
        place = builder.gep(first, [at])
        weight = _exponential(builder, builder.fsub(load(builder, place), everywhere))
        # What is hidden counts for nothing even where nothing has been seen.
        weight = builder.select(_are_seen(builder, at, bounds), weight, _constant(0.0))
        store(builder, weight, place)
        return [builder.fadd(held[0], weight)]

    (total,) = looped(builder, count, [_constant(0.0)], weigh)
    total = _over_lanes(builder, total, builder.fadd)
    return context.make_tuple(builder, signature.return_type, [most, total])


def _are_seen(builder: Any, at: Any, bounds: list[Any]) -> Any:
    lanes = ir.Constant(INTEGERS, list(range(LANES)))
    here = builder.add(spread(builder, builder.trunc(at, LANE)), lanes)
    return builder.and_(builder.icmp_signed(">=", here, bounds[0]), builder.icmp_signed("<", here, bounds[1]))


def _over_lanes(builder: Any, vector: Any, join: Any) -> Any:
    distance = LANES // 2
    while distance:
        turned = ir.Constant(INTEGERS, [(lane + distance) % LANES for lane in range(LANES)])
        vector = join(vector, builder.shuffle_vector(vector, vector, turned))
        distance //= 2
    return builder.extract_element(vector, ir.Constant(LANE, 0))


def _exponential(builder: Any, x: Any) -> Any:
    """As `jit.exponential`, lane by lane."""
    least = _constant(float(LEAST_EXPONENT))
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    y = builder.fmul(x, _constant(float(LOG2_E)))
    n = builder.call(vector_function(builder, "floor", 1), [builder.fadd(y, _constant(0.5))])
    f = builder.fsub(y, n)
    fma = vector_function(builder, "fma", 3)
    p = _constant(float(POWER_OF_TWO[0]))
    for coefficient in POWER_OF_TWO[1:]:
        p = builder.call(fma, [p, f, _constant(float(coefficient))])
    biased = builder.add(builder.fptosi(n, INTEGERS), ir.Constant(INTEGERS, [EXPONENT_BIAS] * LANES))
    power = builder.shl(biased, ir.Constant(INTEGERS, [EXPONENT_SHIFT] * LANES))
    return builder.fmul(p, builder.bitcast(power, VECTOR))


def _constant(value: float) -> Any:
    return ir.Constant(VECTOR, [ir.Constant(FLOAT, value)] * LANES)
