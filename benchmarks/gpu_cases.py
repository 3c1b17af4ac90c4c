"""What `gpu.py` measures of arithmetic: sums, optimizers, quantising, casts and norms, beside torch's own ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gpu_measure import Bench, Bound, Case, Inputs, Unable, poisoned

from kvdist.dtypes import DType
from kvdist.kernels.interface import Device
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Optimizer, create
from kvdist.optimizer.base import Extent, Step

TORCH = {DType.FLOAT32: torch.float32, DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}
TOLERANCE = {DType.FLOAT32: 1e-6, DType.FLOAT16: 1e-3, DType.BFLOAT16: 6e-3}
"""Rounded once or a few times: a chain of sums of halves rounds at each."""
THRESHOLD = 0.5
SOURCES = 4
RATE, COUNT = 0.1, 3
"""Learning rate, large enough that an error in a step is seen beside the weights, and how manieth update it is."""
REFERENCE_CHUNK = 1 << 18
"""Elements that the reference of an optimizer takes at a time, to stay in the host's cache."""


def arithmetic(bench: Bench) -> list[Case]:
    """All of them."""
    cases = [sums(bench, count, DType.FLOAT32) for count in (2, 4, 8)]
    cases += [sums(bench, SOURCES, dtype) for dtype in (DType.FLOAT16, DType.BFLOAT16)]
    cases += [update(bench, name, **numbers) for name, numbers in RULES.items()]
    cases += [quantise(bench, bits) for bits in (2, 1)]
    cases += [add_dequantised(bench, bits) for bits in (2, 1)]
    cases += [widen(bench, dtype) for dtype in (DType.FLOAT16, DType.BFLOAT16)]
    cases += [narrow(bench, dtype) for dtype in (DType.FLOAT16, DType.BFLOAT16)]
    return [*cases, round_to_half(bench), squares(bench)]


# Sums.


def sums(bench: Bench, count: int, dtype: DType) -> Case:
    """As many arrays into one: torch's chain of additions, and its stack with a sum."""
    elements, kind = bench.sizes.elements, TORCH[dtype]

    def make(seed: int) -> Inputs:
        generator = bench.generator(seed)
        sources = [_normal(elements, kind, generator) for _ in range(count)]
        return {"sources": sources, "out": poisoned(elements, kind, bench.place)}

    def right(inputs: Inputs) -> list[torch.Tensor]:
        total = torch.zeros(elements, dtype=torch.float64, device=bench.place)
        for source in inputs["sources"]:
            total += source
        return [total]

    def ours(device: Device, inputs: Inputs) -> Bound:
        sources, out = [device.view(one, dtype) for one in inputs["sources"]], device.view(inputs["out"], dtype)
        scales = [1.0] * count
        return Bound(lambda: device.kernels.weighted_sum(sources, scales, dtype, out), lambda: [inputs["out"]])

    def chain(inputs: Inputs) -> Bound:
        return Bound(lambda: _chain(inputs["sources"], inputs["out"]), lambda: [inputs["out"]])

    def stack(inputs: Inputs) -> Bound:
        sources, out = inputs["sources"], inputs["out"]
        return Bound(lambda: torch.sum(torch.stack(sources), 0, out=out), lambda: [out])

    return Case(
        f"sum of {count} × {dtype.label}",
        (count + 1) * elements * dtype.itemsize,
        make,
        right,
        {**bench.each(ours), "torch add chain": chain, "torch stack().sum(0)": stack},
        TOLERANCE[dtype],
        share=0.9 if dtype is DType.FLOAT32 else None,
        ratio=1.8 if count == 8 else None,
    )


