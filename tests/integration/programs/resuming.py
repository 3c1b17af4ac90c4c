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
step, save_checkpoint = Trainer.step, Trainer.save_checkpoint


def disturbed_step(trainer):
    global begun
    rank = trainer.kvstore.rank if trainer.kvstore is not None else -1
    if life and not begun:
        begun = True
        print(f"worker {rank} is back at version {trainer.version}", flush=True)
        Path(f"back.{rank}").touch()
    elif not life and rank in victims and trainer.version == killed_at:
        Path(f"dies.{rank}.{os.getpid()}").touch()
        while rank != victims[0] or len(dying := list(Path().glob("dies.*"))) < len(victims):
            time.sleep(0.01)
        for path in sorted(dying, key=lambda path: path.name == f"dies.{rank}.{os.getpid()}"):  # at once, itself last
            os.kill(int(path.suffix[1:]), signal.SIGKILL)
    if trainer.version == waits_at:
        Path(f"waits.{rank}").touch()
        deadline = time.monotonic() + 60
        while len(list(Path().glob("back.*"))) < len(victims) and time.monotonic() < deadline:
            time.sleep(0.01)
    step(trainer)


def saved_together(trainer, directory, number, **more):
    trainer.kvstore.barrier()
    assert trainer.kvstore.average(float(number)) == number, "all are in the same step"
    return save_checkpoint(trainer, directory, number, **more)


goes_on = os.environ["KVDIST_ON_LOSS"] == "continue"
others = int(os.environ["DMLC_NUM_WORKER"]) - len(victims) if goes_on else 0
while life and len(list(Path().glob("waits.*"))) < others:  # a fork is back before they are there
    time.sleep(0.01)
Trainer.step, Trainer.save_checkpoint = disturbed_step, saved_together
found = runpy.run_path("train.py")
print(f"ended in step {found['step']} at version {found['trainer'].version}", flush=True)
