#!/usr/bin/env bash
# Makes an environment of its own for MXNet 1.9.1, whose wheel needs a NumPy that nothing else here can live with,
# and prints the path of its Python. A second call only prints.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=.venv-mxnet
if [ ! -e "$venv/.installed" ]; then
  for python in python3.11 python3.10 python3; do
    if "$python" -c 'import sys; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null; then found=$python; break; fi
  done
  if [ -z "${found:-}" ]; then
    echo "mxnet.sh: MXNet 1.9.1 runs on Python 3.8 to 3.11, and none of these is here" >&2
    exit 1
  fi
  echo "installing MXNet 1.9.1 into $venv" >&2
  "$found" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check mxnet==1.9.1 numpy==1.23.5 >&2
  touch "$venv/.installed"
fi
echo "$PWD/$venv/bin/python"
