"""Values with only some of their rows: `RowSparse`, and tables whose rows are created at their first use: `LazyRows`.

Invariants: repeated rows are summed in the order of the ids, halves in float32. Torch is imported only by calls that
return a tensor; a caller with a tensor has imported torch already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdist.dtypes import DType, from_name
from kvdist.kvstore.values import as_dtype, is_tensor, narrowed, require_whole, tensor_memory, tensor_over, widened
from kvdist.optimizer.initializer import Initializer, initializer_from

Array = NDArray[Any]

_FEW_ROWS = 32
"""Number of rows with many repetitions up to which each row is summed separately."""


class RowSparse:
    """Some rows of a larger array, as ids and values. The other rows are zeros, or have no gradient.

    Args:
        indices: row ids, one-dimensional, integers of at least 0 in any order: a NumPy array, a tensor or a list. The
            values of a repeated id are summed.
        values: array of shape (k, …) with a row per id: a NumPy array of a type that a key may have, or a torch tensor,
            which is detached and moved to host memory. Arrays in host memory are not copied.
        shape: shape of the whole array; None for (largest id + 1, …).

    Raises:
        TypeError: ids are not integers, or values are not an array of a supported type.
        ValueError: an id is negative or not below shape[0], the numbers of ids and rows differ, or the row shape does
            not match `shape`.
    """

    __slots__ = ("_dtype", "_indices", "_shape", "_values")

    def __init__(self, indices: Any, values: Any, shape: Sequence[int] | None = None) -> None:
        self._indices = _checked_indices(indices)
        self._values, self._dtype = _checked_values(values)
        _check_fit(self._indices, tuple(self._values.shape))
        row_shape = tuple(self._values.shape[1:])
        if shape is None:
            self._shape = (int(self._indices.max()) + 1 if self._indices.size else 0, *row_shape)
        else:
            self._shape = _checked_shape(shape)
            _check_inside(self._indices, row_shape, self._shape)

    @property
    def indices(self) -> Array:
        """Row ids: int64, shape (k,)."""
        return self._indices

    @property
    def values(self) -> Any:
        """Values of the rows, shape (k, *shape[1:]): a NumPy array or a tensor, as in the constructor."""
        return self._values

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self._shape

    @property
    def dtype(self) -> DType:
        """Element type; `dtype.label` is its name."""
        return self._dtype

    @property
    def is_torch(self) -> bool:
        """Whether the values are a torch tensor."""
        return not isinstance(self._values, np.ndarray)

    def assign(self, indices: Any, values: Any) -> None:
        """Replace the rows. The shape and the element type stay.

        Args:
            indices, values: as in the constructor. They are converted to NumPy or torch to match the present values;
                bfloat16 values may also be an array of their bits in uint16.

        Raises:
            TypeError, ValueError: as in the constructor, or the element type differs. The rows are then unchanged.
        """
        checked = _checked_indices(indices)
        if self._dtype is DType.BFLOAT16 and isinstance(values, np.ndarray) and values.dtype == np.uint16:
            values = tensor_over(np.ascontiguousarray(values), self._dtype)
        given, dtype = _checked_values(values)
        if dtype is not self._dtype:
            raise TypeError(f"this RowSparse holds {self._dtype.label}, but the values are {dtype.label}: cast them")
        _check_fit(checked, tuple(given.shape))
        _check_inside(checked, tuple(given.shape[1:]), self._shape)
        if isinstance(given, np.ndarray) and self.is_torch:
            given = tensor_over(given, dtype)
        elif not isinstance(given, np.ndarray) and not self.is_torch:
            given = given.numpy()
        self._indices, self._values = checked, given

    def bits(self) -> Array:
        """View of the values as a (k, row_length) array of `dtype.storage`. Do not write to it."""
        row_length = math.prod(self._values.shape[1:])
        return _bits_of(self._values).reshape(len(self._indices), row_length)

    def canonical(self) -> tuple[Array, Array]:
        """Return the ids in increasing order, without repetitions, and their rows; see the function `canonical`."""
        return canonical(self._indices, self.bits(), self._dtype)

    def to_dense(self) -> Any:
        """Return the whole array, with zeros in absent rows: NumPy or torch, like the values."""
        ids, rows = self.canonical()
        dense = np.zeros((self._shape[0], rows.shape[1]), self._dtype.storage)
        dense[ids] = rows
        dense = dense.reshape(self._shape)
        return tensor_over(dense, self._dtype) if self.is_torch else dense

    def to_torch(self) -> Any:
        """Return a coalesced sparse COO tensor with a single sparse dimension, in host memory. Imports torch."""
        import torch

        ids, rows = self.canonical()
        values = tensor_over(rows.reshape(len(ids), *self._shape[1:]), self._dtype)
        tensor = torch.sparse_coo_tensor(
            torch.from_numpy(ids)[None], values, self._shape, device=values.device, check_invariants=False
        )
        return tensor._coalesced_(True)

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: Any = "float32") -> RowSparse:
        """Create an object without rows, as `row_sparse_pull` can fill it: NumPy, or for bfloat16 torch.

        Args:
            shape: shape of the whole array.
            dtype: element type.

        Raises:
            TypeError, ValueError: `dtype` or `shape` is not allowed for a key.
        """
        kind, checked = as_dtype(dtype), _checked_shape(shape)
        if kind is DType.BFLOAT16:
            import torch

            return cls([], torch.empty((0, *checked[1:]), dtype=torch.bfloat16, device="cpu"), checked)
        return cls([], np.empty((0, *checked[1:]), kind.storage), checked)

    @classmethod
    def from_dense(cls, array: Any) -> RowSparse:
        """Copy the rows of an array that are not all zeros. A row with NaN is included.

        Args:
            array: a NumPy array or tensor with at least one dimension.

        Raises:
            TypeError: `array` is not an array of a supported type.
            ValueError: `array` has no dimension.
        """
        values, dtype = _checked_values(array)
        flat = _bits_of(values).reshape(values.shape[0], math.prod(values.shape[1:]))
        # The sign of a bfloat16 zero is a bit too.
        there = (flat & 0x7FFF) != 0 if dtype is DType.BFLOAT16 else flat != 0
        ids = np.flatnonzero(there.any(axis=1)).astype(np.int64)
        rows = flat[ids].reshape(len(ids), *values.shape[1:])
        return cls(ids, rows if isinstance(values, np.ndarray) else tensor_over(rows, dtype), values.shape)

    @classmethod
    def from_torch(cls, tensor: Any) -> RowSparse:
        """Convert a sparse COO tensor, such as the gradient of ``torch.nn.Embedding(sparse=True)``.

        Args:
            tensor: tensor with a single sparse dimension. Repeated rows are summed.

        Raises:
            TypeError: `tensor` is not a sparse COO tensor.
            ValueError: `tensor` has several sparse dimensions.
        """
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
            raise TypeError(f"from_torch takes a sparse COO tensor, not {_told(tensor)}; from_dense takes dense ones")
        if tensor.sparse_dim() != 1:
            raise ValueError(
                f"a RowSparse holds whole rows, but this tensor has {tensor.sparse_dim()} sparse dimensions: convert"
                " it, such as by dense.to_sparse(1)"
            )
        plain = tensor.detach().cpu()
        # Not `coalesce()`: torch sums halves in their own type.
        rows = cls(plain._indices()[0], plain._values(), tuple(plain.shape))
        ids, bits = rows.canonical()
        if ids is not rows.indices:
            rows.assign(ids, tensor_over(bits.reshape(len(ids), *rows.shape[1:]), rows.dtype))
        return rows

    def __len__(self) -> int:
        """Number of ids, repetitions counted."""
        return len(self._indices)

    def __repr__(self) -> str:
        """Number of rows, the first ids, shape and type; no values."""
        shown = ", ".join(str(one) for one in self._indices[:6].tolist()) + (", …" if len(self) > 6 else "")
        kind = "torch" if self.is_torch else "numpy"
        return f"RowSparse({len(self)} rows [{shown}] of {self._shape}, {self._dtype.label}, {kind})"


@dataclass(frozen=True)
class LazyRows:
    """Declaration of a table of rows without their values, for `KVStore.init`.

    A row reads as its initial value and takes no memory before its first update, so the table may be larger than
    memory.

    Attributes:
        shape: shape of the table, (rows, …).
        dtype: element type: a name such as ``float32``, a NumPy or torch type; stored as a `DType`.
        initializer: initial value of the rows: ``zeros``, ``constant(0.5)``, ``uniform(0.07,seed=3)``,
            ``normal(0.01,seed=3)``, or an `Initializer`.

    Raises:
        TypeError: the element type is not allowed for a key.
        ValueError: the shape is empty or has a negative dimension, or the initializer is unknown or unsuitable.
    """

    shape: tuple[int, ...]
    dtype: DType = DType.FLOAT32
    initializer: Initializer | str = "zeros"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _checked_shape(self.shape))
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        initializer = initializer_from(self.initializer)
        initializer.check(self.dtype)
        object.__setattr__(self, "initializer", initializer)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the table with all its rows."""
        return math.prod(self.shape) * self.dtype.itemsize


