"""Forks ranks: torch is imported once, and each rank is a process of its own that begins within milliseconds.

Reads a JSON object a line. ``{"program": path, "env": {...}, "output": path}`` starts a rank, in which the program runs
as a script does, to the end of the interpreter; answers its pid. ``{"wait": pid}`` answers how it ended.
"""

import json
import os
import runpy
import sys

import kvdist.collective  # noqa: F401 (for the ranks)

program = ""
for line in sys.stdin:
    asked = json.loads(line)
    if "wait" in asked:
        print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        os.environ.update(asked["env"])
        output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.close(nothing)
        program = asked["program"]
        break
    print(pid, flush=True)
if program:
    runpy.run_path(program, run_name="__main__")