def _chain(sources: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    torch.add(sources[0], sources[1], out=out)
    for source in sources[2:]:
        out.add_(source)


# Optimizers: a sum and an update in one.

RULES: dict[str, dict[str, float]] = {
    "sgd": {},
    "sgd momentum": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "adam": {},
    "adamw": {},
}
"""Without weight decay, where torch's and ours are the same formula for all of them."""


def update(bench: Bench, name: str, **numbers: float) -> Case:
    """A sum of four gradients and an update in place, beside torch's chain of additions and its fused optimizer."""
    elements = bench.sizes.elements
    optimizer = create(name.split()[0], learning_rate=RATE, **numbers)
    states = len(optimizer.state_names)

    def make(seed: int) -> Inputs:
        generator = bench.generator(seed)
        made: Inputs = {"sources": [_normal(elements, torch.float32, generator) for _ in range(SOURCES)]}
        made["weight"] = _normal(elements, torch.float32, generator)
        made["states"] = [_normal(elements, torch.float32, generator).abs_().add_(0.1) for _ in range(states)]
        return made

    def right(inputs: Inputs) -> list[torch.Tensor]:
        return _updated(optimizer, inputs)

    def ours(device: Device, inputs: Inputs) -> Bound:
        sources = [device.view(one, DType.FLOAT32) for one in inputs["sources"]]
        weight = device.view(inputs["weight"], DType.FLOAT32)
        arrays = [device.view(one, DType.FLOAT32) for one in inputs["states"]]
        equation, scales = optimizer.equation(RATE, 0.0, COUNT), [1.0] * SOURCES

        def call() -> None:
            if not device.kernels.fused_update(equation, weight, sources, scales, None, weight, arrays, DType.FLOAT32):
                raise Unable(f"no fused kernel for {equation.name}")

        return Bound(call, lambda: [inputs["weight"], *inputs["states"]])

    def fused(inputs: Inputs) -> Bound:
        return _torch_fused(optimizer, inputs)

    return Case(
        f"sum of {SOURCES} and {name}",
        (SOURCES + 2 + 2 * states) * elements * 4,
        make,
        right,
        {**bench.each(ours), "torch add chain, fused": fused},
        tolerance=1e-5,
        ratio=1.5 if name == "adam" else None,
    )


def _updated(optimizer: Optimizer, inputs: Inputs) -> list[torch.Tensor]:
    """Weight and states after the rule was applied in float64, on the host."""
    size = inputs["weight"].numel()
    weight, states = inputs["weight"].cpu().double().numpy(), [one.cpu().double().numpy() for one in inputs["states"]]
    grad = sum(one.double() for one in inputs["sources"]).cpu().numpy()
    for start in range(0, size, REFERENCE_CHUNK):
        part = slice(start, start + REFERENCE_CHUNK)
        one = weight[part]
        step = Step(RATE, 0.0, COUNT, Extent("weight", (size,)), start)
        optimizer.apply(one, grad[part], one, tuple(state[part] for state in states), np.empty_like(one), step)
    place = inputs["weight"].device
    return [torch.from_numpy(array).to(place) for array in (weight, *states)]


def _torch_fused(optimizer: Optimizer, inputs: Inputs) -> Bound:
    """torch's optimizer with the same state. Its momentum has the learning rate outside: it is ours over -lr."""
    parameter = torch.nn.Parameter(inputs["weight"])
    parameter.grad = poisoned(parameter.numel(), torch.float32, str(parameter.device))
    states, is_adam = inputs["states"], optimizer.name.startswith("adam")
    made: torch.optim.Optimizer
    if is_adam:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer.name]
        epsilon = optimizer.epsilon * (1 - optimizer.beta2**COUNT) ** -0.5  # torch adds it after its correction
        made = kind([parameter], lr=RATE, eps=epsilon, weight_decay=0.0, fused=True)
        step = torch.tensor(float(COUNT - 1), device=parameter.device)
        made.state[parameter] = {"step": step, "exp_avg": states[0], "exp_avg_sq": states[1]}
    else:
        momentum = getattr(optimizer, "momentum", 0.0)
        nesterov = optimizer.name == "nag"
        made = torch.optim.SGD([parameter], lr=RATE, momentum=momentum, nesterov=nesterov, fused=True)
        for state in states:
            made.state[parameter] = {"momentum_buffer": state.div_(-RATE)}

    def call() -> None:
        _chain(inputs["sources"], parameter.grad)
        made.step()

    def results() -> list[torch.Tensor]:
        return [parameter.detach(), *(states if is_adam else [state * -RATE for state in states])]

    return Bound(call, results)


