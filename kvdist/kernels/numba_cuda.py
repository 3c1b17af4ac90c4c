"""Kernels for NVIDIA's GPUs, written in Python: numba compiles them, and `kvdist.kernels.cupy_device` launches them.

Rules that hold here:

* Every operation is the reference's, in its order and type, so that the results are equal bit by bit (a NaN stays a
  NaN). NVVM would contract a product and an addition to one instruction, so every product is a call of `_times`, whose
  result is rounded; in expressions of rules `_with_rounded_products` writes the call in the place of `*`.
* A kernel is a template, a function with its parts as globals, for one set of types: see `Kernel`. Where a template
  takes a tuple, it is compiled for each length.
* Halves are their bits, in uint16. Sums of halves, and states of their rules, are of float32.
* A template is a loop over elements, rows or chunks, which a grid of any size shares. It reads and writes each element
  of its arrays at most once.
* With ``NUMBA_ENABLE_CUDASIM=1`` numba's simulator runs the same functions as Python, with NumPy's numbers.
"""

from __future__ import annotations
import __future__

import ast
import importlib.metadata
import inspect
import logging
import operator
import re
import textwrap
import threading
import types
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import cuda

from kvdist.dtypes import DType
from kvdist.kernels import elementwise, parts
from kvdist.kernels.interface import Expression
from kvdist.kernels.parts import Compiler, Function

LOG = logging.getLogger("kvdist")

SIMULATED = bool(numba.config.ENABLE_CUDASIM)
"""Whether kernels run in numba's simulator."""

VERSION = f"numba {numba.__version__}"
"""What compiles the kernels, for the log."""

if not SIMULATED:
    if getattr(cuda, "implementation", "") != "NVIDIA":
        raise ImportError("numba needs the package numba-cuda for GPUs", name="numba_cuda")
    VERSION += f", numba-cuda {importlib.metadata.version('numba-cuda')}"

THREADS = 2 if SIMULATED else 256
"""Threads of a block. The simulator starts a thread of Python for each: few, but more than one, to share the loops."""

BLOCKS_MAX = 2 if SIMULATED else 132 * 16
"""Blocks of a grid: a multiple of the 132 multiprocessors of an H100 or H200."""

SOURCES_MAX = 8
"""Arrays that a single launch sums; more take several launches."""

LANES_LOG2_MAX = 5
"""Logarithm of how many neighbouring threads share a row at most: a warp."""

CHUNK_BYTES = 4 * THREADS * (1 if SIMULATED else 16)
"""Bytes of an array that a block takes at a time, if the kernel is for many arrays."""

_SIMULATOR = threading.RLock()
"""numba's simulator runs one kernel at a time."""


class Kernel(NamedTuple):
    """A kernel for one set of types.

    Attributes:
        function: the template with its parts.
        types: the type of each argument: a number such as ``int64``, an array such as ``float32*``, arrays such as
            ``uint8**``, which is a table of them in the device's memory, or a tuple such as ``float32*[3]``.
    """

    function: Function
    types: tuple[str, ...]

    def compile(self, capability: tuple[int, int]) -> tuple[bytes, str]:
        """Compile the kernel.

        Args:
            capability: compute capability of a device, such as (9, 0).

        Returns:
            PTX, and the name of the kernel in it. Its parameters are the arguments, with the elements of tuples one by
            one, and arrays and tables as addresses.
        """
        signature = f"void({', '.join(map(_numba_type, self.types))})"
        ptx, _ = cuda.compile(self.function, signature, device=False, abi="numba", cc=capability, output="ptx")
        entry = re.search(r"\.entry\s+(\w+)", ptx)
        assert entry is not None, "numba has compiled a kernel without an entry"
        return ptx.encode(), entry[1]

    def simulate(self, blocks: int, arguments: Sequence[Any]) -> None:
        """Run the kernel in numba's simulator.

        Args:
            blocks: number of blocks.
            arguments: NumPy's numbers and arrays, in tuples and lists where `types` has tuples and tables.
        """
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        given = [FakeCUDAArray(one) if isinstance(one, np.ndarray) else one for one in arguments]
        with _SIMULATOR:
            cuda.jit(self.function)[blocks, THREADS](*given)


