"""Batch normalisation of Keras over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kvdist.collective import Average, size
from kvdist.collective.tensorflow_bridge import reduced


@keras.saving.register_keras_serializable(package="kvdist")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` with the mean and variance of the batches of all ranks.

    Each rank counts equally, whatever the size of its batch, as in Horovod. All ranks must run it forward and backward
    in the same order. In evaluation it behaves like the Keras layer.

    Args:
        fused: must be False; accepted for Horovod.
        kwargs: arguments of `keras.layers.BatchNormalization`.

    Raises:
        ValueError: `fused` is True or None.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError(f"SyncBatchNormalization is not fused with others: leave fused={fused} out")
        super().__init__(**{**kwargs, "name": kwargs.get("name") or "sync_batch_normalization"})

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if size() == 1:
            return mean, variance
        mine = tf.stack([mean, variance + tf.square(mean)])
        (both,) = reduced([mine], "moments of a batch", Average)
        return both[0], both[1] - tf.square(both[0])
