"""Keys, arrays and tensors of a user's call: checks, conversions, and access to their memory.

This module imports neither torch nor a GPU library: a caller that has a tensor has imported it already. Inside the
package a value is its *bits*: a one-dimensional NumPy array of the storage type of its `DType`, in C order and
little-endian.
"""

from __future__ import annotations

import functools
import itertools
import math
import numbers
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvdist.dtypes import DType, from_name
from kvdist.errors import first_line
from kvdist.kernels.quantization import from_float32
from kvdist.naming import NamedKey, name_of

Key: TypeAlias = int | str
Shape: TypeAlias = tuple[int, ...]
Bits: TypeAlias = NDArray[Any]
Keys: TypeAlias = Key | Sequence[Key]
Value: TypeAlias = Any
"""An array, a list of arrays, or for a list of keys a list with either for each key (see `kvdist.kvstore.base`)."""
UpdaterFunction: TypeAlias = Callable[[Key, Any, Any], None]
"""Called as ``fn(key, received, stored)``; changes `stored` in place."""

_BY_NUMPY: dict[np.dtype[Any], DType] = {dtype.storage: dtype for dtype in DType if dtype is not DType.BFLOAT16}
_NUMPY = (np.ndarray, np.generic)
_KEYS_NAMED_MAX = 5
_SUPPORTED = ", ".join(dtype.label for dtype in DType)


def pairs(key: Key | Sequence[Key], value: Any) -> list[tuple[Key, list[Any]]]:
    """The keys of a call, each with its arrays: an array per device, an empty list where the value is None.

    Args:
        key: an int or a str, or a list or tuple of ints or of strs. A repeated key gathers all its arrays.
        value: for a single key an array, a list of arrays, or None; for a list of keys a list with such a value for
            each key.

    Returns:
        Pairs in the order in which the keys appear first.

    Raises:
        TypeError: a key is neither int nor str, or both types are mixed; a list of keys comes without a list of values.
        ValueError: the lists are empty or of different lengths.
    """
    if not isinstance(key, (list, tuple)):
        single = _checked(key)
        return [(single, _arrays(single, value))]
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"a list of keys needs a list of values, one for each key, not a single {type(value).__name__}")
    if len(key) != len(value):
        raise ValueError(
            f"{len(key)} keys need as many values, got {len(value)}; pass one value, or list, for each key"
        )
    if not key:
        raise ValueError("the list of keys is empty; name at least one key")
    if {type(one) for one in key} not in ({int}, {str}):
        key = _checked_list(key)
    gathered: dict[Key, list[Any]] = {}
    for one, arrays in zip(key, value, strict=True):
        if one in gathered:
            gathered[one] += _arrays(one, arrays)
        else:
            gathered[one] = _arrays(one, arrays)
    return list(gathered.items())


def keys(key: Key | Sequence[Key]) -> list[Key]:
    """The keys of a call without values, in the order of the call.

    Raises:
        TypeError, ValueError: as in `pairs`.
    """
    if not isinstance(key, (list, tuple)):
        return [_checked(key)]
    if not key:
        raise ValueError("the list of keys is empty; name at least one key")
    return _checked_list(key)


def describe(value: Any) -> tuple[Shape, DType]:
    """Shape and element type of a NumPy array (a scalar has no dimensions), a torch tensor or an array on a GPU.

    Raises:
        TypeError: the value is no such array, is sparse, or has an unsupported element type; or as in `require_whole`.
    """
    if not isinstance(value, _NUMPY) and is_tensor(value):
        torch = sys.modules["torch"]
        if value.layout is not torch.strided:
            require_plain(value)
        dtype = _torch_dtypes(torch).get(value.dtype)
        if dtype is None:
            raise TypeError(f"tensors of dtype {value.dtype} are not supported; use one of {_SUPPORTED}")
        if value.is_meta or value.is_nested:
            require_whole(value)
        try:
            return tuple(value.shape), dtype
        except RuntimeError:
            require_whole(value)
            raise
    if not isinstance(value, _NUMPY) and not _is_gpu_array(value):
        raise TypeError(
            f"a value must be a NumPy array or a torch tensor, not {type(value).__name__}; numpy.asarray makes an array"
        )
    if type(value) is not np.ndarray:
        require_whole(value)
    dtype = _BY_NUMPY.get(value.dtype) or _BY_NUMPY.get(np.dtype(value.dtype).newbyteorder("<"))
    if dtype is None:
        raise TypeError(f"arrays of dtype {value.dtype} are not supported; use one of {_SUPPORTED}")
    return tuple(value.shape), dtype


