"""Runs a script of MXNet as it is, with stores that rest on kvdist's servers.

kvdist-launch -n 2 -s 2 python examples/mxnet_bridge/run.py your_script.py its arguments
"""

import runpy
import sys
from pathlib import Path

import kvdist_store  # noqa: F401  # importing it is what makes the stores known

if len(sys.argv) < 2:
    sys.exit("run.py needs the script to run: python run.py your_script.py its arguments")
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # as Python does for a script
runpy.run_path(sys.argv[0], run_name="__main__")
