"""Processes of a launcher that reach the scheduler, and are reached, through a proxy at the port FRONT.

Scheduler and servers import it as their server module; workers run their program by it: ``fronted.py PROGRAM [WORD…]``.
"""

import os
import runpy
import sys

import patient  # noqa: F401  # registers a command

if os.environ["DMLC_ROLE"] != "scheduler":
    os.environ["DMLC_PS_ROOT_PORT"] = os.environ["FRONT"]

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
