"""tools/launch.py: exit codes, silence and signals.

Most tests start the launcher from the forked parent, which saves its imports; its workers are small scripts.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.forked import CONFIGS, ForkedParent, Handle, free_port
from tests.test_forked import ACCELERATE_LAUNCH
from tools import launch

TOOL = REPOSITORY / "tools" / "launch.py"
START = "import os, signal, sys, time\nrank = int(os.environ.get('RANK', 0))\n"
# Stops like a recipe: finishes its save in so many seconds after the signal. A second signal would show in the output.
SAVE = """
def stop(signum, frame):
    print(f"rank {rank}: signal {signum}\\n", end="", flush=True)  # one write: two processes share the output
    time.sleep(float(sys.argv[1 + rank]))
    print(f"rank {rank}: saved\\n", end="", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("ready\\n", end="", flush=True)
time.sleep(30)
"""


def worker(folder: Path, text: str) -> str:
    path = folder / "worker.py"
    path.write_text(START + textwrap.dedent(text))
    return str(path)


def command(config: str, script: str, *flags: str) -> list[str]:
    return ["--config_file", str(CONFIGS / f"{config}.yaml"), "--main_process_port", "0", script, *flags]


def start(forked: ForkedParent, config: str, script: str, *flags: str, env: dict[str, str] | None = None) -> Handle:
    return forked.start(TOOL, *command(config, script, *flags), config="single_device", env=env)


def wait_until_ready(handle: Handle, num_workers: int) -> None:
    deadline = time.monotonic() + 60
    while handle.output.count("ready") < num_workers:
        assert time.monotonic() < deadline, handle.output
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({0: 2, 1: None}, 2),
        ({0: 1, 1: 2}, 2),
        ({0: 75, 1: 75}, 75),
        ({0: 0, 1: 75}, 75),
        ({0: -9, 1: 1}, 1),
        ({0: None, 1: 3}, 3),
        ({0: None, 1: -9}, 137),
        ({0: None, 1: None}, 1),
    ],
)
def test_exit_code_is_the_first_failure(codes: launch.Codes, expected: int) -> None:
    assert launch.exit_code(codes) == expected


@pytest.mark.parametrize("config", ["single_device", "ddp", "fsdp_full_shard"])
@pytest.mark.parametrize(
    ("text", "exit_code", "output"),
    [
        ("print('done', flush=True) if rank == 0 else time.sleep(0.5)", 0, "done\n"),
        ("if rank == 0: sys.exit('error: one line') \ntime.sleep(30)", 1, "error: one line\n"),
        (
            "if rank == 0: print('error: bad flag', file=sys.stderr); sys.exit(2) \ntime.sleep(30)",
            2,
            "error: bad flag\n",
        ),
        (
            "if rank == 0: os.kill(os.getpid(), 9) \ntime.sleep(30)",
            137,
            "worker 0 was killed by signal 9 (SIGKILL) (out of memory?)\n",
        ),
    ],
    ids=["success", "error", "usage", "killed"],
)
def test_exit_code_and_nothing_more(
    forked: ForkedParent, tmp_path: Path, config: str, text: str, exit_code: int, output: str
) -> None:
    result = start(forked, config, worker(tmp_path, text)).wait(60)
    assert (result.exit_code, result.output) == (exit_code, output)


@pytest.mark.launch
def test_real_launcher_hands_on_code_and_traceback_once(tmp_path: Path) -> None:
    script = worker(tmp_path, "if rank == 1: raise RuntimeError('lost')\ntime.sleep(30)")
    arguments = [sys.executable, str(TOOL), *command("fsdp_full_shard", script)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=240)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.count("Traceback") == 1 and run.stderr.endswith("RuntimeError: lost\n"), run.stderr


def test_worker_that_stops_first_leaves_the_others_their_time(forked: ForkedParent, tmp_path: Path) -> None:
    text = """
    signal.signal(signal.SIGTERM, lambda *_: print("disturbed", flush=True))
    time.sleep(1.5 * rank)
    print(f"rank {rank}: saved", flush=True)
    sys.exit(75)
    """
    result = start(forked, "fsdp_full_shard", worker(tmp_path, text)).wait(60)
    assert (result.exit_code, result.output) == (75, "rank 0: saved\nrank 1: saved\n")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("config", ["single_device", "fsdp_full_shard"])
def test_signal_is_handed_on_once_and_the_save_waited_for(
    forked: ForkedParent, tmp_path: Path, config: str, signum: signal.Signals
) -> None:
    num_workers = 1 if config == "single_device" else 2
    handle = start(forked, config, worker(tmp_path, SAVE), "1.5", "0.3")
    wait_until_ready(handle, num_workers)
    handle.send_signal(signal.SIGUSR1)  # ignored
    os.killpg(handle.pids[0], signum)  # as a terminal does it: to the launcher's whole process group
    os.killpg(handle.pids[0], signum)  # and once more by another way, such as make
    result = handle.wait(60)
    assert result.exit_code == 75, result.output
    events = [f"rank {rank}: {event}" for rank in range(num_workers) for event in ("signal 15", "saved")]
    assert sorted(result.output.splitlines()) == sorted(["ready"] * num_workers + events)


def test_the_save_after_sigterm_to_accelerate_s_own_launcher(forked: ForkedParent, tmp_path: Path) -> None:
    """Torch's agent gives the workers 30 seconds, of which this save takes a part, and knows one exit code."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(textwrap.dedent(ACCELERATE_LAUNCH))
    script = worker(tmp_path, SAVE)
    handle = forked.start(launcher, *command("ddp", script, "1.5", "0.3"), config="single_device")
    wait_until_ready(handle, 2)
    os.kill(handle.pids[0], signal.SIGTERM)
    result = handle.wait(60)
    assert result.exit_code == 1, result.output
    for rank in range(2):
        assert f"rank {rank}: signal 15\n" in result.output and f"rank {rank}: saved\n" in result.output, result.output


def test_second_signal_kills_at_once(forked: ForkedParent, tmp_path: Path) -> None:
    handle = start(forked, "fsdp_full_shard", worker(tmp_path, SAVE), "30", "30")
    wait_until_ready(handle, 2)
    handle.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    handle.send_signal(signal.SIGTERM)
    result = handle.wait(60)
    assert result.exit_code == 128 + signal.SIGKILL
    assert result.seconds < 20
    assert "was killed by signal 9 (SIGKILL)\n" in result.output


def test_workers_that_do_not_stop_are_killed_after_the_grace(forked: ForkedParent, tmp_path: Path) -> None:
    handle = start(forked, "single_device", worker(tmp_path, SAVE), "30", env={"LAUNCH_GRACE_SECONDS": "0.5"})
    wait_until_ready(handle, 1)
    handle.send_signal(signal.SIGTERM)
    result = handle.wait(60)
    assert result.exit_code == 128 + signal.SIGKILL
    assert result.seconds < 20


def test_failing_worker_ends_the_wait_for_the_others(forked: ForkedParent, tmp_path: Path) -> None:
    text = """
    signals = []
    def stop(signum, frame):  # rank 1 fails in its save; rank 0 waits for it until the agent's signal comes
        signals.append(signum)
        if rank == 1 or len(signals) == 2:
            sys.exit(1)
    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
    """
    handle = start(forked, "fsdp_full_shard", worker(tmp_path, text))
    wait_until_ready(handle, 2)
    handle.send_signal(signal.SIGTERM)
    result = handle.wait(25)
    assert result.exit_code == 1 and not result.timed_out


TWO = "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: 'no'\n"


def parse(tmp_path: Path, yaml_text: str, *flags: str, script: str | None = None) -> argparse.Namespace:
    from accelerate.commands.launch import launch_command_parser

    config = tmp_path / "config.yaml"
    config.write_text(textwrap.dedent(yaml_text))
    script = script or worker(tmp_path, "")
    return launch_command_parser().parse_args(["--config_file", str(config), *flags, script])


def test_more_processes_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TWO.replace("num_processes: 2", "num_processes: 8")
    launch.check(parse(tmp_path, text))  # no GPU at all: a rehearsal on the CPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"8 processes .* 4 GPUs; launch with --num_processes 4\."):
        launch.check(parse(tmp_path, text))
    launch.check(parse(tmp_path, text, "--num_processes", "4"))
    address = "--main_process_ip", "127.0.0.1", "--main_process_port", "29500"
    launch.check(parse(tmp_path, text, "--num_machines", "2", *address))
    with pytest.raises(ValueError, match="starts one process without DDP"):
        launch.check(parse(tmp_path, text, "--cpu"))


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (TWO.replace("num_processes: 2\n", ""), [], "num_processes: is missing"),
        (
            TWO.replace("2", "3") + "num_machines: 2\nmain_process_ip: a\nmain_process_port: 29617\n",
            [],
            "config.yaml:2: num_processes: found 3, the total over all machines, which 2 machines cannot share",
        ),
        (
            TWO + "main_process_ip: a\nmain_process_port: 0\nnum_machines: 2\n",
            [],
            "main_process_port: 0 lets each machine choose another port",
        ),
        (TWO + "num_machines: 2\nmain_process_port: 29617\n", [], "2 machines need main_process_ip"),
        (TWO, ["--num_machines", "2"], "2 machines need --main_process_ip and --main_process_port"),
        (TWO, ["--num_processes", "0"], "num_processes \\(from the launcher\\): found 0; expected at least 1"),
        (
            TWO,
            ["--main_process_port", "70000"],
            "main_process_port \\(from the launcher\\): found 70000; expected 0 to",
        ),
        (TWO + "num_proceses: 3\n", [], "config.yaml:4: num_proceses"),
        (TWO.replace("MULTI_GPU", "FSPD"), [], "FSPD"),
        ("num_processes: 3\nmixed_precision: 'no'\n", [], "distributed_type"),
        ("distributed_type: [\n", [], "config.yaml"),
        ("", [], "expected lines of `key: value`"),
        (TWO, ["--config_file", "accelerate_configs/fsdp9.yaml"], "ddp.yaml"),
    ],
)
def test_bad_configurations_are_one_line(tmp_path: Path, text: str, flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        launch.check(parse(tmp_path, text, *flags))
    assert "\n" not in str(error.value)


def test_missing_script_and_missing_config_exit_2(forked: ForkedParent, tmp_path: Path) -> None:
    result = forked.run(TOOL, *command("ddp", str(tmp_path / "absent.py")), config="single_device")
    assert (result.exit_code, result.output) == (2, f"error: {tmp_path / 'absent.py'}: no such script\n")
    result = forked.run(TOOL, worker(tmp_path, ""), config="single_device")
    assert result.exit_code == 2 and result.output.startswith("error: --config_file is missing")


@pytest.mark.parametrize(
    ("num_machines", "more", "flags", "port"),
    [
        (1, "", [], 0),
        (1, "main_process_port: 29617\n", [], None),
        (1, "", ["--main_process_port", "29617"], 29617),
        (2, "main_process_ip: 127.0.0.1\nmain_process_port: 29617\nmachine_rank: 0\nmixed_precision: 'no'\n", [], None),
    ],
)
def test_runs_of_one_machine_have_ports_of_their_own(
    num_machines: int, more: str, flags: list[str], port: int | None, tmp_path: Path
) -> None:
    text = f"distributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: {num_machines}\n{more}"
    launch.check(args := parse(tmp_path, text, *flags))
    assert args.main_process_port == port


@pytest.mark.parametrize("name", ["FSDP_OFFLOAD_PARAMS", "PARALLELISM_CONFIG_CP_SIZE", "ACCELERATE_USE_DEEPSPEED"])
def test_settings_beside_the_file_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launch.check(parse(tmp_path, TWO))
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"the environment has {name}, .*config.yaml says; unset it"):
        launch.check(parse(tmp_path, TWO))