def is_key_type(tensor: Any) -> bool:
    """Whether a key may have the element type of this tensor."""
    return tensor.dtype in _torch_dtypes(sys.modules["torch"])


def require_plain(tensor: Any) -> None:
    """Refuse a torch tensor whose memory is not a plain strided array of its elements.

    Raises:
        TypeError: the tensor is sparse, quantized, or a lazy conjugate or negative; or as in `require_whole`.
    """
    require_whole(tensor)
    if tensor.layout is not sys.modules["torch"].strided:
        raise TypeError(f"tensors of layout {tensor.layout} are not supported; use .to_dense()")
    if tensor.is_quantized:
        raise TypeError(f"quantized tensors ({tensor.dtype}) are not supported; use .dequantize()")
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError(
            "it shows the conjugate or negative of the elements in its memory; use .resolve_conj().resolve_neg()"
        )


def require_whole(value: Any) -> None:
    """Refuse a tensor or array without a value for each of its elements.

    Raises:
        TypeError: the value is on the device ``meta``, nested, masked, or of a lazy module without a shape.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask: fill it, as by value.filled(0)")
    if getattr(value, "is_meta", False):
        raise TypeError("a tensor on the device 'meta' has no values: load or initialise it, behind to_empty()")
    if getattr(value, "is_nested", False):
        raise TypeError("nested tensors are not supported; use .to_padded_tensor(0.0), or a key for each part")
    try:
        getattr(value, "shape", None)
    except RuntimeError as error:
        raise TypeError(f"a tensor without a shape: {first_line(error)}") from None


def first_shape(key: Key, arrays: Sequence[Any]) -> tuple[Shape, DType]:
    """Shape and dtype of a key's first values, an array per device, which must agree.

    Raises:
        ValueError, TypeError: the list is empty, a value is not an array, or values differ; the message names the key.
    """
    if not arrays:
        raise ValueError(f"{name_of(key)} has no value; init needs an array for every key")
    try:
        shape, dtype = describe(arrays[0])
    except TypeError as error:
        raise TypeError(f"{name_of(key)}: {error}") from None
    for other in arrays[1:]:
        require(key, other, shape, dtype)
    return shape, dtype


def has_dtype(key: Key, value: Any, shape: Shape, dtype: DType) -> bool:
    """Whether a value of the key's shape is of its dtype, too; else it can be `converted`.

    Raises:
        TypeError: the value is not an array, or of an unsupported dtype; the message names the key.
        ValueError: the value has another shape.
    """
    if type(value) is np.ndarray and value.shape == shape and _BY_NUMPY.get(value.dtype) is dtype:
        return True  # the usual case, asked for every array of every call
    try:
        given_shape, given_dtype = describe(value)
    except TypeError as error:
        raise TypeError(f"{name_of(key)}: {error}") from None
    if given_shape != shape:
        raise ValueError(
            f"{name_of(key)} has shape {shape}, but the value has shape {given_shape}: every value of a key has"
            " the shape that init gave it"
        )
    return given_dtype is dtype


def require(key: Key, value: Any, shape: Shape, dtype: DType) -> None:
    """Check that a value fits its key.

    Raises:
        TypeError: the value is not an array, or of another dtype; the message names the key and both dtypes.
        ValueError: the value has another shape.
    """
    if not has_dtype(key, value, shape, dtype):
        given = describe(value)[1].label
        raise TypeError(f"{name_of(key)} holds {dtype.label}, but the value is {given}; convert it")


def converted(value: Any, dtype: DType) -> Any:
    """A copy of another element type: floats are rounded to nearest, and fractions are cut off for integers.

    Raises:
        TypeError: the library of an array on a GPU does not convert.
    """
    if is_tensor(value):
        return value.detach().to(getattr(sys.modules["torch"], dtype.label))
    if isinstance(value, _NUMPY):
        bits = recast(np.asarray(value), describe(value)[1], dtype)
        return like("torch" if dtype is DType.BFLOAT16 else "numpy", value.shape, dtype, bits)
    if not hasattr(value, "astype") or dtype is DType.BFLOAT16:
        raise TypeError(f"an array on a GPU of dtype {value.dtype} is not converted to {dtype.label}; convert it")
    return value.astype(dtype.storage)


def recast(values: Bits, dtype: DType, to: DType) -> Bits:
    """Values as another element type: floats are rounded to nearest, and fractions are cut off for integers.

    Args:
        values: array of `dtype.storage`.
        dtype: the element type of `values`.
        to: the element type of the result; `values` is returned itself if both are the same.
    """
    return values if dtype is to else narrowed(widened(values, dtype), to)


def widened(values: Bits, dtype: DType) -> Bits:
    """Values as an array of the type in which they are summed."""
    if dtype is DType.BFLOAT16:
        return np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
    return values.astype(dtype.accumulate, copy=False)


def narrowed(sums: Bits, dtype: DType) -> Bits:
    """Sums as an array of the type of values. Too large sums become infinite without a warning, as in MXNet."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype is DType.BFLOAT16:
            return from_float32(sums.astype(np.float32, copy=False).reshape(-1), dtype).reshape(sums.shape)
        return sums.astype(dtype.storage, copy=False)


