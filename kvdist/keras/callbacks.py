"""Horovod's callbacks for `model.fit`, with its formulas: initial broadcast, averaged metrics, learning rates.

Put `MetricAverageCallback` before callbacks that read metrics, such as `ReduceLROnPlateau` and `TensorBoard`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, MutableMapping
from typing import Any

import keras
import numpy as np
import torch

from kvdist import collective
from kvdist.collective import Min, ProcessSet, global_process_set
from kvdist.keras.optimizer import with_outermost_distributed
from kvdist.keras.values import array_of, broadcast_global_variables, broadcast_values, value_of

Logs = MutableMapping[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Copy the weights and the optimizer state of the root rank to all ranks, once, before the first batch.

    If the model of some rank is not built by then, it happens on all ranks at the end of the first batch, as always in
    Horovod. The seeds of random layers stay different on each rank.

    Args:
        root_rank: global rank whose values are sent, usually 0, which may have loaded a checkpoint.
        device: accepted for Horovod, without effect.
        local_variables: list of variables of the model that are not copied.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: list[Any] | None = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._kept: dict[int, Any] = {}
        self._is_done = False
        for variable in local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable of the model from the broadcast."""
        self._kept[id(value_of(var))] = var

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcast if all ranks have built their models."""
        if getattr(self.model, "ddp_model", None) is not None:
            raise ValueError(
                "Keras has put this model into torch's DistributedDataParallel, which averages gradients by itself:"
                " do not call torch.distributed.init_process_group in programs that use kvdist.keras"
            )
        self._is_done = False
        self.model.optimizer = with_outermost_distributed(self.model.optimizer)
        if self.model.built and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        is_built = torch.tensor(int(self.model.built), device="cpu")
        ready = collective.allreduce(is_built, op=Min, name="models are built")
        if ready.item():
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast after the first batch if a model was not built before."""
        if not self._is_done:
            self._broadcast()

    def _broadcast(self) -> None:
        self._is_done = True
        if not self._kept:
            broadcast_global_variables(self._root_rank, self.model)
            return
        variables = [*self.model.weights, *self.model.optimizer.variables]
        broadcast_values([one for one in variables if id(value_of(one)) not in self._kept], self._root_rank)


