"""Sends commands to the servers: ``commands.py FOLDER``. Handlers note there what they were told."""

import sys
from pathlib import Path

from kvdist import KvdistError, kv

store = kv.create("dist")
folder = Path(sys.argv[1])
store.init("w", 0.0 * store.empty(3))
store.barrier()
if store.rank == 0:
    store.send_command_to_servers(7, "ein größeres\nWort")
    noted = {path.name: path.read_text("utf-8") for path in folder.glob("server-*")}
    assert noted == {"server-0": "7 ein größeres\nWort", "server-1": "7 ein größeres\nWort"}, noted
    for head in (8, 9):
        try:
            store.send_command_to_servers(head, "x")
        except KvdistError as error:
            print(f"refused: {type(error).__name__}: {error}")
store.barrier()
print(f"the servers live: {store.pull('w').shape}")
store.close()
