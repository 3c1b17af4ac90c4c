"""Names that scripts and tests for Horovod import from `horovod.tensorflow.util`."""

from tensorflow import executing_eagerly as _executing_eagerly

__all__ = ["_executing_eagerly"]