def assembled(ptx: bytes, capability: tuple[int, int]) -> bytes:
    """Machine code of a device for PTX: drivers older than numba's compiler load it, but refuse the compiler's PTX.

    Without nvJitLink, which comes with ``numba-cuda[cu12]``, or if that fails, the PTX itself: the driver assembles it.

    Args:
        ptx: the program.
        capability: compute capability of the device.
    """
    try:
        from cuda.bindings import nvjitlink

        linker = nvjitlink.create(1, [f"-arch=sm_{capability[0]}{capability[1]}"])
        try:
            nvjitlink.add_data(linker, nvjitlink.InputType.PTX, ptx, len(ptx), "kvdist")
            nvjitlink.complete(linker)
            code = bytearray(nvjitlink.get_linked_cubin_size(linker))
            nvjitlink.get_linked_cubin(linker, code)
        finally:
            nvjitlink.destroy(linker)
    except Exception as error:  # noqa: BLE001  # missing, too old for the PTX or the device, another interface
        LOG.debug("nvJitLink has not assembled a kernel, so the driver does: %s", error)
        return ptx
    return bytes(code)


def _numba_type(name: str) -> str:
    """numba's name of a type of `Kernel.types`."""
    number, count = tuple_type(name)
    if count is not None:
        return f"UniTuple({_numba_type(number)}, {count})"
    return f"CPointer({_numba_type(name[:-1])})" if name.endswith("*") else name


def tuple_type(name: str) -> tuple[str, int | None]:
    """The type of the elements of a tuple, and their number; for another type that type, and None."""
    element, bracket, count = name.partition("[")
    return element, int(count.rstrip("]")) if bracket else None


# Numbers.


_F32, _U8, _U16, _U32 = np.float32, np.uint8, np.uint16, np.uint32

if SIMULATED:

    def _part(function):
        return function

    def _bits(value):
        return value.view(np.uint32)

    def _float(bits):
        return bits.view(np.float32)

    _TIMES: dict[Any, Function] = {np.float32: operator.mul, np.float64: operator.mul}
    _OWN_CASTS: dict[str, Function] = {}
else:
    from numba.cuda import libdevice

    _part = cuda.jit(device=True)

    @_part
    def _bits(value):
        return _U32(libdevice.float_as_int(value))

    @_part
    def _float(bits):
        return libdevice.int_as_float(np.int32(bits))

    def _times_float(one, other):
        return libdevice.fmul_rn(one, other)

    def _times_double(one, other):
        return libdevice.dmul_rn(one, other)

    def _to_float16(value):
        return _U16(libdevice.float2half_rn(value))

    def _from_float16(half):
        return libdevice.half2float(np.int16(half))

    _TIMES = {np.float32: _part(_times_float), np.float64: _part(_times_double)}
    # Each of these casts is a single instruction of the device.
    _OWN_CASTS = {"to_float16": _part(_to_float16), "from_float16": _part(_from_float16)}


def _same(value):
    return value


def _first(value, _):
    return value


_same, _first = _part(_same), _part(_first)
_limited = _part(parts.limited)


@cache
def _cast(name: str) -> Function:
    """A cast of halves: a function of `kvdist.kernels.parts`, or the device's own instruction."""
    shared = parts.with_globals(getattr(parts, name), {"_bits": _bits, "_float": _float})
    return _OWN_CASTS.get(name) or _part(shared)


class _Element(NamedTuple):
    """How kernels read and write elements of a type.

    Attributes:
        name: type of the elements in memory, halves as their bits.
        wide: type of the elements in registers.
        read: element in memory → number.
        write: number → element in memory.
    """

    name: str
    wide: str
    read: Function
    write: Function


@cache
def _element(dtype: DType) -> _Element:
    if dtype.storage == dtype.accumulate:
        return _Element(dtype.label, dtype.label, _same, _same)
    return _Element("uint16", "float32", _cast(f"from_{dtype.label}"), _cast(f"to_{dtype.label}"))


def _wide(dtype: DType) -> _Element:
    """Elements of the type in which `dtype` is summed."""
    return _element(DType.FLOAT32) if dtype.storage != dtype.accumulate else _element(dtype)


# Globals of templates, for which each kernel has its own values.

