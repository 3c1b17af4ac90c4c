"""kvdist: a parameter server for PyTorch and NumPy that speaks MXNet's KVStore language.

The public names and nothing else. What needs torch, and what needs sockets, is imported when it is first used, so that
``import kvdist`` costs little and a server never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvdist.errors import (
    BarrierTimeout,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    FencedError,
    ForkError,
    InitMismatch,
    KeyNotInitialised,
    KvdistError,
    NoCheckpoint,
    OptimizerMismatch,
    PeerLostError,
    ProtocolError,
    PushRefused,
    StoreClosed,
)
from kvdist.version import __version__

if TYPE_CHECKING:
    from kvdist import kvstore as kv
    from kvdist import lr_scheduler, optimizer, profiler
    from kvdist.buffers import sync_buffers
    from kvdist.data import SplitSampler, split_and_load, split_data
    from kvdist.kvstore.base import KVStore
    from kvdist.kvstore.saved import Checkpoint
    from kvdist.trainer import Trainer

__all__ = [
    "BarrierTimeout",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceeded",
    "FencedError",
    "ForkError",
    "InitMismatch",
    "KVStore",
    "KeyNotInitialised",
    "KvdistError",
    "NoCheckpoint",
    "OptimizerMismatch",
    "PeerLostError",
    "ProtocolError",
    "PushRefused",
    "SplitSampler",
    "StoreClosed",
    "Trainer",
    "__version__",
    "kv",
    "lr_scheduler",
    "optimizer",
    "profiler",
    "split_and_load",
    "split_data",
    "sync_buffers",
]

_MODULES = {
    "kv": "kvdist.kvstore",
    "lr_scheduler": "kvdist.lr_scheduler",
    "optimizer": "kvdist.optimizer",
    "profiler": "kvdist.profiler",
}
_NAMES = {
    "Checkpoint": "kvdist.kvstore.saved",
    "KVStore": "kvdist.kvstore.base",
    "SplitSampler": "kvdist.data",
    "Trainer": "kvdist.trainer",
    "split_and_load": "kvdist.data",
    "split_data": "kvdist.data",
    "sync_buffers": "kvdist.buffers",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = import_module(_MODULES[name])
    elif name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    else:
        raise AttributeError(f"module 'kvdist' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
