"""Runs the `train.py` of a folder while workers are killed and come back.

``resuming.py FOLDER RANKS KILLED_AT WAITS_AT``. All wait in their step WAITS_AT until those that were started again
have begun their first step. All meet at a barrier and for a mean before each checkpoint. The end says where each
worker's loop was.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from kvdist import Trainer

folder, killed_at, waits_at = sys.argv[1], int(sys.argv[3]), int(sys.argv[4])
victims = [int(rank) for rank in sys.argv[2].split(",")]
os.chdir(folder)
life = int(os.environ.get("KVDIST_RESTARTS", "0"))
begun = False
WAITS_S = 60.0
step, save_checkpoint = Trainer.step, Trainer.save_checkpoint


def disturbed_step(trainer):
    global begun
    rank = trainer.kvstore.rank if trainer.kvstore is not None else -1
    if life and not begun:
        begun = True
        print(f"worker {rank} is back at version {trainer.version}", flush=True)
        Path(f"back.{rank}").touch()
    elif not life and rank in victims and trainer.version == killed_at:
        own = Path(f"dies.{rank}.{os.getpid()}")
        own.touch()
        dying = wait_for("dies.*", len(victims))
        if rank != victims[0]:
            time.sleep(WAITS_S)  # until it is killed
        for path in sorted(dying, key=lambda path: path == own):  # all at once, itself last
            os.kill(int(path.suffix[1:]), signal.SIGKILL)
    if trainer.version == waits_at:
        Path(f"waits.{rank}").touch()
        wait_for("back.*", len(victims))
    step(trainer)


def wait_for(pattern, count):
    deadline = time.monotonic() + WAITS_S
    while len(found := list(Path().glob(pattern))) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def saved_together(trainer, directory, number, **more):
    trainer.kvstore.barrier()
    assert trainer.kvstore.average(float(number)) == number, "all are in the same step"
    return save_checkpoint(trainer, directory, number, **more)


goes_on = os.environ["KVDIST_ON_LOSS"] == "continue"
others = int(os.environ["DMLC_NUM_WORKER"]) - len(victims) if goes_on else 0
if life:  # a fork begins so soon that the last of them may not be dead, nor the others at their step
    Path(f"again.{os.environ['KVDIST_RANK']}").touch()
    wait_for("again.*", len(victims))
    wait_for("waits.*", others)
Trainer.step, Trainer.save_checkpoint = disturbed_step, saved_together
found = runpy.run_path("train.py")
print(f"ended in step {found['step']} at version {found['trainer'].version}", flush=True)
