"""Runs that are killed, told to stop, or fail at chosen moments, and what they leave."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.checkpoint import check_contents, read_checkpoint, step_folders
from tests.conftest import REPOSITORY
from tests.forked import CONFIGS, ForkedParent, Result, patched
from tests.tiny import (
    LAUNCHER_FLAGS,
    RECIPE,
    checkpoint_names,
    flags,
    lines,
    mounted,
    saving,
    series,
    train,
    with_loss_scale,
)

INTERRUPTED = REPOSITORY / "tests" / "distributed" / "interrupted.py"
NUM_STEPS = 24
KILLED_RUN = [*saving(2), "--save_total_limit=2", f"--max_steps={NUM_STEPS}"]
TIMEOUT = 60  # seconds; no process may outlive the end of another one by more


def interrupt(
    forked: ForkedParent,
    output: Path,
    moment: str,
    action: str,
    *more: str,
    config: str = "fsdp_full_shard",
    num_processes: int = 2,
) -> Result:
    result = forked.run(
        INTERRUPTED, moment, action, str(RECIPE), *flags(output, *more),
        config=config, num_processes=num_processes, launcher_flags=LAUNCHER_FLAGS, timeout=TIMEOUT,
    )  # fmt: skip
    assert not result.timed_out, result.output
    return result


def assert_complete(output: Path) -> None:
    """Whatever has a checkpoint's name is a complete one."""
    for folder in step_folders(output / "checkpoints"):
        assert check_contents(read_checkpoint(folder)) is None


# SIGKILL


@pytest.fixture(scope="module")
def uninterrupted(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, ...]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(forked, folder / "run", *KILLED_RUN)
    assert checkpoint_names(folder / "run") == ["step_00000022", "step_00000024"]
    return series(folder / "run")


def random_moment(generator: random.Random) -> str:
    """In a step, at a file of a save, in pruning; in either rank where both take part."""
    kind = generator.choice(["step", "file", "file", "prune"])
    if kind == "prune":  # the main process removes; three files, two folders, and a name before them
        return f"prune:{generator.randint(1, 12)}:0"
    rank = generator.randint(0, 1)
    if kind == "step":
        return f"step:{generator.randint(1, 12)}:{rank}:after={generator.uniform(0, 0.2):.3f}"
    return f"file:{generator.randint(1, 45 if rank == 0 else 6)}:{rank}"


def kill_and_resume(
    forked: ForkedParent, output: Path, seed: int, num_kills: int, expected: dict[int, tuple[float, ...]]
) -> None:
    """Kill the run `num_kills` times, each time going on from the latest checkpoint, and let it end."""
    generator = random.Random(seed)
    resume = ["--resume_from_checkpoint=latest", *(["--async_save"] if seed % 2 else [])]
    killed: list[object] = []
    while len(killed) < num_kills:
        moment = random_moment(generator)
        result = interrupt(forked, output, moment, "kill", *KILLED_RUN, *resume)
        assert_complete(output)
        if result.exit_codes == [-signal.SIGKILL] * 2:
            killed.append(moment)
        else:  # it ended before its moment came, or all was done when it came: from the start again
            is_done = "\nDone after" in result.output and set(result.exit_codes) <= {0, -signal.SIGKILL}
            assert result.exit_code == 0 or is_done, f"{moment}: {result.output}"
            assert series(output) == expected, (seed, killed)
            shutil.rmtree(output)
    train(forked, output, *KILLED_RUN, *resume)
    assert series(output) == expected, (seed, killed)
    assert checkpoint_names(output) == ["step_00000022", "step_00000024"]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_run_resumes_bit_for_bit(
    seed: int, uninterrupted: dict[int, tuple[float, ...]], forked: ForkedParent, tmp_path: Path
) -> None:
    kill_and_resume(forked, tmp_path / "run", seed, 5, uninterrupted)


@pytest.mark.kill
@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 120))
def test_two_hundred_kills(
    seed: int, uninterrupted: dict[int, tuple[float, ...]], forked: ForkedParent, tmp_path: Path
) -> None:
    kill_and_resume(forked, tmp_path / "run", seed, 10, uninterrupted)


# Signals

STOPPED_RUN = [*saving(4), "--max_steps=6"]
# Two batches of loss and two of generation in each evaluation of each process.
EVALUATING = ["--eval_strategy=steps", "--eval_steps=3", "--rouge_samples=12", "--per_device_eval_batch_size=3"]


