"""Loading what was saved of a model, with its optimizer distributed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kvdist.collective import Compression
from kvdist.collective.reduction import NoneCompressor
from kvdist.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[NoneCompressor] = Compression.none,
) -> Any:
    """Load a model, and have its optimizer average gradients over the ranks.

    It may have been saved with a distributed optimizer or without: the file is the same. The optimizer's state is that
    of the file.

    Args:
        filepath: what `model.save` wrote.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other classes and functions that it does not know, by their names.
        compression: see `DistributedOptimizer`.
    """
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