_read: Any = _same
_read_source: Any = _same
_gradient: Any = None
_write: Any = _same
_times: Any = operator.mul
_step: Any = None
_start: Any = None
_expression: Any = None


def _kernel(template: Function, types: Sequence[str], **own: Any) -> Kernel:
    return Kernel(parts.with_globals(template, own), tuple(types))


# Sums and casts.


def _weighted_sum(out, before, sources, scales, factor, goes_on, size):
    """out ← factor · (before + Σ scales[j]·sources[j]), without `before` at the beginning of a sum."""
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        total = _times(_read(sources[0][i]), scales[0])
        if goes_on:
            total = before[i] + total
        for j in range(1, len(sources)):
            total = total + _times(_read(sources[j][i]), scales[j])
        out[i] = _write(_times(total, factor))


@cache
def weighted_sum(dtype: DType, to: DType, count: int) -> Kernel:
    """The kernel ``(out, before, sources, scales, factor, goes_on, size)``.

    Args:
        dtype: type of the sources.
        to: type of the sum: `dtype`, or the type in which that is summed, which `before` has.
        count: number of sources, at most `SOURCES_MAX`.
    """
    given, out, wide = _element(dtype), _element(to), _wide(dtype).name
    # Integers have scales of 1.
    times = _TIMES[dtype.accumulate.type] if dtype.is_floating else _first
    types = [f"{out.name}*", f"{wide}*", f"{given.name}*[{count}]", f"{wide}[{count}]", wide, "int32", "int64"]
    return _kernel(_weighted_sum, types, _read=given.read, _write=out.write, _times=times)


def _copy(out, values, size):
    """out ← values, in another type."""
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        out[i] = _write(_read(values[i]))


@cache
def cast(dtype: DType, to: DType) -> Kernel:
    """The kernel ``(out, values, size)`` from halves to float32, or back."""
    given, out = _element(dtype), _element(to)
    return _kernel(_copy, [f"{out.name}*", f"{given.name}*", "int64"], _read=given.read, _write=out.write)


def _squares(values, partial, size):
    """Sum of the squares of each thread's elements, in float64."""
    total = np.float64(0)
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        value = np.float64(_read(values[i]))
        total = total + _times(value, value)
    partial[cuda.grid(1)] = total


@cache
def squares(dtype: DType) -> Kernel:
    """The kernel ``(values, partial, size)``; `partial` has an element for each thread of the grid."""
    given = _element(dtype)
    types = [f"{given.name}*", "float64*", "int64"]
    return _kernel(_squares, types, _read=given.read, _times=_TIMES[np.float64])


# Updates.


def _step_0(i, grad, weight, states, numbers):
    return _expression(grad, weight, *numbers)


def _step_1(i, grad, weight, states, numbers):
    weight, one = _expression(grad, weight, states[0][i], *numbers)
    states[0][i] = one
    return weight


def _step_2(i, grad, weight, states, numbers):
    weight, one, two = _expression(grad, weight, states[0][i], states[1][i], *numbers)
    states[0][i] = one
    states[1][i] = two
    return weight


def _step_3(i, grad, weight, states, numbers):
    weight, one, two, three = _expression(grad, weight, states[0][i], states[1][i], states[2][i], *numbers)
    states[0][i] = one
    states[1][i] = two
    states[2][i] = three
    return weight


_STEPS: Sequence[Function] = (_step_0, _step_1, _step_2, _step_3)
"""An element of a rule with no state, and with one to three: moves the states and returns the new weight."""


def _sum_of(i, sources, scales, factor, limit):
    """Element i of factor · Σ scales[j]·sources[j], cut to ±limit."""
    grad = _times(_read_source(sources[0][i]), scales[0])
    for j in range(1, len(sources)):
        grad = grad + _times(_read_source(sources[j][i]), scales[j])
    return _limited(_times(grad, factor), limit)


def _update(out, weight, states, sources, scales, factor, limit, numbers, size):
    """out, states ← the rule for the gradient factor · Σ scales[j]·sources[j], cut to ±limit."""
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        grad = _gradient(i, sources, scales, factor, limit)
        out[i] = _write(_step(i, grad, _read(weight[i]), states, numbers))