@pytest.fixture(scope="module")
def not_stopped(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs without and with evaluation."""
    folder = tmp_path_factory.mktemp("not_stopped")
    train(forked, folder / "plain", *STOPPED_RUN)
    train(forked, folder / "evaluating", *STOPPED_RUN, *EVALUATING)
    return folder / "plain", folder / "evaluating"


@pytest.mark.parametrize(
    ("moment", "action", "more"),
    [
        ("step:7:0", "SIGTERM", []),
        ("step:7:1:after=0.05", "SIGUSR1", []),
        pytest.param("step:7:0", "SIGINT", [], marks=pytest.mark.full),
        ("step:7:1", "SIGTERM!", []),  # one rank alone
        ("file:12:0", "SIGTERM", []),  # in a save
        ("file:1:1", "SIGTERM", ["--async_save", "--save_steps=2"]),  # the steps go on meanwhile
        ("step:3:0", "SIGTERM", EVALUATING),  # noticed at the end of step 3, where an evaluation is due
        ("evaluation:2:0", "SIGTERM", EVALUATING),
        pytest.param("evaluation:4:0", "SIGTERM", EVALUATING, marks=pytest.mark.full),  # while generating
    ],
)  # fmt: skip
def test_a_signal_ends_with_a_checkpoint_that_resumes_exactly(
    moment: str, action: str, more: list[str], not_stopped: tuple[Path, Path], forked: ForkedParent, tmp_path: Path
) -> None:
    output, whole = tmp_path / "run", not_stopped[more is EVALUATING]
    options = [*STOPPED_RUN, *more]
    result = interrupt(forked, output, moment, action, *options)
    assert result.exit_codes == [75, 75] and result.exit_code == 75, result.output
    assert "Traceback" not in result.output
    (stopped,) = re.findall(r"stopped by (.*) at step (\d+): the last complete checkpoint is (\S+);", result.output)
    assert stopped[0] == ("a signal to another process" if action.endswith("!") else action)
    step = int(stopped[1])
    assert step < 6 and stopped[2] == str(output / "checkpoints" / f"step_{step:08d}")
    assert_complete(output)
    assert max(line["step"] for line in lines(output)) <= step
    train(forked, output, *options, "--resume_from_checkpoint=latest")
    assert series(output) == series(whole)
    evaluations = [
        [{key: value for key, value in line.items() if key.startswith(("step", "eval"))} for line in lines(folder)
         if "eval_loss" in line] for folder in (output, whole)
    ]  # fmt: skip
    assert evaluations[0] == evaluations[1], "an evaluation that was stopped is made up for, once"


def test_a_time_limit_that_is_announced_while_data_are_prepared(forked: ForkedParent, tmp_path: Path) -> None:
    output = tmp_path / "run"
    code = """
import os, signal
from common import data

def announced(**options):
    os.kill(os.getpid(), signal.SIGUSR1)
    return load(**options)

load, data.load_splits = data.load_splits, announced
"""
    result = forked.run(
        patched(RECIPE, tmp_path, code), *flags(output, "--max_steps=1000"),
        config="fsdp_full_shard", num_processes=2, launcher_flags=LAUNCHER_FLAGS,
    )  # fmt: skip
    assert result.exit_codes == [75, 75] and "stopped by SIGUSR1 at step 1: " in result.output, result.output
    assert checkpoint_names(output) == ["step_00000001"]


def test_a_time_limit_ends_with_a_checkpoint(forked: ForkedParent, tmp_path: Path) -> None:
    output = tmp_path / "run"
    result = train(forked, output, "--max_steps=1000", "--max_run_seconds=2", exit_code=75)
    assert re.search(r"stopped by --max_run_seconds at step \d+: .*go on with --resume_from_checkpoint", result.output)
    assert len(checkpoint_names(output)) == 1
    assert_complete(output)
    assert result.seconds < 30


def test_a_second_signal_leaves_at_once_and_keeps_the_checkpoint_before(forked: ForkedParent, tmp_path: Path) -> None:
    """Rank 0 waits in a collective for rank 1, which is stopped: no step boundary will come."""
    output = tmp_path / "run"
    handle = forked.start(
        RECIPE, *flags(output, *saving(1), "--max_steps=1000"),
        config="fsdp_full_shard", num_processes=2, launcher_flags=LAUNCHER_FLAGS,
    )  # fmt: skip
    deadline = time.monotonic() + TIMEOUT
    while not step_folders(output / "checkpoints"):
        assert time.monotonic() < deadline, handle.output
        time.sleep(0.02)
    os.kill(handle.pids[1], signal.SIGSTOP)
    os.kill(handle.pids[0], signal.SIGTERM)
    time.sleep(2.3)
    os.kill(handle.pids[0], signal.SIGTERM)
    started = time.monotonic()
    time.sleep(0.2)
    os.kill(handle.pids[1], signal.SIGKILL)
    result = handle.wait(TIMEOUT)
    assert result.exit_codes[0] == 128 + signal.SIGTERM
    assert time.monotonic() - started < 10
    assert "second signal" in result.output and "Traceback" not in result.output
    assert_complete(output)


def worker_command(output: Path, launcher: list[str], config: str = "ddp") -> list[str]:
    script = [str(RECIPE), *flags(output, *saving(1000), "--max_steps=100000")]
    return [
        *launcher,
        "--config_file",
        str(CONFIGS / f"{config}.yaml"),
        *LAUNCHER_FLAGS,
        "--main_process_port=0",
        *script,
    ]


def wait_for_step(output: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 2 * TIMEOUT  # imports included
    while not (output / "metrics.jsonl").exists() or len(lines(output)) < 2:
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            pytest.fail(f"no step: {process.communicate()}")
        time.sleep(0.1)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("launcher", "exit_code"),
    [
        ([sys.executable, "tools/launch.py"], 75),
        # torch's agent knows no other code; `make test` has this in tests/test_launch_tool.py, with quick workers
        pytest.param([sys.executable, "-m", "accelerate.commands.launch"], 1, marks=pytest.mark.full),
    ],
    ids=["tools/launch.py", "accelerate launch"],
)
def test_sigterm_to_the_launcher(launcher: list[str], exit_code: int, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = subprocess.Popen(
        worker_command(output, launcher), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_step(output, process)
        process.terminate()
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == exit_code, out + err
    assert "stopped by SIGTERM" in err
    assert len(checkpoint_names(output)) == 1
    assert_complete(output)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has gone")
def test_processes_that_tokenize_end_with_a_killed_run(forked: ForkedParent, tmp_path: Path) -> None:
    code = "import time\nfrom common import data\ndata.encode = lambda *args: time.sleep(600)"
    script = patched(RECIPE, tmp_path, code)
    options = flags(tmp_path / "run", "--preprocessing_num_workers=2", "--max_source_length=31")  # not in the cache
    handle = forked.start(script, *options, config="single_device", launcher_flags=LAUNCHER_FLAGS)
    run, deadline = psutil.Process(handle.pids[0]), time.monotonic() + TIMEOUT
    while len(workers := run.children(recursive=True)) < 3 and time.monotonic() < deadline:  # two, and their manager
        time.sleep(0.05)
    run.kill()
    handle.wait()
    gone, alive = psutil.wait_procs(workers, timeout=20)
    for process in alive:
        process.kill()
    assert len(gone) >= 3 and not alive


@pytest.mark.launch
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has gone")
def test_a_killed_launcher_leaves_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = worker_command(output, [sys.executable, "tools/launch.py"], "fsdp_full_shard")
    with (tmp_path / "err").open("w") as file:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=file, stderr=file, text=True)
    ranks: list[psutil.Process] = []
    try:
        wait_for_step(output, process)
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        gone, alive = psutil.wait_procs(ranks, timeout=20)
    finally:
        process.kill()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
    assert len(gone) >= 2 and not alive
    text = (tmp_path / "err").read_text()
    assert "stopped by SIGTERM" in text and "Traceback" not in text, text
    assert len(checkpoint_names(output)) == 1
    assert_complete(output)


# Failures


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_takes_the_others_down(rank: int, forked: ForkedParent, tmp_path: Path) -> None:
    output = tmp_path / "run"
    result = interrupt(forked, output, f"step:9:{rank}", "raise", *saving(2), "--max_steps=100")
    assert result.exit_code == 1
    assert result.seconds < TIMEOUT
    assert result.output.count("Traceback") == 1 and "RuntimeError: raised on purpose" in result.output
    assert checkpoint_names(output)[-1] == "step_00000004"
    assert_complete(output)


def test_a_rank_that_is_killed_takes_the_others_down(forked: ForkedParent, tmp_path: Path) -> None:
    output = tmp_path / "run"
    result = interrupt(forked, output, "step:9:1", "SIGKILL!", *saving(2), "--max_steps=100")
    assert result.exit_codes[1] == -signal.SIGKILL and result.exit_codes[0] != 0
    assert result.seconds < TIMEOUT
    assert "Traceback" not in result.output
    assert_complete(output)


@pytest.mark.parametrize("more", [[], ["--async_save"]])
def test_a_full_disk_ends_the_run_in_one_line(more: list[str], forked: ForkedParent, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=5m") as disk:
        output = disk / "run"
        result = train(forked, output, *saving(1), "--max_steps=20", *more, exit_code=1)
        (error,) = [line for line in result.output.splitlines() if line.startswith("error")]
        found = re.match(r"error: the checkpoint of step (\d+) cannot be written: .*; the last complete.*step_(\d+)\.",
                         error)  # fmt: skip
        assert found and int(found[2]) == int(found[1]) - 1, error
        assert "Traceback" not in result.output
        assert checkpoint_names(output)[-1] == f"step_{found[2]}", "what was begun is cleaned up"
        assert_complete(output)


def test_a_disk_too_full_for_the_last_weights(forked: ForkedParent, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=300k") as disk:
        result = train(forked, disk / "run", "--max_steps=2", config="single_device", exit_code=2)
        assert "free, but the last weights need" in result.output and "Traceback" not in result.output
        assert [path.name for path in (disk / "run").iterdir()] == ["config.yaml"]
    evaluating = ["--max_steps=2", "--eval_strategy=steps", "--eval_steps=1"]
    train(forked, tmp_path / "run", *evaluating, config="single_device")
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "run" / "model").iterdir())
    with mounted(tmp_path / "large", f"size={num_bytes * 3 // 2}") as disk:  # best/ takes the room of model/
        result = train(forked, disk / "run", *evaluating, config="single_device", exit_code=1)
        (error,) = [line for line in result.output.splitlines() if line.startswith("error")]
        assert re.search(r"run/(best|model) cannot be written: .*No space left on device", error), error
        assert "Traceback" not in result.output
        assert {path.name for path in (disk / "run").iterdir()} == {"config.yaml", "metrics.jsonl", "best"}


def test_a_folder_that_cannot_be_written(forked: ForkedParent, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=300k,ro") as disk:
        result = train(forked, disk / "run", "--max_steps=2", config="single_device", exit_code=2)
        assert re.search(r"^error: --output_dir .*run: cannot be written: .*read-only", result.output, re.MULTILINE)
        assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("config", "more"),
    [("ddp", []), ("fsdp_full_shard", []), ("ddp", ["--logging_steps=100"])],  # a save looks before it writes
)
def test_a_gradient_that_is_not_finite_ends_the_run(
    config: str, more: list[str], forked: ForkedParent, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    result = train(
        forked, output, *saving(1), "--max_steps=9", "--learning_rate=1e30", "--max_grad_norm=0", *more,
        config=config, num_processes=2, exit_code=1,
    )  # fmt: skip
    (error,) = [line for line in result.output.splitlines() if line.startswith("error")]
    found = re.match(r"error: step (\d+): the gradient norm or loss is (nan|inf); its batch has training examples "
                     r"(\d+, ){3}\d+\. .*The last complete checkpoint is \S+step_0*(\d+)\.", error)  # fmt: skip
    assert found and int(found[4]) == int(found[1]) - 1, error
    assert "Traceback" not in result.output
    assert_complete(output)


@pytest.mark.parametrize(
    ("options", "exit_code"),
    [
        (["--max_steps=9", "--learning_rate=1e30", "--max_grad_norm=0"], 1),
        (["--max_steps=1000", "--max_run_seconds=1"], 75),
    ],
    ids=["failed", "stopped"],
)
def test_a_run_that_ends_early_keeps_the_checkpoint_that_is_being_written(
    options: list[str], exit_code: int, forked: ForkedParent, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    code = """
import time
from common.checkpoint import Checkpoints

def publish_late(*args):
    time.sleep(2)
    publish(*args)

publish, Checkpoints._publish = Checkpoints._publish, publish_late
"""
    result = forked.run(
        patched(RECIPE, tmp_path, code), *flags(output, *saving(1), "--async_save", *options),
        config="fsdp_full_shard", num_processes=2, launcher_flags=LAUNCHER_FLAGS,
    )  # fmt: skip
    assert result.exit_code == exit_code, result.output
    (checkpoint,) = re.findall(r"[Tt]he last complete checkpoint is (\S+step_\d+)", result.output)
    assert checkpoint_names(output)[-1] == Path(checkpoint).name
    if exit_code == 75:
        assert f"at step {int(checkpoint[-8:])}: " in result.output, "what was saved at the stop is kept"
    assert_complete(output)


def test_damage_is_found_whichever_process_looks_at_the_file(forked: ForkedParent, tmp_path: Path) -> None:
    """Each compares a share of the files; all have to come to one answer."""
    output = tmp_path / "run"
    train(forked, output, *saving(1), "--max_steps=2")
    whole = series(output)
    newest = output / "checkpoints" / "step_00000002"
    for file in sorted(path for path in newest.rglob("*") if path.is_file() and path.name != "manifest.json")[:4]:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        result = train(forked, output, *saving(1), "--max_steps=2", "--resume_from_checkpoint=latest")
        assert re.search(rf"skipped .*step_00000002.*{file.name}", result.output), result.output
        assert series(output) == whole


def test_the_watch_for_spikes_sees_the_loss_of_all_processes(forked: ForkedParent, tmp_path: Path) -> None:
    output = tmp_path / "run"
    code = """
from common.loop import SpikeGuard

def shown(self, loss, norm):
    print(f"seen {loss!r}")
    return check(self, loss, norm)

check, SpikeGuard.check = SpikeGuard.check, shown
"""
    script = patched(RECIPE, tmp_path, code)
    options = flags(output, "--max_steps=3", "--spike_factor=3")
    result = forked.run(script, *options, config="ddp", num_processes=2, launcher_flags=LAUNCHER_FLAGS)
    assert result.exit_code == 0, result.output
    seen = sorted(float(loss) for loss in re.findall(r"seen (\S+)", result.output))
    assert seen == pytest.approx(sorted(2 * [line["loss"] for line in lines(output)]), rel=1e-6)


def test_steps_that_are_not_finite_can_be_left_out(forked: ForkedParent, tmp_path: Path) -> None:
    """Every step is left out here, because the first update ruins the weights; the third is one too many."""
    output = tmp_path / "run"
    options = ["--max_steps=9", "--learning_rate=1e30", "--max_grad_norm=0", "--max_skipped_steps=2"]
    result = train(forked, output, *options, *saving(100), exit_code=1)
    skipped = re.findall(r"^skipped: step (\d+): the gradient norm or loss is (?:nan|inf)", result.output, re.MULTILINE)
    assert len(skipped) == 2
    (error,) = [line for line in result.output.splitlines() if line.startswith("error")]
    assert f"error: step {int(skipped[-1]) + 1}: the gradient norm" in error
    counts = {line["step"]: line.get("num_skipped_steps") for line in lines(output)}
    assert counts[int(skipped[0])] == 1 and counts[int(skipped[1])] == 2
    assert next(line for line in lines(output) if line["step"] == int(skipped[0]))["loss"] is None


def exact(exponent: int) -> str:
    return re.escape(f"{2.0**exponent:,.15g}")


def test_an_overflow_in_fp16_is_no_fault_of_the_data(forked: ForkedParent, tmp_path: Path) -> None:
    """A loss scale that is too large at first, in float32: it is halved until no gradient overflows."""
    output, script = tmp_path / "run", with_loss_scale(tmp_path, "LossScale(2.0**136)")
    options = flags(output, "--max_steps=12")
    result = forked.run(script, *options, config="ddp", num_processes=2, launcher_flags=LAUNCHER_FLAGS)
    assert result.exit_code == 0, result.output
    skipped = [line for line in result.output.splitlines() if line.startswith("skipped: ")]
    assert 3 <= len(skipped) <= 11
    assert "\r" not in result.output and "step 10: " in result.output  # no terminal: lines, and no bar
    for step, line in enumerate(skipped, start=1):
        assert re.fullmatch(rf"skipped: step {step}: the gradient norm is (inf|nan), an overflow in fp16; .* the loss "
                            rf"scale goes from {exact(137 - step)} to {exact(136 - step)}", line), line  # fmt: skip
    by_step = {line["step"]: line for line in lines(output) if "loss" in line}
    assert sorted(by_step) == list(range(1, 13))
    for step, metrics in by_step.items():
        assert (metrics["loss"] is None) == (metrics["grad_norm"] is None) == (step <= len(skipped))
        assert metrics["num_skipped_steps"] == min(step, len(skipped))
        assert metrics["loss_scale"] == 2.0 ** (136 - min(step, len(skipped)))
