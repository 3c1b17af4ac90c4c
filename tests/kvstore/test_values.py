"""What may be handed in, and that memory is read and written to the bit."""

from itertools import product

import numpy as np
import pytest
import torch

from kvdist import RowSparse, kv
from kvdist.dtypes import DType
from kvdist.kvstore import values
from tests.cases import each

NUMPY_DTYPES = [dtype for dtype in DType if dtype is not DType.BFLOAT16]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3)]


def bits_of(count: int, dtype: DType) -> np.ndarray:
    """Bits that are numbers in every type, and not the same backwards."""
    numbers = np.arange(count) % 100
    if dtype is DType.BFLOAT16:
        return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2")
    return numbers.astype(dtype.storage)


def numpy_contiguous(shape, dtype):
    return np.zeros(shape, dtype.storage)


def numpy_transposed(shape, dtype):
    return np.zeros(shape[::-1], dtype.storage).T


def numpy_every_other(shape, dtype):
    return np.zeros((*shape, 2), dtype.storage)[..., 1]


def numpy_big_endian(shape, dtype):
    return np.zeros(shape, dtype.storage.newbyteorder(">"))


def numpy_unaligned(shape, dtype):
    count = int(np.prod(shape)) * dtype.itemsize
    return np.zeros(count + 1, np.uint8)[1:].view(dtype.storage).reshape(shape)


def torch_contiguous(shape, dtype):
    return torch.zeros(shape, dtype=getattr(torch, dtype.label))


def torch_transposed(shape, dtype):
    return torch.zeros(shape[::-1], dtype=getattr(torch, dtype.label)).permute(tuple(reversed(range(len(shape)))))


def torch_every_other(shape, dtype):
    return torch.zeros((*shape, 2), dtype=getattr(torch, dtype.label))[..., 1]


def torch_that_requires_grad(shape, dtype):
    return torch.zeros(shape, dtype=getattr(torch, dtype.label), requires_grad=dtype.is_floating)


FORMS = [
    numpy_contiguous,
    numpy_transposed,
    numpy_every_other,
    numpy_big_endian,
    numpy_unaligned,
    torch_contiguous,
    torch_transposed,
    torch_every_other,
    torch_that_requires_grad,
]
TABLE = [
    (form, shape, dtype)
    for form, shape, dtype in product(FORMS, SHAPES, DType)
    if form.__name__.startswith("torch") or dtype in NUMPY_DTYPES
]


@each("form, shape, dtype", TABLE)
def test_what_is_written_is_read_back_to_the_bit_whatever_the_kind_dtype_and_layout(form, shape, dtype):
    value = form(shape, dtype)
    bits = bits_of(int(np.prod(shape)), dtype)
    assert values.describe(value) == (shape, dtype)
    values.write_bits(value, bits, dtype)
    read = values.read_bits(value)
    assert read.dtype == dtype.storage and read.ndim == 1 and read.flags.c_contiguous and read.flags.aligned
    np.testing.assert_array_equal(read, bits)
    expected = bits.view("<u2") if dtype is DType.BFLOAT16 else bits.astype(float)
    shown = value.detach().view(torch.int16).numpy() if dtype is DType.BFLOAT16 else np.asarray(value.tolist(), float)
    np.testing.assert_array_equal(shown.reshape(-1), expected.reshape(-1))


@each("form, shape, dtype", TABLE)
def test_writable_bits_are_the_values_own_memory_or_none(form, shape, dtype):
    value = form(shape, dtype)
    memory = values.writable_bits(value, dtype)
    if memory is None:
        assert form not in (numpy_contiguous, torch_contiguous, torch_that_requires_grad)
        return
    memory[...] = bits_of(memory.size, dtype)
    np.testing.assert_array_equal(values.read_bits(value), bits_of(memory.size, dtype))


@each("form", [numpy_contiguous, torch_contiguous, torch_that_requires_grad])
def test_reading_contiguous_memory_makes_no_copy(form):
    value = form((3, 5), DType.FLOAT32)
    read = values.read_bits(value)
    values.write_bits(value, bits_of(15, DType.FLOAT32), DType.FLOAT32)
    np.testing.assert_array_equal(read, bits_of(15, DType.FLOAT32))


