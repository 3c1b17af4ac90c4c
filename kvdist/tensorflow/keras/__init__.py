"""`kvdist.keras` where scripts have ``import horovod.tensorflow.keras as hvd``: Keras 3 on TensorFlow."""

from typing import TYPE_CHECKING, Any

import kvdist.tensorflow.keras.callbacks as _callbacks
from kvdist import keras as _keras
from kvdist.collective import Average, Compression, ProcessSet, ReduceOp, global_process_set
from kvdist.collective.reduction import NoneCompressor
from kvdist.horovod import without_elastic
from kvdist.keras import *  # noqa: F403
from kvdist.keras import __all__ as __all__
from kvdist.keras.optimizer import Groups

callbacks = _callbacks  # type: ignore[misc]  # not those of kvdist.keras, which the star has brought

if not TYPE_CHECKING:
    __getattr__ = without_elastic(__name__)


def DistributedOptimizer(  # type: ignore[no-redef]
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[NoneCompressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`kvdist.keras.DistributedOptimizer` with arguments in the order of horovod.tensorflow.keras."""
    return _keras.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        num_groups,
        groups,
        backward_passes_per_step,
        average_aggregated_gradients,
        process_set,
        scale_local_gradients,
    )
