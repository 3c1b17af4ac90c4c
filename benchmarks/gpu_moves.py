"""What `gpu.py` measures of moving: copies, buckets, rows, checks, the way to the host and a whole step of a store."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gpu_measure import Bench, Bound, Case, Inputs, poisoned
from models import parse_spec

from kvdist.dtypes import DType
from kvdist.kernels.interface import Device

DUPLICATES = 0.3
"""The share of rows whose index another row has had."""
ALIGNMENT_BYTES = 256
STEP_DEVICES = 2
"""How many gradients a worker has of each key in a step."""


def moves(bench: Bench, stack: contextlib.ExitStack) -> list[Case]:
    """All of them but the copy. What a step keeps open is closed with the stack."""
    cases = [pack(bench), unpack(bench), merge_rows(bench), add_rows(bench), all_finite(bench)]
    return [*cases, download(bench), upload(bench), step(bench, stack)]


def copy(bench: Bench) -> Case:
    """torch's copy of a large array within the device: the bandwidth that all others are compared with."""
    elements = 4 * bench.sizes.elements

    def make(seed: int) -> Inputs:
        source = torch.randn(elements, device=bench.place, generator=bench.generator(seed))
        return {"source": source, "out": poisoned(elements, torch.float32, bench.place)}

    def right(inputs: Inputs) -> list[torch.Tensor]:
        return [inputs["source"].double()]

    def bind(inputs: Inputs) -> Bound:
        return Bound(lambda: inputs["out"].copy_(inputs["source"]), lambda: [inputs["out"]])

    moved = 8 * elements
    return Case("copy", moved, make, right, {"torch copy_": bind}, 0.0, of_ours=False)


# Buckets: many small tensors and one array.


def pack(bench: Bench) -> Case:
    """The tensors of ResNet-50 into one array, in one launch."""
    bucket, offsets, octets = _bucket(bench)

    def ours(device: Device, inputs: Inputs) -> Bound:
        sources = [device.view(one, DType.FLOAT32) for one in inputs["tensors"]]
        out = device.view(inputs["flat"], DType.UINT8)
        return Bound(lambda: device.pack(sources, offsets, out), lambda: _stretches(inputs["flat"], bucket, offsets))

    def foreach(inputs: Inputs) -> Bound:
        places = _stretches(inputs["flat"], bucket, offsets)
        return Bound(lambda: torch._foreach_copy_(places, inputs["tensors"]), lambda: places)

    def make(seed: int) -> Inputs:
        return {"tensors": _tensors(bench, bucket, seed), "flat": poisoned(octets, torch.uint8, bench.place)}

    def right(inputs: Inputs) -> list[torch.Tensor]:
        return list(inputs["tensors"])

    contenders = {**bench.each(ours), "torch _foreach_copy_": foreach}
    return Case(f"pack of {len(bucket)} tensors", 8 * sum(bucket), make, right, contenders, 0.0, ratio=1.0)