# Quantising.


def quantise(bench: Bench, bits: int) -> Case:
    """float32 to codes with a residual. The packing must be the reference's, to the bit."""
    elements, octets = bench.sizes.elements, _octets(bench.sizes.elements, bits)

    def make(seed: int) -> Inputs:
        generator = bench.generator(seed)
        made: Inputs = {"grad": _normal(elements, torch.float32, generator)}
        made["residual"] = _normal(elements, torch.float32, generator).mul_(0.25)
        return {**made, "out": poisoned(octets, torch.uint8, bench.place)}

    def right(inputs: Inputs) -> list[torch.Tensor]:
        grad, residual = (inputs[name].cpu().numpy() for name in ("grad", "residual"))
        out, rest = np.empty(octets, np.uint8), residual.copy()
        _of(REFERENCE, "quantise", bits)(grad, rest, THRESHOLD, out)
        # The residual as bits: it is of one addition and one subtraction, so it must be the same.
        return [torch.from_numpy(array).to(bench.place) for array in (out, rest.view(np.int32))]

    def ours(device: Device, inputs: Inputs) -> Bound:
        grad, residual = (device.view(inputs[name], DType.FLOAT32) for name in ("grad", "residual"))
        out, function = device.view(inputs["out"], DType.UINT8), _of(device.kernels, "quantise", bits)
        return Bound(
            lambda: function(grad, residual, THRESHOLD, out),
            lambda: [inputs["out"], inputs["residual"].view(torch.int32)],
        )

    moved = 12 * elements + octets
    return Case(f"{bits}-bit quantise with residual", moved, make, right, bench.each(ours), 0.0, share=0.8)


def add_dequantised(bench: Bench, bits: int) -> Case:
    """What codes are worth, added to a sum; torch would have to unpack them first and has no op for it."""
    elements, octets = bench.sizes.elements, _octets(bench.sizes.elements, bits)

    def make(seed: int) -> Inputs:
        generator = bench.generator(seed)
        codes = torch.randint(0, 256, (octets,), dtype=torch.uint8, device=bench.place, generator=generator)
        if bits == 2:  # 0, 2 and 3 are codes, 1 is none: a lower bit only where the higher one is set
            codes &= ((codes & 0b10101010) >> 1) | 0b10101010
        return {"data": codes, "total": _normal(elements, torch.float32, generator)}

    def right(inputs: Inputs) -> list[torch.Tensor]:
        worth = np.empty(elements, np.float32)
        _of(REFERENCE, "dequantise", bits)(inputs["data"].cpu().numpy(), THRESHOLD, worth)
        return [inputs["total"].double() + torch.from_numpy(worth).to(bench.place)]

    def ours(device: Device, inputs: Inputs) -> Bound:
        data, total = device.view(inputs["data"], DType.UINT8), device.view(inputs["total"], DType.FLOAT32)
        function = device.add_dequantised_2bit if bits == 2 else device.add_dequantised_1bit
        return Bound(lambda: function(data, THRESHOLD, total), lambda: [inputs["total"]])

    moved = 8 * elements + octets
    return Case(f"{bits}-bit de-quantise and add", moved, make, right, bench.each(ours), share=0.8)


def _of(kernels: Any, verb: str, bits: int) -> Callable[..., None]:
    functions = {
        ("quantise", 2): kernels.quantise_2bit,
        ("quantise", 1): kernels.quantise_1bit,
        ("dequantise", 2): kernels.dequantise_2bit,
        ("dequantise", 1): kernels.dequantise_1bit,
    }
    return functions[verb, bits]


