#!/bin/sh
umask 077
folder=$(mktemp -d "$HOME/.kvdist.XXXXXXXX") || exit
trap 'rm -rf "$folder"' EXIT
trap : INT TERM
head -c 32 /dev/urandom > "$folder/secret"
cat > "$folder/hosts" <<'KVDIST_0123456789abcdef'
here
here
d1
fd00::17
KVDIST_0123456789abcdef
cat > "$folder/process" <<'KVDIST_0123456789abcdef'
folder=$1
case $OMPI_COMM_WORLD_RANK in
0)
unset KVDIST_BIGARRAY_BOUND KVDIST_CROSS_RANK KVDIST_CROSS_SIZE KVDIST_LISTEN_FD KVDIST_LOCAL_RANK KVDIST_LOCAL_SIZE KVDIST_NUM_SERVER KVDIST_NUM_WORKER KVDIST_RESTARTS KVDIST_ROLE KVDIST_ROOT_PORT KVDIST_ROOT_URI KVDIST_SECURITY KVDIST_SUPERVISED KVDIST_TAKEN_BY
[ "${OPENBLAS_NUM_THREADS+set}" ] || export OPENBLAS_NUM_THREADS=1
export PATH=/venv/bin"${PATH:+:$PATH}"
export DMLC_NUM_SERVER=1
export DMLC_NUM_WORKER=2
export DMLC_PS_ROOT_PORT=23456
export DMLC_PS_ROOT_URI=10.0.0.99
export DMLC_ROLE=scheduler
export KVDIST_JOB=0123456789abcdef
export KVDIST_LOCAL_REDUCE=auto
export KVDIST_ON_LOSS=fail
export KVDIST_PLACEMENT=bytes
export KVDIST_RANK=0
export KVDIST_REPLICAS=0
export KVDIST_TRANSPORT=auto
export MXNET_KVSTORE_BIGARRAY_BOUND=1000000
export TEXT='it'"'"'s a "value" with
lines, %i, = and : and $HOME;`id` $(touch pwned)\ é 😀  '
export KVDIST_SECRET_FILE="$folder/secret"
exec /venv/bin/python -m kvdist </dev/null
;;
1)
unset KVDIST_CROSS_RANK KVDIST_CROSS_SIZE KVDIST_LISTEN_FD KVDIST_LOCAL_RANK KVDIST_LOCAL_SIZE KVDIST_NUM_SERVER KVDIST_NUM_WORKER KVDIST_RESTARTS KVDIST_ROLE KVDIST_ROOT_PORT KVDIST_ROOT_URI KVDIST_SECURITY KVDIST_SUPERVISED KVDIST_TAKEN_BY
[ "${OPENBLAS_NUM_THREADS+set}" ] || export OPENBLAS_NUM_THREADS=1
export PATH=/venv/bin"${PATH:+:$PATH}"
export DMLC_NUM_SERVER=1
export DMLC_NUM_WORKER=2
export DMLC_PS_ROOT_PORT=23456
export DMLC_PS_ROOT_URI=10.0.0.99
export DMLC_ROLE=server
export KVDIST_BIGARRAY_BOUND=77
export KVDIST_JOB=0123456789abcdef
export KVDIST_LOCAL_REDUCE=auto
export KVDIST_ON_LOSS=fail
export KVDIST_PLACEMENT=bytes
export KVDIST_RANK=0
export KVDIST_REPLICAS=0
export KVDIST_TRANSPORT=auto
export MXNET_KVSTORE_BIGARRAY_BOUND=77
export TEXT='it'"'"'s a "value" with
lines, %i, = and : and $HOME;`id` $(touch pwned)\ é 😀  '
export KVDIST_SECRET_FILE="$folder/secret"
cd '/my job' || exit
exec /venv/bin/python -m kvdist </dev/null
;;
2)
unset KVDIST_BIGARRAY_BOUND KVDIST_LISTEN_FD KVDIST_NUM_SERVER KVDIST_NUM_WORKER KVDIST_RESTARTS KVDIST_ROLE KVDIST_ROOT_PORT KVDIST_ROOT_URI KVDIST_SECURITY KVDIST_SUPERVISED KVDIST_TAKEN_BY
[ "${OMP_NUM_THREADS+set}" ] || export OMP_NUM_THREADS=8
export PATH=/venv/bin"${PATH:+:$PATH}"
export PYTHONPATH='/li b'"${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_VISIBLE_DEVICES=0,1
export DMLC_NUM_SERVER=1
export DMLC_NUM_WORKER=2
export DMLC_PS_ROOT_PORT=23456
export DMLC_PS_ROOT_URI=10.0.0.99
export DMLC_ROLE=worker
export KVDIST_CROSS_RANK=0
export KVDIST_CROSS_SIZE=2
export KVDIST_JOB=0123456789abcdef
export KVDIST_LOCAL_RANK=0
export KVDIST_LOCAL_REDUCE=auto
export KVDIST_LOCAL_SIZE=1
export KVDIST_ON_LOSS=fail
export KVDIST_PLACEMENT=bytes
export KVDIST_RANK=0
export KVDIST_REPLICAS=0
export KVDIST_TRANSPORT=auto
export MXNET_KVSTORE_BIGARRAY_BOUND=1000000
export PERCENT=100%
export TEXT='it'"'"'s a "value" with
lines, %i, = and : and $HOME;`id` $(touch pwned)\ é 😀  '
export KVDIST_SECRET_FILE="$folder/secret"
cd '/my job' || exit
exec python 'my train.py' 'it'"'"'s a "value" with
lines, %i, = and : and $HOME;`id` $(touch pwned)\ é 😀  ' </dev/null
;;
3)
unset KVDIST_BIGARRAY_BOUND KVDIST_LISTEN_FD KVDIST_NUM_SERVER KVDIST_NUM_WORKER KVDIST_RESTARTS KVDIST_ROLE KVDIST_ROOT_PORT KVDIST_ROOT_URI KVDIST_SECURITY KVDIST_SUPERVISED KVDIST_TAKEN_BY
[ "${OMP_NUM_THREADS+set}" ] || export OMP_NUM_THREADS=8
export PATH=/venv/bin"${PATH:+:$PATH}"
export PYTHONPATH='/li b'"${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_VISIBLE_DEVICES=0,1
export DMLC_NUM_SERVER=1
export DMLC_NUM_WORKER=2
export DMLC_PS_ROOT_PORT=23456
export DMLC_PS_ROOT_URI=10.0.0.99
export DMLC_ROLE=worker
export KVDIST_CROSS_RANK=1
export KVDIST_CROSS_SIZE=2
export KVDIST_JOB=0123456789abcdef
export KVDIST_LOCAL_RANK=0
export KVDIST_LOCAL_REDUCE=auto
export KVDIST_LOCAL_SIZE=1
export KVDIST_ON_LOSS=fail
export KVDIST_PLACEMENT=bytes
export KVDIST_RANK=1
export KVDIST_REPLICAS=0
export KVDIST_TRANSPORT=auto
export MXNET_KVSTORE_BIGARRAY_BOUND=1000000
export PERCENT=100%
export TEXT='it'"'"'s a "value" with
lines, %i, = and : and $HOME;`id` $(touch pwned)\ é 😀  '
export KVDIST_SECRET_FILE="$folder/secret"
cd '/my job' || exit
exec python 'my train.py' 'it'"'"'s a "value" with
lines, %i, = and : and $HOME;`id` $(touch pwned)\ é 😀  ' </dev/null
;;
esac
KVDIST_0123456789abcdef
mpirun --map-by seq --hostfile "$folder/hosts" --tag-output -np 4 /bin/sh "$folder/process" "$folder"
