"""kvdist: a parameter server for PyTorch and NumPy with the KVStore interface of MXNet.

This module only has the public names. Modules that need torch or sockets are imported at first use, so ``import
kvdist`` is fast and a server never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvdist.errors import (
    AuthenticationError,
    BarrierTimeout,
    CheckpointError,
    CollectiveError,
    CollectiveMismatch,
    ConfigError,
    DeadlineExceeded,
    DeadlockError,
    DeviceError,
    DuplicateNameError,
    FencedError,
    ForkError,
    InitMismatch,
    JobOver,
    KeyNotInitialised,
    KvdistError,
    NoCheckpoint,
    OptimizerMismatch,
    PeerLostError,
    ProcessSetError,
    ProtocolError,
    PushRefused,
    RankLostError,
    RolledBackError,
    StoreClosed,
)
from kvdist.runtime.preparations import PREPARATIONS
from kvdist.version import __version__

if TYPE_CHECKING:
    from kvdist import collective, horovod, kv, lr_scheduler, optimizer, profiler
    from kvdist.config.policies import (
        Asynchronous,
        LocalSteps,
        Quota,
        asynchronous,
        diloco,
        local_sgd,
        quota,
    )
    from kvdist.kvstore.base import KVStore
    from kvdist.kvstore.checkpoints import Checkpoint
    from kvdist.kvstore.rowsparse import LazyRows, RowSparse
    from kvdist.runtime.node import Node
    from kvdist.training.data import SplitSampler, split_and_load, split_data
    from kvdist.training.embedding import Embedding
    from kvdist.training.queue_sampler import QueueSampler
    from kvdist.training.replicas import Replicas, replicate, sync_buffers
    from kvdist.training.trainer import Trainer

__all__ = [
    "Asynchronous",
    "BarrierTimeout",
    "Checkpoint",
    "AuthenticationError",
    "CheckpointError",
    "CollectiveError",
    "CollectiveMismatch",
    "ConfigError",
    "DeadlineExceeded",
    "DeadlockError",
    "DeviceError",
    "DuplicateNameError",
    "Embedding",
    "FencedError",
    "ForkError",
    "InitMismatch",
    "KVStore",
    "KeyNotInitialised",
    "KvdistError",
    "LazyRows",
    "LocalSteps",
    "NoCheckpoint",
    "OptimizerMismatch",
    "PeerLostError",
    "ProcessSetError",
    "ProtocolError",
    "PushRefused",
    "QueueSampler",
    "Quota",
    "RankLostError",
    "Replicas",
    "RolledBackError",
    "RowSparse",
    "SplitSampler",
    "StoreClosed",
    "Trainer",
    "__version__",
    "asynchronous",
    "collective",
    "diloco",
    "horovod",
    "kv",
    "local_sgd",
    "lr_scheduler",
    "optimizer",
    "profiler",
    "quota",
    "replicate",
    "split_and_load",
    "split_data",
    "sync_buffers",
    "JobOver",
]

_MODULES = ("collective", "horovod", "kv", "lr_scheduler", "optimizer", "profiler")
_NAMES = {
    "Asynchronous": "kvdist.config.policies",
    "Checkpoint": "kvdist.kvstore.checkpoints",
    "Embedding": "kvdist.training.embedding",
    "KVStore": "kvdist.kvstore.base",
    "LazyRows": "kvdist.kvstore.rowsparse",
    "LocalSteps": "kvdist.config.policies",
    "QueueSampler": "kvdist.training.queue_sampler",
    "Quota": "kvdist.config.policies",
    "Replicas": "kvdist.training.replicas",
    "RowSparse": "kvdist.kvstore.rowsparse",
    "SplitSampler": "kvdist.training.data",
    "Trainer": "kvdist.training.trainer",
    "asynchronous": "kvdist.config.policies",
    "diloco": "kvdist.config.policies",
    "local_sgd": "kvdist.config.policies",
    "quota": "kvdist.config.policies",
    "replicate": "kvdist.training.replicas",
    "split_and_load": "kvdist.training.data",
    "split_data": "kvdist.training.data",
    "sync_buffers": "kvdist.training.replicas",
}
_REMOVED = {
    **dict.fromkeys(("ssp", "StaleSynchronous"), "kvdist.asynchronous()"),
    **dict.fromkeys(("backup", "Backup"), "kvdist.quota(samples)"),
    **dict.fromkeys(("buffered", "Buffered"), "kvdist.asynchronous(damping='sqrt') or kvdist.quota(samples)"),
}
"""Names of 0.2 and before → what to use instead, for error messages."""


def _attach_diagnostics(node: Node) -> None:
    import_module("kvdist.diagnostics.attach").attach(node)


PREPARATIONS.append(_attach_diagnostics)


def __getattr__(name: str) -> Any:
    try:
        if name in _MODULES:
            value: Any = import_module(f"kvdist.{name}")
        elif name in _NAMES:
            value = getattr(import_module(_NAMES[name]), name)
        elif name in _REMOVED:
            # ``from kvdist import …`` would hide the text of an AttributeError.
            raise ImportError(f"kvdist.{name} was removed: use {_REMOVED[name]}", name="kvdist")
        else:
            raise AttributeError(f"module 'kvdist' has no attribute {name!r}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"kvdist.{name} needs torch, which is not installed: pip install 'torch>=2.1'", name="torch"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
