"""Runs a Gluon script as it is, with the stores ``kvdist`` and ``kvdist_async`` known to MXNet.

kvdist-launch -n 2 -s 2 python examples/mxnet_bridge/run.py your_script.py its arguments
"""

import runpy
import sys

import kvdist_store  # noqa: F401  # importing it is what makes the stores known

if len(sys.argv) < 2:
    sys.exit("run.py needs the script to run: python run.py your_script.py its arguments")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
