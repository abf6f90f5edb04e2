#!/bin/bash
# One process of mpiexec: gives PyTorch rank, size and address under the names that it reads, from what MPI has set.
#
#     rank.sh MASTER_ADDR MASTER_PORT YAML COMMAND [ARGUMENT ...]
set -euo pipefail

first_set() { # value of the first of the named variables that is set
    for name in "$@"; do
        if [ -n "${!name:-}" ]; then
            echo "${!name}"
            return
        fi
    done
}

# Open MPI; PMIx; MPICH, Intel MPI and Cray; MVAPICH.
RANK=$(first_set OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK MV2_COMM_WORLD_RANK)
WORLD_SIZE=$(first_set OMPI_COMM_WORLD_SIZE PMI_SIZE MV2_COMM_WORLD_SIZE)
LOCAL_RANK=$(first_set OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID PMI_LOCAL_RANK PALS_LOCAL_RANKID MV2_COMM_WORLD_LOCAL_RANK)
LOCAL_WORLD_SIZE=$(first_set OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS PMI_LOCAL_SIZE PALS_LOCAL_SIZE MV2_COMM_WORLD_LOCAL_SIZE)
if [ -z "$RANK" ] || [ -z "$WORLD_SIZE" ]; then
    echo "error: no rank and size in OMPI_COMM_WORLD_*, PMI_* or MV2_*: start this script with mpiexec." >&2
    exit 2
fi
if ! [[ $RANK =~ ^[0-9]+$ && $WORLD_SIZE =~ ^[0-9]+$ ]] || ((RANK >= WORLD_SIZE)); then
    echo "error: the environment says rank $RANK of $WORLD_SIZE processes: start this script with mpiexec." >&2
    exit 2
fi
if (($# < 4)); then
    echo "error: usage: rank.sh MASTER_ADDR MASTER_PORT YAML COMMAND [ARGUMENT ...]" >&2
    exit 2
fi
if [ -z "$LOCAL_RANK" ] || [ -z "$LOCAL_WORLD_SIZE" ]; then
    # Hosts have equally many processes, and neighbouring ranks share one.
    hosts=1
    if [ -f "${PBS_NODEFILE:-}" ]; then
        hosts=$(sort -u "$PBS_NODEFILE" | grep -c .)
    fi
    LOCAL_WORLD_SIZE=$((WORLD_SIZE / hosts))
    if ((LOCAL_WORLD_SIZE * hosts != WORLD_SIZE)); then
        echo "error: $WORLD_SIZE processes do not divide evenly among the $hosts hosts of $PBS_NODEFILE." >&2
        exit 2
    fi
    LOCAL_RANK=$((RANK % LOCAL_WORLD_SIZE))
fi
MASTER_ADDR=$1 MASTER_PORT=$2 ACCELERATE_CONFIG_FILE=$3
shift 3
export RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT ACCELERATE_CONFIG_FILE
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # as accelerate launch and torchrun have it
exec "$@"
