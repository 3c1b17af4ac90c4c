"""One file of arrays: what others write is read, what is written others read, and nothing in a header is trusted."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvdist.checkpoint import format as tensors
from kvdist.checkpoint.format import NAMES, Tensor, TensorFile, write_named_tensors, write_tensors
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError
from tests.cases import each

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1, 1, 1), (1025,)]
TORCH_TYPES = {dtype: getattr(torch, dtype.label) for dtype in DType}


def bits_of(dtype, size, seed=0):
    """Random bytes of a type, every pattern: NaNs, infinities and subnormal numbers too."""
    data = np.random.default_rng(seed).integers(0, 256, size * dtype.itemsize, np.uint8)
    return data.view(dtype.storage)


def tensor(name, dtype, shape, seed=0):
    bits = bits_of(dtype, int(np.prod(shape, dtype=int)), seed)
    return Tensor(name, dtype, shape, lambda: bits)


def all_kinds():
    return [
        tensor(f"{dtype.label}{list(shape)}", dtype, shape, 31 * number + index)
        for number, dtype in enumerate(DType)
        for index, shape in enumerate(SHAPES)
    ]


def bytes_of(array):
    return array.contiguous().view(torch.uint8).numpy().tobytes() if array.numel() else b""


def read(file, name, dtype, start=0, count=None):
    out = np.empty(file.entries[name].size - start if count is None else count, dtype.storage)
    file.read_into(name, start, out)
    return out


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_the_library_of_the_format_reads_every_type_and_shape_that_is_written(tmp_path):
    written = all_kinds()
    record = write_tensors(tmp_path, "server-0", written, {"who": "kvdist"})
    found = load_file(tmp_path / record.name)
    assert found.keys() == {one.name for one in written}
    for one in written:
        array = found[one.name].reshape(-1)
        assert (found[one.name].shape, array.dtype) == (one.shape, TORCH_TYPES[one.dtype])
        assert bytes_of(array) == one.read().tobytes(), one.name
    with safe_open(tmp_path / record.name, "pt") as file:
        assert file.metadata() == {"who": "kvdist"}


def test_what_the_library_of_the_format_writes_is_read_bit_by_bit(tmp_path):
    given_bits = {one.name: one for one in all_kinds()}
    arrays = {}
    for name, one in given_bits.items():
        arrays[name] = torch.empty(one.shape, dtype=TORCH_TYPES[one.dtype])
        arrays[name].reshape(-1).view(torch.uint8).copy_(torch.from_numpy(one.read().view(np.uint8)))
    save_file(arrays, tmp_path / "theirs.safetensors", {"format": "pt"})
    file = TensorFile(tmp_path / "theirs.safetensors")
    assert file.metadata == {"format": "pt"} and file.entries.keys() == given_bits.keys()
    for name, one in given_bits.items():
        assert (file.entries[name].dtype, file.entries[name].shape) == (one.dtype, one.shape)
        assert read(file, name, one.dtype).tobytes() == one.read().tobytes(), name


def test_a_file_without_arrays_is_written_and_read_by_both(tmp_path):
    record = write_tensors(tmp_path, "server-0", [], {})
    assert TensorFile(tmp_path / record.name).entries == {} == load_file(tmp_path / record.name)


def test_each_array_begins_where_its_elements_may(tmp_path):
    record = write_tensors(tmp_path, "server-0", all_kinds(), {"odd": "x" * 13})
    for name, found in TensorFile(tmp_path / record.name).entries.items():
        assert found.offset % found.dtype.itemsize == 0, name


@each("name", ['"quoted"', "ключ 鍵 🔑", "line\nbreak", "", "__metadata", "a/b[0:3]/weight", "\x00"])
def test_a_name_may_be_any_text(tmp_path, name):
    record = write_tensors(tmp_path, "server-0", [tensor(name, DType.FLOAT32, (3,))], {})
    assert list(TensorFile(tmp_path / record.name).entries) == [name] == list(load_file(tmp_path / record.name))


@each(
    "names, sentence",
    [
        (["a", "a"], "the arrays of a file need different names"),
        (["__metadata__"], "none may be called __metadata__"),
        (["\ud800"], "cannot be encoded"),
    ],
)
def test_a_name_that_no_file_can_have_is_refused_before_anything_is_written(tmp_path, names, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        write_tensors(tmp_path, "server-0", [tensor(name, DType.INT8, (1,)) for name in names], {})
    assert list(tmp_path.iterdir()) == []


def test_a_header_longer_than_readers_take_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "HEADER_BYTES_MAX", 100)
    with pytest.raises(CheckpointError, match="2 arrays need a header of .* bytes, where files may have 100; use more"):
        write_tensors(tmp_path, "server-0", [tensor(name, DType.INT8, (1,)) for name in "ab"], {})


def test_arrays_are_asked_for_one_after_the_other_and_once(tmp_path):
    asked = []

    def asking(name):
        return Tensor(name, DType.FLOAT32, (2,), lambda: asked.append(name) or np.zeros(2, np.float32))

    write_tensors(tmp_path, "server-0", [asking("a"), asking("b")], {})
    assert asked == ["a", "b"]


@given(start=st.integers(0, 17), count=st.integers(0, 17))
@settings(max_examples=40)
def test_any_stretch_of_an_array_is_read_alone(tmp_path_factory, start, count):
    folder = tmp_path_factory.mktemp("stretch")
    one = tensor("w", DType.BFLOAT16, (17,))
    record = write_tensors(folder, "server-0", [tensor("before", DType.FLOAT64, (3,)), one], {})
    file = TensorFile(folder / record.name)
    if start + count <= 17:
        assert read(file, "w", DType.BFLOAT16, start, count).tobytes() == one.read()[start : start + count].tobytes()
    else:
        with pytest.raises(CheckpointError, match=f"does not have elements {start} to {start + count} of w"):
            read(file, "w", DType.BFLOAT16, start, count)


def test_an_array_that_is_not_there_or_of_another_type_is_an_error(tmp_path):
    record = write_tensors(tmp_path, "server-0", [tensor("w", DType.FLOAT16, (4,))], {})
    file = TensorFile(tmp_path / record.name)
    for name, dtype in [("v", np.float16), ("w", np.uint16), ("w", np.float32)]:
        with pytest.raises(CheckpointError, match=f"does not have elements 0 to 4 of {name}"):
            file.read_into(name, 0, np.empty(4, dtype))
    with pytest.raises(CheckpointError, match="does not have elements -1 to 1 of w"):
        file.read_into("w", -1, np.empty(2, np.float16))


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    record = write_tensors(tmp_path, "server-0", [tensor("w", DType.FLOAT32, (400,))], {})
    file = TensorFile(tmp_path / record.name)
    with open(tmp_path / record.name, "r+b") as handle:
        handle.truncate(record.nbytes - 1)
    with pytest.raises(CheckpointError, match="was cut off while it was read"):
        read(file, "w", DType.FLOAT32)


def test_a_file_cut_off_anywhere_is_no_file_of_arrays(tmp_path):
    record = write_tensors(tmp_path, "server-0", [tensor("w", DType.FLOAT32, (5,)), tensor("v", DType.INT8, (3,))], {})
    content = (tmp_path / record.name).read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="cut"):
            TensorFile(tmp_path / "cut")


HUGE = 1 << 70
WRONG = {
    "nothing at all": b"",
    "a length without a header": struct.pack("<Q", 2),
    "a header longer than the file": raw({}, length=1000),
    "a header longer than any": raw({}, length=(1 << 64) - 1),
    "no JSON": raw(b"}{"),
    "no UTF-8": raw(b'{"\xff": 1}'),
    "a list": raw([1]),
    "a number": raw(7),
    "an entry that is none": raw({"w": 7}),
    "metadata that is none": raw({"__metadata__": 7}),
    "an unknown type": raw({"w": entry("F8")}, bytes(8)),
    "a type that is no text": raw({"w": entry(dtype=[])}, bytes(8)),
    "no type": raw({"w": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "no offsets": raw({"w": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "three offsets": raw({"w": entry(offsets=(0, 8, 16))}, bytes(8)),
    "offsets beyond the file": raw({"w": entry(offsets=(0, 8))}, bytes(7)),
    "offsets far beyond the file": raw({"w": entry(offsets=(HUGE, HUGE + 8))}, bytes(8)),
    "offsets that begin beyond the file": raw({"w": entry(offsets=(8, 16))}, bytes(8)),
    "negative offsets": raw({"w": entry(offsets=(-8, 0))}, bytes(8)),
    "offsets the wrong way round": raw({"w": entry(offsets=(8, 0))}, bytes(8)),
    "offsets longer than the shape": raw({"w": entry(shape=(1,))}, bytes(8)),
    "a negative length": raw({"w": entry(shape=(-2,))}, bytes(8)),
    "two negative lengths": raw({"w": entry(shape=(-2, -1))}, bytes(8)),
    "a huge length": raw({"w": entry(shape=(HUGE, 0), offsets=(0, 0))}),
    "a length that is a truth value": raw({"w": entry("I8", (True,), (0, 1))}, bytes(1)),
    "a length that is no whole number": raw({"w": entry(shape=(2.0,))}, bytes(8)),
    "a length that is text": raw({"w": entry(shape=("2",))}, bytes(8)),
    "an offset that is a truth value": raw({"w": entry("I8", (1,), (False, 1))}, bytes(1)),
    "offsets that are no numbers": raw({"w": entry(offsets=(None, 8))}, bytes(8)),
    "more dimensions than anybody has": raw({"w": entry("I8", (1,) * 65, (0, 1))}, bytes(1)),
    "millions of dimensions": raw({"w": entry("I8", (999_999,) * 200_000, (0, 1))}, bytes(1)),
    "a number of thousands of digits": raw(b'{"w":{"dtype":"I8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}'),
    "two arrays in one place": raw({"v": entry(), "w": entry()}, bytes(8)),
    "an array over another": raw({"v": entry(), "w": entry(offsets=(4, 12))}, bytes(12)),
    "a hole": raw({"v": entry(), "w": entry(offsets=(9, 17))}, bytes(17)),
    "bytes at the end": raw({"w": entry()}, bytes(9)),
    "bytes and no array": raw({}, bytes(1)),
    "one name twice": raw(b'{"w":%s,"w":%s}' % ((json.dumps(entry("I8", (0,), (0, 0))).encode(),) * 2)),
    "one entry twice": raw(b'{"w":{"dtype":"I8","shape":[0],"shape":[0],"data_offsets":[0,0]}}'),
    "nested without end": raw(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
}


@each("content", WRONG.values())
def test_a_header_is_not_believed(tmp_path, content):
    (tmp_path / "wrong").write_bytes(content)
    with pytest.raises(CheckpointError, match="wrong is (damaged: its header is not readable|not a safetensors file)"):
        TensorFile(tmp_path / "wrong")


def test_a_header_that_is_right_is_believed(tmp_path):
    (tmp_path / "right").write_bytes(raw({"w": entry(), "v": entry("I8", (2, 0), (8, 8))}, bytes(8)))
    assert TensorFile(tmp_path / "right").entries.keys() == {"w", "v"}


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_are_a_file_of_arrays_or_an_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "file"
    for text in (content, raw(content), raw(b'{"w":' + content + b"}")):
        path.write_bytes(text)
        try:
            TensorFile(path)
        except CheckpointError as error:
            assert str(path) in str(error)


def test_a_named_file_replaces_no_other_unless_it_is_told_to(tmp_path):
    path = tmp_path / "model.safetensors"
    write_named_tensors(path, [tensor("a", DType.INT8, (1,))], {}, overwrite=False)
    with pytest.raises(FileExistsError):
        write_named_tensors(path, [tensor("b", DType.INT8, (1,))], {}, overwrite=False)
    assert list(load_file(path)) == ["a"] and list(tmp_path.iterdir()) == [path]
    write_named_tensors(path, [tensor("b", DType.INT8, (1,))], {}, overwrite=True)
    assert list(load_file(path)) == ["b"] and list(tmp_path.iterdir()) == [path]


def test_the_types_of_the_format_are_all_types_that_keys_have():
    assert NAMES.keys() == set(DType)
