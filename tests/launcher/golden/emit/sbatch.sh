#!/bin/bash
#SBATCH --job-name=kvdist
#SBATCH --ntasks=4
# Add what your cluster asks for, such as:
##SBATCH --partition=gpu --time=1:00:00 --gpus-per-task=1 --cpus-per-task=4

# The scheduler runs on the first node. One node alone can use its loopback address.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahosts "$first" | awk 'NR == 1 { print $1 }')
case $address in
127.* | ::1 | "") [ "$SLURM_JOB_NUM_NODES" = 1 ] || address=$(hostname -I | awk '{ print $1 }') ;;
esac
port=$((20000 + SLURM_JOB_ID % 10000))
secret=$(head -c 32 /dev/urandom | base64 | tr -d '\n')

# Starts one step; its tasks read the script on standard input, after a line that is known only here.
step() {
  exec srun --overlap --kill-on-bad-exit=1 --label "$@" /bin/sh -s \
    < <(printf 'address=%s port=%s secret=%s\n' "$address" "$port" "$secret" && cat)
}

# That port may be another job's, or program's: one that is free there. --label puts the number of the task before it.
port=$(step --nodes=1 --nodelist="$first" --ntasks=1 <<'KVDIST_0123456789abcdef'
exec /venv/bin/python -c 'import sys; sys.path[:] = filter(None, sys.path)
import random, socket
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
for port in (int(sys.argv[2]), *random.sample(range(20000, 30000), 100)):
    try:
        socket.create_server((sys.argv[1], port), family=family).close()
    except OSError as error:
        why = error
    else:
        print(port)
        break
else:
    sys.exit(f"kvdist: no port of {sys.argv[1]} is free for the scheduler: {why}")
' "$address" "$port" </dev/null
KVDIST_0123456789abcdef
) || exit
port=${port##* }

step --nodes=1 --nodelist="$first" --ntasks=1 <<'KVDIST_0123456789abcdef' &
{
unset KVDIST_BIGARRAY_BOUND KVDIST_LISTEN_FD KVDIST_NUM_SERVER KVDIST_NUM_WORKER KVDIST_RESTARTS KVDIST_ROLE KVDIST_ROOT_PORT KVDIST_ROOT_URI KVDIST_SECURITY KVDIST_SUPERVISED KVDIST_TAKEN_BY
[ "${OPENBLAS_NUM_THREADS+set}" ] || export OPENBLAS_NUM_THREADS=1
[ "${PYTHONUNBUFFERED+set}" ] || export PYTHONUNBUFFERED=1
export PATH=/venv/bin"${PATH:+:$PATH}"
export PYTHONPATH='/li b'"${PYTHONPATH:+:$PYTHONPATH}"
export DMLC_NUM_SERVER=1
export DMLC_NUM_WORKER=2
export DMLC_ROLE=scheduler
export KVDIST_JOB=0123456789abcdef
export KVDIST_LOCAL_REDUCE=auto
export KVDIST_ON_LOSS=fail
export KVDIST_PLACEMENT=bytes
export KVDIST_REPLICAS=0
export KVDIST_TRANSPORT=auto
export MXNET_KVSTORE_BIGARRAY_BOUND=1000000
export TEXT='it'"'"'s a "value" with
lines, %i, = and : and $HOME;`id` $(touch pwned)\ é 😀  '
export DMLC_PS_ROOT_URI="$address" DMLC_PS_ROOT_PORT="$port" KVDIST_JOB="slurm-$SLURM_JOB_ID"
export KVDIST_RANK="$SLURM_PROCID"
file=$(umask 077 && mktemp "${TMPDIR:-/tmp}/kvdist.XXXXXXXX") || exit
printf %s "$secret" > "$file"
exec 9< "$file" && rm -f "$file" || exit
export KVDIST_SECRET_FILE="/proc/$$/fd/9"
unset secret
exec /venv/bin/python -m kvdist </dev/null
}
KVDIST_0123456789abcdef
scheduler=$!

step --distribution=cyclic --ntasks=1 <<'KVDIST_0123456789abcdef' &
{
unset KVDIST_LISTEN_FD KVDIST_NUM_SERVER KVDIST_NUM_WORKER KVDIST_RESTARTS KVDIST_ROLE KVDIST_ROOT_PORT KVDIST_ROOT_URI KVDIST_SECURITY KVDIST_SUPERVISED KVDIST_TAKEN_BY
[ "${OPENBLAS_NUM_THREADS+set}" ] || export OPENBLAS_NUM_THREADS=1
[ "${PYTHONUNBUFFERED+set}" ] || export PYTHONUNBUFFERED=1
export PATH=/venv/bin"${PATH:+:$PATH}"
export PYTHONPATH='/li b'"${PYTHONPATH:+:$PYTHONPATH}"
export DMLC_NUM_SERVER=1
export DMLC_NUM_WORKER=2
export DMLC_ROLE=server
export KVDIST_BIGARRAY_BOUND=77
export KVDIST_JOB=0123456789abcdef
export KVDIST_LOCAL_REDUCE=auto
export KVDIST_ON_LOSS=fail
export KVDIST_PLACEMENT=bytes
export KVDIST_REPLICAS=0
export KVDIST_TRANSPORT=auto
export MXNET_KVSTORE_BIGARRAY_BOUND=77
export TEXT='it'"'"'s a "value" with
lines, %i, = and : and $HOME;`id` $(touch pwned)\ é 😀  '
export DMLC_PS_ROOT_URI="$address" DMLC_PS_ROOT_PORT="$port" KVDIST_JOB="slurm-$SLURM_JOB_ID"
export KVDIST_RANK="$SLURM_PROCID"
file=$(umask 077 && mktemp "${TMPDIR:-/tmp}/kvdist.XXXXXXXX") || exit
printf %s "$secret" > "$file"
exec 9< "$file" && rm -f "$file" || exit
export KVDIST_SECRET_FILE="/proc/$$/fd/9"
unset secret
exec /venv/bin/python -m kvdist </dev/null
}
KVDIST_0123456789abcdef
servers=$!

step --distribution=cyclic --ntasks=2 <<'KVDIST_0123456789abcdef' &
{
unset KVDIST_BIGARRAY_BOUND KVDIST_LISTEN_FD KVDIST_NUM_SERVER KVDIST_NUM_WORKER KVDIST_RESTARTS KVDIST_ROLE KVDIST_ROOT_PORT KVDIST_ROOT_URI KVDIST_SECURITY KVDIST_SUPERVISED KVDIST_TAKEN_BY
[ "${PYTHONUNBUFFERED+set}" ] || export PYTHONUNBUFFERED=1
export PATH=/venv/bin"${PATH:+:$PATH}"
export PYTHONPATH='/li b'"${PYTHONPATH:+:$PYTHONPATH}"
export DMLC_NUM_SERVER=1
export DMLC_NUM_WORKER=2
export DMLC_ROLE=worker
export KVDIST_JOB=0123456789abcdef
export KVDIST_LOCAL_REDUCE=auto
export KVDIST_ON_LOSS=fail
export KVDIST_PLACEMENT=bytes
export KVDIST_REPLICAS=0
export KVDIST_TRANSPORT=auto
export MXNET_KVSTORE_BIGARRAY_BOUND=1000000
export PERCENT=100%
export TEXT='it'"'"'s a "value" with
lines, %i, = and : and $HOME;`id` $(touch pwned)\ é 😀  '
export DMLC_PS_ROOT_URI="$address" DMLC_PS_ROOT_PORT="$port" KVDIST_JOB="slurm-$SLURM_JOB_ID"
export KVDIST_RANK="$SLURM_PROCID"
set -- $(echo "$SLURM_STEP_TASKS_PER_NODE" | tr , '\n' | tr '(x)' '   ' | awk -v node="$SLURM_NODEID" \
  -v local="$SLURM_LOCALID" '{
    for (i = 0; i < ($2 ? $2 : 1); i++) {
      if (seen == node) size = $1
      if ($1 > local) { across++; if (seen < node) rank++ }
      seen++
    }
  } END { print size, rank + 0, across }')
export KVDIST_LOCAL_RANK="$SLURM_LOCALID" KVDIST_LOCAL_SIZE="$1" KVDIST_CROSS_RANK="$2" KVDIST_CROSS_SIZE="$3"
file=$(umask 077 && mktemp "${TMPDIR:-/tmp}/kvdist.XXXXXXXX") || exit
printf %s "$secret" > "$file"
exec 9< "$file" && rm -f "$file" || exit
export KVDIST_SECRET_FILE="/proc/$$/fd/9"
unset secret
exec python 'my train.py' 'it'"'"'s a "value" with
lines, %i, = and : and $HOME;`id` $(touch pwned)\ é 😀  ' </dev/null
}
KVDIST_0123456789abcdef
workers=$!

# The workers decide how the job ends. The others then end by themselves, or if workers never joined them, are ended.
trap 'kill "$scheduler" "$servers" "$workers" 2>/dev/null' INT TERM
wait "$workers"; code=$?
( sleep 10; kill "$scheduler" "$servers" 2>/dev/null ) &
guard=$!
wait "$servers" "$scheduler"
kill "$guard" 2>/dev/null
exit "$code"
