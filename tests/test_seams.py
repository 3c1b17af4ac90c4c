"""Features stand at seams: dense init, push and pull work where a feature's modules cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FEATURES = {
    "checkpoint": "checkpoint.export checkpoint.files checkpoint.folders checkpoint.format checkpoint.locks"
    " checkpoint.shards",
    "clipping": "core.server.clipping kvstore.clipping",
    "compression": "optimizer.compression kvstore.compression",
    "dumps": "diagnostics.record diagnostics.replay diagnostics.ring diagnostics.why",
    "devices": "kernels.gpu kernels.cupy_device kernels.cupy_runtime kernels.numba_cuda optimizer.offload"
    " kvstore.device",
    "GPU libraries": "kernels.cupy_device kernels.cupy_runtime kernels.numba_cuda",
    "host aggregation": "core.worker.host_aggregation",
    "leases of examples": "core.scheduler.leases training.queue_sampler",
    "ledger": "diagnostics.ledger",
    "newcomers": "core.scheduler.newcomers core.worker.newcomer",
    "replicas of servers": "core.server.replica",
    "return of the scheduler": "runtime.journal",
    "profiler": "profiler diagnostics.attach diagnostics.profiler diagnostics.trace",
}
"""Feature → the modules and packages of kvdist that it lives in."""

ATTACHED = {"diagnostics.attach"}
"""Modules that are attached to each node: one that attaches nothing takes the place of each."""

PROGRAM = """
import sys
import types

names = [f"kvdist.{name}" for name in sys.argv[1].split()]
REFUSED = tuple(name for name in names if name not in sys.argv[2:])
for name in names:
    if name in sys.argv[2:]:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].attach = lambda node: None

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(REFUSED):
            raise ImportError(f"{name} is taken away")

sys.meta_path.insert(0, Refusal())
import numpy as np
from kvdist import kv

with kv.create("dist") as store:
    store.init(["w", "v"], [np.zeros(5, np.float32), np.ones((3, 2), np.float32)])
    store.push(["w", "v"], [np.full(5, 2, np.float32), np.full((3, 2), 3, np.float32)])
    print(store.pull("w").tolist(), store.pull("v").tolist())
    store.set_optimizer("sgd", learning_rate=1.0)
    store.pushpull("w", out := np.ones(5, np.float32))
    print(out.tolist())
"""


@pytest.mark.parametrize("feature", FEATURES)
def test_dense_values_are_pushed_and_pulled_without(feature: str) -> None:
    command = [sys.executable, "-c", PROGRAM, FEATURES[feature], *(f"kvdist.{name}" for name in ATTACHED)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{[2.0] * 5} {[[3.0, 3.0]] * 3}", f"{[1.0] * 5}"]


def test_the_modules_of_features_are_there() -> None:
    places = [ROOT / "kvdist" / name.replace(".", "/") for names in FEATURES.values() for name in names.split()]
    assert [str(place) for place in places if not (place.is_dir() or place.with_suffix(".py").exists())] == []