def require_writable(key: Key, value: Any, shape: Shape, dtype: DType) -> None:
    """Check that a result for the key can be written into the value: it has the key's shape and is not read-only."""
    has_dtype(key, value, shape, dtype)
    if isinstance(value, np.generic):
        raise ValueError(
            f"{name_of(key)}: a NumPy scalar cannot be written into; give numpy.asarray(value) and keep that"
        )
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ValueError(f"{name_of(key)}: {_read_only(value)}")


def read_bits(value: Any) -> Bits:
    """The value's elements as one-dimensional storage bits.

    No copy is made of contiguous host memory: the result then shows the value itself and must not be written.
    """
    if isinstance(value, _NUMPY):
        plain = np.asarray(value)
        if plain.dtype in _BY_NUMPY and plain.flags.c_contiguous and plain.flags.aligned:
            return plain.reshape(-1)
        return np.array(plain, dtype=describe(plain)[1].storage, order="C", copy=True).reshape(-1)
    if not is_tensor(value):
        get = getattr(value, "get", None) or value.copy_to_host
        return np.ascontiguousarray(get()).reshape(-1)
    return tensor_memory(value.detach().cpu().contiguous())


def writable_bits(value: Any, dtype: DType) -> Bits | None:
    """The value's memory as bits of this type to write into; None if it has no such form (then use `write_bits`).

    The caller is going to write: autograd learns now that a tensor changes, so a backward pass that still needs the
    old values raises instead of computing with the new ones.
    """
    if isinstance(value, np.ndarray):
        plain = np.asarray(value)
        return plain.reshape(-1) if plain.flags.carray and plain.dtype == dtype.storage else None
    if not is_tensor(value) or value.device.type != "cpu" or not value.is_contiguous():
        return None
    memory = tensor_memory(about_to_change(value))
    return memory if memory.dtype == dtype.storage else None


def about_to_change(value: Any) -> Any:
    """The value without its history; autograd learns now that a tensor, which is contiguous, changes."""
    if not is_tensor(value):
        return value
    sys.modules["torch"].autograd.graph.increment_version(value)
    return value.detach()


def is_in_order(value: Any) -> bool:
    """Whether a tensor, or an array on a GPU, is contiguous in C order."""
    return bool(value.is_contiguous()) if is_tensor(value) else _is_gpu_array_in_order(value)


def in_order(value: Any) -> Any:
    """A tensor, or an array on a GPU, in C order and without its history; a non-contiguous tensor is copied.

    Raises:
        TypeError: an array of another library is not contiguous.
    """
    if is_tensor(value):
        return value.detach().contiguous()
    if not _is_gpu_array_in_order(value):
        raise TypeError("an array on a GPU must be contiguous in C order: make it so, as with cupy.ascontiguousarray")
    return value


def gpu_of(value: Any) -> int | None:
    """The number of the GPU on which a value lies; None for the host's memory."""
    # Asked for every array of every call: what is usual is recognised without asking torch what a tensor is.
    if type(value) is np.ndarray or getattr(value, "is_cuda", None) is False:
        return None
    if is_tensor(value):
        index: int = value.device.index
        return index
    return _gpu_array_index(value) if _is_gpu_array(value) else None


