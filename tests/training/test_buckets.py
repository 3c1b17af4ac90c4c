"""Which gradients travel together, and when a bucket starts."""

import copy
import gc
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kvdist.buckets import BUCKET_BYTES, Bucket, GradientBuckets, arrange
from tests.cases import each

torch.set_num_threads(1)


class Recorder(GradientBuckets):
    """Writes down what starts, and with which gradients; `fails` makes the next start raise."""

    def __init__(self, parameters, bucket_bytes=BUCKET_BYTES, **options):
        self.parameters, self.begun, self.started, self.fails = parameters, 0, [], None
        super().__init__([f"layer {i}" for i in range(len(parameters))], parameters, bucket_bytes, **options)

    def begin(self):
        self.begun += 1

    def start(self, bucket):
        if self.fails is not None:
            raise self.fails
        self.started.append([self._number(member) for member in bucket.members])

    def _number(self, member):
        return [None if one.grad is None else float(one.grad.flatten()[0]) for one in self.parameters[member]]


def parameter(size=1):
    return nn.Parameter(torch.ones(size))


def singles(*sizes):
    return [[parameter(size)] for size in sizes]


def backward(*terms):
    """One pass in which the gradient of each parameter is its factor."""
    sum((one * factor).sum() for one, factor in terms).backward()


class Counted(Bucket):
    """A bucket that counts how often one is looked up."""

    lookups = 0

    def __hash__(self):
        Counted.lookups += 1
        return super().__hash__()


# Layout.


@each(
    "sizes, limit, expected",
    [
        ([5], 10, [(0,)]),
        ([0], 10, [(0,)]),
        ([5, 5, 5], 10, [(1, 2), (0,)]),
        ([5, 5, 5, 5], 10, [(2, 3), (0, 1)]),
        ([1, 100, 1, 100], 10, [(3,), (1, 2), (0,)]),
        ([0, 0, 10], 10, [(2,), (0, 1)]),
        ([9, 9, 9], 1, [(2,), (1,), (0,)]),
    ],
)
def test_buckets_are_filled_from_the_last_parameter_to_the_first(sizes, limit, expected):
    buckets = arrange(sizes, limit)
    assert [bucket.members for bucket in buckets] == expected
    assert [bucket.priority for bucket in buckets] == list(range(len(buckets)))


@given(st.lists(st.integers(0, 40), min_size=1), st.integers(1, 50))
def test_every_parameter_is_in_one_bucket_and_only_the_last_bucket_may_be_small(sizes, limit):
    buckets = arrange(sizes, limit)
    assert [member for bucket in reversed(buckets) for member in bucket.members] == list(range(len(sizes)))
    filled = [sum(sizes[member] for member in bucket.members) for bucket in buckets]
    assert all(total >= limit for total in filled[:-1])
    # Without the parameter that closed it, none would have been full.
    assert all(sum(sizes[member] for member in bucket.members[1:]) < limit for bucket in buckets)


# During the backward pass.


def test_each_bucket_starts_within_the_backward_pass_as_soon_as_its_gradients_are_there():
    first, second, third = parameters = [parameter() for _ in range(3)]
    buckets = Recorder([[one] for one in parameters], bucket_bytes=8)
    seen = []
    hidden = first * 2
    hidden.register_hook(lambda _: seen.append(len(buckets.started)))  # before the first parameter has its gradient
    (hidden * second * third).sum().backward()
    assert buckets.started == [[[2.0], [2.0]], [[2.0]]]
    assert seen == [1] and buckets.begun == 1 and buckets.is_open
    buckets.complete()
    assert len(buckets.started) == 2 and not buckets.is_open


def test_a_bucket_of_several_devices_waits_for_all_of_them():
    replicas = [parameter(), parameter()]
    buckets = Recorder([replicas])
    backward((replicas[0], 3.0))
    assert buckets.started == []
    backward((replicas[1], 4.0))
    assert buckets.started == [[[3.0, 4.0]]]


