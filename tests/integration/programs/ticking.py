"""A clock of a worker's own: a busy machine slows it as it slows kvdist."""

import sys
import threading
import time


def start_ticking():
    """Say ten times a second that this process runs."""
    threading.Thread(target=_tick, daemon=True).start()


def _tick():
    while True:
        time.sleep(0.1)
        sys.stdout.write("tick\n")
        sys.stdout.flush()