def _update_with_master(out, weight, master, states, sources, scales, factor, limit, numbers, size):
    """As `_update`, from the master; from the weight where the master does not round to it: the weight is newer."""
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        grad = _gradient(i, sources, scales, factor, limit)
        start = master[i] if _write(master[i]) == weight[i] else _read(weight[i])
        new = _step(i, grad, start, states, numbers)
        master[i] = new
        out[i] = _write(new)


@cache
def update(
    expression: Expression, dtype: DType, states: int, numbers: int, count: int, is_wide: bool, has_master: bool
) -> Kernel:
    """The kernel ``(out, weight, [master,] states, sources, scales, factor, limit, numbers, size)``.

    Args:
        expression: the rule; see `kvdist.kernels.elementwise`.
        dtype: type of the weight, a floating type.
        states: number of states, at most 3. Without states the kernel takes any array instead.
        numbers: number of numbers, at least 1.
        count: number of sources, at most `SOURCES_MAX`.
        is_wide: whether sources have the type in which `dtype` is summed, and not `dtype`.
        has_master: whether there is a float32 weight behind a half weight.

    Raises:
        TypeError: the source of the expression cannot be read, it is a closure, or it has a literal number.
    """
    element, wide = _element(dtype), _wide(dtype)
    source, real = wide if is_wide else element, dtype.accumulate.type
    times = _TIMES[real]
    compiler = Compiler(_part, real, _REPLACEMENTS, partial(_with_rounded_products, times=times))
    rule = compiler.compiled(expression)
    step = compiler.copied(_STEPS[states], {"_expression": rule})
    weights = [f"{element.name}*"] * 2 + [f"{wide.name}*"] * has_master
    types = [
        *weights, f"{wide.name}*[{max(1, states)}]", f"{source.name}*[{count}]", f"{wide.name}[{count}]", wide.name,
        wide.name, f"{wide.name}[{numbers}]", "int64",
    ]  # fmt: skip
    gradient = compiler.copied(_sum_of, {"_read_source": source.read, "_times": times})
    own = {"_read": element.read, "_write": element.write, "_gradient": gradient, "_step": step}
    return _kernel(_update_with_master if has_master else _update, types, **own)


_REPLACEMENTS: Mapping[Any, Function] = {elementwise.sqrt: elementwise.sqrt} if SIMULATED else {}
"""In the simulator a root is NumPy's: that of Python is of float64."""


