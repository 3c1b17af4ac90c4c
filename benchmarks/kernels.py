"""What sums and optimizers cost on one core: NumPy, numba, torch's fused ones, and what memory allows.

    python benchmarks/kernels.py

A row is one kernel on slices of one size. Every call works on other slices than the one before, out of more memory
than the caches hold, as a server's keys do; except for the small size, which is about the cost of a call. The bound is
the bytes that must be read and written, at the speed of copying a large array; where little is written a kernel can be
faster than that, because a copy waits for what it writes. torch's fused optimizers take a single
gradient and update in place, so that they move fewer bytes: their rows stand beside ours in place, with one source.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cluster import machine

from kvdist.dtypes import DType
from kvdist.kernels.cpu import choose
from kvdist.kernels.interface import Kernels
from kvdist.optimizer import Optimizer, Updater, create

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = (1 << 20, 1000)
FOOTPRINT_BYTES = 400e6
"""Memory over which the calls of one row wander."""
SETS_MAX = 16
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nag": {},
    "adam": {},
    "adamw": {},
}


@dataclass(frozen=True)
class Result:
    """One kernel on one size by one backend."""

    kernel: str
    sources: int
    in_place: bool
    elements: int
    backend: str
    median_us: float
    gigabytes_per_s: float
    share_of_bound: float


@dataclass
class Slices:
    """The arrays of one call."""

    out: Any
    weight: Any
    sources: list[Any]
    states: list[Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures sums and optimizers on one core.")
    parser.add_argument("--repeats", type=int, default=8, help="how often each row visits its slices")
    parser.add_argument("--elements", type=int, action="append", help="size of a slice; may be repeated")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", metavar="FILE", help=f"write the results to FILE, in {RESULTS.name}/ if relative")
    options = parser.parse_args()
    copy = copy_bytes_per_s(options.repeats)
    print(f"copying: {copy / 1e9:.1f} GB/s read and written\n")
    print(f"{'kernel':10} {'sources':>7} {'elements':>9}  {'backend':8} {'us':>9} {'GB/s':>7} {'of bound':>8}")
    results = []
    for elements in options.elements or SIZES:
        for result in rows(elements, options.repeats, copy, with_torch=not options.no_torch):
            kernel = result.kernel + ("!" if result.in_place else "")
            print(
                f"{kernel:10} {result.sources:7} {result.elements:9}  {result.backend:8} {result.median_us:9.1f}"
                f" {result.gigabytes_per_s:7.1f} {result.share_of_bound:8.0%}",
                flush=True,
            )
            results.append(result)
    print("! in place")
    if options.json:
        path = RESULTS / options.json
        path.parent.mkdir(exist_ok=True)
        work = {"repeats": options.repeats, "copy_gigabytes_per_s": copy / 1e9}
        record = {"machine": machine(), "work": work, "results": [asdict(result) for result in results]}
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print(f"written to {path}")


def rows(elements: int, repeats: int, copy: float, with_torch: bool) -> list[Result]:
    """All rows of one size."""
    backends = {"numpy": choose("numpy"), "numba": choose("numba")}
    found = []

    def row(kernel: str, sources: int, states: int, in_place: bool, calls: dict[str, Callable[[Slices], None]]) -> None:
        # A sum reads its sources and writes; an optimizer reads and writes the weight and the states besides.
        arrays = sources + 1 + (0 if kernel == "sum" else 1 + 2 * states)
        moved = arrays * elements * 4
        slices = make_slices(elements, sources, states, in_place)
        # Backends take turns, so that whatever else the machine does meets all alike.
        for backend, seconds in measure(calls, slices, repeats, elements).items():
            rate = moved / seconds
            found.append(Result(kernel, sources, in_place, elements, backend, seconds * 1e6, rate / 1e9, rate / copy))

    for sources in (2, 4):
        row("sum", sources, 0, False, {name: summing(kernels) for name, kernels in backends.items()})
    for name, numbers in OPTIMIZERS.items():
        optimizer = create("sgd" if name == "momentum" else name, wd=0.01, **numbers)
        states = len(optimizer.state_names)
        calls = {backend: updating(kernels, optimizer) for backend, kernels in backends.items()}
        for sources in (2, 4):
            row(name, sources, states, False, calls)
        fused = {"torch": torch_call(name)} if with_torch else {}
        row(name, 1, states, True, {**calls, **fused})
    return found + coding_rows(backends, elements, repeats, copy)


CODERS: dict[str, tuple[float, float]] = {
    "2-bit": (12, 1 / 4), "2-bit back": (4, 1 / 4), "1-bit": (12, 1 / 8), "1-bit back": (4, 1 / 8),
    "fp16": (12, 2), "bf16": (12, 2), "from half": (4, 2), "to half": (4, 2),
}  # fmt: skip
"""What is encoded or decoded → bytes of an element in float32 arrays, and in the encoded one, read and written."""


def coding_rows(backends: dict[str, Kernels], elements: int, repeats: int, copy: float) -> list[Result]:
    """What compression costs: with a residual (read and written) where it has one."""
    found = []
    for name, widths in CODERS.items():
        moved = sum(widths) * elements
        slices = make_slices(elements, 1, 1, False)
        calls = {backend: coding(kernels, name) for backend, kernels in backends.items()}
        for backend, seconds in measure(calls, slices, repeats, elements).items():
            rate = moved / seconds
            found.append(Result(name, 1, False, elements, backend, seconds * 1e6, rate / 1e9, rate / copy))
    return found


def coding(kernels: Kernels, name: str) -> Callable[[Slices], None]:
    """Encode or decode one array of the slices; the codes lie where the result of an optimizer would."""

    def call(slices: Slices) -> None:
        (grad,), (residual,) = slices.sources, slices.states
        octets = slices.out.view(np.uint8)
        words2, words1 = octets[: -(-grad.size // 16) * 4], octets[: -(-grad.size // 32) * 4]
        halves = octets[: 2 * grad.size].view(np.float16)
        match name:
            case "2-bit":
                kernels.quantise_2bit(grad, residual, 0.5, words2)
            case "2-bit back":
                kernels.dequantise_2bit(words2, 0.5, residual)
            case "1-bit":
                kernels.quantise_1bit(grad, residual, 0.5, words1)
            case "1-bit back":
                kernels.dequantise_1bit(words1, 0.5, residual)
            case "fp16":
                kernels.round_to_half(grad, residual, DType.FLOAT16, halves)
            case "bf16":
                kernels.round_to_half(grad, residual, DType.BFLOAT16, halves.view(np.uint16))
            case "from half":
                kernels.to_float32(halves, DType.FLOAT16, residual)
            case "to half":
                kernels.from_float32(grad, DType.FLOAT16, halves)

    return call


def make_slices(elements: int, sources: int, states: int, in_place: bool) -> list[Slices]:
    """As many sets of arrays as fill the footprint, for small arrays a few."""
    count = min(SETS_MAX, max(2, int(FOOTPRINT_BYTES / (elements * 4 * (2 + sources + states)))))
    rng = np.random.default_rng(0)

    def noise() -> Any:
        return rng.standard_normal(elements).astype(np.float32)

    sets = []
    for _ in range(count):
        weight = noise()
        out = weight if in_place else noise()
        sets.append(
            Slices(
                out, weight, [noise() for _ in range(sources)], [np.zeros(elements, np.float32) for _ in range(states)]
            )
        )
    return sets


def summing(kernels: Kernels) -> Callable[[Slices], None]:
    def call(slices: Slices) -> None:
        kernels.weighted_sum(slices.sources, [0.5] * len(slices.sources), DType.FLOAT32, slices.out)

    return call


def updating(kernels: Kernels, optimizer: Optimizer) -> Callable[[Slices], None]:
    updater = Updater(optimizer, kernels)

    def call(slices: Slices) -> None:
        scales = [0.5] * len(slices.sources)
        updater.update(id(slices), slices.weight, slices.sources, scales, DType.FLOAT32, slices.out)

    return call


def torch_call(name: str) -> Callable[[Slices], None]:
    """The optimizer of torch with ``fused=True`` on one thread, a parameter for each set of slices."""
    import torch

    torch.set_num_threads(1)
    makers: dict[str, Callable[[Any], Any]] = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01, fused=True),
        "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, fused=True),
        "nag": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
        "adam": lambda p: torch.optim.Adam(p, weight_decay=0.01, fused=True),
        "adamw": lambda p: torch.optim.AdamW(p, weight_decay=0.01, fused=True),
    }
    optimizers: dict[int, Any] = {}

    def call(slices: Slices) -> None:
        if id(slices) not in optimizers:
            parameter = torch.nn.Parameter(torch.from_numpy(slices.weight))
            parameter.grad = torch.from_numpy(slices.sources[0])
            optimizers[id(slices)] = makers[name]([parameter])
        optimizers[id(slices)].step()

    return call


def measure(
    calls: dict[str, Callable[[Slices], None]], slices: list[Slices], repeats: int, elements: int
) -> dict[str, float]:
    """Median seconds of a call, by backend."""
    inner = 1 if elements > 100_000 else 200
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            for each in slices:
                start = time.perf_counter()
                for _ in range(inner):
                    call(each)
                if repeat:  # the first visit makes states and compiles
                    taken[name].append((time.perf_counter() - start) / inner)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def copy_bytes_per_s(repeats: int) -> float:
    """Bytes read and written per second when a large array is copied."""
    source = np.ones(int(FOOTPRINT_BYTES / 8), np.float32)
    target = np.empty_like(source)
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(taken[1:])


if __name__ == "__main__":
    main()
