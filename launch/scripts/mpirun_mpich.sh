#!/bin/bash
# The same job as `spmdrun -n 4 train.py`, with MPICH's own mpirun:
#     RANKS=4 launch/scripts/mpirun_mpich.sh train.py --epochs 3
set -euo pipefail
RANKS=${RANKS:-4}

# Threads of each rank: its share of the cores.
CORES=$(nproc)
THREADS=$((CORES > RANKS ? CORES / RANKS : 1))
export SPMD_NUM_THREADS=$THREADS OMP_NUM_THREADS=$THREADS OPENBLAS_NUM_THREADS=$THREADS

# MPICH needs no flags. It waits busily: with more ranks than cores prefer Open MPI, unless all
# ranks are on one host, where spmd does not wait inside MPI.
exec mpirun -n "$RANKS" -bind-to "core:$THREADS" -prepend-rank python "$@"
