"""A rank of a job without servers: sums over all ranks. What it does besides is its first word."""

import os
import sys
import time

import torch

import kvdist.collective as hvd


def main() -> int:
    is_root = "KVDIST_LISTEN_FD" in os.environ  # `init` takes it
    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum).item()
    here = f"{hvd.local_rank()} of {hvd.local_size()} here, {hvd.cross_rank()} of {hvd.cross_size()} across"
    print(f"rank {hvd.rank()} of {hvd.size()}, {here}: {total:g}{', inherited' if is_root else ''}", flush=True)
    if sys.argv[1] == "fail" and hvd.rank() == 1:
        return 9
    if sys.argv[1] == "fail":
        time.sleep(60)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