class _Products(ast.NodeTransformer):
    """Writes ``a * b`` as ``_times(a, b)``."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Mult):
            return node
        return ast.Call(ast.Name("_times", ast.Load()), [node.left, node.right], [])

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name) or not isinstance(node.op, ast.Mult):
            self.generic_visit(node)
            return node
        product = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.Assign([node.target], self.visit_BinOp(product))


def _with_rounded_products(function: Function, times: Function) -> Function:
    """A function of an expression, whose products are rounded each by itself.

    Raises:
        TypeError: the source of the function cannot be read, is that of a lambda, or has changed since the import.
    """
    name = function.__qualname__
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError) as error:
        raise TypeError(f"the source of the expression {name} cannot be read ({error}): define it in a file") from error
    if not isinstance(tree.body[0], ast.FunctionDef):
        raise TypeError(f"the expression {name} is not defined by `def`")
    if [_instructions(code) for code in _codes_of(tree, function)] != [_instructions(function.__code__)]:
        raise TypeError(f"the file of the expression {name} has changed since it was imported: start the program again")
    (code,) = _codes_of(ast.fix_missing_locations(_Products().visit(tree)), function)
    return types.FunctionType(code, {**function.__globals__, "_times": times}, function.__name__)


def _codes_of(tree: ast.Module, function: Function) -> list[types.CodeType]:
    """The code of a function as its definition has it, not run; none if the definition is of another function."""
    program = compile(tree, inspect.getfile(function), "exec", flags=__future__.annotations.compiler_flag)
    codes = [constant for constant in program.co_consts if isinstance(constant, types.CodeType)]
    return [code for code in codes if code.co_name == function.__code__.co_name]


def _instructions(code: types.CodeType) -> tuple[Any, ...]:
    """What a function does, without its docstring and its lines."""
    constants = [constant for constant in code.co_consts if not isinstance(constant, str)]
    return code.co_code, code.co_names, code.co_varnames, constants


# Codes.


def _round_to_half(grad, residual, out, size):
    """See `kernels.quantization.round_to_half`."""
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        value = residual[i] + grad[i]
        half = _write(value)
        finite = abs(value) < _F32(np.inf)
        if finite and (half & _U16(0x7FFF)) == _infinite:
            half = _U16(half - _U16(1))
        out[i] = half
        residual[i] = value - _read(half) if finite else _F32(0)


_infinite: Any = None
_INFINITE = {DType.FLOAT16: np.uint16(0x7C00), DType.BFLOAT16: np.uint16(0x7F80)}
"""The bits of an infinite half without its sign."""


@cache
def round_to_half(dtype: DType) -> Kernel:
    """The kernel ``(grad, residual, out, size)``."""
    half = _element(dtype)
    own = {"_read": half.read, "_write": half.write, "_infinite": _INFINITE[dtype]}
    return _kernel(_round_to_half, ["float32*", "float32*", "uint16*", "int64"], **own)


def _quantise_2bit(grad, residual, limit, out, elements, size):
    """A thread makes a byte of codes, of four elements."""
    for place in range(cuda.grid(1), size, cuda.gridsize(1)):
        byte = 0
        for i in range(4 * place, min(4 * place + 4, elements)):
            value = residual[i] + grad[i]
            code = 0
            if value >= limit:
                value = value - limit
                code = 3
            elif value <= -limit:
                value = value - (-limit)
                code = 2
            byte |= code << (6 - 2 * (i & 3))
            residual[i] = value
        out[place] = _U8(byte)


def _quantise_1bit(grad, residual, limit, out, elements, size):
    """A thread makes a byte of codes, of eight elements."""
    for place in range(cuda.grid(1), size, cuda.gridsize(1)):
        byte = 0
        for i in range(8 * place, min(8 * place + 8, elements)):
            value = residual[i] + grad[i]
            above = value > limit
            residual[i] = value - (_F32(1) if above else _F32(-1))
            byte |= (1 if above else 0) << (7 - (i & 7))
        out[place] = _U8(byte)


def _dequantise_2bit(data, limit, out, adds, size):
    """out ← the values of the codes, added to `out` if `adds`."""
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        code = (data[i >> 2] >> (6 - 2 * (i & 3))) & 3
        value = limit if code == 3 else _F32(0)
        value = -limit if code == 2 else value
        out[i] = out[i] + value if adds else value


def _dequantise_1bit(data, limit, out, adds, size):
    """out ← the values of the codes, added to `out` if `adds`."""
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        value = _F32(1) if (data[i >> 3] >> (7 - (i & 7))) & 1 else _F32(-1)
        out[i] = out[i] + value if adds else value


_CODES = ("float32*", "float32*", "float32", "uint8*", "int64", "int64")
_VALUES = ("uint8*", "float32", "float32*", "int32", "int64")
QUANTISE = {1: Kernel(_quantise_1bit, _CODES), 2: Kernel(_quantise_2bit, _CODES)}
"""By the bits of a code, the kernel ``(grad, residual, limit, out, elements, size)``; `size` is that of `out`."""
DEQUANTISE = {1: Kernel(_dequantise_1bit, _VALUES), 2: Kernel(_dequantise_2bit, _VALUES)}
"""By the bits of a code, the kernel ``(data, limit, out, adds, size)``."""


# Rows of a table. 2^lanes neighbouring threads share a row, so that no thread divides for a row. Therefore columns are
# counted by `while`, too: numba's `range` divides by its step.


def lanes_of(length: int) -> int:
    """Logarithm of how many threads share a row of so many elements."""
    return min(LANES_LOG2_MAX, max(0, length - 1).bit_length())


def _add_rows(table, indices, rows, length, lanes, count):
    """table[indices[k]] += rows[k]; no index comes twice."""
    for i in range(cuda.grid(1), count << lanes, cuda.gridsize(1)):
        row = i >> lanes
        target, source = indices[row] * length, row * length
        column = i & ((1 << lanes) - 1)
        while column < length:
            new = _read(table[target + column]) + _read(rows[source + column])
            table[target + column] = _write(new)
            column += 1 << lanes


@cache
def add_rows(dtype: DType) -> Kernel:
    """The kernel ``(table, indices, rows, length, lanes, count)``."""
    element = _element(dtype)
    types = [f"{element.name}*", "int64*", f"{element.name}*", "int64", "int64", "int64"]
    return _kernel(_add_rows, types, _read=element.read, _write=element.write)


def _sum_groups(rows, order, starts, out, groups, count, length, lanes):
    """out[g] ← Σ rows[order[k]] for starts[g] <= k < starts[g + 1], in that order. A row that is alone is copied."""
    for i in range(cuda.grid(1), groups << lanes, cuda.gridsize(1)):
        group = i >> lanes
        begin = starts[group]
        end = starts[group + 1] if group + 1 < groups else count
        column = i & ((1 << lanes) - 1)
        while column < length:
            first = rows[order[begin] * length + column]
            if end - begin > 1:
                total = _read(first)
                for k in range(begin + 1, end):
                    total = total + _read(rows[order[k] * length + column])
                first = _write(total)
            out[group * length + column] = first
            column += 1 << lanes


@cache
def sum_groups(dtype: DType) -> Kernel:
    """The kernel ``(rows, order, starts, out, groups, count, length, lanes)``."""
    element = _element(dtype)
    types = [f"{element.name}*", "int64*", "int64*", f"{element.name}*", *["int64"] * 4]
    return _kernel(_sum_groups, types, _read=element.read, _write=element.write)


# Many arrays of very different lengths in one launch: a block takes a chunk of an array at a time.


@_part
def _array_of(firsts, count, chunk):
    """The array to which a chunk belongs: the last one whose first chunk is at or before it."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high + 1) // 2
        if firsts[middle] <= chunk:
            low = middle
        else:
            high = middle - 1
    return low


