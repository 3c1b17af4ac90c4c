"""Workers that train, meet at barriers and lease data until FOLDER/stop is there: ``scheduler_dies.py FOLDER``.

Each step of each worker adds 1 to the weight, so the weight says how many pushes are in it.
"""

import sys
import time
from pathlib import Path

import numpy as np

import kvdist
from kvdist import RolledBackError, kv

EVERY = 10
stop = Path(sys.argv[1]) / "stop"
store = kv.create("dist")
store.set_optimizer("sgd", learning_rate=1.0)
store.init("w", np.zeros(5))
print("begins", flush=True)
step, again, is_over, is_stale = 0, 0, False, False
while not is_over:
    try:
        if is_stale:
            value = store.pull("w")
            assert (value == step * store.num_workers).all(), (step, value)
            is_stale = False
        value = np.full(5, -1.0)
        store.pushpull("w", value)
        step += 1
        assert (value == step * store.num_workers).all(), (step, value)
        time.sleep(0.005)
        if step % EVERY == 0:
            is_over = store.average(np.array([float(stop.exists())]))[0] > 0
            store.barrier()
    except RolledBackError as error:
        again += step - error.step
        step, is_over, is_stale = error.step, False, True
print(f"ended with {value[0]:g} in {step} steps, {again} of them again, kvdist {kvdist.__version__}", flush=True)
store.close()
