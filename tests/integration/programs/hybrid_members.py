"""Worker 1 of a ``hybrid`` store leaves, and the next calls of worker 0 say so."""

import numpy as np

from kvdist import RowSparse, kv

store = kv.create("hybrid")
store.init("rows", RowSparse.zeros((4, 2)))
heard = []
store.on_membership_change(lambda before, after: heard.append((before, after)))
store.on_rollback(heard.append)
store.barrier()
if store.rank == 0:
    while not heard:
        store.row_sparse_pull("rows", row_ids=np.arange(2))
    print("heard", heard, "members", store.members, flush=True)
store.close()
