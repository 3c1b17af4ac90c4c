"""The rows of docs/reference/mxnet.md: tests that show what is kept or mended, and what is there for what is not."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import kvdist
from kvdist import Trainer, kv, optimizer, profiler
from kvdist.config.environment import without_effect
from kvdist_launch.cli import main
from tests.cases import each

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "reference" / "mxnet.md"
TEST = re.compile(r"^ *def (test_\w+)", re.MULTILINE)
ROW = re.compile(r"^\| (.*?) \| (kept|mended|not offered) \| .*\|$", re.MULTILINE)
NOT_OFFERED, OFFERED = ("not offered",), ("kept", "mended")
NAME = re.compile(r"[A-Z0-9_]+")
CSR = ((0, 1, 2), (0, 1), (1.0, 1.0))


def rows(after: str, words: tuple[str, ...] = NOT_OFFERED) -> list[str]:
    text = DOCUMENT.read_text().split(f"\n## {after}\n")[1]
    return [first for first, word in ROW.findall(text.split("\n## ")[0]) if word in words]


def absent(*names: str, of: object = kvdist) -> bool:
    """Whether each name is an error that has it."""
    for name in names:
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(of, name)
    return True


@contextlib.contextmanager
def local():
    with kv.create("local") as store:
        store.init("w", np.zeros((2, 2), np.float32))
        yield store


def refused(error: type[Exception], words: str, call, *args, **kwargs) -> bool:
    with pytest.raises(error, match=words):
        call(*args, **kwargs)
    return True


def csr() -> bool:
    with local() as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about csr tensors
        array = torch.sparse_csr_tensor(*map(torch.tensor, CSR))
        return refused(TypeError, "'w': .*layout torch.sparse_csr", store.push, "w", array)


def of_the_c_api() -> bool:
    with local() as store:
        return absent("set_barrier_before_exit", of=store) and absent("MXInitPSEnv")


def unknown_numbers(*names: str) -> bool:
    given = torch.nn.Parameter(torch.ones(1))
    return all(
        refused(TypeError, f"sgd has no hyper-parameter {name}; it takes learning_rate, ", make, numbers)
        for name in names
        for numbers in [{name: 1}]
        for make in (lambda own: optimizer.create("sgd", **own), lambda own: Trainer([given], "sgd", own))
    )


def lists() -> bool:
    updater, arrays = optimizer.Updater(optimizer.create("sgd")), [np.ones(2, np.float32)] * 2
    return refused(TypeError, "call it once for each key", updater, [0, 1], arrays, arrays)


def in_parts_of_one_length() -> bool:
    """`SplitSampler` in place of `shard`: 7 examples, 3 workers."""
    parts = [list(kvdist.SplitSampler(7, 3, index, shuffle=False)) for index in range(3)]
    assert {len(part) for part in parts} == {2} and sorted(one for part in parts for one in part) == list(range(6))
    return absent("Dataset")


def samplers_of_torch() -> bool:
    loader = torch.utils.data.DataLoader(torch.arange(7), batch_size=3, drop_last=True)
    assert [len(batch) for batch in loader] == [3, 3]
    return absent("SequentialSampler", "RandomSampler", "BatchSampler", "DataLoader")


def lists_of_indices() -> bool:
    """The two lists of the row: of the examples that a function wants, and every third from each beginning."""
    n, k = 7, 3
    for indices in ([i for i in range(n) if i % 2], [j for i in range(k) for j in range(i, n, k)]):
        loader = torch.utils.data.DataLoader(torch.arange(n), batch_size=None, sampler=indices)
        assert list(map(int, loader)) == indices
    return absent("FilterSampler", "IntervalSampler")


def one_capability() -> bool:
    with local() as store:
        return store.is_capable(kv.KVStoreBase.OPTIMIZER) and kv.KVStoreBase.OPTIMIZER == "optimizer"


def states_of_an_updater() -> bool:
    """Another updater goes on with the states of one, which are arrays."""
    one, other = (optimizer.Updater(optimizer.create("sgd", learning_rate=1.0, momentum=0.5)) for _ in range(2))
    first, second = np.zeros(2, np.float32), np.zeros(2, np.float32)
    one("w", np.ones(2, np.float32), first)
    (momentum,) = one.states["w"].arrays
    assert momentum.tolist() == [-1, -1]
    other.restore("w", copy.deepcopy(one.states["w"]))
    other("w", np.zeros(2, np.float32), second)
    return second.tolist() == [-0.5, -0.5]


def sums_where_the_store_updates() -> bool:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.sum().backward()
    with kv.create("local") as store:
        trainer = Trainer([weight], "sgd", kvstore=store, update_on_kvstore=True)
        return all(
            refused(RuntimeError, "update_on_kvstore=False", call, *sizes)
            for call, *sizes in ((trainer.allreduce_grads,), (trainer.update, 1))
        )


def options_that_change_nothing() -> bool:
    return profiler.set_config(profile_all=True, continuous_dump=True, aggregate_stats=True) is None


def one_round_trip() -> bool:
    """What servers send to a worker: one message, with the values."""
    with tempfile.TemporaryDirectory() as folder, kv.create("dist") as store:
        store.init("w", np.zeros(2, np.float32))
        profiler.set_config(filename=f"{folder}/trace.json")
        profiler.start()
        store.pushpull("w", np.ones(2, np.float32))
        store.barrier()  # by then the message before it has been noted
        profiler.dump()
        told = json.loads(Path(folder, "trace.worker-0.json").read_text())["traceEvents"]
    profiler.set_config()
    return [one["name"] for one in told if one["name"] in ("Counted", "Values")] == ["Values"]


def as_long_as_the_page_says() -> bool:
    """What the page of measurements has, to one decimal."""
    (told,) = re.findall(r"\| all rows at once .*\[([0-9.]+) times as long\]\(", DOCUMENT.read_text())
    page = DOCUMENT.parents[1] / "measured" / "tables.md"
    (measured,) = re.findall(r"(\d\.\d+) times as long \(turns", page.read_text())
    return round(float(measured), 1) == float(told)


def warned_of(*names: str) -> bool:
    return all(without_effect({name: "1"})[0].startswith(f"{name} has no effect: ") for name in names)


def unknown_optimizers() -> bool:
    return all(refused(ValueError, f"unknown optimizer '{one}': known are ", optimizer.create, one) for one in LOST)


LOST = ("LBSGD", "ccSGD")
EVENTS = ("Domain", "Task", "Frame", "Event", "Counter", "Marker", "scope")
OLD_PROFILER = ("profiler_set_config", "profiler_set_state", "dump_profile")
CASES = {
    "`teststore`": lambda: refused(ValueError, "register a class of your own called TestStore", kv.create, "teststore"),
    "`MXNET_KVSTORE_USETREE=1` and the like": lambda: without_effect({"MXNET_KVSTORE_USETREE": "1"}),
    "`csr` arrays": csr,
    "`set_barrier_before_exit` of the C API": of_the_c_api,
    "`MXInitPSEnv` of the C API": of_the_c_api,
    "`KVStoreServer(kvstore).run()`": lambda: absent("KVStoreServer") and absent("KVStoreServer", of=kv),
    "`Dataset.shard(num_shards, index)`": in_parts_of_one_length,
    "`SequentialSampler`, `RandomSampler`, `BatchSampler`, `DataLoader`": samplers_of_torch,
    "`FilterSampler`, `IntervalSampler`": lists_of_indices,
    "`gluon.utils.clip_global_norm(arrays, max_norm)`": lambda: absent("clip_global_norm"),
    "`Module.fit(kvstore=…)`, `Estimator`": lambda: absent("Module", "Estimator"),
    "`Updater.sync_state_context(state, context)`": lambda: absent("sync_state_context", of=optimizer.Updater),
    "`Updater` called with lists": lists,
    "`param_idx2name`, `sym`, `param_dict`": lambda: unknown_numbers("param_idx2name", "sym", "param_dict"),
    "`begin_num_update`": lambda: unknown_numbers("begin_num_update"),
    "`aggregate_num`, `use_fused_step`": lambda: unknown_numbers("aggregate_num", "use_fused_step"),
    "LBSGD, ccSGD": unknown_optimizers,
    "`dumps()`": lambda: absent("dumps", of=profiler),
    ", ".join(f"`{name}`" for name in EVENTS): lambda: absent(*EVENTS, of=profiler),
    ", ".join(f"`{name}`" for name in OLD_PROFILER): lambda: absent(*OLD_PROFILER, of=profiler),
}
Shown = str | Callable[[], bool]
SHOWN: dict[str, tuple[Shown, ...]] = {
    # Stores
    "`local`, `local_update_cpu`, `local_allreduce_cpu`": (
        "test_a_store_within_a_process_sums_over_devices_and_replaces_or_updates",
        "test_nothing_that_was_handed_in_or_out_is_shared_with_the_store",
    ),
    "`device`, `local_allreduce_device`": (
        "test_a_store_within_a_process_sums_over_devices_and_replaces_or_updates",
        "test_keys_are_spread_over_the_gpus_by_their_bytes",
        "test_nothing_crosses_to_the_host_in_a_step_with_an_optimizer",
    ),
    "`nccl`": (
        "test_nccl_says_what_it_is_in_a_process_that_is_alone",
        "test_nccl_sums_among_the_workers_where_a_launcher_has_started_several",
    ),
    "`dist`, `dist_sync`": ("test_every_name_of_a_store_on_servers_makes_one",),
    "`dist_device_sync`, `dist_sync_device`": (
        "test_every_name_of_a_store_on_servers_makes_one",
        "test_what_crosses_is_one_sum_down_and_one_result_up",
    ),
    "`dist_async`, `dist_device_async`, `dist_async_device`": (
        "test_every_push_is_an_update_of_an_asynchronous_store_and_one_without_an_optimizer_is_refused",
    ),
    "`p3`, `p3store_dist`": (
        "test_a_store_has_priority_slices_by_its_name_or_by_the_environment",
        "test_keys_are_agreed_by_name_and_not_by_their_order",
    ),
    "`horovod`, `byteps`": (
        "test_the_names_of_stores_without_servers",
        "test_a_collective_store_sums_over_devices_and_workers_and_knows_no_tables",
        "test_what_the_store_cannot_do_is_refused_with_what_can",
    ),
    "any other name": ("test_an_unknown_name_is_an_error_that_lists_the_names",),
    "`KVStoreBase`, `@KVStoreBase.register`": (
        "test_a_store_of_ones_own_sums_and_the_workers_update",
        "test_the_mirrored_systems_way_to_register_is_the_same",
    ),
    # Methods of a store
    "`init(key, value)`": (
        "test_the_first_value_is_rank_0s_whatever_the_others_gave",
        "test_a_repeated_init_changes_nothing_and_one_of_another_shape_or_type_is_refused",
        "test_workers_that_init_another_shape_or_type_all_get_an_error_that_names_the_key",
    ),
    "`push(key, value, priority=0)`": (
        "test_the_sum_over_devices_then_workers_replaces_the_value_where_there_is_no_optimizer",
        "test_two_pushes_of_one_worker_are_two_rounds",
        "test_shapes_that_do_not_fit_are_refused_with_both_and_unknown_keys_by_name",
        "test_none_is_an_empty_contribution_that_counts",
    ),
    "`pull(key, out=None, priority=0, ignore_sparse=True)`": (
        "test_keys_are_words_or_numbers_alone_or_in_lists_and_lists_of_lists_are_devices",
        "test_what_was_handed_out_never_changes",
    ),
    "`pushpull(key, value, out=None, priority=0)`": (
        "test_pushpull_writes_in_place_or_into_out_and_then_leaves_what_was_pushed",
        one_round_trip,
    ),
    "`broadcast(key, value, out, priority=0)`": ("test_broadcast_gives_rank_0s_present_values_again_and_again",),
    "`row_sparse_pull(key, out=None, priority=0, row_ids=None)`": (
        "test_rows_that_were_not_given_are_zero_and_only_those_that_are_named_come",
    ),
    "row-sparse `init`": (
        "test_rows_that_were_not_given_are_zero_and_only_those_that_are_named_come",
        "test_tables_may_be_torchs_sparse_tensors_and_rows_may_be_pushed_to_an_array",
        "test_a_table_that_is_only_declared_has_rows_once_they_are_updated",
    ),
    "row-sparse `push`, with no rows, too": (
        "test_pushed_rows_are_summed_with_their_repetitions_over_devices_and_workers",
    ),
    "`pull` of a table with `ignore_sparse=True`": (
        "test_a_pull_of_a_table_brings_all_rows_into_an_array_and_leaves_rows_in_out_as_they_are",
    ),
    "`broadcast` of a row-sparse key": (
        "test_broadcast_gives_a_new_table_out_and_refuses_to_replace_one",
        "test_a_pull_of_a_table_brings_all_rows_into_an_array_and_leaves_rows_in_out_as_they_are",
    ),
    "`ignore_sparse=False`": (
        "test_a_pull_of_a_table_brings_all_rows_into_an_array_and_leaves_rows_in_out_as_they_are",
    ),
    "`pull` of an array with a row-sparse `out`": (
        "test_a_pull_of_an_array_into_rows_warns_once_and_leaves_them",
        "test_rows_as_the_result_of_an_array_are_refused_where_they_would_be_lost",
    ),
    "rows pushed to a key that is an array": (
        "test_tables_may_be_torchs_sparse_tensors_and_rows_may_be_pushed_to_an_array",
    ),
    "without an optimizer the sum replaces a table": ("test_without_an_optimizer_the_sum_replaces_the_whole_table",),
    "all rows at once are 64 times slower than an array": (as_long_as_the_page_says,),
    "`set_gradient_compression(params)`": (
        "test_2bit_is_exact_for_keys_that_are_cut_and_for_the_sum_over_devices",
        "test_1bit_sends_1_above_the_threshold_and_minus_1_below",
        "test_halves_are_rounded_and_topk_sends_the_largest_whole_and_both_keep_the_rest",
        "test_pulled_halves_are_rounded_once_and_the_servers_keep_float32",
        "test_a_device_store_compresses_each_device",
        "test_calls_of_all_kinds_share_one_residual",
        "test_a_threshold_is_not_rounded_to_six_decimals",
        "test_what_cannot_be_compressed_is_refused_by_name_or_travels_as_it_is",
        "test_workers_that_compress_otherwise_are_told",
    ),
    "compressed keys of other types are fatal, row-sparse ones too": (
        "test_what_cannot_be_compressed_is_refused_by_name_or_travels_as_it_is",
    ),
    "`set_optimizer(optimizer)`": (
        "test_with_an_optimizer_the_servers_update",
        "test_another_optimizer_is_refused_whoever_gives_it",
        "test_a_description_makes_an_equal_optimizer",
    ),
    "`_set_updater(fn)`": (
        "test_an_updater_gets_the_sum_and_the_stored_value_of_the_stored_kind",
        "test_no_function_of_a_worker_runs_on_servers",
    ),
    "`save_optimizer_states(fname, dump_optimizer=False)`, `load_optimizer_states(fname)`": (
        "test_states_of_an_optimizer_are_saved_and_loaded",
        "test_a_run_resumed_on_any_number_of_servers_has_the_bits_of_one_that_was_not_interrupted",
        "test_a_store_without_an_optimizer_gets_the_one_that_was_saved",
    ),
    "`rank`, `num_workers`, `type`": ("test_the_first_value_is_rank_0s_whatever_the_others_gave",),
    "`is_capable(capability)`, `KVStoreBase.OPTIMIZER`": (one_capability,),
    "`_barrier()`": ("test_a_barrier_that_is_over_names_who_is_missing_and_can_be_passed_later",),
    "`_send_command_to_servers(head, body)`": ("test_commands_run_on_every_server_and_their_errors_reach_the_caller",),
    "`get_num_dead_node(node_id, timeout)` of the C API": (
        "test_no_process_is_known_to_be_lost",
        "test_kill_9_without_a_launcher_is_named_everywhere",
    ),
    # Keys and values
    "keys are `int` or `str`, one or a list": (
        "test_keys_are_words_or_numbers_alone_or_in_lists_and_lists_of_lists_are_devices",
    ),
    "string keys need the same order of `init` on all workers": (
        "test_keys_are_agreed_by_name_and_not_by_their_order",
    ),
    "a list of arrays for one key: one per device": (
        "test_keys_are_words_or_numbers_alone_or_in_lists_and_lists_of_lists_are_devices",
    ),
    "a key that appears twice in a call is summed": (
        "test_keys_are_words_or_numbers_alone_or_in_lists_and_lists_of_lists_are_devices",
        "test_a_repeated_key_in_one_call_is_summed",
    ),
    "keys of a call are handled in ascending order": (
        "test_keys_of_a_call_are_handled_in_the_order_given_and_may_be_any_numbers",
    ),
    "float16 and its kin are summed in their own type": (
        "test_halves_are_summed_in_float32_and_rounded_once",
        "test_each_worker_rounds_the_sum_of_its_halves_before_it_travels",
        "test_stores_of_one_process_sum_halves_in_float32",
    ),
    "arrays of another dtype than the key's": (
        "test_each_array_becomes_the_keys_type_before_they_are_summed",
        "test_rows_become_the_tables_type_and_that_of_out",
    ),
    "a pushed array may become the store's, or be overwritten by a pull": (
        "test_what_was_pushed_may_be_changed_at_once",
        "test_what_was_handed_out_never_changes",
    ),
    "a push of another shape replaces the value": (
        "test_shapes_that_do_not_fit_are_refused_with_both_and_unknown_keys_by_name",
        "test_a_wrong_value_is_refused_before_anything_is_changed",
    ),
    "at most 2 GiB a key, keys below 215 330 for the hash": (
        "test_the_limits_themselves_are_allowed",
        "test_keys_of_a_call_are_handled_in_the_order_given_and_may_be_any_numbers",
    ),
    # Trainer
    "`Trainer(params, optimizer, optimizer_params, kvstore='device', compression_params=None,"
    " update_on_kvstore=None)`": (
        "test_training_is_the_same_as_with_torch",
        "test_gradients_are_compressed_whoever_updates",
        "test_one_device_is_compressed_whoever_updates",
    ),
    "`params`: a dict (sorted by name) or a list": (
        "test_a_dict_is_taken_in_the_order_of_its_names",
        "test_groups_have_multipliers_and_parameters_of_several_layers_are_one_key",
        "test_replicas_on_several_devices_train_as_one_network_on_the_whole_batch",
    ),
    "shared parameters": (
        "test_groups_have_multipliers_and_parameters_of_several_layers_are_one_key",
        "test_a_parameter_of_two_layers_has_one_key_and_the_sum_of_its_gradients",
    ),
    "deferred shapes": ("test_lazy_modules_need_one_forward_pass",),
    "where the weights are updated": (
        "test_who_updates_the_weights_within_a_process",
        "test_who_updates_the_weights_on_servers",
        "test_a_store_that_was_made_before_updates_and_several_devices_need_one",
        "test_where_a_gradient_is_sparse_the_devices_update_unless_the_store_is_wanted",
        "test_an_asynchronous_store_always_updates",
        "test_an_asynchronous_store_cannot_give_back_sums",
        "test_a_store_that_cannot_update_cannot_be_told_to",
        "test_with_sparse_gradients_servers_cannot_be_told_to_leave_the_update_to_workers_or_to_clip",
    ),
    "`step(batch_size, ignore_stale_grad=False)`": (
        "test_step_averages_over_workers_and_step_with_a_size_sums_what_each_divides",
    ),
    "`ignore_stale_grad`": ("test_an_old_gradient_is_an_error_before_anything_is_sent_or_is_left_out",),
    "`allreduce_grads()`, `update(batch_size, ignore_stale_grad=False)`": (
        "test_sums_can_be_changed_between_allreduce_grads_and_update",
        sums_where_the_store_updates,
    ),
    "`learning_rate`, `optimizer`": ("test_the_learning_rate_with_a_schedule_is_that_of_the_last_step",),
    "`set_learning_rate(lr)`": ("test_a_learning_rate_set_in_mid_run_counts_from_the_next_step",),
    "`Parameter.lr_mult`, `Parameter.wd_mult`": (
        "test_groups_have_multipliers_and_parameters_of_several_layers_are_one_key",
    ),
    "`save_states(fname)`, `load_states(fname)`": (
        "test_states_are_saved_and_loaded_whoever_updates",
        "test_a_checkpoint_brings_back_weights_and_states_to_the_bit",
    ),
    "loading parameters drops the store, or raises on `dist`": (
        "test_weights_changed_by_hand_are_an_error_until_they_are_broadcast",
    ),
    "AMP: the loss scaler of the trainer": ("test_a_step_that_the_scaler_skips_on_one_worker_stops_nobody",),
    "a parameter without a gradient on one worker stops all": (
        "test_a_parameter_without_a_gradient_on_one_worker_gets_the_others_update",
    ),
    "`split_data`, `split_and_load`, `SplitSampler`": (
        "test_a_batch_is_split_over_devices_as_gluon_does",
        "test_the_parts_of_a_data_set_are_contiguous_and_of_one_length",
        "test_padded_parts_are_equal_and_lose_no_example",
    ),
    # Horovod's scripts
    "`init()`, `shutdown()`, `is_initialized()`": (
        "test_a_wrong_call_is_refused_with_what_to_do",
        "test_a_job_without_servers_is_refused_with_the_line_to_type",
    ),
    "`rank()`, `size()`, `local_rank()`, `local_size()`, `cross_rank()`, `cross_size()`": (
        "test_every_rank_has_what_is_computed_by_hand_or_by_one_process",
        "test_a_wrong_call_is_refused_with_what_to_do",
    ),
    "`DistributedTrainer(params, optimizer, optimizer_params=None, compression=Compression.none,"
    " gradient_predivide_factor=1.0, prefix=None, num_groups=0)`": (
        "test_horovods_scripts_end_with_equal_weights_on_ranks_that_begin_differently",
        "test_every_rank_has_what_is_computed_by_hand_or_by_one_process",
        "test_a_wrong_call_is_refused_with_what_to_do",
    ),
    "`DistributedOptimizer(optimizer, gradient_predivide_factor=1.0, num_groups=0)`": (
        "test_horovods_scripts_end_with_equal_weights_on_ranks_that_begin_differently",
        "test_every_rank_has_what_is_computed_by_hand_or_by_one_process",
    ),
    "`broadcast_parameters(params, root_rank=0, prefix=None)`": (
        "test_every_rank_has_what_is_computed_by_hand_or_by_one_process",
        "test_a_wrong_call_is_refused_with_what_to_do",
    ),
    "`allreduce`, `allreduce_`, `grouped_allreduce`, `grouped_allreduce_`": (
        "test_every_rank_has_what_is_computed_by_hand_or_by_one_process",
    ),
    "`allgather`, `allgather_object`, `broadcast`, `broadcast_`, `broadcast_object`": (
        "test_every_rank_has_what_is_computed_by_hand_or_by_one_process",
    ),
    "`Compression.none`, `Compression.fp16`": ("test_every_rank_has_what_is_computed_by_hand_or_by_one_process",),
    # Optimizers and schedules
    "`Optimizer(rescale_grad, wd, clip_gradient, learning_rate, …)`": (
        "test_defaults_are_those_of_the_mirrored_system",
        "test_a_frozen_hyper_parameter_cannot_change_and_the_error_says_what_can",
    ),
    "`opt.create(name, **kw)`": ("test_an_unknown_name_lists_the_known_ones",),
    "`@opt.register`": (
        "test_a_registered_class_is_created_by_name_and_by_description",
        "test_an_optimizer_that_only_workers_know_is_refused_with_advice",
    ),
    "`Updater`, `get_updater(optimizer)`": ("test_an_updater_applies_an_optimizer_to_arrays",),
    "`create_state(index, weight)` of an optimizer of one's own": (
        "test_the_earlier_weight_of_dcasgd_starts_as_the_weight",
        "test_each_python_example_runs_alone_in_the_embedded_cluster",
    ),
    "`Updater.get_states`, `Updater.set_states`": (states_of_an_updater,),
    "`multi_precision`": ("test_small_steps_of_halves_are_lost_unless_there_is_a_master",),
    "`lazy_update`": (
        "test_rows_without_a_gradient_go_on_unless_the_update_is_lazy",
        "test_with_lazy_update_only_pushed_rows_are_touched_whether_given_or_made_when_touched",
        "test_lazy_update_is_off_unless_asked_for_and_part_of_the_rule",
    ),
    "`set_learning_rate` with a schedule": ("test_with_a_schedule_nobody_else_sets_the_rate",),
    "SGD, Adam, AdamW, AdaBelief, Adamax, RMSProp, AdaDelta, AdaGrad, Ftrl, FTML, Signum, DCASGD, LAMB, LANS": (
        "test_a_trainer_on_servers_makes_the_steps_of_the_equations",
        "test_a_trainer_within_a_process_makes_the_steps_of_the_equations",
        "test_defaults_are_those_of_the_mirrored_system",
    ),
    "NAG": (
        "test_fifty_steps_at_one_learning_rate_equal_torch",
        "test_another_equation_gives_other_numbers_and_a_warning",
    ),
    "SGLD": ("test_the_noise_of_sgld_has_the_variance_of_its_rate_and_is_that_of_any_number_of_servers",),
    "Nadam": (
        "test_each_parameter_has_its_own_momentum_schedule_of_nadam",
        "test_nadam_keeps_its_schedule_for_each_slice_and_a_join_keeps_it_too",
    ),
    "LARS": (
        "test_lars_lamb_and_lans_measure_whole_parameters_however_many_servers_there_are",
        "test_lars_leaves_parameters_of_one_dimension_at_the_plain_rate",
    ),
    "GroupAdaGrad": (
        "test_a_trainer_on_servers_makes_the_steps_of_the_equations",
        "test_the_rows_of_an_embedding_have_a_history_each",
    ),
    "Test": ("test_a_trainer_on_servers_makes_the_steps_of_the_equations",),
    "`FactorScheduler`, `MultiFactorScheduler`, `PolyScheduler`, `CosineScheduler`": (
        "test_the_first_rates_are_those_of_the_mirrored_system",
        "test_a_rate_depends_on_the_count_alone",
        "test_a_schedule_is_followed_on_servers_and_on_workers",
    ),
    "a schedule of one's own (`LRScheduler`)": (
        "test_a_schedule_of_ones_own_is_refused_because_servers_would_not_know_it",
        "test_a_learning_rate_set_in_mid_run_counts_from_the_next_step",
        "test_schedulers_of_torch_make_the_same_training",
    ),
    # Profiler
    "`mx.profiler.set_config(filename, …)`": (
        "test_worker_and_server_write_a_file_each",
        options_that_change_nothing,
    ),
    "`set_state('run')`, `set_state('stop')`, `pause`, `resume`, `dump(finished=True)`": (
        "test_a_state_is_run_or_stop",
        "test_nothing_is_noted_while_paused_and_a_new_trace_begins_anew",
    ),
    "`profile_process='server'`": (
        "test_two_workers_and_two_servers_write_a_valid_trace_each",
        "test_no_command_of_a_worker_waits_for_a_file",
        "test_servers_need_a_store_to_be_told",
    ),
    "`dump_period`": ("test_the_trace_of_a_worker_that_is_ended_by_a_signal_is_valid",),
    # Launcher
    "`-n`, `-s`, `-H`, `--sync-dst-dir`, `--launcher local`, `ssh`, `mpi`": (
        "test_a_launched_job_ends_well",
        "test_the_command_of_the_tutorial_copies_starts_and_ends_a_job_on_two_machines",
        "test_mpirun_starts_a_cluster_and_leaves_nothing_in_the_home_folder",
    ),
    "`--env NAME:VALUE`, `--env-server`, `--env-worker`": (
        "test_variables_go_to_the_processes_that_they_are_for_and_the_roles_own_win",
        "test_the_first_separator_after_the_name_decides",
    ),
    # Environment variables
    "`DMLC_ROLE`, `DMLC_NUM_WORKER`, `DMLC_NUM_SERVER`, `DMLC_PS_ROOT_URI`, `DMLC_PS_ROOT_PORT`": (
        "test_a_cluster_is_described_by_mxnets_names_or_their_twins",
    ),
    "`DMLC_NODE_HOST`, `DMLC_INTERFACE`": (
        "test_an_interface_stands_for_its_address",
        "test_a_name_is_listened_at_by_every_address_that_others_may_dial",
    ),
    "`MXNET_KVSTORE_BIGARRAY_BOUND`": (
        "test_a_small_bound_cuts_small_keys_and_changes_no_value",
        "test_how_keys_are_cut_is_the_schedulers_word",
    ),
    "`MXNET_UPDATE_ON_KVSTORE`": (
        "test_who_updates_the_weights_on_servers",
        "test_the_environment_says_who_updates_for_those_who_do_not",
    ),
    "`MXNET_PROFILER_AUTOSTART`": ("test_workers_and_servers_trace_themselves_where_a_variable_says_so",),
    "`DMLC_PS_VAN_TYPE`": (
        "test_a_store_has_priority_slices_by_its_name_or_by_the_environment",
        "test_the_first_worker_names_variables_that_change_nothing",
        "test_stores_of_different_types_are_refused",
    ),
    "`PS_HEARTBEAT_INTERVAL`, `PS_HEARTBEAT_TIMEOUT`": (
        "test_a_process_that_stands_still_is_noticed",
        lambda: warned_of("PS_HEARTBEAT_INTERVAL", "PS_HEARTBEAT_TIMEOUT"),
    ),
    "`PS_RESEND`, `PS_RESEND_TIMEOUT`": (
        "test_every_request_is_answered_and_every_weight_is_exact",
        lambda: warned_of("PS_RESEND", "PS_RESEND_TIMEOUT"),
    ),
    "`MXNET_KVSTORE_SLICE_THRESHOLD`": (
        "test_the_size_of_priority_slices_is_read_in_elements_or_in_bytes_and_survives_a_round_trip",
        "test_a_store_without_priority_slices_is_cut_as_ever",
        "test_how_keys_are_cut_is_the_schedulers_word",
    ),
}
"""Rows that are kept or mended: names of tests, wherever they stand, and what no other test shows."""
PRINTS = "--launcher none prints the commands to start on each host"
LAUNCHER = {
    "`--launcher sge`, `yarn`": [(["--launcher", "sge"], PRINTS), (["--launcher", "yarn"], PRINTS)],
    "`--p3`": [(["--p3"], "unknown option --p3; -x DMLC_PS_VAN_TYPE=p3, or kv.create('p3')")],
    "`--env NAME`": [(["--env", "LR"], "'LR' does not set a variable; write NAME=VALUE"), (["--env", "LR"], "-x NAME")],
}
SILENT = {
    *(
        "DMLC_TASK_ID",
        "DMLC_JOB_CLUSTER",
        "DMLC_NUM_ATTEMPT",
        "DMLC_SUBMIT_CLUSTER",
        "DMLC_WORKER_ID",
        "DMLC_SERVER_ID",
    ),
    *("DMLC_TRACKER_URI", "DMLC_TRACKER_PORT", "DMLC_WORKER_CORES", "DMLC_WORKER_MEMORY_MB", "DMLC_SERVER_CORES"),
    *("DMLC_SERVER_MEMORY_MB", "DMLC_JOB_ARCHIVES", "DMLC_HDFS_OPTS"),
    *("MXNET_CPU_WORKER_NTHREADS", "MXNET_CPU_PRIORITY_NTHREADS", "MXNET_ENABLE_GPU_P2P", "MXNET_PROFILER_MODE"),
    *("PORT", "DMLC_USE_IBVERBS", "DMLC_LOG_STACK_TRACE_DEPTH"),
}
"""Variables of launchers, those that MXNet itself reads beside its stores, and three more: nothing is said of them."""


NEW_METHODS = re.compile(r"^\| \| new \| (.*) \|$", re.MULTILINE)
OTHER_WORDS = (("adagrad", "eps", "epsilon"), ("groupadagrad", "eps", "epsilon"))
OTHER_WORDS += (("rmsprop", "gamma1", "rho"), ("rmsprop", "gamma2", "momentum"))


def test_every_row_has_a_case():
    sections = ("Stores", "Methods of a store", "Trainer", "Optimizers and schedules", "Profiler")
    assert [row for section in sections for row in rows(section)] == list(CASES)
    assert rows("Launcher") == list(LAUNCHER)
    after = ("Horovod's scripts", *sections[3:], "Launcher", "Environment variables")
    offered = (*sections[:2], "Keys and values", "Trainer", *after)
    assert [row for section in offered for row in rows(section, OFFERED)] == list(SHOWN)
    everything = DOCUMENT.read_text().count("| not offered |")
    assert everything == len(CASES) + len(LAUNCHER) + len(rows("Environment variables"))
    assert len(ROW.findall(DOCUMENT.read_text())) == everything + len(SHOWN)


def test_what_is_kept_or_mended_is_shown_by_tests_that_there_are():
    there = {name for file in TESTS.rglob("test_*.py") for name in TEST.findall(file.read_text())}
    named = {one for shown in SHOWN.values() for one in shown if isinstance(one, str)}
    assert all(SHOWN.values()) and not named - there, sorted(named - there)


@each("row, show", [(row, one) for row, shown in SHOWN.items() for one in shown if callable(one)])
def test_what_is_kept_or_mended_and_shown_by_no_other_test(row, show):
    assert show()


@each("row", CASES)
def test_what_is_not_offered_is_refused_by_name_or_done_as_the_row_says(row):
    assert CASES[row]()


@each("row, words, message", [(row, *case) for row, cases in LAUNCHER.items() for case in cases])
def test_options_that_are_not_offered_are_refused_by_name(capfd, row, words, message):
    with contextlib.suppress(SystemExit):
        assert main(["-n1", *words, "true"]) == 2
    assert message in capfd.readouterr().err


def test_variables_that_are_not_offered_are_warned_of():
    listed = [name for row in rows("Environment variables") for name in NAME.findall(row)]
    warned = [name for name in listed if without_effect({name: "1"})]
    assert set(listed) - set(warned) == SILENT and len(warned) > 10
    for name in warned:
        (sentence,) = without_effect({name: "1"})
        assert sentence.startswith(f"{name} has no effect: ")


def test_the_new_methods_are_there():
    (row,) = NEW_METHODS.findall(DOCUMENT.read_text())
    names = re.findall(r"`(\w+)`", row)
    assert len(names) > 10 and all(hasattr(kv.KVStore, name) for name in names)


@each("name, word, ours", OTHER_WORDS)
def test_words_of_1_9_are_refused_with_ours(name, word, ours):
    with pytest.raises(TypeError, match=rf"{name} has no hyper-parameter {word} \(here it is called {ours}\)"):
        optimizer.create(name, **{word: 0.5})


def test_the_rate_that_adadelta_has_only_here_is_1():
    assert optimizer.create("adadelta").learning_rate == 1


def test_keys_of_a_call_are_handled_in_the_order_given_and_may_be_any_numbers():
    keys, seen = [5, 215_330, 2**40, 1], []
    with kv.create("local") as store:
        store.init(keys, [np.zeros(1, np.float32)] * 4)
        store.set_updater(lambda key, received, stored: seen.append(key))
        store.push(keys, [np.ones(1, np.float32)] * 4)
    assert seen == keys


CUT = """
import numpy as np
from kvdist import kv

with kv.create("dist") as one, kv.create("p3") as other:
    for store in (one, other):
        store.init("w", np.zeros(1001, np.float32))
        print(store.type, len(store._backend.keys["w"].slices), flush=True)
"""


def test_how_keys_are_cut_is_the_schedulers_word(capfd, monkeypatch):
    """Keys of 500 elements lie on both servers, and priority slices have 100 elements; the worker says otherwise."""
    monkeypatch.setenv("MXNET_KVSTORE_BIGARRAY_BOUND", "500")
    monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", "100")
    others = [f"--env-worker=MXNET_KVSTORE_{name}" for name in ("BIGARRAY_BOUND=5000", "SLICE_THRESHOLD=7")]
    assert main(["-n1", "-s2", *others, sys.executable, "-c", CUT]) == 0
    assert re.findall(r"\w+ \d+$", capfd.readouterr().out, re.MULTILINE) == ["dist 2", "p3 11"]
