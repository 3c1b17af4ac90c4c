"""A server whose GPU is a device of the tests: ``offloading.py [MEMORY_BYTES_MAX]``. The environment says the rest."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from kvdist import __main__ as command
from kvdist.kernels import gpu
from tests.devices import NumpyDevice

opened = []


def open_gpu(index, otherwise):
    opened.append(NumpyDevice(index, memory_bytes_max=int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 40))
    return opened[-1]


if __name__ == "__main__":
    gpu.open_gpu = open_gpu
    code = command.main([])
    for device in opened:
        moved = f"{device.uploaded_bytes} up, {device.downloaded_bytes} down, {device.pinned_bytes} pinned"
        print(f"{device.name}: {moved}", flush=True)
    sys.exit(code)
