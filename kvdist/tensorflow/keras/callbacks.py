"""The callbacks of `kvdist.keras`, which are the same on TensorFlow."""

from kvdist.keras.callbacks import BestModelCheckpoint as BestModelCheckpoint
from kvdist.keras.callbacks import BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback
from kvdist.keras.callbacks import LearningRateScheduleCallback as LearningRateScheduleCallback
from kvdist.keras.callbacks import LearningRateWarmupCallback as LearningRateWarmupCallback
from kvdist.keras.callbacks import MetricAverageCallback as MetricAverageCallback
