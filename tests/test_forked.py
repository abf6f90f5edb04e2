"""The forked runner stands for `accelerate launch` in other tests: ranks must start and end in the same way."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forked import CONFIGS, ForkedParent, Handle

PROBE = """
    import json, os, sys
    rank = os.environ.get("RANK", "0")
    with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
        json.dump({"env": dict(os.environ), "argv": sys.argv[2:], "path": sys.path[0], "cwd": os.getcwd(),
                   "name": __name__, "file": __file__}, file)
"""
LAUNCHES: list[tuple[str, int, list[str]]] = [
    ("single_device", 1, []),
    ("ddp", 3, ["--num_processes", "3"]),
    ("fsdp_full_shard", 2, []),
    ("fsdp_shard_grad_op", 2, ["--mixed_precision", "no"]),
    ("fsdp1_full_shard", 2, []),
]


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def wait_until_gone(pids: list[int], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if psutil.pid_exists(pid)]}"
        time.sleep(0.05)


def wait_for_output(handle: Handle, text: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while text not in handle.output:
        assert time.monotonic() < deadline, handle.output
        time.sleep(0.05)


# accelerate's launcher itself, as a script: the parent saves its imports, the ranks are new interpreters.
ACCELERATE_LAUNCH = """
    import os
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]  # what a launcher has given to this script
    from accelerate.commands.launch import main
    main()