class MetricAverageCallback(keras.callbacks.Callback):
    """Replace the metrics of an epoch by their averages over the ranks.

    All ranks must have the same metrics, so either all of them run a validation or none does.

    Args:
        device: accepted for Horovod, without effect.
        process_set: ranks that take part.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average the values of `logs` in place."""
        if not logs:
            return
        names = sorted(logs)
        values = [array_of(logs[name]).astype(np.float64) for name in names]
        flat = torch.from_numpy(np.concatenate([value.reshape(-1) for value in values]))
        # The names are part of the operation's name: ranks with other metrics get an error that lists them.
        collective.allreduce_(flat, name=f"metrics {', '.join(names)}", process_set=self._process_set)
        averages = np.split(flat.numpy(), np.cumsum([value.size for value in values])[:-1])
        for name, value, average in zip(names, values, averages, strict=True):
            logs[name] = average.reshape(value.shape) if value.shape else float(average[0])


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiply the learning rate by a function of the epoch, during a range of epochs.

    Args:
        initial_lr: learning rate to multiply.
        multiplier: a function of the epoch; or a number m, for m ** (epoch - start_epoch).
        start_epoch, end_epoch: first epoch of the range, and first epoch after it; None for no end.
        staircase: True changes the rate with the first batch of an epoch, and the epoch is an integer. False changes it
            with every batch, and the epoch is epoch + batch / steps_per_epoch.
        momentum_correction: in the batch in which the rate changes, multiply the optimizer's momentum by new rate / old
            rate (https://arxiv.org/abs/1706.02677).
        steps_per_epoch: number of batches of an epoch; None takes it from `fit`.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is None; give the learning rate that is multiplied")
        self.initial_lr = float(initial_lr)
        self.multiplier = multiplier if callable(multiplier) else _powers(multiplier, start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Check the number of steps and the momentum.

        Raises:
            ValueError: `staircase` is False, and the number of steps of an epoch is unknown.
        """
        if not self.staircase and not self.steps_per_epoch:
            steps = (self.params or {}).get("steps")
            if not steps:
                raise ValueError(
                    f"how many steps an epoch has is unknown: give {type(self).__name__}(steps_per_epoch=...)"
                )
            self.steps_per_epoch = int(steps)
        if self.momentum_correction and self._has_momentum() and self._is_traced():
            warnings.warn(
                "momentum is a constant in the graphs that TensorFlow compiles, so that momentum_correction has no"
                " effect there: pass momentum_correction=False, or compile the model with run_eagerly=True",
                stacklevel=2,
            )
            self.momentum_correction = False

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Store the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the rate of this batch."""
        is_over = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or is_over:
            return
        if not self.staircase and self.steps_per_epoch:
            self._adjust(self._epoch + batch / self.steps_per_epoch)
        elif self.staircase and batch == 0:
            self._adjust(self._epoch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Restore the optimizer's momentum."""
        if self._momentum is not None:
            self._innermost().momentum = self._momentum
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log the rate, under Horovod's name and under that of Keras 3."""
        if logs is not None:
            logs["lr"] = logs["learning_rate"] = self._rate()

    def _adjust(self, epoch: float) -> None:
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        if self.momentum_correction and self._has_momentum() and old:
            optimizer = self._innermost()
            self._momentum = optimizer.momentum
            optimizer.momentum = self._momentum * new / old

    def _rate(self) -> float:
        return float(array_of(self.model.optimizer.learning_rate))

    def _innermost(self) -> Any:
        optimizer = self.model.optimizer
        is_outer = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        return optimizer.inner_optimizer if is_outer else optimizer

    def _has_momentum(self) -> bool:
        return bool(getattr(self._innermost(), "momentum", 0.0))

    def _is_traced(self) -> bool:
        return keras.backend.backend() == "tensorflow" and not self.model.run_eagerly


def _powers(base: float, start_epoch: int) -> Callable[[float], float]:
    return lambda epoch: float(base ** (epoch - start_epoch))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increase the learning rate linearly from initial_lr / size to `initial_lr` over the first epochs.

    With S steps per epoch, e = epoch + batch / S + 1 / S and W epochs, the rate is initial_lr / size * (e * (size - 1)
    / W + 1); the last batch of the warm-up has exactly `initial_lr`.

    Args:
        initial_lr: rate after the warm-up, already multiplied by the number of ranks.
        warmup_epochs: W.
        momentum_correction, steps_per_epoch: as in `LearningRateScheduleCallback`.
        verbose: 1 prints a line at the end, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(initial_lr, self._rise, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def _rise(self, epoch: float) -> float:
        size = collective.size()
        epoch += 1.0 / (self.steps_per_epoch or 1)
        return 1.0 / size * (epoch * (size - 1) / self.warmup_epochs + 1)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log the rate, and print a line after the last epoch of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and collective.rank() == 0:
            said = f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.\n"
            sys.stdout.write(said)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Save the best model of a training run, on rank 0.

    Args:
        monitor, verbose, mode, save_freq: as in `keras.callbacks.ModelCheckpoint`.
        filepath: path of the file; None for ``best_model.keras``, or ``best_model.weights.h5`` for weights alone.
        save_weights_only: save only the weights of the model.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
        save_weights_only: bool = False,
    ) -> None:
        path = filepath or f"best_model.{'weights.h5' if save_weights_only else 'keras'}"
        super().__init__(
            path,
            monitor,
            verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Save after a number of batches, if `save_freq` is a number."""
        if collective.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Save after the epoch, if `save_freq` is ``epoch``."""
        if collective.rank() == 0:
            super().on_epoch_end(epoch, logs)
