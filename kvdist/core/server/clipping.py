"""Clipping by the norm of a step whose keys lie on all servers: gradients come first, the factor later. Pure.

1. A push with `Flag.MEASURE`: its round closes as usual, but the contributions are kept, and each worker receives the
   sum of squares of their scaled sum.
2. Each worker adds up the answers of all servers, and knows the norm.
3. An empty push with `Flag.APPLY`, whose rescale is the factor: once all have sent it, the kept contributions are
   applied.

Invariants:

* No slice of a step is updated before every worker knows the norm, and so every slice was summed.
* The kept contributions show the payloads of the first push. A worker on this host leaves them alone until the second
  push is counted; without a second push they are never read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvdist import errors
from kvdist.core.round import Contribution, rescale_of, scales_of
from kvdist.core.server.block import Block
from kvdist.core.server.holder import Holder
from kvdist.naming import name_of
from kvdist.optimizer.base import Optimizer
from kvdist.protocol import messages as msg

_MEASURE = int(msg.Flag.MEASURE)
_CLIPPED = int(msg.Flag.MEASURE | msg.Flag.APPLY)
_PUSHED = {0: "a gradient", _MEASURE: "a gradient to be clipped", int(msg.Flag.APPLY): "the factor of a clipped one"}


def turned(
    holders: Sequence[Holder], rounds: Sequence[Sequence[Contribution]], optimizer: Optimizer | None
) -> Sequence[Sequence[Contribution]]:
    """Return the contributions to apply for each block, after `turn`; contributions that were kept in vain are dropped.

    Raises:
        OptimizerMismatch, PushRefused: as `turn`.
    """
    blocks = [holder for holder in holders if isinstance(holder, Block)]
    if any(contribution.flags & _CLIPPED for contribution in rounds[0]):
        return [turn(block, contributions, optimizer) for block, contributions in zip(blocks, rounds, strict=True)]
    for block in blocks:
        block.kept = ()  # no second push came, as the norm was not finite: this frees the memory of a gradient
    return rounds


def turn(block: Block, contributions: Sequence[Contribution], optimizer: Optimizer | None) -> Sequence[Contribution]:
    """Keep and measure the contributions of a round of first pushes; return those to apply after second pushes.

    Raises:
        OptimizerMismatch: some workers clip and others do not, or to other norms.
        PushRefused: the round cannot be measured, or no contributions were kept, which only a broken peer can cause.
    """
    kept, block.kept = block.kept, ()
    if len({one.flags & _CLIPPED for one in contributions}) > 1:
        said = "; ".join(f"{one.member} pushes {_PUSHED.get(one.flags & _CLIPPED, 'both')}" for one in contributions)
        raise errors.OptimizerMismatch(
            f"workers clip {name_of(block.key)} differently: {said}. Pass the same clip_norm on all workers"
        )
    if contributions[0].flags & _MEASURE:
        block.squares = squares(block, contributions, optimizer)
        block.kept = contributions
        return ()
    factors = [one.setting[2] for one in contributions]
    factor = factors[0]
    if factor is None or not kept:
        raise errors.PushRefused(f"{name_of(block.key)} was not measured before it was to be clipped")
    if len(set(factors)) > 1:
        said = "; ".join(f"{one.member} multiplies by {one.setting[2]}" for one in contributions)
        raise errors.OptimizerMismatch(
            f"workers disagree on the gradient of {name_of(block.key)}: {said}. Pass the same clip_norm on all workers"
        )
    return [replace(one, setting=(*one.setting[:2], factor * rescale_of(one, optimizer))) for one in kept]


def squares(block: Block, contributions: Sequence[Contribution], optimizer: Optimizer | None) -> float:
    """Return the sum of squares of the scaled sum of contributions, in float64: a single pass over them.

    Raises:
        PushRefused: their type has no norm, or they cannot be scaled.
    """
    if not block.dtype.is_floating:
        raise errors.PushRefused(f"{name_of(block.key)} is of {block.dtype.label}, and only floating types have a norm")
    present = [one for one in contributions if not one.is_empty]
    scales = scales_of(present, contributions, optimizer)
    size, length = block.pool.size if present else 0, block.kernels.chunk_elements
    scratch = np.empty(min(size, length), block.dtype.accumulate)
    total = 0.0
    try:
        with np.errstate(all="ignore"):  # a gradient that overflows has a norm that is not finite, which workers say
            for start in range(0, size, length):
                stop = min(start + length, size)
                part = scratch[: stop - start]
                block.kernels.weighted_sum([one.values[start:stop] for one in present], scales, block.dtype, part)
                total += block.kernels.squares(part)
    except (TypeError, ValueError) as error:
        raise errors.PushRefused(f"{name_of(block.key)}: {error}") from error
    return total
