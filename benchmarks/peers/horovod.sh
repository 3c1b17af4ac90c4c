#!/usr/bin/env bash
# Makes an environment of its own for Horovod 0.28.1 over gloo, built against MXNet 1.9.1, and prints the path of its
# Python. A second call only prints. The build takes some ten minutes on two cores and needs cmake and a C++ compiler.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=.venv-horovod
if [ ! -e "$venv/.installed" ]; then
  for tool in cmake g++ make; do
    command -v "$tool" > /dev/null || { echo "horovod.sh: building Horovod needs $tool, which is not here" >&2; exit 1; }
  done
  for python in python3.11 python3.10 python3.9 python3.8 python3; do
    if "$python" -c 'import sys; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null; then found=$python; break; fi
  done
  if [ -z "${found:-}" ]; then
    echo "horovod.sh: MXNet 1.9.1, against which Horovod is built, runs on Python 3.8 to 3.11; none is here" >&2
    exit 1
  fi
  echo "building Horovod 0.28.1 into $venv; this takes a while" >&2
  "$found" -m venv --clear "$venv"
  pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" mxnet==1.9.1 numpy==1.23.5 'setuptools<70' wheel packaging cffi cloudpickle psutil pyyaml >&2
  # Its sources predate compilers that no longer draw in <cstdint> by themselves, and CMake 4.
  export HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1
  export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO HOROVOD_GPU_OPERATIONS=
  export CXXFLAGS="${CXXFLAGS:-} -include cstdint" CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS=-j2
  PATH="$PWD/$venv/bin:$PATH" "${pip[@]}" --no-build-isolation horovod==0.28.1 >&2
  "$venv/bin/python" -c 'import horovod.mxnet' >&2
  touch "$venv/.installed"
fi
echo "$PWD/$venv/bin/python"
