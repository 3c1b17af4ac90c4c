"""`kvdist.keras` where scripts have ``import horovod.tensorflow.keras as hvd``: Keras 3 on TensorFlow."""

from kvdist.keras import *  # noqa: F403
from kvdist.keras import __all__ as __all__
