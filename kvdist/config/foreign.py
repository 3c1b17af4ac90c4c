"""Names of MXNet and Horovod that kvdist accepts without effect, or refuses: the only list of them. Pure.

They are variables of both, options of ``horovodrun``, and arguments of ``horovod.run``. Scripts that have them go on
working, with a warning. What would change the number of processes is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Foreign(NamedTuple):
    """Names without effect, or that are refused; why, or what to do instead. ``=`` follows options with a number, ``:``
    those with a text."""

    names: str
    why: str
    is_refused: bool = False


NOT_YET = "training while processes come and go is not possible yet"
TREE = "MXNET_KVSTORE_LOGTREE MXNET_KVSTORE_TREE_ARRAY_BOUND MXNET_KVSTORE_TREE_BACKTRACK"
FOREIGN = (
    # MXNet and ps-lite.
    Foreign("DMLC_PS_VAN_TYPE",
            "except for p3; there is one transport, and KVDIST_TRANSPORT turns shared memory off"),
    Foreign("DMLC_PS_WATER_MARK",
            "KVDIST_WINDOW_BYTES bounds what is on its way, for P3 KVDIST_PRIORITY_WINDOW_BYTES"),
    Foreign("DMLC_LOCAL", "processes of one host share memory by themselves"),
    Foreign("DMLC_USE_KUBERNETES", "DMLC_NODE_HOST is the address that a server announces"),
    Foreign("PS_HEARTBEAT_INTERVAL", "heartbeats are always on; their interval follows from KVDIST_PATIENCE_S"),
    Foreign("PS_HEARTBEAT_TIMEOUT", "KVDIST_PATIENCE_S is how long a process may be silent"),
    Foreign("PS_RESEND PS_RESEND_TIMEOUT", "a lost message is always sent again"),
    Foreign("PS_DROP_MSG", "no message is dropped on purpose"),
    Foreign("PS_VERBOSE", "a wait of more than KVDIST_EXPLAIN_AFTER_S says what it waits for"),
    Foreign("DMLC_RANK", "KVDIST_RANK asks for a rank"),
    Foreign("MXNET_KVSTORE_SERIAL_PUSH MXNET_KVSTORE_REDUCTION_NTHREADS",
            "values of the host are summed on the thread that pushes, those of GPUs there"),
    Foreign(f"{TREE} MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY", "GPUs are not summed along a tree"),
    Foreign("MXNET_KVSTORE_USETREE",
            "values of several GPUs are summed on one of them, in the order of the devices; there is nothing to set"),
    Foreign("MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE", "kvdist.profiler shows what travels"),
    Foreign("MXNET_UPDATE_AGGREGATION_SIZE MXNET_OPTIMIZER_AGGREGATION_SIZE",
            "all parameters of a step travel together"),
    # Horovod.
    Foreign("--disable-cache disable_cache", "no cache is kept between jobs"),
    Foreign("HOROVOD_FUSION_THRESHOLD HOROVOD_CYCLE_TIME --fusion-threshold-mb= --cycle-time-ms=",
            "an operation begins when it is called, so there is no cycle in which tensors are collected; a grouped one"
            " sends its tensors together"),
    Foreign("HOROVOD_CACHE_CAPACITY --cache-capacity=", "ranks agree on a tensor once, however many there are"),
    Foreign("HOROVOD_HIERARCHICAL_ALLREDUCE HOROVOD_HIERARCHICAL_ALLGATHER HOROVOD_TORUS_ALLREDUCE"
            " --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather"
            " --torus-allreduce --no-torus-allreduce", "gloo and NCCL choose how they reduce and gather"),
    Foreign("HOROVOD_AUTOTUNE --autotune --no-autotune --autotune-log-file: --autotune-warmup-samples="
            " --autotune-steps-per-sample= --autotune-bayes-opt-max-samples= --autotune-gaussian-process-noise=",
            "kvdist has nothing to tune"),
    Foreign("HOROVOD_MPI_THREADS_DISABLE HOROVOD_ADASUM_MPI_CHUNK_SIZE --mpi --jsrun --mpi-threads-disable"
            " --no-mpi-threads-disable --mpi-args: --binding-args: use_mpi mpi_args",
            "no MPI takes part: kvdist-run starts the processes, and gloo or NCCL connects them"),
    Foreign("--gloo use_gloo", "gloo connects processes on CPUs in any case, NCCL those on GPUs"),
    Foreign("HOROVOD_NUM_NCCL_STREAMS --num-nccl-streams=",
            "NCCL follows its own variables, which reach every process"),
    Foreign("HOROVOD_THREAD_AFFINITY --thread-affinity=", "let taskset or numactl start the program"),
    Foreign("HOROVOD_LOG_HIDE_TIME --log-with-timestamp --log-without-timestamp --log-hide-timestamp"
            " --no-log-hide-timestamp",
            "kvdist-run --prefix-output-with-timestamp begins each line with the time, and nothing else has it"),
    Foreign("HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_START_TIMEOUT is how long ranks look for each other"),
    Foreign("HOROVOD_CONTROLLER",
            "except for gloo; ranks agree over connections of their own, and no MPI takes part"),
    Foreign("HOROVOD_CPU_OPERATIONS", "except for gloo, which connects processes on CPUs in any case"),
    Foreign("HOROVOD_DISABLE_GROUP_FUSION", "a grouped operation is never joined with others"),
    Foreign("HOROVOD_ENABLE_ASYNC_COMPLETION", "a handle is done when its result is there"),
    Foreign("HOROVOD_ENABLE_XLA_OPS", "XLA does not compile operations"),
    Foreign("--min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit"
            " --blacklist-cooldown-range --host-discovery-script",
            f"{NOT_YET}; write -np and -H for those of the whole job", is_refused=True),
    Foreign("min_num_proc max_num_proc slots reset_limit cooldown_range host_discovery_script min_np max_np",
            f"{NOT_YET}; leave it out, and give num_proc, the number of workers for the whole job", is_refused=True),
)  # fmt: skip

FOREIGN_NAMES = {name: row for row in FOREIGN for name in re.findall("[^=: ]+", row.names)}
"""Name → its row."""
HOROVOD_VARIABLES = [name for name in FOREIGN_NAMES if name.startswith("HOROVOD_")]
MXNET_VARIABLES = [name for name in FOREIGN_NAMES if name.isupper() and name not in HOROVOD_VARIABLES]


def without_effect(names: Iterable[str]) -> list[str]:
    """A sentence about each of these names."""
    return [f"{name} has no effect: {FOREIGN_NAMES[name].why}" for name in names]