def _octets(elements: int, bits: int) -> int:
    return -(-elements * bits // 32) * 4


# Casts and norms.


def widen(bench: Bench, dtype: DType) -> Case:
    """Halves to float32."""
    return _cast(bench, f"{dtype.label} to float32", dtype, DType.FLOAT32)


def narrow(bench: Bench, dtype: DType) -> Case:
    """float32 to halves."""
    return _cast(bench, f"float32 to {dtype.label}", DType.FLOAT32, dtype)


def _cast(bench: Bench, name: str, given: DType, wanted: DType) -> Case:
    elements = bench.sizes.elements

    def make(seed: int) -> Inputs:
        source = _normal(elements, TORCH[given], bench.generator(seed))
        return {"source": source, "out": poisoned(elements, TORCH[wanted], bench.place)}

    def ours(device: Device, inputs: Inputs) -> Bound:
        source, out = device.view(inputs["source"], given), device.view(inputs["out"], wanted)
        if wanted is DType.FLOAT32:
            return Bound(lambda: device.kernels.to_float32(source, given, out), lambda: [inputs["out"]])
        return Bound(lambda: device.kernels.from_float32(source, wanted, out), lambda: [inputs["out"]])

    def copy(inputs: Inputs) -> Bound:
        return Bound(lambda: inputs["out"].copy_(inputs["source"]), lambda: [inputs["out"]])

    moved = elements * (given.itemsize + wanted.itemsize)
    contenders = {**bench.each(ours), "torch copy_": copy}
    return Case(name, moved, make, lambda inputs: [inputs["source"].double()], contenders, TOLERANCE[wanted])


def round_to_half(bench: Bench) -> Case:
    """float32 to float16 with a residual, to the reference's bits."""
    elements = bench.sizes.elements

    def make(seed: int) -> Inputs:
        generator = bench.generator(seed)
        made: Inputs = {"grad": _normal(elements, torch.float32, generator)}
        made["residual"] = _normal(elements, torch.float32, generator).mul_(1e-4)
        return {**made, "out": poisoned(elements, torch.float16, bench.place)}

    def right(inputs: Inputs) -> list[torch.Tensor]:
        rest, out = inputs["residual"].cpu().numpy().copy(), np.empty(elements, np.float16)
        REFERENCE.round_to_half(inputs["grad"].cpu().numpy(), rest, DType.FLOAT16, out)
        return [torch.from_numpy(array).to(bench.place) for array in (out.view(np.int16), rest.view(np.int32))]

    def ours(device: Device, inputs: Inputs) -> Bound:
        grad, residual = (device.view(inputs[name], DType.FLOAT32) for name in ("grad", "residual"))
        out = device.view(inputs["out"], DType.FLOAT16)
        return Bound(
            lambda: device.kernels.round_to_half(grad, residual, DType.FLOAT16, out),
            lambda: [inputs["out"].view(torch.int16), inputs["residual"].view(torch.int32)],
        )

    return Case("float16 with residual", 14 * elements, make, right, bench.each(ours), 0.0, share=0.8)


def squares(bench: Bench) -> Case:
    """The squared norm of an array, as a number on the host: both wait for it."""
    elements = bench.sizes.elements

    def make(seed: int) -> Inputs:
        return {"values": _normal(elements, torch.float32, bench.generator(seed)), "found": [float("nan")]}

    def right(inputs: Inputs) -> list[torch.Tensor]:
        return [inputs["values"].double().square().sum().reshape(1)]

    def ours(device: Device, inputs: Inputs) -> Bound:
        values = device.view(inputs["values"], DType.FLOAT32)
        return _number(inputs, lambda: device.kernels.squares(values))

    def norm(inputs: Inputs) -> Bound:
        return _number(inputs, lambda: float(torch.linalg.vector_norm(inputs["values"], dtype=torch.float64)) ** 2)

    contenders = {**bench.each(ours), "torch vector_norm": norm}
    return Case("squared norm", 4 * elements, make, right, contenders)


def _number(inputs: Inputs, function: Callable[[], float]) -> Bound:
    def call() -> None:
        inputs["found"][0] = function()

    return Bound(call, lambda: [torch.tensor(inputs["found"], dtype=torch.float64)])


def _normal(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(count, dtype=dtype, device=generator.device, generator=generator)