def write_bits(value: Any, bits: Bits, dtype: DType) -> None:
    """Write bits of this type into the value in place, on the host or a GPU; converts them to the value's type.

    Raises:
        ValueError: the value is a read-only array.
    """
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            raise ValueError(_read_only(value))
        numbers = recast(bits, dtype, DType.FLOAT32) if dtype is DType.BFLOAT16 else bits
        with np.errstate(over="ignore", invalid="ignore"):  # another type may hold less
            np.asarray(value)[...] = numbers.reshape(value.shape)
    elif not is_tensor(value):
        put = getattr(value, "set", None) or value.copy_to_device
        put(np.ascontiguousarray(recast(bits, dtype, describe(value)[1])).reshape(value.shape))
    else:
        value.detach().copy_(tensor_over(bits, dtype).view(value.shape))


def present_stream(value: Any) -> AbstractContextManager[Any]:
    """Context in which the stream that is current at this call, for a tensor on a GPU, is current in any thread."""
    if not is_tensor(value) or not value.is_cuda:
        return nullcontext()
    cuda = sys.modules["torch"].cuda
    stream: AbstractContextManager[Any] = cuda.stream(cuda.current_stream(value.device))
    return stream


def kind_of(value: Any) -> str:
    """Kind of a value, for `like`: ``numpy``, ``torch``, or a library and a device, such as ``torch:cuda:0``."""
    if isinstance(value, _NUMPY):
        return "numpy"
    if not is_tensor(value):
        return f"{type(value).__module__.partition('.')[0]}:{_gpu_array_index(value)}"
    return "torch" if value.device.type == "cpu" else f"torch:{value.device}"


def like(kind: str, shape: Shape, dtype: DType, bits: Bits) -> Any:
    """An array or tensor of the kind with these bits: a view in host memory, a copy on a device."""
    if kind == "numpy":
        return bits.reshape(shape)
    library, _, device = kind.partition(":")
    if library != "torch":
        return _gpu_array_like(library, int(device), bits.reshape(shape))
    tensor = tensor_over(bits, dtype).view(shape)
    return tensor.to(device) if device else tensor


def empty_tensor(kind: str, shape: Shape, dtype: DType) -> Any:
    """A new uninitialized tensor of a kind; None if the kind is not a torch tensor."""
    library, _, device = kind.partition(":")
    torch = sys.modules.get("torch")
    if library != "torch" or torch is None:
        return None
    return torch.empty(shape, dtype=getattr(torch, dtype.label), device=device or "cpu")


def is_tensor(value: Any) -> bool:
    """Whether the value is a torch tensor (never as long as torch is not imported)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_dtype(dtype: Any) -> DType:
    """The element type meant by a name, a NumPy dtype or type, a torch dtype, or a `DType`.

    Raises:
        TypeError: the argument means no element type, or a type that no key may have.
    """
    if isinstance(dtype, DType):
        return dtype
    text = str(dtype)
    if text.startswith("torch.") or text == DType.BFLOAT16.label:
        return from_name(text.removeprefix("torch."))
    return from_name(np.dtype(dtype).name)


def as_numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype of new arrays of an element type; `dtype` is as for `as_dtype`.

    Raises:
        TypeError: NumPy has no such type.
    """
    found = as_dtype(dtype)
    if found is DType.BFLOAT16:
        raise TypeError("NumPy has no bfloat16; make a torch tensor, or an array of another dtype")
    return found.storage


def require_same_type(keys: Iterable[Key], known: Collection[Key]) -> None:
    """Check that new keys are of the same type as the store's.

    Raises:
        TypeError: new keys are names and the store's are numbers, or the other way round.
    """
    there = next(iter(known), None)
    for key in keys:
        if there is not None and isinstance(key, str) is not isinstance(there, str):
            raise TypeError(f"{name_of(key)} is of another type than {there!r}; a store's keys are all int or all str")


def unknown_key(key: Key, known: Collection[Key]) -> str:
    """The error message for a key that has not been initialised."""
    if not known:
        return f"{name_of(key)} has not been initialised, and neither has any other; call init first"
    named = ", ".join(repr(one) for one in itertools.islice(known, _KEYS_NAMED_MAX))
    more = "" if len(known) <= _KEYS_NAMED_MAX else f", … ({len(known)} in all)"
    return f"{name_of(key)} has not been initialised; call init first. The store has the keys {named}{more}"


