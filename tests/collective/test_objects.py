"""Objects that ranks hand each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvdist.collective as hvd
from kvdist.errors import CollectiveError
from tests.cases import each
from tests.collective.ranks import returned, run_ranks


def make(rank):
    return {
        "rank": rank,
        "nested": [(rank, None), {rank, "x"}, {"text": "ü" * rank, 7: 2.5}, b"\0\1"],
        "array": np.full((rank, 3), rank, np.int16),
        "tensors": [torch.full((2, 2), rank, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex128)],
        "scalar": torch.tensor(rank),
        "empty": [torch.empty(0), torch.empty(0, 3, dtype=torch.float64), torch.empty(2, 0, dtype=torch.bool)],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "shape": torch.Size([rank, 2]),
        "parameter": torch.nn.Parameter(torch.ones(3, 4).T),
    }


def check(result, rank):
    wanted = make(rank)
    assert result["nested"] == wanted["nested"] and result["rank"] == rank and result["shape"] == (rank, 2)
    assert result["array"].dtype == np.int16 and np.array_equal(result["array"], wanted["array"])
    for one, other in zip(result["tensors"], wanted["tensors"], strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert [(one.shape, one.dtype) for one in result["empty"]] == [(one.shape, one.dtype) for one in wanted["empty"]]
    assert result["conjugate"].tolist() == [1 - 2j]
    assert result["scalar"].item() == rank and result["scalar"].shape == ()
    assert type(result["parameter"]) is torch.Tensor and not result["parameter"].requires_grad
    assert torch.equal(result["parameter"], torch.ones(4, 3))


def test_all_get_the_object_of_the_root_and_the_root_keeps_its_own():
    def program(rank):
        mine = make(rank)
        result = hvd.broadcast_object(mine, 1, name="state")
        assert (result is mine) == (rank == 1)
        if rank != 1:
            check(result, 1)
        assert hvd.broadcast_object(root_rank=0, obj=None if rank else [1]) == [1]
        return hvd.broadcast_object(rank, root_rank=0)

    assert returned(run_ranks(3, program)) == [0, 0, 0]


def test_everybody_gets_everybodys_object():
    def program(rank):
        for number, result in enumerate(hvd.allgather_object(make(rank))):
            check(result, number)
        return hvd.allgather_object("x" * rank)

    assert returned(run_ranks(3, program)) == [["", "x", "xx"]] * 3


def test_an_object_that_cannot_be_sent_raises_on_all_ranks_and_stops_nobody():
    def program(rank):
        with pytest.raises(TypeError if rank == 0 else CollectiveError) as of_root:
            hvd.broadcast_object({"a": [0, 1, 2j]})
        with pytest.raises(TypeError if rank == 1 else CollectiveError) as of_one:
            hvd.allgather_object(len if rank == 1 else 3)
        with pytest.raises(TypeError if rank == 0 else CollectiveError) as sparse:
            hvd.broadcast_object(torch.eye(2).to_sparse())
        return str(of_root.value), str(of_one.value), str(sparse.value), hvd.allgather_object(rank)

    first, second = returned(run_ranks(2, program))
    assert first[0].startswith("obj['a'][2] is a complex, which cannot be sent")
    assert second[0] == f"rank 0 has an object that cannot be sent: {first[0]}"
    assert second[1].startswith("obj is a builtin_function_or_method")
    assert first[1] == f"rank 1 has an object that cannot be sent: {second[1]}"
    assert "torch.sparse_coo" in first[2] and second[3] == [0, 1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@each(
    "make_value, what, kind",
    [
        (lambda: torch.empty(3, device="meta"), "cannot be sent: .*on meta", TypeError),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "cannot be sent: ", TypeError),
        (lambda: "name-\udcff.png", "has characters that are not text", ValueError),
    ],
)
def test_what_cannot_be_sent_is_named_by_its_place_on_all_ranks(make_value, what, kind):
    value = make_value()

    def program(rank):
        with pytest.raises(kind if rank == 0 else CollectiveError, match=rf"obj\['files'\]\[1\] {what}"):
            hvd.broadcast_object({"files": [0, value]} if rank == 0 else None)
        with pytest.raises(kind if rank == 0 else CollectiveError, match=f"obj {what}"):
            hvd.allgather_object(value if rank == 0 else None)
        return rank

    assert returned(run_ranks(2, program)) == [0, 1]
