#!/usr/bin/env bash
# Makes an environment for MXNet 1.9.1 and kvdist in .venv-bridge, at the root of the repository, and prints the path of
# its Python. A second call only prints. kvdist comes without numba and torch: MXNet needs a NumPy too old for both.
# environment.sh 2.0.0b1: the same for MXNet 2, in .venv-bridge-2.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
version=${1:-1.9.1}
venv=.venv-bridge
case $version in 2.*) venv=.venv-bridge-2 ;; esac
if [ ! -e "$venv/.installed" ]; then
  for python in python3.11 python3.10 python3; do
    if "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null; then found=$python; break; fi
  done
  if [ -z "${found:-}" ]; then
    echo "environment.sh: MXNet $version and kvdist both run on Python 3.10 and 3.11, and neither is here" >&2
    exit 1
  fi
  echo "installing MXNet $version and kvdist into $venv" >&2
  "$found" -m venv --clear "$venv"
  install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
  "${install[@]}" mxnet==$version numpy==1.23.5 'pyzmq>=26.4' 'msgpack>=1.0.5' 'scikit-learn>=1.2,<1.3' >&2
  "${install[@]}" --no-deps --editable . >&2
  touch "$venv/.installed"
fi
echo "$PWD/$venv/bin/python"
