"""``--emit sbatch`` and ``--launcher slurm``: a batch script with three job steps in one allocation.

Scheduler, servers and workers are a step each, so Slurm's number of a task is the rank, and its number within the
node the local rank. What the tasks run reaches them through srun's standard input: nothing is in an argument list,
and no folder needs to be shared but those of the user's own program.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvdist.nodes import Role
from kvdist_launch.emit.roles import PLACES, RoleSpec
from kvdist_launch.emit.shell import exports, heredoc

SLURM_HEAD = """\
#!/bin/bash
#SBATCH --job-name=kvdist
#SBATCH --ntasks={tasks}
# Add what your cluster asks for, such as:
##SBATCH --partition=gpu --time=1:00:00 --gpus-per-task=1 --cpus-per-task=4

# The scheduler runs on the first node. One node alone can use its loopback address.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahosts "$first" | awk 'NR == 1 {{ print $1 }}')
case $address in
127.* | ::1 | "") [ "$SLURM_JOB_NUM_NODES" = 1 ] || address=$(hostname -I | awk '{{ print $1 }}') ;;
esac
port=$((20000 + SLURM_JOB_ID % 10000))
secret={secret}

# Starts one step; its tasks read the script on standard input, after a line that is known only here.
step() {{
  exec srun --overlap --kill-on-bad-exit=1 --label "$@" /bin/sh -s \\
    < <(printf 'address=%s port=%s secret=%s\\n' "$address" "$port" "$secret" && cat)
}}
"""

MAKE_SECRET = "$(head -c 32 /dev/urandom | base64 | tr -d '\\n')"

TAIL = """\

# The workers decide how the job ends. The others then end by themselves, or if workers never joined them, are ended.
trap 'kill "$scheduler" "$servers" "$workers" 2>/dev/null' INT TERM
wait "$workers"; code=$?
( sleep {grace}; kill "$scheduler" "$servers" 2>/dev/null ) &
guard=$!
wait "$servers" "$scheduler"
kill "$guard" 2>/dev/null
exit "$code"
"""
GRACE_S = 10

USE_SECRET = """\
file=$(umask 077 && mktemp "${TMPDIR:-/tmp}/kvdist.XXXXXXXX") || exit
printf %s "$secret" > "$file"
exec 9< "$file" && rm -f "$file" || exit
export KVDIST_SECRET_FILE="/proc/$$/fd/9"
unset secret"""
"""The file has no name any more when the program starts, so that not even a killed one leaves it behind."""

SET_PLACES = """\
set -- $(echo "$SLURM_STEP_TASKS_PER_NODE" | tr , '\\n' | tr '(x)' '   ' | awk -v node="$SLURM_NODEID" \\
  -v local="$SLURM_LOCALID" '{
    for (i = 0; i < ($2 ? $2 : 1); i++) {
      if (seen == node) size = $1
      if ($1 > local) { across++; if (seen < node) rank++ }
      seen++
    }
  } END { print size, rank + 0, across }')
export KVDIST_LOCAL_RANK="$SLURM_LOCALID" KVDIST_LOCAL_SIZE="$1" KVDIST_CROSS_RANK="$2" KVDIST_CROSS_SIZE="$3\""""
"""Slurm writes 2(x3),1 where three nodes have two tasks each and a fourth has one."""

OF_A_TASK = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "KVDIST_RANK", *PLACES, "KVDIST_SECRET_FILE")
OPTIONS = {
    Role.SCHEDULER: '--nodes=1 --nodelist="$first" --ntasks=1',
    Role.SERVER: "--distribution=cyclic --ntasks={count}",
    Role.WORKER: "--distribution=cyclic --ntasks={count}",
}
VARIABLES = {Role.SCHEDULER: "scheduler", Role.SERVER: "servers", Role.WORKER: "workers"}


def sbatch(roles: Sequence[RoleSpec], word: str, is_secret: bool) -> str:
    """The batch script.

    Args:
        word: a line that does not occur in any value.
        is_secret: whether the processes get a common secret to encrypt with.
    """
    text = SLURM_HEAD.format(tasks=sum(spec.count for spec in roles), secret=MAKE_SECRET if is_secret else "")
    for spec in roles:
        options = OPTIONS[spec.role].format(count=spec.count)
        lines = [
            f"step {options} <<'{word}' &",
            *heredoc(_task_script(spec, is_secret), word),
            f"{VARIABLES[spec.role]}=$!",
        ]
        text += "\n" + "\n".join(lines) + "\n"
    return text + TAIL.format(grace=GRACE_S)


def _task_script(spec: RoleSpec, is_secret: bool) -> list[str]:
    """What each task runs. The braces make the shell read all of it before anything else reads standard input."""
    lines = ["{", *exports(spec.environment, OF_A_TASK if is_secret else OF_A_TASK[:-1])]
    lines += ['export DMLC_PS_ROOT_URI="$address" DMLC_PS_ROOT_PORT="$port" KVDIST_JOB="slurm-$SLURM_JOB_ID"']
    lines += ['export KVDIST_RANK="$SLURM_PROCID"']
    if spec.role is Role.WORKER:
        lines += SET_PLACES.split("\n")
    if is_secret:
        lines += USE_SECRET.split("\n")
    return [*lines, f"exec {shlex.join(spec.argv)} </dev/null", "}"]