def as_averaged(value: Any) -> Any:
    """The value as a new array or tensor of a floating type.

    Raises:
        TypeError: the value is neither a number nor an array that a store could hold.
    """
    if isinstance(value, numbers.Number | np.generic) and not isinstance(value, complex | np.complexfloating):
        return np.array(value, np.float64)
    require_whole(value)
    if isinstance(value, np.ndarray):
        return value.astype(np.float64) if value.dtype.kind in "biu" else _described(value).copy()
    if is_tensor(value):
        tensor = value.detach()
        is_whole = not tensor.is_floating_point() and not tensor.is_complex()
        return tensor.double() if is_whole else _described(tensor).clone()
    raise TypeError(f"average takes a number, a NumPy array or a torch tensor, not {type(value).__name__}")


def as_given(value: Any, result: Any) -> Any:
    """The result in the form of the argument `value`: a float for a number."""
    return float(result) if isinstance(value, numbers.Number | np.generic) else result


def zeros_like(array: Any) -> Any:
    """A new array of the kind, shape and dtype of a value, with zeros."""
    return array.detach().new_zeros(array.shape) if is_tensor(array) else np.zeros_like(array)


def _described(value: Any) -> Any:
    describe(value)
    return value


def _checked(key: Any) -> Key:
    if isinstance(key, bool) or not isinstance(key, (int, str, np.integer)):
        raise TypeError(f"a key must be an int or a str, not {type(key).__name__} ({key!r})")
    return key if isinstance(key, (str, NamedKey)) else int(key)


def _checked_list(keys: Sequence[Any]) -> list[Key]:
    checked = [_checked(key) for key in keys]
    if len({isinstance(key, str) for key in checked}) > 1:
        raise TypeError("the keys of one call must be all int or all str, not mixed")
    return checked


def _arrays(key: Key, value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        return [value]
    if not value:
        raise ValueError(f"{name_of(key)} has an empty list of values; give an array, or None for no gradient")
    return [array for array in value if array is not None]


def _read_only(value: Bits) -> str:
    return (
        f"the array of shape {value.shape} and dtype {value.dtype} is read-only, so the result cannot be written"
        " into it; give a writable one, such as its .copy()"
    )


def tensor_memory(tensor: Any) -> Bits:
    """Host memory of a contiguous tensor that does not require grad."""
    if tensor.dtype is sys.modules["torch"].bfloat16:
        bits: Bits = tensor.view(sys.modules["torch"].int16).numpy().view(DType.BFLOAT16.storage)
    else:
        bits = tensor.numpy()
    return bits.reshape(-1)


def tensor_over(bits: Bits, dtype: DType) -> Any:
    """A flat tensor with these bits: a view if they are writable, else a copy."""
    torch = sys.modules["torch"]
    if not bits.flags.writeable:
        bits = bits.copy()  # torch has no read-only tensors, and what was handed out must not change
    if dtype is DType.BFLOAT16:
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits)


@functools.cache
def _torch_dtypes(torch: Any) -> dict[Any, DType]:
    return {getattr(torch, dtype.label): dtype for dtype in DType}


def _is_gpu_array(value: Any) -> bool:
    """Whether the value is an array on a GPU."""
    return getattr(value, "__cuda_array_interface__", None) is not None


def _gpu_array_index(value: Any) -> int | None:
    """Index of the GPU on which an array lies."""
    from kvdist.kernels.gpu import gpu_index  # a feature at a seam: loaded where it is used

    return gpu_index(value)


def _is_gpu_array_in_order(value: Any) -> bool:
    """Whether an array on a GPU is contiguous in C order."""
    interface = value.__cuda_array_interface__
    strides = interface.get("strides")
    if strides is None or math.prod(interface["shape"]) == 0:
        return True
    expected = np.dtype(interface["typestr"]).itemsize
    for length, stride in zip(reversed(interface["shape"]), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _gpu_array_like(library: str, index: int, array: NDArray[Any]) -> Any:
    """A copy of host memory on a GPU, as an array of the library."""
    if library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(index):
            return cupy.asarray(array)
    cuda = sys.modules[library].cuda
    with cuda.gpus[index]:
        return cuda.to_device(array)