def _copy_arrays(sources, targets, sizes, firsts, count, chunks, length):
    """targets[k] ← sources[k]."""
    for chunk in range(cuda.blockIdx.x, chunks, cuda.gridDim.x):
        array = _array_of(firsts, count, chunk)
        start = (chunk - firsts[array]) * length
        source, target = sources[array], targets[array]
        for i in range(start + cuda.threadIdx.x, min(start + length, sizes[array]), cuda.blockDim.x):
            target[i] = source[i]


@cache
def copy_arrays(itemsize: int) -> Kernel:
    """The kernel ``(sources, targets, sizes, firsts, count, chunks, length)`` that copies sources[k] to targets[k].

    `firsts` is the number of each array's first chunk, of `chunks` chunks of `length` elements. Arrays are not empty.

    Args:
        itemsize: bytes of an element: 1, 2, 4 or 8.
    """
    unit = f"uint{8 * itemsize}**"
    return Kernel(_copy_arrays, (unit, unit, "int64*", "int64*", "int64", "int64", "int64"))


def _find_not_finite(arrays, exponent, found, sizes, firsts, count, chunks, length):
    """Set `found` if an element has all bits of the exponent, as infinity and NaN have; else write nothing."""
    for chunk in range(cuda.blockIdx.x, chunks, cuda.gridDim.x):
        place = _array_of(firsts, count, chunk)
        start = (chunk - firsts[place]) * length
        array = arrays[place]
        for i in range(start + cuda.threadIdx.x, min(start + length, sizes[place]), cuda.blockDim.x):
            if (array[i] & exponent) == exponent:
                found[0] = 1


_EXPONENT = {
    DType.FLOAT32: 0x7F800000, DType.FLOAT64: 0x7FF0000000000000, DType.FLOAT16: 0x7C00, DType.BFLOAT16: 0x7F80,
}  # fmt: skip


@cache
def find_not_finite(dtype: DType) -> tuple[Kernel, int]:
    """The kernel ``(arrays, exponent, found, sizes, firsts, count, chunks, length)``, and `exponent`."""
    unit = f"uint{8 * dtype.itemsize}"
    types = (f"{unit}**", unit, "uint32*", "int64*", "int64*", "int64", "int64", "int64")
    return Kernel(_find_not_finite, types), _EXPONENT[dtype]