def canonical(indices: Array, values: Array, dtype: DType) -> tuple[Array, Array]:
    """Ids in strictly increasing order, and their rows.

    Arguments already in that order are returned without a copy. Otherwise the ids are sorted stably, a pass over the
    rows gathers them, and a pass over repeated rows sums them in the order of `indices`; halves in float32.

    Args:
        indices: row ids, int64, shape (k,).
        values: rows, shape (k, row_length), of `dtype.storage`.
        dtype: the element type.
    """
    if is_strictly_increasing(indices):
        return indices, values
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    is_first = np.empty(len(ordered), np.bool_)
    is_first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    rows = values[order[starts]]
    if len(starts) < len(ordered):
        counts = np.diff(starts, append=len(ordered))
        with np.errstate(all="ignore"):
            rows = _with_repeated(rows, values, order, starts, counts, dtype)
    return ordered[starts], rows


def is_strictly_increasing(indices: Array) -> bool:
    """Whether each id is greater than its predecessor."""
    return len(indices) < 2 or bool((indices[1:] > indices[:-1]).all())


def _with_repeated(rows: Array, values: Array, order: Array, starts: Array, counts: Array, dtype: DType) -> Array:
    """Sums of the rows of each id: to all first rows the second rows are added, then the third rows, and so on."""
    repeated = np.flatnonzero(counts > 1)
    sums = widened(rows[repeated], dtype)
    active, turn = np.arange(len(repeated)), 1
    while len(active) > _FEW_ROWS:
        place = repeated[active]
        sums[active] += widened(values[order[starts[place] + turn]], dtype)
        turn += 1
        active = active[counts[place] > turn]
    for one in active.tolist():  # the few ids that everybody has, perhaps thousands of times
        start, count = starts[repeated[one]], counts[repeated[one]]
        terms = widened(values[order[start + turn - 1 : start + count]], dtype)
        terms[0] = sums[one]
        # A reduction goes row by row where rows have several elements; of single ones it would make pairs.
        sums[one] = np.add.reduce(terms, axis=0) if terms.shape[1] > 1 else np.add.accumulate(terms, axis=0)[-1]
    rows[repeated] = narrowed(sums, dtype)
    return rows


