"""Products of one row with many, in the compiler's own language: as many rows at once as a register has lanes.

A sum over the lanes of a register costs as much as the products before it; of LANES registers at once it costs a third,
and rows that are turned, for many others to be multiplied with, need none.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from engine.matrix_tiles import (
    LANE,
    LANES,
    LINE_NUMBERS,
    PANEL,
    ROWS_A_POINTER,
    VECTOR,
    arrays_of,
    hidden,
    index,
    load,
    looped,
    prefetch,
    store,
    vector_function,
)


@intrinsic
def dot_rows(
    typing: Any,  # noqa: ARG001  # the compiler looks at names and number of what it is given
    one: Any,
    one_at: Any,  # noqa: ARG001
    rows: Any,
    rows_at: Any,  # noqa: ARG001
    step: Any,  # noqa: ARG001
    width: Any,  # noqa: ARG001
    out: Any,
    out_at: Any,  # noqa: ARG001
) -> Any:
    """Compiled, writes the products of one row with each of LANES others, which are `step` apart.

    width: a multiple of LANES, and not 0. The arrays are flat, of float32.
    """
    number = types.int64
    return types.void(one, number, rows, number, number, number, out, number), _emit_dots


@intrinsic
def turn_rows(
    typing: Any,  # noqa: ARG001
    rows: Any,
    rows_at: Any,  # noqa: ARG001
    step: Any,  # noqa: ARG001
    width: Any,  # noqa: ARG001
    out: Any,
    out_at: Any,  # noqa: ARG001
) -> Any:
    """Compiled, writes LANES rows as columns of a panel, whose rows are PANEL apart; otherwise like `dot_rows`."""
    number = types.int64
    return types.void(rows, number, number, number, out, number), _emit_turn


@intrinsic
def fetch(typing: Any, numbers: Any, at: Any, count: Any) -> Any:  # noqa: ARG001
    """Compiled, has the processor fetch numbers of a flat array that will be read soon; not 0 of them."""
    return types.void(numbers, types.int64, types.int64), _emit_fetch


def _emit_dots(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    _, one_at, _, rows_at, step, width, _, out_at = arguments
    one, rows, out = (array.data for array in arrays_of(context, builder, signature, arguments))
    first = builder.gep(one, [one_at])
    zeros = [ir.Constant(VECTOR, [0.0] * LANES)] * LANES
    pointers = _pointers(builder, builder.gep(rows, [rows_at]), step)

    def add(at: Any, held: list[Any]) -> list[Any]:
        pointers, sums = held[:-LANES], held[-LANES:]
        factor, fma = load(builder, builder.gep(first, [at])), vector_function(builder, "fma", 3)
        loaded = [load(builder, place) for place in _places(builder, pointers, step)]
        added = [builder.call(fma, [one, factor, total]) for one, total in zip(loaded, sums, strict=True)]
        return _further(builder, pointers) + added

    sums = looped(builder, width, pointers + zeros, add)[-LANES:]
    store(builder, _lane_sums(builder, sums), builder.gep(out, [out_at]))
    return context.get_dummy_value()


def _emit_turn(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    _, rows_at, step, width, _, out_at = arguments
    rows, out = (array.data for array in arrays_of(context, builder, signature, arguments))
    corner = builder.gep(out, [out_at])

    def turn(at: Any, pointers: list[Any]) -> list[Any]:
        loaded = [load(builder, place) for place in _places(builder, pointers, step)]
        for m, column in enumerate(_turned(builder, loaded)):
            place = builder.mul(builder.add(at, index(m)), index(PANEL))
            store(builder, column, builder.gep(corner, [place]))
        return _further(builder, pointers)

    looped(builder, width, _pointers(builder, builder.gep(rows, [rows_at]), step), turn)
    return context.get_dummy_value()


def _emit_fetch(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    _, at, count = arguments
    (numbers,) = (array.data for array in arrays_of(context, builder, signature, arguments))
    first = builder.gep(numbers, [at])

    def ask(at: Any, _: list[Any]) -> list[Any]:
        for line in range(0, LANES, LINE_NUMBERS):
            prefetch(builder, builder.gep(first, [builder.add(at, index(line))]))
        return []

    looped(builder, count, [], ask)
    return context.get_dummy_value()


def _pointers(builder: Any, corner: Any, step: Any) -> list[Any]:
    return [builder.gep(corner, [builder.mul(step, index(m))]) for m in range(0, LANES, ROWS_A_POINTER)]


def _places(builder: Any, pointers: list[Any], step: Any) -> list[Any]:
    """Gives where LANES rows are, by few pointers: see `matrix_tiles`."""
    rows = [divmod(m, ROWS_A_POINTER) for m in range(LANES)]
    return [
        builder.gep(pointers[which], [builder.mul(step, index(more))]) if more else pointers[which]
        for which, more in rows
    ]


def _further(builder: Any, pointers: list[Any]) -> list[Any]:
    return [hidden(builder, builder.gep(pointer, [index(LANES)])) for pointer in pointers]


def _lane_sums(builder: Any, registers: list[Any]) -> Any:
    """Gives the lane sums of LANES registers in one: two are added at a time, neighbour to neighbour."""
    while len(registers) > 1:
        pairs = zip(registers[::2], registers[1::2], strict=True)
        registers = [
            builder.fadd(_picked(builder, pair, range(0, 2 * LANES, 2)), _picked(builder, pair, range(1, 2 * LANES, 2)))
            for pair in pairs
        ]
    return registers[0]


def _turned(builder: Any, registers: list[Any]) -> list[Any]:
    """Gives LANES registers with rows and columns exchanged: each round shuffles the halves into each other."""
    low, high = ([lane + half for i in range(LANES // 2) for lane in (i, i + LANES)] for half in (0, LANES // 2))
    for _ in range(LANES.bit_length() - 1):
        pairs = zip(registers[: LANES // 2], registers[LANES // 2 :], strict=True)
        registers = [_picked(builder, pair, lanes) for pair in pairs for lanes in (low, high)]
    return registers


def _picked(builder: Any, pair: tuple[Any, Any], lanes: Any) -> Any:
    return builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(LANE, LANES), list(lanes)))
