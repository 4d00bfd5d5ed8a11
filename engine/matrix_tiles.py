"""The innermost loop of a matrix product, in the compiler's own language: a tile of sums that never leaves registers.

Of a loop in Python numba makes vectors, and yet keeps the sums in memory; this reaches what the processor can multiply.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

FLOAT, INDEX, LANE, BYTE = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8)

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

LINE_NUMBERS = 16
"""Of float32 in a line of the processor's caches: 64 bytes on all that have AVX2."""
FOR_READING, NEARLY_EVERYWHERE, DATA = 0, 2, 1
"""What the compiler's prefetch wants to know: the second level of the caches, since the first holds little."""

VECTOR = ir.VectorType(FLOAT, LANES)
ALIGNMENT = 4
"""Of numbers in memory, in bytes: arrays begin anywhere."""


@intrinsic
def add_tile(
    typing: Any,  # noqa: ARG001  # the compiler looks at names and number of what it is given
    rows: Any,
    row_at: Any,  # noqa: ARG001
    row_step: Any,  # noqa: ARG001
    panel: Any,
    panel_at: Any,  # noqa: ARG001
    panel_step: Any,  # noqa: ARG001
    depth: Any,  # noqa: ARG001
    out: Any,
    out_at: Any,  # noqa: ARG001
    out_step: Any,  # noqa: ARG001
    height: Any,  # noqa: ARG001
    ahead: Any,
    ahead_at: Any,  # noqa: ARG001
    ahead_step: Any,  # noqa: ARG001
) -> Any:
    """Compiled, adds the product of some rows and a panel to a tile of `out`.

    rows, height x depth with height up to HEIGHT, panel, depth x PANEL, and the tile, height x PANEL, lie in flat
    arrays of float32: they begin at `at`, and each of their rows is `step` further than the last.
    """
    number = types.int64
    signature = types.void(
        rows, number, number, panel, number, number, number, out, number, number, number, ahead, number, number
    )
    return signature, _emit


def _emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    _, row_at, row_step, _, panel_at, panel_step, depth, _, out_at, out_step, height, _, ahead_at, ahead_step = (
        arguments
    )
    rows, panel, out, ahead = (array.data for array in arrays_of(context, builder, signature, arguments))
    pairs = (rows, row_at), (panel, panel_at), (out, out_at), (ahead, ahead_at)
    places = [builder.gep(array, [at]) for array, at in pairs]
    builder.call(_function(builder.module), [*places, row_step, panel_step, out_step, ahead_step, depth, height])
    return context.get_dummy_value()


def _function(module: Any) -> Any:
    """Gives the compiler's function for tiles of every height: one for all who call it, or each would compile them."""
    name = f"pitstop_add_tile_{HEIGHT}x{PANEL}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [FLOAT.as_pointer()] * 4 + [INDEX] * 6), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    rows, panel, out, ahead, row_step, panel_step, out_step, ahead_step, depth, height = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    done = builder.append_basic_block("done")
    choice = builder.switch(height, done)
    for number in range(1, HEIGHT + 1):
        block = builder.append_basic_block(f"tile{number}")
        choice.add_case(index(number), block)
        builder.position_at_end(block)
        weights = panel, panel_step, depth
        _emit_tile(builder, number, (rows, row_step), weights, (out, out_step), (ahead, ahead_step))
        builder.branch(done)
    builder.position_at_end(done)
    builder.ret_void()
    return function


