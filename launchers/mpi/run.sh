#!/bin/bash
# Starts a recipe with mpiexec instead of accelerate launch.
#
#     launchers/mpi/run.sh [-n PROCESSES] YAML SCRIPT [FLAG ...]
#     launchers/mpi/run.sh -n 2 accelerate_configs/fsdp_full_shard.yaml recipes/t5_summarize.py --max_steps 10
#
# Without -n: as many processes as PBS_NODEFILE has lines. Its hosts are used where there is one; MPIEXEC_FLAGS are further
# flags of mpiexec. MASTER_ADDR and MASTER_PORT (host and port of process 0) are chosen unless they are set.
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

num_processes=
if [ "${1:-}" = -n ]; then
    num_processes=${2:-}
    shift 2 || fail "-n needs a number of processes."
fi
[ $# -ge 2 ] || fail "expected [-n PROCESSES] YAML SCRIPT [FLAG ...]."
yaml=$1
shift
[ -f "$yaml" ] || fail "$yaml: no such accelerate YAML."
command -v mpiexec >/dev/null || fail "mpiexec is not installed (Debian: openmpi-bin)."

flags=()
is_open_mpi=
if mpiexec --version 2>&1 | grep -q -e "Open MPI" -e OpenRTE; then
    is_open_mpi=1
    flags+=(--bind-to none) # by default it ties a process with all its threads to one core
fi
host=$(hostname)
if [ -n "${PBS_NODEFILE:-}" ]; then
    [ -f "$PBS_NODEFILE" ] || fail "PBS_NODEFILE is $PBS_NODEFILE: no such file."
    flags+=("$([ -n "$is_open_mpi" ] && echo --hostfile || echo -f)" "$PBS_NODEFILE")
    host=$(head -n 1 "$PBS_NODEFILE")
    : "${num_processes:=$(grep -c . "$PBS_NODEFILE")}"
fi
[[ $num_processes =~ ^[1-9][0-9]*$ ]] || fail "give a number of processes with -n (there is no PBS_NODEFILE)."
read -r -a more <<<"${MPIEXEC_FLAGS:-}"

# As arguments, because not every mpiexec hands the environment on to other hosts.
exec mpiexec -n "$num_processes" "${flags[@]}" "${more[@]}" \
    "$(dirname "$(realpath "$0")")/rank.sh" "${MASTER_ADDR:-$host}" "${MASTER_PORT:-$((20000 + $$ % 20000))}" \
    "$(realpath "$yaml")" "$(command -v python || command -v python3)" "$@"