"""


def starts(folder: Path) -> dict[str, dict[str, Any]]:
    """What the ranks of a run saw, by rank, without what differs from run to run."""
    ranks = {file.stem: json.loads(file.read_text()) for file in folder.iterdir()}
    assert len({rank["env"].pop("MASTER_PORT", None) for rank in ranks.values()}) == 1, "all ranks meet at one port"
    for rank in ranks.values():
        rank["env"].pop("TORCHELASTIC_ERROR_FILE", None)
        rank["env"].pop("ACCELERATE_CONFIG_FILE", None)  # in the place of the launcher's command line
    return ranks


def assert_same_starts(folder: Path, reference: Path) -> None:
    forked, launched = starts(folder), starts(reference)
    assert forked.keys() == launched.keys()
    for rank in launched:
        differing = {key for key, _ in forked[rank]["env"].items() ^ launched[rank]["env"].items()}
        assert not differing, f"rank {rank}: {differing}"
    assert forked == launched


@pytest.mark.parametrize(("config", "num_ranks", "launcher_flags"), LAUNCHES)
def test_ranks_start_as_under_accelerate_launch(
    forked: ForkedParent, tmp_path: Path, config: str, num_ranks: int, launcher_flags: list[str]
) -> None:
    probe = script(tmp_path, PROBE)
    launcher = script(tmp_path, ACCELERATE_LAUNCH, "launcher.py")
    for name in ("forked", "launched"):
        (tmp_path / name).mkdir()
    flags = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--main_process_port", "0", *launcher_flags]
    result = forked.run(
        launcher, *flags, str(probe), str(tmp_path / "launched"), "--flag", "a b", config="single_device"
    )
    assert result.exit_code == 0, result.output
    result = forked.run(probe, str(tmp_path / "forked"), "--flag", "a b", config=config, launcher_flags=launcher_flags)
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "launched").iterdir())) == num_ranks
    assert_same_starts(tmp_path / "forked", tmp_path / "launched")


@pytest.mark.launch
def test_ranks_start_as_under_a_real_accelerate_launch(forked: ForkedParent, tmp_path: Path) -> None:
    probe = script(tmp_path, PROBE)
    for name in ("forked", "launched"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", str(CONFIGS / "fsdp_full_shard.yaml"), str(probe), str(tmp_path / "launched")]
    subprocess.run(command, env=dict(os.environ), check=True, timeout=240)  # env: without what C code has added to it
    assert forked.run(probe, str(tmp_path / "forked")).exit_code == 0
    assert_same_starts(tmp_path / "forked", tmp_path / "launched")


def test_ranks_meet_in_a_process_group(forked: ForkedParent, tmp_path: Path) -> None:
    recipe = script(
        tmp_path,
        """
        import random, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        print("total", total.item(), "random", random.random())
        dist.destroy_process_group()
        """,
    )
    result = forked.run(recipe, num_processes=3)
    assert result.exit_codes == [0, 0, 0] and result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[:2] for line in lines] == [["total", "6.0"]] * 3
    assert len({line.split()[3] for line in lines}) == 3, "ranks must not share Python's random state"
    assert result.seconds < 30 and not result.timed_out


def test_failing_rank_takes_the_others_down(forked: ForkedParent, tmp_path: Path) -> None:
    recipe = script(
        tmp_path,
        """
        import os, signal, sys, time
        rank = int(os.environ["RANK"])
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            time.sleep(0.5)
            sys.exit(3)
        time.sleep(60)
        """,
    )
    result = forked.run(recipe, num_processes=3)
    assert result.exit_codes == [-signal.SIGKILL, 3, -signal.SIGTERM]
    assert result.exit_code == 3
    assert result.seconds < 30 and not result.timed_out


@pytest.mark.parametrize(
    ("ending", "exit_code", "output"),
    [
        ("sys.exit(2)", 2, ""),
        ("sys.exit('one line')", 1, "one line\n"),
        ("sys.exit()", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os.kill(os.getpid(), 9)", 128 + 9, ""),
        ("atexit.register(print, 'at exit')", 0, "at exit\n"),
    ],
)
def test_endings_of_a_script(forked: ForkedParent, tmp_path: Path, ending: str, exit_code: int, output: str) -> None:
    result = forked.run(script(tmp_path, f"import atexit, os, sys\n{ending}"), config="single_device")
    assert result.exit_code == exit_code
    assert output in result.output
    assert ("Traceback" in result.output) == (ending == "1 / 0")


def test_timeout_kills_all_ranks(forked: ForkedParent, tmp_path: Path) -> None:
    handle = forked.start(script(tmp_path, "import time; print('up'); time.sleep(60)"))
    wait_for_output(handle, "up\nup\n")
    result = handle.wait(timeout=0.2)
    assert result.timed_out
    assert result.exit_codes == [-signal.SIGKILL] * 2
    wait_until_gone(handle.pids)


def test_ranks_that_stop_after_a_save_wait_for_each_other(forked: ForkedParent, tmp_path: Path) -> None:
    recipe = script(
        tmp_path,
        """
        import os, signal, sys, time
        def save(signum, frame):
            time.sleep(int(os.environ["RANK"]))
            print("saved")
            sys.exit(75)
        signal.signal(signal.SIGUSR1, save)
        print("ready")
        time.sleep(60)
        """,
    )
    handle = forked.start(recipe)
    wait_for_output(handle, "ready\nready\n")
    handle.send_signal(signal.SIGUSR1)
    result = handle.wait()
    assert result.exit_codes == [75, 75] and result.exit_code == 75
    assert result.output.count("saved") == 2


def test_kill_reaches_children_of_ranks(forked: ForkedParent, tmp_path: Path) -> None:
    recipe = script(
        tmp_path,
        """
        import subprocess, time
        print("child", subprocess.Popen(["sleep", "60"]).pid)
        time.sleep(60)
        """,
    )
    handle = forked.start(recipe, config="single_device")
    wait_for_output(handle, "child")
    child = int(handle.output.split()[1])
    handle.kill()
    assert handle.wait().exit_codes == [-signal.SIGKILL]
    wait_until_gone([*handle.pids, child])


def test_no_rank_outlives_the_tests(forked: ForkedParent, tmp_path: Path) -> None:
    recipe = script(tmp_path, "import time; time.sleep(60)")
    reader, writer = os.pipe()
    tests = os.fork()
    if tests == 0:
        handle = forked.start(recipe)
        os.write(writer, json.dumps(handle.pids).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.waitpid(tests, 0)
    pids = json.loads(os.read(reader, 1000))
    os.close(reader)
    assert len(pids) == 2
    wait_until_gone(pids)


def test_launcher_refusals_reach_the_test(forked: ForkedParent, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent.yaml` does not exist"):
        forked.run(tmp_path / "script.py", config=tmp_path / "absent.yaml")
    edited = tmp_path / "edited.yaml"
    edited.write_text((CONFIGS / "ddp.yaml").read_text() + "unknown_key: 1\n")
    with pytest.raises(ValueError, match="unknown_key"):
        forked.run(tmp_path / "script.py", config=edited)