def arrays_of(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """Gives the arrays among the arguments of an intrinsic."""
    given = zip(signature.args, arguments, strict=True)
    return [context.make_array(kind)(context, builder, value) for kind, value in given if isinstance(kind, types.Array)]


def _emit_tile(builder: Any, height: int, source: Any, weights: Any, out: Any, later: Any) -> None:
    """Sums one row of weights after the other, adds that to the tile: each given by its corner and its step."""
    (first_row, row_step), (first_weight, weight_step, depth), (corner, step) = source, weights, out
    first_later, later_step = later
    starts = [builder.gep(first_row, [builder.mul(row_step, index(m))]) for m in range(0, height, ROWS_A_POINTER)]
    before, loop, after = builder.block, builder.append_basic_block("depth"), builder.append_basic_block("store")
    builder.branch(loop)
    builder.position_at_end(loop)
    count = carried(builder, depth, before)
    weight = carried(builder, first_weight, before)
    pointers = [carried(builder, start, before) for start in starts]
    soon = carried(builder, first_later, before)
    # From zero: numbers are summed by parts of K, and rounding grows with the length of a part.
    sums = [carried(builder, ir.Constant(VECTOR, [0.0] * LANES), before) for _ in range(height * VECTORS)]
    weights_of_row = [load(builder, builder.gep(weight, [index(v * LANES)])) for v in range(VECTORS)]
    added = []
    for m in range(height):
        pointer, further = pointers[m // ROWS_A_POINTER], m % ROWS_A_POINTER
        value = builder.load(builder.gep(pointer, [builder.mul(row_step, index(further))]) if further else pointer)
        everywhere = spread(builder, value)
        sums_of_row = sums[m * VECTORS : (m + 1) * VECTORS]
        for one, total in zip(weights_of_row, sums_of_row, strict=True):
            added.append(builder.call(vector_function(builder, "fma", 3), [everywhere, one, total]))
    for line in range(0, PANEL, LINE_NUMBERS):
        prefetch(builder, builder.gep(soon, [index(line)]))
    soon.add_incoming(builder.gep(soon, [later_step]), loop)
    left = builder.sub(count, index(1))
    count.add_incoming(left, loop)
    weight.add_incoming(builder.gep(weight, [weight_step]), loop)
    for pointer in pointers:
        # Were it plain to the compiler how a pointer moves, it would keep one for each row, and most of them in memory.
        pointer.add_incoming(hidden(builder, builder.gep(pointer, [index(1)])), loop)
    for value, result in zip(sums, added, strict=True):
        value.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed(">", left, index(0)), loop, after)
    builder.position_at_end(after)
    for i, result in enumerate(added):
        column = index(i % VECTORS * LANES)
        place = builder.gep(corner, [builder.add(builder.mul(step, index(i // VECTORS)), column)])
        store(builder, builder.fadd(load(builder, place), result), place)


def prefetch(builder: Any, place: Any) -> None:
    """Has the processor fetch the line of its caches that is there, which will be read soon."""
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), LANE, LANE, LANE])
    insert: Any = cgutils.get_or_insert_function
    function = insert(builder.module, kind, "llvm.prefetch.p0")
    how = [ir.Constant(LANE, value) for value in (FOR_READING, NEARLY_EVERYWHERE, DATA)]
    builder.call(function, [builder.bitcast(place, BYTE.as_pointer()), *how])


def index(value: int) -> Any:
    """Gives a constant to count and to find places with."""
    return ir.Constant(INDEX, value)


def carried(builder: Any, start: Any, before: Any) -> Any:
    """Gives what a loop carries from one round to the next; `before` is the block it begins in."""
    phi = builder.phi(start.type)
    phi.add_incoming(start, before)
    return phi


def looped(builder: Any, count: Any, starts: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emits a loop over 0, LANES, 2 LANES up to `count`, entered at least once; gives what it carries at its end.

    body: takes the number and what is carried, and gives the latter anew. It emits no branches.
    """
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = carried(builder, index(0), before)
    held = [carried(builder, start, before) for start in starts]
    results = body(at, held)
    for phi, result in zip([at, *held], [builder.add(at, index(LANES)), *results], strict=True):
        phi.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", builder.add(at, index(LANES)), count), loop, after)
    builder.position_at_end(after)
    return results


def load(builder: Any, place: Any) -> Any:
    """Gives the LANES numbers there."""
    loaded = builder.load(builder.bitcast(place, VECTOR.as_pointer()))
    loaded.align = ALIGNMENT
    return loaded


def store(builder: Any, vector: Any, place: Any) -> None:
    """Writes LANES numbers there."""
    builder.store(vector, builder.bitcast(place, VECTOR.as_pointer())).align = ALIGNMENT


def vector_function(builder: Any, name: str, num_arguments: int) -> Any:
    """Gives a function of the compiler that takes and gives vectors."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * num_arguments)
    insert: Any = cgutils.get_or_insert_function
    return insert(builder.module, kind, f"llvm.{name}.v{LANES}f32")


def hidden(builder: Any, pointer: Any) -> Any:
    """Gives the pointer, and the compiler does not see from what."""
    kind = ir.FunctionType(pointer.type, [pointer.type])
    return builder.call(ir.InlineAsm(kind, "", "=r,0"), [pointer])


def spread(builder: Any, value: Any) -> Any:
    """Gives a number, or an index, in every lane."""
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(LANE, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(LANE, LANES), [0] * LANES))
