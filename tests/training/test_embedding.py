"""`Embedding`: what it looks up, what it pushes, and what of the next batch is under way meanwhile."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import kvdist
from kvdist import InitMismatch, kv

ROWS, DIM = 20, 3


@pytest.fixture(params=["local", "dist"])
def store(request):
    with kv.create(request.param) as made:
        yield made


def layer(store, **options):
    return kvdist.Embedding(ROWS, DIM, store, **{"initializer": "constant(1)", **options})


def rows(store, *ids, key="embedding"):
    return store.row_sparse_pull(key, row_ids=list(ids)).values[:, 0].tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_layer_trains_as_the_one_of_torch_does(store, dtype):
    store.set_optimizer("sgd", learning_rate=0.5)
    ours = layer(store, initializer="normal(1,seed=4)", dtype=dtype)
    weight = torch.from_numpy(store.row_sparse_pull("embedding", row_ids=range(ROWS)).values.copy())
    theirs = nn.Embedding(ROWS, DIM, _weight=weight)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        ids = torch.randint(ROWS, (2, 4), generator=generator)
        outputs = []
        for embedding in (ours, theirs):
            outputs.append(embedding(ids))
            outputs[-1].square().sum().backward()
        ours.step()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(*outputs)
    values = torch.from_numpy(store.row_sparse_pull("embedding", row_ids=range(ROWS)).values)
    torch.testing.assert_close(values, theirs.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_gradients_of_ids_that_are_named_often_are_summed_in_their_order(store, dtype):
    store.set_optimizer("sgd", learning_rate=1)
    embedding = layer(store, dtype=dtype)
    ids = torch.tensor([[7, 2, 7], [2, 7, 19]])
    grad = torch.arange(ids.numel() * DIM).reshape(*ids.shape, DIM).to(dtype)
    embedding(ids).backward(grad)
    ((_, looked_up),) = embedding._used
    expected = torch.zeros(ROWS, DIM, dtype=dtype).index_add_(0, ids.reshape(-1), grad.reshape(-1, DIM))
    assert torch.equal(looked_up.grad, expected[[2, 7, 19]])


def test_gradients_of_several_passes_are_summed(store):
    store.set_optimizer("sgd", learning_rate=1)
    embedding = layer(store)
    for ids in ([1, 2], [2, 3]):
        embedding(torch.tensor(ids)).sum().backward()
    embedding.step()
    assert rows(store, 1, 2, 3, 4) == [0, -1, 0, 1]


def test_a_pass_without_gradients_pushes_nothing_and_a_step_without_a_pass_counts(store):
    store.set_optimizer("sgd", learning_rate=1)
    embedding = layer(store)
    with torch.no_grad():
        embedding(torch.tensor([1]))
    embedding.eval()
    assert not embedding(torch.tensor([1])).requires_grad
    embedding.step()
    embedding.train()
    embedding(torch.zeros(0, dtype=torch.int64)).sum().backward()
    embedding.step()
    assert rows(store, 1) == [1]


def test_a_number_of_examples_divides_the_gradients(store):
    store.set_optimizer("sgd", learning_rate=1)
    embedding = layer(store)
    embedding(torch.tensor([[7]])).sum().backward()
    embedding.step(4)
    assert rows(store, 7) == [0.75]


def test_rows_that_were_named_beforehand_are_those_after_the_step(store):
    store.set_optimizer("sgd", learning_rate=1)
    embedding = layer(store)
    batches = [torch.tensor([1, 2]), torch.tensor([2, 3]), torch.tensor([3, 4])]
    seen = []
    embedding.prefetch(batches[0])
    for ids, following in zip(batches, [*batches[1:], None], strict=True):
        output = embedding(ids)
        seen.append(output[:, 0].tolist())
        output.sum().backward()
        if following is not None:
            embedding.prefetch(following)
        embedding.step()
    assert seen == [[1, 1], [0, 1], [0, 1]]


def test_ids_that_were_named_beforehand_may_be_written_over(store):
    store.set_optimizer("sgd", learning_rate=1)
    embedding = layer(store)
    store.push("embedding", kvdist.RowSparse([3], torch.ones(1, DIM), (ROWS, DIM)))
    ids = torch.tensor([1, 2])
    embedding.prefetch(ids)
    ids.copy_(torch.tensor([2, 3]))
    assert embedding(ids)[:, 0].tolist() == [1, 0]


def test_ids_that_were_named_without_gradients_may_be_trained_on(store):
    store.set_optimizer("sgd", learning_rate=1)
    embedding, ids = layer(store), torch.tensor([1, 2, 2])
    with torch.inference_mode():
        embedding.prefetch(ids)
    embedding(ids).sum().backward()
    embedding.step()
    assert rows(store, 1, 2) == [0, -1]


def test_rows_that_were_named_before_a_step_without_a_pass_are_those_after_it(store):
    store.set_optimizer("sgd", learning_rate=1)
    embedding, twin = layer(store), layer(store)
    embedding.prefetch(torch.tensor([1, 2]))
    twin(torch.tensor([1])).sum().backward()
    twin.step()  # as another worker would in the same round
    embedding.step()
    assert embedding(torch.tensor([1, 2]))[:, 0].tolist() == [0, 1]


def test_a_copy_of_a_network_looks_up_the_same_rows_and_pushes_only_its_own_gradients(store):
    store.set_optimizer("sgd", learning_rate=1)
    network = nn.Sequential(layer(store, padding_idx=0), nn.Linear(DIM, 1))
    network(torch.tensor([1])).sum().backward()
    network[0].prefetch(torch.tensor([1]))
    twin = copy.deepcopy(network)
    assert twin[1].weight is not network[1].weight and twin[0].padding_idx == 0
    twin[0].step()
    assert rows(store, 1) == [1]
    twin[0](torch.tensor([2])).sum().backward()
    twin[0].step()
    assert rows(store, 2) == [0]


def test_a_layer_is_not_pickled(store):
    with pytest.raises(TypeError, match="rows of the Embedding 'embedding' live on a store.*save_checkpoint"):
        pickle.dumps(layer(store))


def test_other_rows_than_were_named_are_pulled(store):
    embedding = layer(store)
    embedding.prefetch(torch.tensor([1, 2]))
    assert embedding(torch.tensor([[5, 5]])).shape == (1, 2, DIM)


def test_padding_reads_as_zeros_and_is_never_changed(store):
    store.set_optimizer("sgd", learning_rate=1)
    embedding = layer(store, padding_idx=0)
    output = embedding(torch.tensor([0, 3]))
    assert output[:, 0].tolist() == [0, 1]
    output.sum().backward()
    embedding.step()
    assert rows(store, 0, 3) == [1, 0]


def test_layers_may_share_a_table_and_a_store_may_have_several(store):
    store.set_optimizer("sgd", learning_rate=1)
    first, twin, other = layer(store), layer(store), layer(store, key="other")
    first(torch.tensor([1])).sum().backward()
    first.step()
    assert twin(torch.tensor([1]))[0, 0] == 0 and other(torch.tensor([1]))[0, 0] == 1
    with pytest.raises(InitMismatch, match="key 'other'"):
        kvdist.Embedding(ROWS + 1, DIM, store, "other")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", torch.bfloat16])
def test_rows_are_of_the_type_asked_for(store, dtype):
    store.set_optimizer("sgd", learning_rate=1)
    embedding = layer(store, dtype=dtype)
    output = embedding(torch.tensor([1, 1]))
    assert output.dtype is (dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))
    output.sum().backward()
    embedding.step()
    assert embedding(torch.tensor([1]))[0].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (torch.tensor([1.5]), TypeError, "not a tensor of torch.float32"),
        (torch.tensor([True]), TypeError, "not a tensor of torch.bool"),
        ([1, 2], TypeError, "not list"),
        (torch.tensor([20]), ValueError, "rows 0 to 19, and row 20 was asked for"),
        (torch.tensor([-1]), ValueError, "row -1 was asked for"),
    ],
)
def test_wrong_ids_are_refused(store, ids, error, words):
    with pytest.raises(error, match=words):
        layer(store)(ids)


def test_wrong_layers_are_refused(store):
    with pytest.raises(ValueError, match="nothing to look up"):
        kvdist.Embedding(0, 3, store)
    with pytest.raises(ValueError, match="padding_idx is 20"):
        layer(store, padding_idx=20)
    with pytest.raises(ValueError, match="an initialiser is written .*, not .xavier"):
        layer(store, initializer="xavier")
    with pytest.raises(TypeError, match="cannot be int32"):
        layer(store, dtype="int32")
    with pytest.raises(TypeError, match="store must be a kvdist store or the name of one, not int"):
        kvdist.Embedding(2, 2, 5)
    with pytest.raises(ValueError, match="'embedding' has no optimizer, so gradients would replace its rows"):
        layer(store).step()
    store.set_optimizer("sgd")
    with pytest.raises(ValueError, match="batch_size is 0"):
        layer(store).step(0)


def test_a_network_shows_its_table():
    with kv.create("local") as store:
        assert "20, 3, key='embedding'" in repr(nn.Sequential(layer(store)))