@pytest.mark.full
def test_a_signal_ends_the_wait_for_the_first_machine(forked: ForkedParent, tmp_path: Path) -> None:
    """Inside torch, where no handler of Python's runs."""
    config = tmp_path / "config.yaml"
    config.write_text(
        f"{TWO}num_machines: 2\nmachine_rank: 1\nmain_process_ip: 127.0.0.1\nmain_process_port: {free_port()}\n"
    )
    handle = forked.start(TOOL, "--config_file", str(config), worker(tmp_path, ""), config="single_device")
    time.sleep(10)
    handle.send_signal(signal.SIGTERM)
    result = handle.wait(20)
    assert result.exit_code in (128 + signal.SIGTERM, -signal.SIGTERM) and result.seconds < 20


def run_machines(output: Path, *flags: list[str], env: dict[str, str] | None = None) -> list[tuple[int, str]]:
    """Exit code and output of launchers that stand for one machine each, with flags of their own."""
    port = free_port()
    machines = [
        subprocess.Popen(
            [
                sys.executable, str(TOOL), "--num_processes", "2", "--num_machines", "2", "--machine_rank", str(rank),
                "--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "--config_file", *own,
                f"--output_dir={output}",
            ],
            cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, own in enumerate(flags)
    ]  # fmt: skip
    try:
        said = [machine.communicate(timeout=80)[0] for machine in machines]
        return [(machine.returncode, text) for machine, text in zip(machines, said, strict=True)]
    finally:
        for machine in machines:
            machine.terminate()
            machine.wait(timeout=30)


RECIPE = ["recipes/gpt_shakespeare.py", "--config=gpt_shakespeare_demo"]


@pytest.mark.full
@pytest.mark.timeout(180)
def test_a_machine_that_comes_late_hears_of_the_error_too(tmp_path: Path) -> None:
    # Without a GPU gloo waits for all processes anyhow; on GPUs nothing did.
    (tmp_path / "sitecustomize.py").write_text("import os, time\ntime.sleep(12 * (os.environ.get('RANK') == '1'))\n")
    output = tmp_path / "run"
    (output / "checkpoints").mkdir(parents=True)
    flags = [str(CONFIGS / "ddp.yaml"), *RECIPE]
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for code, said in run_machines(output, flags, flags, env=env):
        assert code == 2 and "holds another run (checkpoints)" in said, said


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("config", "flags", "difference"),
    [
        ("fsdp_shard_grad_op", [], "fsdp_reshard_after_forward is true for process 0 and false for process 1: start"),
        pytest.param("ddp", [], "is false for process 0 and None for process 1: start all", marks=pytest.mark.full),
        pytest.param(
            "fsdp_full_shard", ["--learning_rate=0.1"], "--learning_rate is 0.004 for process 0 and 0.1 for process 1",
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_machines_with_other_settings_end(config: str, flags: list[str], difference: str, tmp_path: Path) -> None:
    ours, theirs = (str(CONFIGS / f"{name}.yaml") for name in ("fsdp_full_shard", config))
    for code, said in run_machines(tmp_path / "run", [ours, *RECIPE], [theirs, *RECIPE, *flags]):
        assert code == 2 and difference in said and "Traceback" not in said, said
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_one_line(forked: ForkedParent, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config.write_text(
            "distributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: 2\nmachine_rank: 0\nmixed_precision: 'no'\n"
            f"main_process_ip: 127.0.0.1\nmain_process_port: {taken.getsockname()[1]}\n"
        )
        result = forked.run(TOOL, "--config_file", str(config), worker(tmp_path, ""), config="single_device")
    assert result.exit_code == 2, result.output
    waiting, error = result.output.splitlines()
    assert waiting == "machine 0 of 2: waiting for the others"
    assert error.startswith("error: Tried to launch") and "main_process_port" in error


def dry_run(*arguments: str, gpus: str = "") -> str:
    """The command line that make would run, on a machine where CUDA shows the GPUs `gpus`."""
    run = subprocess.run(
        ["make", "--dry-run", "--old-file=.venv/.installed", "--no-print-directory", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus},
        capture_output=True,
        text=True,
        check=True,
    )
    return " ".join(run.stdout.replace("\\\n", " ").split())


@pytest.mark.parametrize(
    ("arguments", "gpus", "expected"),
    [
        ([], "", "--config_file accelerate_configs/fsdp_full_shard.yaml recipes/t5_summarize.py"),
        ([], "0,1,3", "accelerate_configs/fsdp_full_shard.yaml --num_processes 3 recipes/t5_summarize.py"),
        (["CONFIG=single_device"], "0,1", "accelerate_configs/single_device.yaml recipes/t5_summarize.py"),
        (["CONFIG=my/own.yaml", "NUM_PROCESSES=4"], "0", "my/own.yaml --num_processes 4 recipes/t5_summarize.py"),
        (["PRESET=demo"], "", "t5_summarize.py --config recipes/configs/t5_summarize_demo.yaml"),
        (["PRESET=t5_summarize_demo"], "", "t5_summarize.py --config recipes/configs/t5_summarize_demo.yaml"),
        (["PRESET=my/own.yaml", "ARGS=--max_steps 3"], "", "t5_summarize.py --config my/own.yaml --max_steps 3"),
    ],
)
def test_make_builds_the_command_line(arguments: list[str], gpus: str, expected: str) -> None:
    assert dry_run("t5-summarize", *arguments, gpus=gpus).endswith(expected)


def test_make_demo_uses_two_processes_but_not_on_one_gpu() -> None:
    assert "fsdp_full_shard.yaml --num_processes 2 recipes/t5_summarize.py" in dry_run("demo")
    assert "fsdp_full_shard.yaml --num_processes 2 recipes/t5_summarize.py" in dry_run("demo", gpus="0,1,2,3")
    assert "fsdp_full_shard.yaml --num_processes 1 recipes/t5_summarize.py" in dry_run("demo", gpus="0")
