"""Equal values of variables on all ranks: at once, within a function, and by a hook of a `MonitoredTrainingSession`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kvdist.collective import ProcessSet, global_process_set, tensorflow_bridge


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Replace variables by those of one rank.

    Args:
        variables: of TensorFlow or Keras, the same ones on all ranks in the same order.
        root_rank: the rank whose values they are.
        process_set: the ranks that take part.
        inplace: accepted for compatibility; it is always in place.

    Returns:
        None, or in a graph the op that does it.
    """
    del inplace
    return tensorflow_bridge.broadcast_variables(variables, root_rank, process_set)


def broadcast_global_variables(root_rank: int) -> Any:
    """The op that gives all ranks one rank's values of all variables of the graph, in `tf.compat.v1`.

    Raises:
        RuntimeError: TensorFlow executes eagerly and has no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "there is no list of all variables where TensorFlow executes eagerly: use broadcast_variables(variables of"
            " the model and of the optimizer, root_rank)"
        )
    return tensorflow_bridge.broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Give all ranks one rank's variables once a session has initialised or restored them.

    Args:
        root_rank: whose values they are, usually 0, which restores a checkpoint.
        device: where the op is placed; '' leaves it to TensorFlow.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._device = device
        self._op: Any = None

    def begin(self) -> None:
        """Add the op to the graph, which is finished afterwards."""
        if self._op is None or self._op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self._device):
                self._op = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        session.run(self._op)
