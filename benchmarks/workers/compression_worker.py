"""One worker at the common work, with gradients that 2-bit sends exactly: every element is the threshold."""

from __future__ import annotations

import numpy as np
from workload import measure, parse_arguments

from kvdist import kv

THRESHOLD = 1.5
"""Of two workers that sum to 3, as the gradients of the common work do."""
PARAMETERS = {
    "whole": None,
    "fp16": {"type": "fp16"},
    "fp16-fp16": {"type": "fp16", "pull": "fp16"},
    "2bit": {"type": "2bit", "threshold": THRESHOLD},
    "2bit-fp16": {"type": "2bit", "threshold": THRESHOLD, "pull": "fp16"},
}


def main() -> None:
    options = parse_arguments()
    store = kv.create(options.store)
    parameters = PARAMETERS[options.system]
    if parameters is not None:
        store.set_gradient_compression(parameters)
    keys = list(range(options.spec.count))
    grads = [np.full(size, THRESHOLD, np.float32) for size in options.spec.sizes]
    outs = [np.empty(size, np.float32) for size in options.spec.sizes]
    store.init(keys, [np.zeros(size, np.float32) for size in options.spec.sizes])

    def exchange() -> None:
        store.pushpull(keys, grads, out=outs)

    measure(options, store.rank, store.num_workers, lambda: None, store.barrier, exchange, lambda: outs)
    store.close()


if __name__ == "__main__":
    main()
