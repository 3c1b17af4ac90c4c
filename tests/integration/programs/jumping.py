"""The time of day jumps by a day, forwards or backwards, each time that a process which imports this looks at it.

Scheduler and servers import it as their server module, which has to register something; workers simply import it.
"""

import itertools
import time

from kvdist import kv

DAY_S = 86_400.0
time_of_day = time.time
jumps = itertools.cycle([DAY_S, -DAY_S, 0.0])


def jumping():
    return time_of_day() + next(jumps)


time.time, time.time_ns = jumping, lambda: int(jumping() * 1e9)
print(f"a look at the clock, and the next one {time.time() - time.time():.0f} s before it", flush=True)


@kv.register_command(1)
def do_nothing(head, body, rank):
    """A command for the tests."""
