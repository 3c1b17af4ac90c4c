#!/usr/bin/env bash
# Makes an environment for the tests of kvdist.tensorflow in .venv-tensorflow, at the root of the repository, and prints
# the path of its Python. A second call only prints. TensorFlow is apart from the other tests: it needs a Python that it
# has wheels for, and takes seconds to import.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=.venv-tensorflow
stamp="$venv/.installed"
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
  for python in python3.11 python3.12 python3.13 python3.10 python3; do
    if "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then found=$python; break; fi
  done
  if [ -z "${found:-}" ]; then
    echo "environment.sh: TensorFlow 2.21 runs on Python 3.10 to 3.13, and none of them is here" >&2
    exit 1
  fi
  echo "installing TensorFlow and kvdist into $venv" >&2
  "$found" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
    --editable '.[tensorflow]' 'cloudpickle>=3' scikit-learn pytest pytest-timeout pytest-xdist >&2
  touch "$stamp"
fi
echo "$PWD/$venv/bin/python"
