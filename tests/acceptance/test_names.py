"""Errors and sentences about waits name parameters as the user did, and begin with who has to do what."""

from __future__ import annotations

import re

import pytest

START = """
    import os, sys, time
    import torch
    from kvdist import Trainer, kv

    store = kv.create("dist")
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    parameters = net.named_parameters() if sys.argv[1] == "named" else net.parameters()
    trainer = Trainer(parameters, "sgd", {"learning_rate": 0.1}, kvstore=store)
"""
NAMES = {
    "named": (r"'\d\.(weight|bias)'", "'0.weight'"),
    "plain": (r"parameter \d of shape \([\d, ]+\)", r"parameter 0 of shape \(\d, 4\)"),
}


@pytest.mark.parametrize("how", NAMES)
def test_the_first_line_of_a_wait_says_who_has_to_push_which_parameter(job, script, tmp_path, how):
    program = script(
        START
        + """
    for step in range(2):
        while step == 1 and store.rank == 1 and not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
        net(torch.ones(1, 4)).sum().backward()
        trainer.step()
        net.zero_grad()
    """
    )
    pytest.importorskip("torch")
    go = tmp_path / "go"
    job.cluster(2, 2, program, how, str(go), KVDIST_EXPLAIN_AFTER_S="0.5")
    job.line("worker-0", "(step 2)")
    go.touch()
    job.succeed()
    # On a busy machine worker-1 may be awaited before, when it starts.
    first = next(line for line in job.processes["worker-0"].text.splitlines() if re.search("waiting.*step 2", line))
    sentence = (
        rf"worker-0: waiting \d+\.\d s for worker-1 \(\S+\) to push {NAMES[how][0]} \(step 2\), in pushpull of 4 keys"
    )
    assert re.search(sentence, first), first


@pytest.mark.parametrize("how", NAMES)
def test_workers_that_declare_a_parameter_differently_hear_its_name(job, script, how):
    program = script(
        START.replace("Linear(4, 3)", "Linear(4, 3 + store.rank)").replace("Linear(3, 2)", "Linear(3 + store.rank, 2)")
        + """
    trainer.broadcast_parameters()
    """
    )
    pytest.importorskip("torch")
    job.cluster(2, 1, program, how)
    job.finish()
    for rank in range(2):
        text = job.processes[f"worker-{rank}"].text
        told = rf"InitMismatch: worker-0 declares {NAMES[how][1]} with shape \(\d, 4\); worker-1 with shape "
        assert re.search(told, text), text


def test_workers_that_disagree_on_a_learning_rate_hear_the_name_of_a_parameter(job, script):
    program = script(
        START
        + """
    net(torch.ones(1, 4)).sum().backward()
    trainer.broadcast_parameters()
    trainer.set_learning_rate(0.1 + store.rank)
    trainer.step()
    """
    )
    pytest.importorskip("torch")
    job.cluster(2, 1, program, "named")
    job.finish()
    text = job.transcript()
    assert "workers disagree on the learning rate or weight decay of '0.weight' in one round" in text, text


WITHOUT_SERVERS = {
    "other shapes": r"worker-0: 'weight': float32 of shape \(3, 4\); worker-1: 'weight': float32 of shape \(4, 4\)",
    "other calls": r"ranks called different operations .*\(Sum, keys 0, 1, 2: 'weight', 'bias', the vote ",
    "names on one": r"InitMismatch: .* worker-0 says: .* names \S+ of 'bias' to 'weight', .* worker-1 says: ",
}


@pytest.mark.parametrize("how", WITHOUT_SERVERS)
def test_without_servers_names_are_shown_and_compared(job, script, how):
    program = script(
        """
        import sys
        import torch
        from kvdist import Trainer, kv

        store = kv.create("collective")
        how, odd = sys.argv[1], store.rank == 1
        net = torch.nn.Linear(4, 4 if how == "other shapes" and odd else 3)
        parameters = net.parameters() if how == "names on one" and odd else net.named_parameters()
        trainer = Trainer(parameters, "sgd", {"learning_rate": 0.1}, kvstore=store)
        trainer.broadcast_parameters()
        if how == "other calls" and odd:
            store.barrier()
        net(torch.ones(1, 4)).sum().backward()
        trainer.step()
        print("stepped")
    """
    )
    job.cluster(2, 0, program, how)
    job.finish()
    for rank in range(2):
        text = job.processes[f"worker-{rank}"].text
        assert re.search(WITHOUT_SERVERS[how], text), text


def test_workers_that_would_put_a_parameter_on_servers_or_not_hear_its_name(job, script):
    program = script(
        """
        import torch
        from kvdist import Trainer, kv

        store = kv.create("hybrid")
        table = torch.nn.Embedding(9, 2, sparse=store.rank == 1)
        net = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(2, 1)})
        trainer = Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        net["top"](net["table"](torch.tensor([1, 2]))).sum().backward()
        trainer.step()
    """
    )
    pytest.importorskip("torch")
    job.cluster(2, 1, program)
    job.finish()
    for rank in range(2):
        text = job.processes[f"worker-{rank}"].text
        assert re.search(r"of \d new keys these go to the servers: 'table.weight'", text), text