@each("dtype", DType)
def test_like_gives_the_kind_that_came(dtype):
    kinds = {values.kind_of(form((3,), dtype)) for form in (torch_contiguous, torch_that_requires_grad)}
    assert kinds == {"torch"}
    tensor = values.like("torch", (3, 1), dtype, bits_of(3, dtype))
    assert tensor.dtype is getattr(torch, dtype.label) and tuple(tensor.shape) == (3, 1)
    np.testing.assert_array_equal(values.read_bits(tensor), bits_of(3, dtype))
    if dtype in NUMPY_DTYPES:
        array = values.like(values.kind_of(np.zeros(3)), (3, 1), dtype, bits_of(3, dtype))
        assert array.shape == (3, 1) and array.dtype == dtype.storage


def test_a_tensor_over_read_only_bits_is_a_copy():
    bits = bits_of(3, DType.FLOAT32)
    bits.flags.writeable = False
    values.like("torch", (3,), DType.FLOAT32, bits).fill_(9)
    np.testing.assert_array_equal(bits, [0, 1, 2])


def write_into_memory(value, bits, dtype):
    values.writable_bits(value, dtype)[...] = bits


@each("write", [values.write_bits, write_into_memory])
def test_a_backward_pass_through_overwritten_weights_raises(write):
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    write(weight, np.array([1, 2, 3], np.float32), DType.FLOAT32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_read_only_array_is_refused_by_name():
    array = np.zeros((2, 3), np.float32)
    array.flags.writeable = False
    assert values.writable_bits(array, DType.FLOAT32) is None
    with pytest.raises(ValueError, match=r"shape \(2, 3\) and dtype float32 is read-only"):
        values.write_bits(array, np.ones(6, np.float32), DType.FLOAT32)
    with pytest.raises(ValueError, match="key 'w': .*read-only"):
        values.require_writable("w", array, (2, 3), DType.FLOAT32)


@each(
    "value, message",
    [
        (1.5, "not float; numpy.asarray"),
        ([1.0], "not list; numpy.asarray"),
        (np.zeros(2, complex), "dtype complex128 are not supported; use one of float32"),
        (np.zeros(2, bool), "dtype bool are not supported"),
        (np.array(["a"]), "dtype <U1 are not supported"),
        (np.zeros(2, object), "dtype object are not supported"),
        (torch.zeros(2, dtype=torch.bool), "dtype torch.bool are not supported"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo are not supported; use .to_dense"),
    ],
)
def test_what_is_not_a_supported_array_is_refused(value, message):
    with pytest.raises(TypeError, match=message):
        values.describe(value)


def test_a_value_that_does_not_fit_its_key_is_refused_by_key_expected_and_given():
    with pytest.raises(ValueError, match=r"key 'w' has shape \(2, 3\), but the value has shape \(3, 2\)"):
        values.require("w", np.zeros((3, 2), np.float32), (2, 3), DType.FLOAT32)
    with pytest.raises(TypeError, match="key 5 holds float32, but the value is float64"):
        values.require(5, np.zeros((2, 3)), (2, 3), DType.FLOAT32)
    with pytest.raises(TypeError, match="key 5: a value must be a NumPy array or a torch tensor, not str"):
        values.require(5, "text", (2, 3), DType.FLOAT32)


A, B, C = (np.full(2, number, np.float32) for number in (1, 2, 3))


@each(
    "key, value, expected",
    [
        (3, A, [(3, [A])]),
        ("w", [A, B], [("w", [A, B])]),
        ("w", None, [("w", [])]),
        ("w", [None, B], [("w", [B])]),
        ([3], [A], [(3, [A])]),
        ((3, 5), (A, B), [(3, [A]), (5, [B])]),
        (["b", "a"], [[A, B], C], [("b", [A, B]), ("a", [C])]),
        ([5, 3, 5], [A, B, C], [(5, [A, C]), (3, [B])]),
        ([5, 3], [None, [B]], [(5, []), (3, [B])]),
        ([np.int64(5)], [A], [(5, [A])]),
        ("", A, [("", [A])]),
    ],
)
def test_keys_and_values_become_pairs(key, value, expected):
    found = values.pairs(key, value)
    assert [(one, [id(array) for array in arrays]) for one, arrays in found] == [
        (one, [id(array) for array in arrays]) for one, arrays in expected
    ]


@each(
    "key, value, error, message",
    [
        (1.5, A, TypeError, "must be an int or a str, not float"),
        (True, A, TypeError, "must be an int or a str, not bool"),
        (None, A, TypeError, "must be an int or a str, not NoneType"),
        ([1, "a"], [A, A], TypeError, "all int or all str, not mixed"),
        ([1, True], [A, A], TypeError, "not bool"),
        ([1, 2], A, TypeError, "a list of values, one for each key, not a single ndarray"),
        ([1, 2], [A], ValueError, "2 keys need as many values, got 1"),
        ([], [], ValueError, "list of keys is empty"),
        (1, [], ValueError, "key 1 has an empty list of values"),
        ([1, 2], [A, []], ValueError, "key 2 has an empty list of values"),
    ],
)
def test_keys_and_values_that_do_not_fit_are_refused(key, value, error, message):
    with pytest.raises(error, match=message):
        values.pairs(key, value)


def test_keys_alone_are_checked_too():
    assert values.keys("w") == ["w"]
    assert values.keys((3, 5, 3)) == [3, 5, 3]
    with pytest.raises(TypeError, match="not float"):
        values.keys([1, 2.0])
    with pytest.raises(ValueError, match="empty"):
        values.keys([])


@each(
    "given, expected",
    [
        ("float32", DType.FLOAT32),
        ("bfloat16", DType.BFLOAT16),
        (np.float16, DType.FLOAT16),
        (np.dtype(">i4"), DType.INT32),
        (float, DType.FLOAT64),
        (torch.bfloat16, DType.BFLOAT16),
        (torch.uint8, DType.UINT8),
        (DType.INT8, DType.INT8),
    ],
)
def test_a_dtype_may_be_given_in_many_ways(given, expected):
    assert values.as_dtype(given) is expected


def test_dtypes_that_no_array_can_have_are_refused():
    with pytest.raises(TypeError, match="complex64 are not supported"):
        values.as_dtype(torch.complex64)
    with pytest.raises(TypeError, match="NumPy has no bfloat16"):
        values.as_numpy_dtype("bfloat16")


@pytest.mark.gpu
def test_cuda_tensors_are_read_written_and_made():
    tensor = torch.arange(6, dtype=torch.float32, device="cuda").view(2, 3)
    np.testing.assert_array_equal(values.read_bits(tensor), np.arange(6))
    assert values.writable_bits(tensor, DType.FLOAT32) is None
    values.write_bits(tensor, np.arange(6, 12, dtype=np.float32), DType.FLOAT32)
    assert tensor.tolist() == [[6, 7, 8], [9, 10, 11]]
    made = values.like(values.kind_of(tensor), (2, 3), DType.FLOAT32, np.ones(6, np.float32))
    assert made.device == tensor.device


def test_a_numpy_scalar_is_read_like_an_array_without_dimensions_and_cannot_be_written():
    value = np.float32(1.5)
    assert values.describe(value) == ((), DType.FLOAT32)
    assert values.read_bits(value).tolist() == [1.5]
    with pytest.raises(ValueError, match="cannot be written into"):
        values.require_writable("w", value, (), DType.FLOAT32)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@each("kind", ["dist", "device", "local", "collective"])
@each(
    "make, said",
    [
        (lambda: torch.ones(2, device="meta"), "a tensor on the device 'meta' has no values"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested tensors are not supported"),
        (lambda: np.ma.masked_array(np.ones(2, np.float32), [False, True]), "a masked array would lose its mask"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "a tensor without a shape: Can't access the shape"),
        (lambda: torch.ones(2, dtype=torch.complex64), "tensors of dtype torch.complex64 are not supported"),
        (lambda: np.array(["a"]), "arrays of dtype <U1 are not supported"),
    ],
)
def test_a_value_whose_elements_are_not_all_there_is_refused_by_its_key(kind, make, said):
    with kv.create(kind) as store:
        store.init("w", torch.ones(2))
        for call in (
            lambda value: store.init("w2", value),
            lambda value: store.push("w", value),
            lambda value: store.pull("w", out=value),
            lambda value: store.pushpull("w", value),
            lambda value: store.broadcast("w", value, out=torch.ones(2)),
        ):
            with pytest.raises(TypeError, match=f"key 'w2?': {said}"):
                call(make())
        with pytest.raises(TypeError, match=said):
            store.average(make())


def test_rows_and_their_ids_have_no_mask():
    rows, ids = np.ma.masked_array(np.ones((1, 2), np.float32), True), np.ma.masked_array([0], True)
    for given in ((ids, rows.filled(0)), ([0], rows)):
        with pytest.raises(TypeError, match="a masked array would lose its mask"):
            RowSparse(*given)
