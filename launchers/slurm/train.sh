#!/bin/bash
# A recipe as a Slurm job, on one node or several, one process per GPU:
#
#     RECIPE=t5_summarize sbatch -N 2 --gpus-per-node=4 -t 04:00:00 launchers/slurm/train.sh --config t5_summarize_3b
#
# Run sbatch in the repository; account and partition are the site's (-A, -p). What follows the script's name are flags of
# the recipe. From the environment: CONFIG (a name in accelerate_configs/), RECIPE, TOTAL_BATCH_SIZE, MASTER_PORT,
# BATCH_SIZE_PER_DEVICE, and DRY_RUN=1, which prints the command of each node instead of starting it.
# Ten minutes before the time limit the run saves, ends with exit code 75, and is queued again to go on from there.
#SBATCH --job-name=train
#SBATCH --ntasks-per-node=1
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "this is no Slurm job: start it with sbatch, or inside salloc."
cd "${SLURM_SUBMIT_DIR:-.}"
[ -x launchers/slurm/node.sh ] || fail "$PWD is not the repository: run sbatch in it."
yaml=accelerate_configs/${CONFIG:-fsdp_full_shard}.yaml
script=recipes/${RECIPE:-t5_summarize}.py
[ -f "$yaml" ] || fail "CONFIG=${CONFIG:-}: $yaml is no file."
[ -f "$script" ] || fail "RECIPE=${RECIPE:-}: $script is no file."

gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
gpus=${gpus##*:} # `a100:4`
[[ $gpus =~ ^[1-9][0-9]*$ ]] || fail "the allocation says no number of GPUs ('$gpus'): add --gpus-per-node=N."
nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-}}
[[ $nodes =~ ^[1-9][0-9]*$ ]] || fail "SLURM_JOB_NUM_NODES is '$nodes', expected a number of nodes."

# The first node hosts the rendezvous.
nodelist=${SLURM_JOB_NODELIST:-}
names=$(scontrol show hostnames "$nodelist") || fail "scontrol cannot name the nodes of '$nodelist'."
mapfile -t hosts <<<"$names"
[ "${#hosts[@]}" -eq "$nodes" ] && [ -n "${hosts[0]}" ] ||
    fail "scontrol names ${#hosts[@]} nodes ('${hosts[*]}'), but the job has $nodes."
if [ "$nodes" -gt 1 ]; then
    getent hosts "${hosts[0]}" >/dev/null || fail "the first node, ${hosts[0]}, has no address for the others to find."
fi

flags=("$@")
[ -z "${TOTAL_BATCH_SIZE:-}" ] || flags+=(--total_batch_size "$TOTAL_BATCH_SIZE")
[ -z "${BATCH_SIZE_PER_DEVICE:-}" ] || flags+=(--per_device_train_batch_size "$BATCH_SIZE_PER_DEVICE")
# Stopped by the time limit, or a node that failed: the same job, started again.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    set -- "${flags[@]}"
    flags=()
    while [ $# -gt 0 ]; do
        case $1 in # starting afresh was for the first time
        --overwrite_output_dir=*) ;;
        --overwrite_output_dir) [[ ${2:---} == --* ]] || shift ;; # with its value
        *) flags+=("$1") ;;
        esac
        shift
    done
    flags+=(--resume_from_checkpoint latest)
fi

logs=runs/slurm-$SLURM_JOB_ID
node=(
    launchers/slurm/node.sh "$nodes" "$((nodes * gpus))" "${hosts[0]}"
    "${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}" "$logs" "$yaml" "$script" "${flags[@]}"
)
if [ -n "${DRY_RUN:-}" ]; then
    for number in "${!hosts[@]}"; do
        echo "${hosts[number]}: $(SLURM_NODEID=$number "${node[@]}")"
    done
    exit 0
fi
mkdir -p "$logs"
rm -f "$logs/stopped"
# Without a node that failed, the others would wait for it. One that has stopped after its save is no failure to srun
# (node.sh leaves a file and exits with 0): it must not take along the others, which may still be writing.
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 --open-mode=append \
    --output="$logs/node-%n.log" "${node[@]}"
if [ -e "$logs/stopped" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 75
fi
