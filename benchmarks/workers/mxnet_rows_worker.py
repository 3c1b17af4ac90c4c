"""One worker of MXNet's parameter server at the common work on tables of rows. Runs in MXNet's own environment."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from rows import LEARNING_RATE, measure, parse_arguments


def main() -> None:
    options = parse_arguments()
    shape = (options.rows, options.dim)
    store = mx.kv.create("dist_sync")
    store.set_optimizer(mx.optimizer.create("adagrad", learning_rate=LEARNING_RATE, wd=0))
    # A table must be given with all its rows.
    store.init("table", mx.nd.sparse.row_sparse_array((mx.nd.zeros(shape), mx.nd.arange(options.rows)), shape=shape))
    out = mx.nd.sparse.zeros("row_sparse", shape)

    def exchange(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
        rows = mx.nd.array(ids, dtype=np.int64)
        store.push("table", mx.nd.sparse.row_sparse_array((mx.nd.array(values), rows), shape=shape))
        store.row_sparse_pull("table", out=out, row_ids=rows)
        return out.data.asnumpy()

    measure(options, store.rank, store._barrier, exchange)
    store._barrier()


if __name__ == "__main__":
    main()
