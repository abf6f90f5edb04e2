#!/bin/bash
# A recipe as a PBS job, one process per GPU:
#
#     qsub -l select=2:ncpus=32:ngpus=4:mpiprocs=4 -l walltime=04:00:00 \
#         -v CONFIG=fsdp_full_shard,RECIPE=gpt_shakespeare,ARGS="--config gpt_shakespeare_8b" launchers/pbs/train.sh
#
# Run qsub in the repository. mpiprocs is the number of GPUs of a host; queue and project are the site's (-q, -P).
#PBS -N train
#PBS -j oe
set -euo pipefail
cd "$PBS_O_WORKDIR"
if [ -f .venv/bin/activate ]; then
    # shellcheck source=/dev/null
    . .venv/bin/activate
fi
read -r -a arguments <<<"${ARGS:-}"
exec launchers/mpi/run.sh "accelerate_configs/${CONFIG:-fsdp_full_shard}.yaml" "recipes/${RECIPE:-t5_summarize}.py" \
    "${arguments[@]}"
