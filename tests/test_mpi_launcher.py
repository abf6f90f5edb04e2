"""launchers/: what MPI implementations and PBS set becomes what PyTorch reads; the same losses as accelerate launch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.conftest import REPOSITORY
from tests.forked import CONFIGS, ForkedParent, free_port

RUN, RANK = (REPOSITORY / "launchers" / "mpi" / name for name in ("run.sh", "rank.sh"))
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PATH = {"PATH": os.environ["PATH"]}


def rank_environment(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(RANK), "first-host", "23456", "/some.yaml", "env"]
    return subprocess.run(command, env=PATH | env, capture_output=True, text=True, timeout=20)


@pytest.fixture
def node_file(tmp_path: Path) -> Path:
    file = tmp_path / "nodes"
    file.write_text("host-b\nhost-b\nhost-a\nhost-a\n")
    return file


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "5"},
            ("5", "8", "1", "4"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, ("0", "2", "0", "2")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}, ("3", "4", "1", "2")),
        # Without local numbers: one host, or those of the node file.
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("1", "2", "1", "2")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PBS_NODEFILE": "{nodes}"}, ("3", "4", "1", "2")),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "PBS_NODEFILE": "{nodes}"}, ("2", "4", "0", "2")),
    ],
    ids=["open_mpi", "mpich", "cray", "pmi_one_host", "pmi_pbs_last", "pmi_pbs_first_of_second_host"],
)  # fmt: skip
def test_ranks(env: dict[str, str], expected: tuple[str, ...], node_file: Path) -> None:
    result = rank_environment({name: value.format(nodes=node_file) for name, value in env.items()})
    assert result.returncode == 0, result.stderr
    seen = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    assert tuple(seen[name] for name in NAMES) == expected
    assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("first-host", "23456")
    assert seen["ACCELERATE_CONFIG_FILE"] == "/some.yaml" and seen["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "start this script with mpiexec"),
        ({"PMI_RANK": "3", "PMI_SIZE": "2"}, "rank 3 of 2 processes"),
        ({"PMI_RANK": "0", "PMI_SIZE": "two"}, "rank 0 of two processes"),
        ({"PMI_RANK": "0", "PMI_SIZE": "3", "PBS_NODEFILE": "{nodes}"}, "3 processes do not divide evenly among the 2"),
    ],
)
def test_ranks_that_make_no_sense(env: dict[str, str], words: str, node_file: Path) -> None:
    result = rank_environment({name: value.format(nodes=node_file) for name, value in env.items()})
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and words in result.stderr and result.stderr.count("\n") == 1


def stand_in(folder: Path, version: str) -> dict[str, str]:
    """An environment whose `mpiexec` prints its arguments."""
    folder.mkdir()
    file = folder / "mpiexec"
    file.write_text(f'#!/bin/bash\nif [ "$1" = --version ]; then echo "{version}"; else printf "%s\\n" "$@"; fi\n')
    file.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def start(env: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(RUN), *flags], env=env, capture_output=True, text=True, timeout=20, cwd=REPOSITORY)


@pytest.mark.parametrize(
    ("version", "own"),
    [
        ("mpiexec (OpenRTE) 4.1.4", ["--bind-to", "none", "--hostfile", "{nodes}"]),
        ("HYDRA build details:", ["-f", "{nodes}"]),
    ],
)
def test_the_command_in_a_pbs_job(version: str, own: list[str], node_file: Path, tmp_path: Path) -> None:
    """Processes and hosts of the node file, its first host for process 0; `pbs/train.sh` starts it."""
    env = stand_in(tmp_path / "bin", version) | {
        "PBS_NODEFILE": str(node_file), "PBS_O_WORKDIR": str(REPOSITORY), "MPIEXEC_FLAGS": "--tag-output -x A",
        "MASTER_PORT": "23456", "CONFIG": "ddp", "RECIPE": "gpt_shakespeare", "ARGS": "--max_steps 3",
    }  # fmt: skip
    script = REPOSITORY / "launchers" / "pbs" / "train.sh"
    result = subprocess.run([str(script)], env=env, capture_output=True, text=True, timeout=20)
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    flags = [word.format(nodes=node_file) for word in own]
    rank = words.index(str(RANK))
    assert words[:rank] == ["-n", "4", *flags, "--tag-output", "-x", "A"]
    assert words[rank + 1 : rank + 4] == ["host-b", "23456", str(CONFIGS / "ddp.yaml")]
    assert Path(words[rank + 4]).name.startswith("python")
    assert words[rank + 5 :] == ["recipes/gpt_shakespeare.py", "--max_steps", "3"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["accelerate_configs/ddp.yaml"], "expected [-n PROCESSES] YAML SCRIPT"),
        (["-n", "2", "absent.yaml", "script.py"], "absent.yaml: no such accelerate YAML"),
        (["accelerate_configs/ddp.yaml", "script.py"], "give a number of processes with -n"),
        (["-n", "two", "accelerate_configs/ddp.yaml", "script.py"], "give a number of processes with -n"),
    ],
)
def test_mistakes(flags: list[str], words: str, tmp_path: Path) -> None:
    result = start(stand_in(tmp_path / "bin", "Open MPI"), *flags)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and words in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.full
def test_open_mpi_trains_with_the_losses_of_accelerate_launch(forked: ForkedParent, tmp_path: Path) -> None:
    version = shutil.which("mpiexec") and subprocess.run(["mpiexec", "--version"], capture_output=True, text=True)
    if not version or "OpenRTE" not in version.stdout + version.stderr and "Open MPI" not in version.stdout:
        pytest.skip("Open MPI is not installed")
    tiny.train(forked, tmp_path / "accelerate", "--max_steps=3")
    port = free_port()
    yaml = tmp_path / "float32.yaml"
    text = (CONFIGS / "fsdp_full_shard.yaml").read_text()
    assert "mixed_precision: bf16" in text
    yaml.write_text(text.replace("mixed_precision: bf16", 'mixed_precision: "no"'))
    command = [
        str(RUN), "-n", "2", str(yaml), str(tiny.RECIPE), *tiny.flags(tmp_path / "mpi", "--max_steps=3"),
    ]  # fmt: skip
    env = os.environ | {"MPIEXEC_FLAGS": "--allow-run-as-root --oversubscribe", "MASTER_PORT": str(port)}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    losses = tiny.series(tmp_path / "mpi")
    assert len(losses) == 3 and losses == tiny.series(tmp_path / "accelerate")
