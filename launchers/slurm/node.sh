#!/bin/bash
# One node of a Slurm job: srun starts it once on each. Standard output and error of each rank are in LOGS too.
#
#     node.sh NODES PROCESSES MASTER_ADDR MASTER_PORT LOGS YAML SCRIPT [FLAG ...]
set -euo pipefail
nodes=$1 processes=$2 address=$3 port=$4 logs=$5 yaml=$6
shift 6
if [ -f .venv/bin/activate ]; then
    # shellcheck source=/dev/null
    . .venv/bin/activate
fi
command=(
    "$(command -v python || command -v python3)" tools/launch.py --config_file "$yaml" --num_machines "$nodes"
    --num_processes "$processes" --machine_rank "$SLURM_NODEID" --main_process_ip "$address" --main_process_port "$port"
    --tee 3 --log_dir "$logs/node-$SLURM_NODEID"
)
if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${command[@]}" "$@"
    exit
fi
# Slurm signals every process of the job: the workers save, and this shell waits for them.
trap : TERM USR1
code=0
"${command[@]}" "$@" || code=$?
if [ "$code" -eq 75 ]; then
    touch "$logs/stopped"
    code=0
fi
exit "$code"
