"""A queue of examples in one process: what is handed out, counted, saved and refused, and what SIGTERM does."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from kvdist import QueueSampler, Trainer, kv
from kvdist.errors import ConfigError
from kvdist.training.queue_sampler import order_of
from tests.cases import each

LENGTH = 53
KINDS = [None, "local", "device", "dist"]


class Numbers(Dataset):
    """The example at i is i."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index


@pytest.fixture
def trainer_on():
    """Makes trainers on stores of a kind, which are closed at the end."""
    stores = contextlib.ExitStack()

    def make(kind="local"):
        store = kind if kind is None else stores.enter_context(kv.create(kind))
        return Trainer([torch.nn.Parameter(torch.zeros(LENGTH))], "sgd", {"learning_rate": 1.0}, kvstore=store)

    with stores:
        yield make


def weight_of(trainer):
    return trainer._model.parameters[0].replicas[0]


def train(trainer, loader, steps=None):
    """Move element i by 1 for each time that example i is used; returns what was handed out."""
    weight, handed = weight_of(trainer), []
    for numbers in trainer.batches(loader):
        handed += numbers.tolist()
        weight[numbers].sum().backward()
        trainer.step(1)
        weight.grad = None
        if steps is not None and trainer.version == steps:
            break
    return handed


def loader_of(sampler, batch=4, **options):
    return DataLoader(Numbers(), batch, sampler=sampler, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_one_loop_makes_all_epochs_and_the_next_one_makes_them_again(trainer_on, kind):
    trainer, loader = trainer_on(kind), loader_of(QueueSampler(LENGTH, epochs=2, seed=3))
    handed = train(trainer, loader)
    expected = [*order_of(LENGTH, 3, 0), *order_of(LENGTH, 3, 1)]
    assert handed == expected
    assert (-weight_of(trainer)).tolist() == [2] * LENGTH
    again = train(trainer, loader)
    assert again == [*order_of(LENGTH, 3, 2), *order_of(LENGTH, 3, 3)]


def test_without_shuffling_examples_come_in_order(trainer_on):
    trainer = trainer_on()
    assert train(trainer, loader_of(QueueSampler(LENGTH, shuffle=False))) == list(range(LENGTH))


@pytest.mark.parametrize("batches", ["batch_size", "batch_sampler", "one by one"])
def test_a_loop_that_was_left_goes_on_with_what_no_step_has_used(trainer_on, batches):
    trainer, sampler = trainer_on(), QueueSampler(LENGTH)
    if batches == "batch_sampler":
        loader = DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, 4, False), num_workers=2)
    else:
        loader = loader_of(sampler, 4 if batches == "batch_size" else 1, num_workers=2)
    first = train(trainer, loader, steps=5)
    for _ in trainer.batches(loader):
        break  # no step uses it
    rest = train(trainer, loader)
    assert Counter(first + rest) == Counter(range(LENGTH))
    assert (-weight_of(trainer)).tolist() == [1] * LENGTH


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_may_be_used(trainer_on):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    trainer = trainer_on()
    loader = stateful.StatefulDataLoader(Numbers(), 4, sampler=QueueSampler(LENGTH), num_workers=2)
    assert Counter(train(trainer, loader, steps=3) + train(trainer, loader)) == Counter(range(LENGTH))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("loader_workers", [0, 2])
@pytest.mark.parametrize("is_stateful", [False, True])
def test_batches_may_change_their_size_while_the_loader_reads_ahead(trainer_on, loader_workers, is_stateful):
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader if is_stateful else DataLoader
    trainer, weight, sizes, handed = trainer_on(), None, [], []
    loader = kind(Numbers(), 4, sampler=QueueSampler(LENGTH), num_workers=loader_workers)
    for numbers in trainer.batches(loader):
        weight = weight_of(trainer)
        handed += numbers.tolist()
        sizes.append(len(numbers))
        weight.grad = None
        weight[numbers].sum().backward()
        trainer.step(samples=len(numbers))  # refused unless just these were handed out
        loader.batch_sampler.batch_size = 3 + 4 * (len(sizes) % 2)
    assert Counter(handed) == Counter(range(LENGTH)) and trainer.samples_seen == LENGTH
    assert set(sizes[:-1]) == ({4} if is_stateful else {3, 4, 7}), "torchdata's keep the first size"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_checkpoint_has_the_place_in_the_data(trainer_on, kind, loader_workers, tmp_path):
    trainer = trainer_on(kind)
    before = train(trainer, loader_of(QueueSampler(LENGTH, epochs=2), num_workers=loader_workers), steps=7)
    trainer.save_checkpoint(tmp_path, 7).result()
    trainer.close()
    trainer = trainer_on(kind)
    assert trainer.load_checkpoint(tmp_path).data["left"] == [[0, 28, 2 * LENGTH]]
    after = train(trainer, loader_of(QueueSampler(LENGTH, epochs=2), batch=5))
    assert Counter(before + after) == Counter([*range(LENGTH)] * 2)
    again = trainer_on(kind)
    again.load_checkpoint(tmp_path)
    with pytest.raises((ValueError, ConfigError), match=r"QueueSampler\(53, epochs=2, shuffle=True, seed=0\)"):
        train(again, loader_of(QueueSampler(LENGTH - 1, epochs=2)))


def test_batches_that_no_step_has_used_at_the_end_count_and_are_told_of(trainer_on, caplog):
    trainer = trainer_on()
    weight = weight_of(trainer)
    for count, numbers in enumerate(trainer.batches(loader_of(QueueSampler(LENGTH, shuffle=False))), 1):
        weight[numbers].sum().backward()
        if count % 4 == 0:
            trainer.step(1)
            weight.grad = None
    assert "5 examples were handed out and no step has used them" in caplog.text
    assert (-weight).tolist() == [1] * 48 + [0] * 5