def test_gradients_from_threads_start_each_bucket_once():
    from concurrent.futures import ThreadPoolExecutor

    replicas = [[parameter() for _ in range(4)] for _ in range(50)]
    buckets = Recorder(replicas, bucket_bytes=1)
    with ThreadPoolExecutor(4) as pool:
        work = [[one[device] for one in replicas] for device in range(4)]
        list(pool.map(lambda ones: backward(*((one, 2.0) for one in ones)), work))
    assert buckets.started == [[[2.0] * 4]] * 50 and buckets.begun == 1


def test_a_parameter_that_is_used_twice_has_one_gradient():
    shared = parameter()
    buckets = Recorder([[shared]])
    (shared * shared * 3).sum().backward()
    assert buckets.started == [[[6.0]]]


def test_what_got_no_gradient_starts_when_the_step_completes():
    used, unused = parameter(), parameter()
    buckets = Recorder([[used], [unused]])
    backward((used, 2.0))
    assert buckets.started == []
    buckets.complete()
    assert buckets.started == [[[2.0], [None]]] and buckets.begun == 1


def test_a_step_without_any_gradient_starts_every_bucket_in_order():
    buckets = Recorder(singles(2, 2, 2), bucket_bytes=8)
    buckets.complete()
    assert buckets.started == [[[None]]] * 3 and buckets.begun == 1


def test_each_step_has_its_own_buckets():
    one = parameter()
    buckets = Recorder([[one]])
    for step in range(1, 4):
        one.grad = None
        backward((one, float(step)))
        buckets.complete()
    assert buckets.started == [[[1.0]], [[2.0]], [[3.0]]] and buckets.begun == 3


# Several passes.


def test_passes_that_are_paused_only_accumulate():
    one = parameter()
    buckets = Recorder([[one]])
    for _ in range(2):
        with buckets.paused(), buckets.paused():
            backward((one, 1.0))
        assert buckets.started == [] and not buckets.is_open
    backward((one, 1.0))
    assert buckets.started == [[[3.0]]]


def test_a_bucket_may_wait_for_several_passes_over_each_of_its_parameters():
    first, second = parameter(), parameter()
    buckets = Recorder([[first], [second]], bucket_bytes=4, passes=2)
    for factor in (1.0, 2.0):
        backward((first, factor))
    assert buckets.started == [[[3.0]]]
    backward((second, 1.0))
    assert len(buckets.started) == 1
    backward((second, 1.0))
    assert buckets.started == [[[3.0]], [[2.0]]]
    buckets.complete()
    backward((first, 1.0), (second, 1.0))
    assert len(buckets.started) == 2  # each step has its own passes


def test_buckets_may_start_in_one_order_whichever_is_full_first():
    first, second, third = parameters = [parameter() for _ in range(3)]
    buckets = Recorder([[one] for one in parameters], bucket_bytes=4, in_order=True)
    backward((first, 1.0))
    assert buckets.started == []
    backward((third, 3.0))
    assert buckets.started == [[[3.0]]]
    backward((second, 2.0))
    assert buckets.started == [[[3.0]], [[2.0]], [[1.0]]]
    with pytest.raises(RuntimeError, match="gradient of layer 0"):
        backward((first, 1.0))
    buckets.complete()
    backward((first, 5.0))
    buckets.complete()  # what is missing holds up what is full, until the step
    assert len(buckets.started) == 6


def test_which_parameters_travel_together_may_be_given():
    first, second, third = parameters = [parameter() for _ in range(3)]
    given = [Bucket((0, 2), 0), Bucket((1,), 1)]
    buckets = Recorder([[one] for one in parameters], buckets=given)
    backward((second, 2.0), (third, 3.0))
    assert buckets.started == [[[2.0]]]
    backward((first, 1.0))
    assert buckets.started == [[[2.0]], [[1.0], [3.0]]]