def _checked_indices(indices: Any) -> Array:
    if isinstance(indices, (list, tuple)) and not indices:
        return np.zeros(0, np.int64)
    require_whole(indices)
    if is_tensor(indices):
        indices = indices.detach().cpu().numpy()
    given = np.asarray(indices)
    if given.dtype.kind not in "iu":
        raise TypeError(f"row ids must be integers, not {given.dtype}: cast them, such as by ids.astype('int64')")
    if given.ndim != 1:
        raise ValueError(f"row ids must have one dimension, not the shape {given.shape}: use ids.reshape(-1)")
    if given.size and (int(given.min()) < 0 or int(given.max()) > np.iinfo(np.int64).max):
        wrong = int(given.min()) if int(given.min()) < 0 else int(given.max())
        raise ValueError(f"row ids must be at least 0 and fit int64, and {wrong} is among them")
    return np.ascontiguousarray(given, np.int64)


def _checked_values(values: Any) -> tuple[Any, DType]:
    """The values in host memory in C order, and their type."""
    require_whole(values)
    if is_tensor(values):
        if str(values.layout) != "torch.strided":
            raise TypeError(f"values must be dense, not {_told(values)}: RowSparse.from_torch takes sparse tensors")
        values = values.detach().cpu().contiguous()
        dtype = from_name(str(values.dtype).removeprefix("torch."))
    elif isinstance(values, (np.ndarray, list, tuple)):
        values = np.asarray(values)
        dtype = from_name(values.dtype.name)
        values = np.ascontiguousarray(values, dtype.storage) if values.ndim else values
    else:
        raise TypeError(f"values must be a NumPy array or a torch tensor, not {_told(values)}")
    if not values.ndim:
        raise ValueError("values must have a row for each id, but are a scalar")
    return values, dtype


def _check_fit(indices: Array, shape: tuple[int, ...]) -> None:
    if shape[0] != len(indices):
        raise ValueError(f"{len(indices)} row ids need as many rows of values, got {shape[0]}")


def _check_inside(indices: Array, row_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if row_shape != shape[1:]:
        raise ValueError(f"rows of an array of shape {shape} have shape {shape[1:]}, got {row_shape}")
    if indices.size and int(indices.max()) >= shape[0]:
        raise ValueError(f"row {int(indices.max())} is out of range: an array of shape {shape} has {shape[0]} rows")


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise ValueError(f"a shape is a tuple of whole numbers, not {shape!r}")
    wrong = [one for one in shape if isinstance(one, bool) or not isinstance(one, (int, np.integer)) or one < 0]
    if wrong or not shape:
        raise ValueError(
            f"the shape of an array with rows is a tuple of one or more whole numbers of at least 0, not {shape!r}"
        )
    return tuple(int(one) for one in shape)


def _bits_of(values: Any) -> Array:
    return values if isinstance(values, np.ndarray) else tensor_memory(values)


def _told(value: Any) -> str:
    return f"a tensor of layout {value.layout}" if is_tensor(value) else type(value).__name__