def test_a_skipped_step_uses_its_examples(trainer_on):
    trainer, sampler = trainer_on(), QueueSampler(LENGTH)
    for numbers in trainer.batches(loader_of(sampler)):
        if 0 in numbers.tolist():
            trainer.skip_step()
        else:
            weight_of(trainer)[numbers].sum().backward()
            trainer.step(1)
            weight_of(trainer).grad = None
    assert sorted((-weight_of(trainer)).tolist()) == [0] * 4 + [1] * (LENGTH - 4)


@each(
    "options, said",
    [
        ({"length": -1}, "length is -1; it must be a whole number from 0"),
        ({"epochs": 0}, "epochs is 0; it must be a whole number from 1"),
        ({"seed": -3}, "seed is -3; it must be a whole number from 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        QueueSampler(**{"length": 5, **options})


def test_a_data_set_in_place_of_its_length_is_refused():
    with pytest.raises(TypeError, match=r"length must be a whole number, not a TensorDataset; give len\(data\)"):
        QueueSampler(TensorDataset(torch.zeros(8)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="epochs must be a whole number, not '3' of type str"):
        QueueSampler(8, epochs="3")  # type: ignore[arg-type]


def test_an_empty_data_set_ends_at_once(trainer_on):
    assert train(trainer_on(), loader_of(QueueSampler(0))) == []


def test_a_loader_that_is_iterated_by_itself_says_how_it_is_done(trainer_on):
    sampler = QueueSampler(LENGTH)
    with pytest.raises(RuntimeError, match="iterated without a Trainer: write `for batch in trainer.batches"):
        list(loader_of(sampler))
    train(trainer_on(), loader_of(sampler))
    with pytest.raises(RuntimeError, match="iterated without a Trainer: write `for batch in trainer.batches"):
        list(loader_of(sampler))


class Pairs:
    """A batch sampler whose batches nobody knows beforehand."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        yield from ([index] for index in self.sampler)


@each(
    "make",
    [
        lambda sampler: loader_of(sampler, drop_last=True),
        lambda sampler: DataLoader(Numbers(), batch_sampler=Pairs(sampler)),
        lambda sampler: loader_of(sampler, num_workers=1, in_order=False),
    ],
)
def test_loaders_whose_batches_are_not_known_are_refused(trainer_on, make):
    with pytest.raises(ValueError, match="with a QueueSampler the DataLoader must make torch's batches in order"):
        train(trainer_on(), make(QueueSampler(LENGTH)))


def test_one_sampler_comes_after_the_other(trainer_on):
    trainer, first = trainer_on(), QueueSampler(LENGTH)
    train(trainer, loader_of(first), steps=3)
    with pytest.raises(RuntimeError, match="begins before .* has ended"):
        train(trainer, loader_of(QueueSampler(LENGTH)))
    train(trainer, loader_of(first))
    assert len(train(trainer, loader_of(QueueSampler(20)))) == 20
    assert len(train(trainer, DataLoader(Numbers(), 4, sampler=SequentialSampler(range(8))))) == 8


def test_the_store_is_that_of_the_trainer(trainer_on):
    trainer = trainer_on("local")
    with pytest.raises(ValueError, match="another store than this trainer"):
        train(trainer, loader_of(QueueSampler(LENGTH, store=object())))
    other = trainer_on("local")
    other.broadcast_parameters()
    assert len(train(other, loader_of(QueueSampler(LENGTH, store=other.kvstore)))) == LENGTH


def test_loading_within_the_loop_is_refused(trainer_on, tmp_path):
    trainer, sampler = trainer_on(), QueueSampler(LENGTH)
    train(trainer, loader_of(sampler), steps=2)
    trainer.save_checkpoint(tmp_path, 2).result()
    for _ in trainer.batches(loader_of(sampler)):
        with pytest.raises(RuntimeError, match="within the loop over trainer.batches"):
            trainer.load_checkpoint(tmp_path)
        break
    trainer.load_checkpoint(tmp_path)
    assert len(train(trainer, loader_of(sampler))) == LENGTH - 8


def sent_after(trainer, sampler, batches):
    """SIGTERM comes in the loop's batch of this number; returns how many examples were used."""
    used = 0
    with pytest.raises(SystemExit) as ended:
        for count, numbers in enumerate(trainer.batches(loader_of(sampler)), 1):
            if count == batches:
                os.kill(os.getpid(), signal.SIGTERM)
            weight_of(trainer)[numbers].sum().backward()
            trainer.step(1)
            weight_of(trainer).grad = None
            used += len(numbers)
    assert ended.value.code == 0
    return used


def test_after_sigterm_the_batch_is_finished_and_the_loop_ends_the_process_well(trainer_on):
    before = signal.getsignal(signal.SIGTERM)
    trainer = trainer_on("dist")
    assert sent_after(trainer, QueueSampler(LENGTH), 3) == 12
    assert signal.getsignal(signal.SIGTERM) is before
    assert (-weight_of(trainer)).sum().item() == 12


def test_a_handler_of_the_program_is_called_too_and_an_ignored_signal_is_ignored(trainer_on):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        sent_after(trainer_on(), QueueSampler(LENGTH), 2)
        assert heard == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        trainer = trainer_on()
        for numbers in trainer.batches(loader_of(QueueSampler(LENGTH))):
            os.kill(os.getpid(), signal.SIGTERM)
            weight_of(trainer)[numbers].sum().backward()
            trainer.step(1)
            weight_of(trainer).grad = None
        assert (-weight_of(trainer)).tolist() == [1] * LENGTH
    finally:
        signal.signal(signal.SIGTERM, before)
