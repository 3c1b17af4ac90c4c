"""Callbacks of `kvdist.keras`, with some arguments in the order of horovod.tensorflow.keras."""

from typing import Any

from kvdist.keras import callbacks as _of_keras
from kvdist.keras.callbacks import BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback
from kvdist.keras.callbacks import LearningRateScheduleCallback as LearningRateScheduleCallback
from kvdist.keras.callbacks import LearningRateWarmupCallback as LearningRateWarmupCallback
from kvdist.keras.callbacks import MetricAverageCallback as MetricAverageCallback


class BestModelCheckpoint(_of_keras.BestModelCheckpoint):
    """`kvdist.keras.callbacks.BestModelCheckpoint` with arguments in the order of horovod.tensorflow.keras."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        super().__init__(monitor, verbose, mode, save_freq, filepath, save_weights_only)
