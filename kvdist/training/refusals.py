"""What a trainer is asked for at the wrong time, and the sentence that says so."""

from __future__ import annotations


def refuse_size(batch_size: float) -> None:
    """A size is given where gradients have left already."""
    raise ValueError(
        f"step({batch_size}) with overlap=True: gradients have left during backward(), when nobody had said by"
        " what to divide them. Make the loss a mean over its examples and call step() without a size, or make"
        " the trainer with overlap=False"
    )


def refuse_sent(method: str, first: str) -> None:
    """Gradients of a backward pass are on their way."""
    raise RuntimeError(
        f"{method}() while gradients of a backward pass are under way (overlap=True): call {first} before it,"
        " or put the pass into `with trainer.no_sync():` if its gradients are not to be used"
    )


def refuse_updated_there(method: str) -> None:
    """The store updates the weights, so there is nothing to do here."""
    raise RuntimeError(
        f"{method}() cannot be used while the store updates the weights: gradients never come back. Call"
        " step(), or make the trainer with update_on_kvstore=False"
    )
