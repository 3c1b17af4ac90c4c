"""The parameters of networks that people train, as shapes in the order in which their frameworks list them.

Made from the definitions of the architectures, and checked against their published numbers of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from workers.workload import Spec

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """ResNet-50 for ImageNet (He et al., 2015): 25,557,032 parameters."""
    shapes = [(64, 3, 7, 7), *norm(64)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, before, 1, 1), *norm(width), (width, width, 3, 3), *norm(width)]
            shapes += [(4 * width, width, 1, 1), *norm(4 * width)]
            if block == 0:  # the way around changes the number of channels
                shapes += [(4 * width, before, 1, 1), *norm(4 * width)]
            before = 4 * width
    return [*shapes, *linear(2048, 1000)]


def vgg16() -> list[Shape]:
    """VGG-16 for ImageNet (Simonyan and Zisserman, 2014), configuration D: 138,357,544 parameters."""
    shapes: list[Shape] = []
    before = 3
    for channels in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        shapes += [(channels, before, 3, 3), (channels,)]
        before = channels
    return [*shapes, *linear(512 * 7 * 7, 4096), *linear(4096, 4096), *linear(4096, 1000)]


def bert_base() -> list[Shape]:
    """BERT-base, uncased, with its pooler (Devlin et al., 2018): 109,482,240 parameters."""
    hidden, inner = 768, 3072
    shapes: list[Shape] = [(30522, hidden), (512, hidden), (2, hidden), *norm(hidden)]
    for _ in range(12):
        for _ in ("query", "key", "value", "output"):
            shapes += linear(hidden, hidden)
        shapes += [*norm(hidden), *linear(hidden, inner), *linear(inner, hidden), *norm(hidden)]
    return [*shapes, *linear(hidden, hidden)]


def norm(channels: int) -> Iterator[Shape]:
    """Scale and shift."""
    yield from ((channels,), (channels,))


def linear(inputs: int, outputs: int) -> Iterator[Shape]:
    """Weight and bias."""
    yield from ((outputs, inputs), (outputs,))


MODELS: dict[str, Callable[[], list[Shape]]] = {"resnet50": resnet50, "vgg16": vgg16, "bert-base": bert_base}


def parse_spec(text: str) -> Spec:
    """A model's name, or what `Spec.parse` reads."""
    if text in MODELS:
        return Spec(text, tuple(math.prod(shape) for shape in MODELS[text]()))
    return Spec.parse(text)