def unpack(bench: Bench) -> Case:
    """The opposite."""
    bucket, offsets, octets = _bucket(bench)

    def make(seed: int) -> Inputs:
        generator = bench.generator(seed)
        flat = torch.randn(octets // 4, device=bench.place, generator=generator).view(torch.uint8)
        return {"flat": flat, "tensors": [poisoned(size, torch.float32, bench.place) for size in bucket]}

    def right(inputs: Inputs) -> list[torch.Tensor]:
        return _stretches(inputs["flat"], bucket, offsets)

    def ours(device: Device, inputs: Inputs) -> Bound:
        outs = [device.view(one, DType.FLOAT32) for one in inputs["tensors"]]
        flat = device.view(inputs["flat"], DType.UINT8)
        return Bound(lambda: device.unpack(flat, offsets, outs), lambda: inputs["tensors"])

    def foreach(inputs: Inputs) -> Bound:
        places = _stretches(inputs["flat"], bucket, offsets)
        return Bound(lambda: torch._foreach_copy_(inputs["tensors"], places), lambda: inputs["tensors"])

    contenders = {**bench.each(ours), "torch _foreach_copy_": foreach}
    return Case(f"unpack of {len(bucket)} tensors", 8 * sum(bucket), make, right, contenders, 0.0)


def _bucket(bench: Bench) -> tuple[tuple[int, ...], list[int], int]:
    """Elements of each tensor, where each begins in bytes, and the bytes of all."""
    bucket = bench.sizes.bucket or parse_spec("resnet50").sizes
    rounded = [-(-4 * size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in bucket]
    offsets = [0, *itertools.accumulate(rounded)]
    return bucket, offsets[:-1], offsets[-1]


def _tensors(bench: Bench, bucket: Sequence[int], seed: int) -> list[torch.Tensor]:
    generator = bench.generator(seed)
    return [torch.randn(size, device=bench.place, generator=generator) for size in bucket]


def _stretches(flat: torch.Tensor, bucket: Sequence[int], offsets: Sequence[int]) -> list[torch.Tensor]:
    """The parts of an array of bytes in which the tensors lie, as float32."""
    return [flat[offset : offset + 4 * size].view(torch.float32) for size, offset in zip(bucket, offsets, strict=True)]


# Rows.


def merge_rows(bench: Bench) -> Case:
    """Rows of indices that come twice are summed; how many are left is known only then, so both wait for it."""
    count, width = bench.sizes.rows, bench.sizes.row_elements
    distinct = max(1, round(count * (1 - DUPLICATES)))

    def make(seed: int) -> Inputs:
        generator = bench.generator(seed)
        own = _indices(bench, distinct, generator)
        again = torch.randint(distinct, (count - distinct,), device=bench.place, generator=generator)
        order = torch.randperm(count, device=bench.place, generator=generator)
        rows = torch.randn(count * width, device=bench.place, generator=generator)
        return {"indices": torch.cat([own, own[again]])[order].contiguous(), "rows": rows, "found": []}

    def right(inputs: Inputs) -> list[torch.Tensor]:
        return _summed(inputs["indices"], inputs["rows"].double().view(count, width))

    def ours(device: Device, inputs: Inputs) -> Bound:
        indices, rows = device.view(inputs["indices"], DType.INT64), device.view(inputs["rows"], DType.FLOAT32)

        def results() -> list[torch.Tensor]:
            merged, values = inputs["found"]
            return [_downloaded(device, merged), _downloaded(device, values).view(-1, width)]

        return _keeping(inputs, lambda: device.merge_rows(indices, rows, DType.FLOAT32), results)

    def unique(inputs: Inputs) -> Bound:
        rows = inputs["rows"].view(count, width)
        return _keeping(inputs, lambda: _summed(inputs["indices"], rows), lambda: inputs["found"])

    name = f"sum of {count} rows of {width}, {DUPLICATES:.0%} repeated"
    moved = (count + distinct) * (8 + 4 * width)
    contenders = {**bench.each(ours), "torch unique, index_add_": unique}
    return Case(name, moved, make, right, contenders, ratio=1.5)


def _summed(indices: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    distinct, place = torch.unique(indices, return_inverse=True)
    return [distinct, rows.new_zeros(distinct.numel(), rows.shape[1]).index_add_(0, place, rows)]


def _keeping(inputs: Inputs, function: Callable[[], Any], results: Callable[[], Sequence[torch.Tensor]]) -> Bound:
    """A function whose results are new arrays."""

    def call() -> None:
        inputs["found"] = function()

    return Bound(call, results)


def _downloaded(device: Device, array: Any) -> torch.Tensor:
    host = np.empty(array.size, np.dtype(str(array.dtype)))
    device.download(array, host)
    device.mark().wait()
    return torch.from_numpy(host)


def _indices(bench: Bench, count: int, generator: torch.Generator) -> torch.Tensor:
    """Different ones, in any order."""
    return torch.randperm(bench.sizes.table_rows, device=bench.place, generator=generator)[:count].contiguous()


def add_rows(bench: Bench) -> Case:
    """Rows added to those of a table."""
    count, width = bench.sizes.rows, bench.sizes.row_elements

    def make(seed: int) -> Inputs:
        rows = torch.randn(count * width, device=bench.place, generator=bench.generator(seed + 10**6))
        return {**_table(bench, seed), "rows": rows}

    def right(inputs: Inputs) -> list[torch.Tensor]:
        table = inputs["table"].double().view(-1, width)
        return [table.index_add_(0, inputs["indices"], inputs["rows"].double().view(-1, width)).view(-1)]

    def ours(device: Device, inputs: Inputs) -> Bound:
        table, rows = (device.view(inputs[name], DType.FLOAT32) for name in ("table", "rows"))
        indices = device.view(inputs["indices"], DType.INT64)
        return Bound(lambda: device.add_rows(table, indices, rows), lambda: [inputs["table"]])

    def index_add(inputs: Inputs) -> Bound:
        table, rows = (inputs[name].view(-1, width) for name in ("table", "rows"))
        return Bound(lambda: table.index_add_(0, inputs["indices"], rows), lambda: [inputs["table"]])

    contenders = {**bench.each(ours), "torch index_add_": index_add}
    return Case(f"scatter-add of {count} rows of {width}", count * (8 + 12 * width), make, right, contenders)


def _table(bench: Bench, seed: int) -> Inputs:
    generator, count = bench.generator(seed), bench.sizes.table_rows * bench.sizes.row_elements
    table = torch.randn(count, device=bench.place, generator=generator)
    return {"table": table, "indices": _indices(bench, bench.sizes.rows, generator)}


# Checks and the host.


def all_finite(bench: Bench) -> Case:
    """Whether the tensors of ResNet-50 are finite, also where the last one of all elements is not."""
    bucket, _, _ = _bucket(bench)

    def make(seed: int) -> Inputs:
        tensors = _tensors(bench, bucket, seed)
        last = tensors[-1].clone()
        last[-1] = float("nan") if seed % 2 else float("inf")
        return {"tensors": tensors, "broken": [*tensors[:-1], last]}

    def right(inputs: Inputs) -> list[torch.Tensor]:
        lists = inputs["tensors"], inputs["broken"]
        return [torch.tensor([bool(torch.cat(one).double().isfinite().all()) for one in lists])]

    def ours(device: Device, inputs: Inputs) -> Bound:
        lists = [[device.view(one, DType.FLOAT32) for one in inputs[name]] for name in ("tensors", "broken")]
        return _asked(lambda arrays: device.all_finite(arrays, DType.FLOAT32), *lists)

    def norms(inputs: Inputs) -> Bound:
        def finite(tensors: Sequence[torch.Tensor]) -> bool:
            return bool(torch.stack(torch._foreach_norm(tensors)).isfinite().all())

        return _asked(finite, inputs["tensors"], inputs["broken"])

    contenders = {**bench.each(ours), "torch _foreach_norm": norms}
    return Case(f"finite check of {len(bucket)} tensors", 4 * sum(bucket), make, right, contenders, 0.0)


def _asked(finite: Callable[[Any], bool], whole: Any, broken: Any) -> Bound:
    return Bound(lambda: finite(whole), lambda: [torch.tensor([finite(whole), finite(broken)])])


def download(bench: Bench) -> Case:
    """To registered memory of the host, from where the transport sends."""
    return _over_host(bench, "download to pinned memory", lambda device, array, host: device.download(array, host), 0)


def upload(bench: Bench) -> Case:
    """From registered memory of the host."""
    return _over_host(bench, "upload from pinned memory", lambda device, array, host: device.upload(host, array), 1)


def _over_host(bench: Bench, name: str, move: Callable[[Device, Any, Any], None], up: int) -> Case:
    """A copy between an array of the device, ``both[0]``, and one of the host; or with `up` the other way."""
    elements = bench.sizes.elements

    def make(seed: int) -> Inputs:
        source = torch.randn(elements, device=bench.place, generator=bench.generator(seed))
        host = source.cpu().clone()
        both = [source, torch.full_like(host, float("nan"))]
        if up:
            both = [torch.full_like(source, float("nan")), host]
        return {"kept": [], "both": both, "right": host}  # memory is let go in this order: registrations first

    def right(inputs: Inputs) -> list[torch.Tensor]:
        return [inputs["right"].double()]

    def ours(device: Device, inputs: Inputs) -> Bound:
        array, host = device.view(inputs["both"][0], DType.FLOAT32), inputs["both"][1].numpy()
        inputs["kept"].append(device.pin(host))

        def results() -> list[torch.Tensor]:
            device.mark().wait()
            return [inputs["both"][1 - up]]

        return Bound(lambda: move(device, array, host), results)

    def copy_(inputs: Inputs) -> Bound:
        array, host = inputs["both"]
        pinned = host.pin_memory() if array.is_cuda else host
        target, source = (array, pinned) if up else (pinned, array)
        return Bound(lambda: target.copy_(source, non_blocking=True), lambda: [target])

    contenders = {**bench.each(ours), "torch copy_, pinned": copy_}
    return Case(name, 4 * elements, make, right, contenders, 0.0, over_host=True)


# A step.


def step(bench: Bench, stack: contextlib.ExitStack) -> Case:
    """A push and pull of 100 MB by one process with two gradients of each key, on the device and on the host."""
    keys, elements = bench.sizes.keys, bench.sizes.key_elements
    megabytes = 4 * keys * elements / 1e6

    def make(seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)  # integers, so that every sum is exact
        grads = torch.randint(-9, 10, (STEP_DEVICES, keys, elements), generator=generator).float()
        return {"grads": grads, "right": grads.sum(0).view(-1)}

    def by(name: str, place: str, gpu: str = "auto") -> Callable[[Inputs], Bound]:
        def bind(inputs: Inputs) -> Bound:
            store = stack.enter_context(_store(name, gpu))
            numbers = list(range(keys))
            # Memory of their own, as gradients have it.
            grads = [[one[key].to(place, copy=True) for one in inputs["grads"]] for key in numbers]
            outs = [[torch.full_like(one, float("nan")) for one in each] for each in grads]
            store.init(numbers, [torch.zeros_like(each[0]) for each in grads])
            return Bound(
                lambda: store.pushpull(numbers, grads, out=outs),
                lambda: [torch.cat([each[device] for each in outs]) for device in range(STEP_DEVICES)],
            )

        return bind

    def right(inputs: Inputs) -> list[torch.Tensor]:
        return [inputs["right"].to(bench.place)] * STEP_DEVICES

    contenders = {
        f"dist_device_sync, {bench.place}": by("dist_device_sync", bench.place),
        f"device, {bench.place}": by("device", bench.place),
        f"dist_device_sync, {bench.place}, KVDIST_GPU=host": by("dist_device_sync", bench.place, "host"),
        "dist_sync, tensors of the host": by("dist_sync", "cpu"),
    }
    name = f"step of {megabytes:.0f} MB, {STEP_DEVICES} gradients a key"
    return Case(name, 1e6 * megabytes, make, right, contenders, 0.0, over_host=True, by_host=True, of_ours=False)


def _store(name: str, gpu: str) -> Any:
    """A store of this process, with a value of ``KVDIST_GPU``, which it reads when it is made."""
    from kvdist import kv  # not needed for the other rows

    before = os.environ.get("KVDIST_GPU")
    os.environ["KVDIST_GPU"] = gpu
    try:
        return kv.create(name)
    finally:
        del os.environ["KVDIST_GPU"]
        if before is not None:
            os.environ["KVDIST_GPU"] = before