@each("paused", [False, True])
def test_a_second_pass_over_a_started_bucket_raises_in_that_pass(paused):
    one, other = parameter(), parameter()
    buckets = Recorder([[one], [other]], bucket_bytes=4)
    backward((other, 1.0))
    backward((one, 1.0))  # the passes of two losses that share nothing are one step
    message = r"gradient of layer 1, which an earlier pass has sent.*no_sync\(\).*call step\(\)"
    with pytest.raises(RuntimeError, match=message):
        if paused:
            with buckets.paused():
                backward((other, 1.0))
        else:
            backward((other, 1.0))
    assert len(buckets.started) == 2


def test_an_abandoned_pass_is_completed_with_the_gradients_there_are():
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, grad):
            raise ZeroDivisionError("broken")

    early, late = parameter(), parameter()
    buckets = Recorder([[early], [late]], bucket_bytes=4)
    with pytest.raises(ZeroDivisionError):
        (Breaks.apply(early) * late).sum().backward()
    buckets.complete()
    assert buckets.started == [[[1.0]], [[None]]]


# Errors.


def test_an_error_of_start_is_raised_by_backward_and_again_by_complete():
    one = parameter()
    buckets = Recorder([[one]])
    buckets.fails = OSError("gone")
    for call in (lambda: backward((one, 1.0)), buckets.complete):
        with pytest.raises(OSError, match="gone"):
            call()
    buckets.fails = None
    one.grad = None
    backward((one, 5.0))
    assert buckets.started == [[[5.0]]]


# Hooks.


def test_hooks_end_with_their_owner_or_when_they_are_removed():
    one = parameter()
    removed, collected, alive = (Recorder([[one]]) for _ in range(3))
    removed.remove_hooks()
    removed.remove_hooks()
    lists = [removed.started, collected.started, alive.started]
    del collected
    backward((one, 1.0))
    assert [len(started) for started in lists] == [0, 0, 1]
    assert len(one._post_accumulate_grad_hooks) == 1


def test_a_copy_of_the_network_has_no_hooks_and_the_network_can_be_saved():
    net = nn.Linear(3, 2)
    buckets = Recorder([[one] for one in net.parameters()])
    copied = copy.deepcopy(net)
    stored = io.BytesIO()
    torch.save({"weights": net.state_dict(), "net": net}, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    copied.load_state_dict(loaded["weights"])
    for other in (copied, loaded["net"]):
        other(torch.ones(1, 3)).sum().backward()
    assert buckets.started == []
    net(torch.ones(1, 3)).sum().backward()
    assert len(buckets.started) == 1


def test_a_parameter_frozen_before_it_is_watched_has_nothing_to_wait_for_in_a_pass():
    frozen, one = nn.Parameter(torch.ones(1), requires_grad=False), parameter()
    buckets = Recorder([[frozen], [one]], bucket_bytes=4)
    backward((one, 1.0))
    assert buckets.started == [[[1.0]]]
    buckets.complete()
    assert buckets.started == [[[1.0]], [[None]]]


def test_nothing_is_kept_alive_by_a_hook():
    gc.collect()
    gc.disable()
    try:
        one = parameter()
        hooks = one._post_accumulate_grad_hooks
        assert not hooks
        Recorder([[one]])
        assert not one._post_accumulate_grad_hooks
    finally:
        gc.enable()


# Cost.


def test_to_arrange_looks_at_each_size_once():
    class Sizes(list):
        looks = 0

        def __getitem__(self, index):
            self.looks += 1
            return super().__getitem__(index)

    sizes = Sizes([4] * 2000)
    arrange(sizes)
    assert sizes.looks <= 2 * len(sizes)


@each("in_order", [False, True])
def test_a_step_looks_at_each_bucket_a_few_times(in_order):
    parameters = singles(*[1] * 200)
    recorder = Recorder(
        parameters, buckets=[Counted((one,), 199 - one) for one in range(199, -1, -1)], in_order=in_order
    )
    Counted.lookups = 0
    backward(*((one, 1) for (one,) in parameters))
    recorder.complete()
    assert len(recorder.started) == 200 and Counted.lookups <= 10 * 200
