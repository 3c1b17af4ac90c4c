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
from kvdist.version import __version__

if TYPE_CHECKING:
    from kvdist import collective, horovod, kv, lr_scheduler, optimizer, profiler
    from kvdist.config.policies import (
        Asynchronous,
        Backup,
        Buffered,
        LocalSteps,
        Quota,
        StaleSynchronous,
        asynchronous,
        backup,
        buffered,
        diloco,
        local_sgd,
        quota,
        ssp,
    )
    from kvdist.kvstore.base import KVStore
    from kvdist.kvstore.checkpoints import Checkpoint
    from kvdist.kvstore.rowsparse import LazyRows, RowSparse
    from kvdist.training.data import SplitSampler, split_and_load, split_data
    from kvdist.training.embedding import Embedding
    from kvdist.training.queue_sampler import QueueSampler
    from kvdist.training.replicas import Replicas, replicate, sync_buffers
    from kvdist.training.trainer import Trainer

__all__ = [
    "Asynchronous",
    "Backup",
    "BarrierTimeout",
    "Buffered",
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
    "StaleSynchronous",
    "StoreClosed",
    "Trainer",
    "__version__",
    "asynchronous",
    "backup",
    "buffered",
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
    "ssp",
    "sync_buffers",
    "JobOver",
]

_MODULES = ("collective", "horovod", "kv", "lr_scheduler", "optimizer", "profiler")
_NAMES = {
    "Asynchronous": "kvdist.config.policies",
    "Backup": "kvdist.config.policies",
    "Buffered": "kvdist.config.policies",
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
    "StaleSynchronous": "kvdist.config.policies",
    "Trainer": "kvdist.training.trainer",
    "asynchronous": "kvdist.config.policies",
    "backup": "kvdist.config.policies",
    "buffered": "kvdist.config.policies",
    "diloco": "kvdist.config.policies",
    "local_sgd": "kvdist.config.policies",
    "quota": "kvdist.config.policies",
    "replicate": "kvdist.training.replicas",
    "split_and_load": "kvdist.training.data",
    "split_data": "kvdist.training.data",
    "ssp": "kvdist.config.policies",
    "sync_buffers": "kvdist.training.replicas",
}


def __getattr__(name: str) -> Any:
    try:
        if name in _MODULES:
            value: Any = import_module(f"kvdist.{name}")
        elif name in _NAMES:
            value = getattr(import_module(_NAMES[name]), name)
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
