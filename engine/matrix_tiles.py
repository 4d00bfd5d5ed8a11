"""The innermost loop of a matrix product, in the compiler's own language: a tile of sums that never leaves registers.

Of a loop in Python numba makes vectors, and yet keeps the sums in memory; this reaches what the processor can multiply.
"""

from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

FLOAT, INDEX, LANE = ir.FloatType(), ir.IntType(64), ir.IntType(32)

FEATURES = binding.get_host_cpu_features()
IS_SUPPORTED = bool(FEATURES.get("fma")) and bool(FEATURES.get("avx512f") or FEATURES.get("avx2"))
"""False where nobody has measured this way of multiplying."""
LANES, HEIGHT = (16, 14) if FEATURES.get("avx512f") else (8, 6)
"""Numbers in a register, and rows of a full tile: with what they are multiplied of they fill all 32 or 16 registers."""
VECTORS = 2
PANEL = LANES * VECTORS
"""Columns of a tile."""
ROWS_A_POINTER = 3
"""An address is a pointer and once or twice the distance of rows: so a tile takes few registers for addresses."""

VECTOR = ir.VectorType(FLOAT, LANES)


@intrinsic
def add_tile(
    typing: Any,  # noqa: ARG001  # the compiler looks at names and number of what it is given
    rows: Any,
    row: Any,  # noqa: ARG001
    panel: Any,
    first: Any,  # noqa: ARG001
    depth: Any,  # noqa: ARG001
    out: Any,
    at: Any,  # noqa: ARG001
    step: Any,  # noqa: ARG001
    height: Any,  # noqa: ARG001
) -> Any:
    """Compiled, adds the product of some rows and a panel to a tile of `out`.

    rows: M x K, of which `height`, from `row` on, are multiplied; up to HEIGHT. panel: K x PANEL. Of K only `depth`
    numbers are, from `first` on. out: flat; the tile begins at `at`, and a row of it `step` further than the last.
    All three are contiguous float32.
    """
    index = types.int64
    signature = types.void(rows, index, panel, index, index, out, index, index, index)
    return signature, _emit


def _emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    _, row, _, first, depth, _, at, step, height = arguments
    arrays = [
        context.make_array(kind)(context, builder, value)
        for kind, value in zip(signature.args, arguments, strict=True)
        if isinstance(kind, types.Array)
    ]
    width = builder.extract_value(arrays[0].shape, 1)
    start = builder.add(builder.mul(row, width), first)
    source = builder.gep(arrays[0].data, [start])
    weights = builder.gep(arrays[1].data, [builder.mul(first, _index(PANEL))])
    sums = builder.gep(arrays[2].data, [at])
    done = builder.append_basic_block("done")
    choice = builder.switch(height, done)
    for number in range(1, HEIGHT + 1):
        block = builder.append_basic_block(f"tile{number}")
        choice.add_case(_index(number), block)
        builder.position_at_end(block)
        _emit_tile(builder, number, (source, width), (weights, depth), (sums, step))
        builder.branch(done)
    builder.position_at_end(done)
    return context.get_dummy_value()


def _emit_tile(builder: Any, height: int, source: Any, weights: Any, out: Any) -> None:
    """Sums one row of weights after the other, adds that to the tile. Pairs: source, weights and out as above."""
    (first_row, width), (first_weight, depth), (corner, step) = source, weights, out
    starts = [builder.gep(first_row, [builder.mul(width, _index(m))]) for m in range(0, height, ROWS_A_POINTER)]
    before, loop, after = builder.block, builder.append_basic_block("depth"), builder.append_basic_block("store")
    builder.branch(loop)
    builder.position_at_end(loop)
    count = _carried(builder, depth, before)
    weight = _carried(builder, first_weight, before)
    pointers = [_carried(builder, start, before) for start in starts]
    # From zero: numbers are summed by parts of K, and rounding grows with the length of a part.
    sums = [_carried(builder, ir.Constant(VECTOR, [0.0] * LANES), before) for _ in range(height * VECTORS)]
    weights_of_row = [_load(builder, builder.gep(weight, [_index(v * LANES)])) for v in range(VECTORS)]
    added = []
    for m in range(height):
        pointer, further = pointers[m // ROWS_A_POINTER], m % ROWS_A_POINTER
        value = builder.load(builder.gep(pointer, [builder.mul(width, _index(further))]) if further else pointer)
        everywhere = _spread(builder, value)
        sums_of_row = sums[m * VECTORS : (m + 1) * VECTORS]
        for one, total in zip(weights_of_row, sums_of_row, strict=True):
            added.append(builder.call(_fma(builder), [everywhere, one, total]))
    left = builder.sub(count, _index(1))
    count.add_incoming(left, loop)
    weight.add_incoming(builder.gep(weight, [_index(PANEL)]), loop)
    for pointer in pointers:
        # Were it plain to the compiler how a pointer moves, it would keep one for each row, and most of them in memory.
        pointer.add_incoming(_hidden(builder, builder.gep(pointer, [_index(1)])), loop)
    for value, result in zip(sums, added, strict=True):
        value.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed(">", left, _index(0)), loop, after)
    builder.position_at_end(after)
    for i, result in enumerate(added):
        column = _index(i % VECTORS * LANES)
        place = builder.gep(corner, [builder.add(builder.mul(step, _index(i // VECTORS)), column)])
        builder.store(
            builder.fadd(_load(builder, place), result), builder.bitcast(place, VECTOR.as_pointer())
        ).align = 4


def _index(value: int) -> Any:
    return ir.Constant(INDEX, value)


def _carried(builder: Any, start: Any, before: Any) -> Any:
    phi = builder.phi(start.type)
    phi.add_incoming(start, before)
    return phi


def _load(builder: Any, place: Any) -> Any:
    loaded = builder.load(builder.bitcast(place, VECTOR.as_pointer()))
    loaded.align = 4
    return loaded


def _spread(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(LANE, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(LANE, LANES), [0] * LANES))


def _fma(builder: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    insert: Any = cgutils.get_or_insert_function
    return insert(builder.module, kind, f"llvm.fma.v{LANES}f32")


def _hidden(builder: Any, pointer: Any) -> Any:
    kind = ir.FunctionType(pointer.type, [pointer.type])
    return builder.call(ir.InlineAsm(kind, "", "=r,0"), [pointer])
