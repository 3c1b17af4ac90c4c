"""Stores and trainers belong to their process: whoever pickles or copies one is told so."""

from __future__ import annotations

import pytest

PICKLES = """
    import copy
    import pickle

    import torch
    from kvdist import SplitSampler, Trainer, kv
    from torch.utils.data import DataLoader


    class Holds:
        def __init__(self, held):
            self.held = held

        def __len__(self):
            return 10

        def __getitem__(self, index):
            return index


    def report(what, do):
        try:
            do()
        except Exception as error:
            print(f"{what}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{what}: done", flush=True)


    if __name__ == "__main__":
        store = kv.create("dist")
        trainer = Trainer(torch.nn.Linear(2, 2).parameters(), "sgd", kvstore=store)
        sampler = SplitSampler(10, store.num_workers, store.rank)
        for name, thing in {"store": store, "trainer": trainer, "sampler": sampler}.items():
            report(f"pickle {name}", lambda: pickle.dumps(Holds(thing)))
            report(f"deepcopy {name}", lambda: copy.deepcopy(thing))
            loader = DataLoader(Holds(thing), num_workers=1, multiprocessing_context="spawn", sampler=sampler)
            report(f"spawn {name}", lambda: list(loader))
        store.close()
"""


def test_pickling_copying_or_spawning_with_a_store_or_a_trainer_says_what_to_do(job, script):
    pytest.importorskip("torch")
    job.cluster(1, 1, script(PICKLES))
    job.succeed()
    text = job.processes["worker-0"].text
    for way in ("pickle", "deepcopy", "spawn"):
        assert f"{way} store: TypeError: a 'dist' store cannot be pickled, copied or sent to another process" in text
        assert f"{way} trainer: TypeError: a Trainer cannot be pickled, copied or sent to another process" in text
        assert f"{way} sampler: done" in text
    assert "store.rank" in text and "save_checkpoint" in text
