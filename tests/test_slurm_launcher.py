"""launchers/slurm: the command of each node, what is refused, and the way of a job that stops before its time limit."""

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

# Stand-ins: two nodes; srun runs the command once for each of them, and a signal in the middle is the time limit's.
SCONTROL = """#!/bin/bash
if [ "$1" != show ]; then echo "$@" >>calls; exit; fi
[ -n "$3" ] && printf '%s\\n' node-a node-b | head -n "${NUM_HOSTS:-2}"
"""
SRUN = """#!/bin/bash
echo "srun $*" >>calls
while [[ $1 == --* ]]; do shift; done
pids=()
for number in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$number "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
GETENT = '#!/bin/bash\n[ "$2" = node-a ]\n'
# In the place of tools/launch.py.
LAUNCH = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print("started", flush=True)
open(f"started-{os.environ['SLURM_NODEID']}", "w").close()
if "--wait" in sys.argv:
    time.sleep(30)
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """Environment of a job of two nodes with four GPUs each, submitted in a folder that looks like the repository."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "getent": GETENT}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    submitted = tmp_path / "submitted"
    (submitted / "tools").mkdir(parents=True)
    (submitted / "tools" / "launch.py").write_text(LAUNCH)
    for name in ("launchers", "accelerate_configs", "recipes"):
        (submitted / name).symlink_to(REPOSITORY / name)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "40007", "SLURM_SUBMIT_DIR": str(submitted),
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_GPUS_PER_NODE": "h100:4",
    }  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Slurm runs a copy of the script, in a folder of its own."""
    copy = tmp_path / "slurm_script"
    copy.write_bytes((REPOSITORY / "launchers" / "slurm" / "train.sh").read_bytes())
    copy.chmod(0o755)
    return copy


def run(script: Path, env: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(script), *flags], env=env, capture_output=True, text=True, timeout=60, cwd="/")


def calls(env: dict[str, str]) -> list[str]:
    path = Path(env["SLURM_SUBMIT_DIR"], "calls")
    return path.read_text().splitlines() if path.exists() else []


def test_a_dry_run_prints_the_command_of_each_node(job: dict[str, str], script: Path) -> None:
    env = job | {
        "DRY_RUN": "1", "RECIPE": "chess_finetune", "CONFIG": "fsdp_hybrid_shard", "TOTAL_BATCH_SIZE": "64",
        "BATCH_SIZE_PER_DEVICE": "2",
    }  # fmt: skip
    result = run(script, env, "--config", "chess_finetune_7b", "--run_name=two words")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["node-a", "node-b"]
    for rank, line in enumerate(lines):
        words = shlex.split(line.split(": ", 1)[1])
        assert Path(words[0]).name.startswith("python")
        assert words[1:] == [
            "tools/launch.py", "--config_file", "accelerate_configs/fsdp_hybrid_shard.yaml", "--num_machines", "2",
            "--num_processes", "8", "--machine_rank", str(rank), "--main_process_ip", "node-a", "--main_process_port",
            "20007", "--tee", "3", "--log_dir", f"runs/slurm-40007/node-{rank}", "recipes/chess_finetune.py",
            "--config", "chess_finetune_7b", "--run_name=two words", "--total_batch_size", "64",
            "--per_device_train_batch_size", "2",
        ]  # fmt: skip
    assert not calls(job) and not Path(job["SLURM_SUBMIT_DIR"], "runs").exists()


def test_one_node_and_the_count_of_gpus_on_it(job: dict[str, str], script: Path) -> None:
    del job["SLURM_GPUS_PER_NODE"]
    env = job | {"DRY_RUN": "1", "NUM_HOSTS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "3"}
    words = run(script, env | {"SLURM_RESTART_COUNT": "1", "MASTER_PORT": "1234"}).stdout.split()
    assert words[0] == "node-a:" and words[words.index("--num_processes") + 1] == "3"
    assert words[words.index("--main_process_port") + 1] == "1234" and "--machine_rank" in words
    assert words[-3:] == ["recipes/t5_summarize.py", "--resume_from_checkpoint", "latest"]


def test_a_job_that_is_started_again_does_not_start_afresh(job: dict[str, str], script: Path) -> None:
    flags = ["--overwrite_output_dir", "true", "--seed", "1", "--overwrite_output_dir=true", "--max_steps=3"]
    env = job | {"DRY_RUN": "1", "NUM_HOSTS": "1", "SLURM_JOB_NUM_NODES": "1"}
    assert run(script, env, *flags).stdout.split()[-len(flags) :] == flags
    again = run(script, env | {"SLURM_RESTART_COUNT": "1"}, *flags).stdout.split()
    assert again[-5:] == ["--seed", "1", "--max_steps=3", "--resume_from_checkpoint", "latest"]
    assert "true" not in again


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SLURM_JOB_ID": ""}, "no Slurm job: start it with sbatch"),
        ({"SLURM_SUBMIT_DIR": "/tmp"}, "/tmp is not the repository"),
        ({"SLURM_GPUS_PER_NODE": ""}, "add --gpus-per-node=N"),
        ({"SLURM_GPUS_PER_NODE": "a100"}, "no number of GPUs ('a100')"),
        ({"SLURM_JOB_NODELIST": ""}, "scontrol cannot name the nodes of ''"),
        ({"NUM_HOSTS": "1"}, "scontrol names 1 nodes ('node-a'), but the job has 2"),
        ({"CONFIG": "none"}, "accelerate_configs/none.yaml is no file"),
        ({"RECIPE": "none"}, "recipes/none.py is no file"),
    ],
)
def test_refused(job: dict[str, str], script: Path, env: dict[str, str], words: str) -> None:
    result = run(script, job | env)
    assert result.returncode == 2 and words in result.stderr, result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and not calls(job)


def test_a_first_node_that_nobody_finds(job: dict[str, str], script: Path) -> None:
    Path(job["PATH"].split(":")[0], "getent").write_text("#!/bin/bash\nexit 2\n")
    result = run(script, job)
    assert result.returncode == 2 and "node-a, has no address" in result.stderr and not calls(job)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_exit_code_is_the_run_s(job: dict[str, str], script: Path, code: int) -> None:
    result = run(script, job | {"CODE": str(code)})
    assert result.returncode == code and len(calls(job)) == 1  # no requeue
    assert "--kill-on-bad-exit=1" in calls(job)[0] and "--output=runs/slurm-40007/node-%n.log" in calls(job)[0]


def test_the_signal_before_the_limit_saves_and_requeues(job: dict[str, str], script: Path) -> None:
    submitted = Path(job["SLURM_SUBMIT_DIR"])
    with subprocess.Popen([str(script), "--wait"], env=job, stdout=subprocess.PIPE, start_new_session=True) as process:
        deadline = time.monotonic() + 30
        while len(list(submitted.glob("started-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # As Slurm does with --signal=USR1: every process of the step, and not the batch script.
        listing = subprocess.run(["ps", "-e", "-o", "pid=,sid=,args="], capture_output=True, text=True).stdout
        for line in listing.splitlines():
            pid, session, command = line.split(None, 2)
            if (
                int(session) == process.pid
                and ("node.sh" in command or "launch.py" in command)
                and "srun" not in command
            ):
                os.kill(int(pid), 10)
        assert process.wait(30) == 75
    assert calls(job)[1:] == ["requeue 40007"]
    # The job that comes back: no leftover makes it stop again.
    assert run(script, job | {"SLURM_RESTART_COUNT": "1"}).returncode == 0 and len(calls(job)) == 3
