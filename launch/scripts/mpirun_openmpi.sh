#!/bin/bash
# The same job as `spmdrun -n 4 train.py`, with Open MPI's own mpirun:
#     RANKS=4 launch/scripts/mpirun_openmpi.sh train.py --epochs 3
set -euo pipefail
RANKS=${RANKS:-4}

# In a container one is often root, which Open MPI refuses unless told twice.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Probing for fabrics takes a second of every start. On a cluster with one, leave this out.
export OMPI_MCA_btl=${OMPI_MCA_btl:-^ofi}
# Windows of shared memory print errors on hosts without UCX devices.
export OMPI_MCA_osc=${OMPI_MCA_osc:-^ucx}

# Threads of each rank: its share of the cores.
CORES=$(nproc)
THREADS=$((CORES > RANKS ? CORES / RANKS : 1))
export SPMD_NUM_THREADS=$THREADS OMP_NUM_THREADS=$THREADS OPENBLAS_NUM_THREADS=$THREADS

if ((RANKS <= CORES)); then
    BINDING=(--map-by "slot:PE=$THREADS" --bind-to core)
else
    # Ranks that share cores: bound, they disturb each other half as much as unbound, and waiting
    # must give the core away.
    BINDING=(--map-by core:OVERSUBSCRIBE --bind-to core:overload-allowed)
    export OMPI_MCA_mpi_yield_when_idle=1
fi

# --output tag prefixes each line with its rank.
exec mpirun -n "$RANKS" "${BINDING[@]}" --output tag python "$@"
