"""One worker of kvdist at the common work on tables of rows."""

from __future__ import annotations

import numpy as np
from rows import LEARNING_RATE, measure, parse_arguments

from kvdist import LazyRows, RowSparse, kv


def main() -> None:
    options = parse_arguments()
    shape = (options.rows, options.dim)
    store = kv.create("dist_sync")
    store.set_optimizer("adagrad", learning_rate=LEARNING_RATE)
    if options.dense:
        store.init("table", np.zeros(shape, np.float32))
    elif options.whole:
        store.init("table", RowSparse(np.arange(options.rows), np.zeros(shape, np.float32)))
    else:
        store.init("table", LazyRows(shape))
    out = np.empty(shape if options.dense else 0, np.float32)
    rows = RowSparse([], np.empty((0, options.dim), np.float32), shape)

    def exchange(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
        if options.dense:
            store.push("table", values)
            store.pull("table", out=out)
            return out
        store.push("table", RowSparse(ids, values, shape))
        store.row_sparse_pull("table", out=rows, row_ids=ids)
        return rows.values

    measure(options, store.rank, store.barrier, exchange)
    store.close()


if __name__ == "__main__":
    main()
