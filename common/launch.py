"""Process group, device and precision of a run, as the accelerate launcher's YAML asks for them.

The one place that builds an `Accelerator`. On a machine without a GPU the same YAML is rehearsed on the CPU over gloo
with real FSDP units; what had to be substituted is named in the banner, and what cannot be rehearsed is refused.
"""

import faulthandler
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import psutil
import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from torch.distributed.fsdp import CPUOffloadPolicy

from common import arguments, memory
from common.accelerate_config import LaunchConfig, check_launch, wrap_class_names
from common.arguments import TrainArguments, UserError, is_first_process, plan_batch
from common.files import write_text
from common.optim import LossScale
from common.stopping import await_announcement, end_forks_with_this_process, received_signal, signal_with_parent

EXIT_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 75  # stopped by a signal with a complete checkpoint; start again to go on

# Other processes wait this long before they report, so that the one that failed first is seen alone: the launcher ends
# them within a second of its exit.
REPORT_DELAY_SECONDS = 5.0


class Stopped(Exception):
    """The run was asked to stop and has saved a complete checkpoint."""


class RunFailed(Exception):
    """Training cannot go on (a loss that is not finite, a full disk): shown as one line; exit code 1."""


@dataclass(frozen=True)
class Strategy:
    """What the YAML asks for, read from the launcher's environment."""

    kind: Literal["single", "ddp", "fsdp1", "fsdp2"]
    mixed_precision: str
    """no, bf16, fp16 or fp8, as it is in effect."""
    asked_precision: str = "no"
    """The same as the YAML asks for it; a CPU may have taken float32 in its place."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    plugin: FullyShardedDataParallelPlugin | None = None
    """accelerate's reading of fsdp_config; None without FSDP."""
    wrap_classes: tuple[str, ...] = ()
    """Block classes that the YAML names; none: the model's own."""
    context_size: int = 1
    """Processes that share a sequence: context parallelism where there are several."""
    replicas: int = 1
    """Copies of the sharded model: FSDP2's hybrid has several groups of processes, each with one."""
    backward_prefetch: str | None = None
    """FSDP2: BACKWARD_PRE or NO_PREFETCH where the YAML has the key; None leaves the order to FSDP2."""
    forward_prefetch: bool = False
    ram_efficient_loading: bool = True
    """Each process reads its own slices of a checkpoint; else each loads the whole model before sharding."""
    fp8_options: Mapping[str, bool] = field(default_factory=dict)
    """Arguments of torchao's Float8LinearConfig."""
    compile_options: Mapping[str, Any] | None = None
    """Arguments of torch.compile; None: not compiled."""
    substitutions: tuple[str, ...] = field(default=())
    """What this machine cannot do as asked and what runs in its place, for the banner."""

    @property
    def is_fsdp(self) -> bool:
        return self.plugin is not None

    @property
    def is_offloaded(self) -> bool:
        """Parameters, gradients and optimizer rest in host memory, and the update is computed there."""
        offload = self.plugin.cpu_offload if self.plugin else None  # FSDP2: a policy object in both cases
        return isinstance(offload, CPUOffloadPolicy) or bool(getattr(offload, "offload_params", False))

    def describe(self) -> str:
        """The strategy in words."""
        names = {"single": "one device", "ddp": "DDP, parameters replicated", "fsdp1": "FSDP1", "fsdp2": "FSDP2"}
        text = names[self.kind]
        if self.kind == "fsdp2":
            assert self.plugin is not None
            text += ", parameters, gradients and optimizer sharded"
            text += ", resharded after forward" if self.plugin.reshard_after_forward else ", kept after forward"
            if self.replicas > 1:
                text += f", {self.replicas} replicas"
            if self.context_size > 1:
                text += f", each sequence split over {self.context_size} processes"
        elif self.kind == "fsdp1":
            assert self.plugin is not None and self.plugin.sharding_strategy is not None
            text += f" {self.plugin.sharding_strategy.name.lstrip('_')}"
        return text + (", offloaded to host memory" if self.is_offloaded else "")


def run(main: Callable[[], None]) -> NoReturn:
    """Run a recipe's main and leave with its exit code: 0 done, 1 error, 2 user error, 75 stopped with a checkpoint.

    An error is shown once, by the process that had it. The others leave quietly and nothing waits for them. A process
    that crashes inside a library shows where its threads were.
    """
    faulthandler.enable(2)
    await_announcement()
    end_forks_with_this_process()
    _stop_with_launcher()
    try:
        main()
    except UserError as error:
        code, message = EXIT_USER_ERROR, traceback.format_exc() if arguments.show_tracebacks else f"error: {error}\n"
    except RunFailed as error:
        code, message = EXIT_ERROR, traceback.format_exc() if arguments.show_tracebacks else f"error: {error}\n"
    except Stopped as stopped:
        code, message = EXIT_STOPPED, f"{stopped}\n"
    except KeyboardInterrupt:
        code, message = EXIT_ERROR, "interrupted\n"
    except Exception as error:
        known = None if arguments.show_tracebacks else _explain(error)
        code, message = EXIT_ERROR, f"error: {known}\n" if known else traceback.format_exc()
        if _is_lost_connection(error):
            # Another process has gone; its own error is the one to see, and the launcher is about to end this one, or
            # has tried to by the signal that asks for a stop.
            time.sleep(2 * REPORT_DELAY_SECONDS)
            if received_signal() is not None:
                os._exit(EXIT_ERROR)
    else:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit(0)
    if code != EXIT_STOPPED and not is_first_process():
        time.sleep(REPORT_DELAY_SECONDS)
    if code != EXIT_STOPPED or is_first_process():
        sys.stdout.flush()
        sys.stderr.write(message)
    sys.stderr.flush()
    # Not sys.exit: the interpreter's shutdown can wait for collectives that will never finish.
    os._exit(code)


def _explain(error: Exception) -> str | None:
    """One line for a library's error that is no fault of the code; None: where it was has to be seen."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        return memory.explain(error)
    if "No space left on device" in text:
        return text
    if re.match(r"DataLoader worker .*(killed|exited)", text):
        return f"{text} Fewer --dataloader_num_workers need less host memory."
    return None


def _stop_with_launcher() -> None:
    """Have Linux send this process SIGTERM when tools/launch.py has gone, however that was; nobody else would tell."""
    launcher = os.environ.get("LAUNCHER_PID")
    if launcher is None or sys.platform != "linux":
        return
    signal_with_parent(signal.SIGTERM)
    if int(launcher) not in [
        process.pid for process in psutil.Process().parents()
    ]:  # gone already, which sends nothing
        os.kill(os.getpid(), signal.SIGTERM)


def _is_lost_connection(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return any(text in str(error) for text in ("Connection closed by peer", "Connection reset by peer", "gloo"))


def build_accelerator(args: TrainArguments) -> tuple[Accelerator, Strategy]:
    """Join the process group that the launcher prepared and check that what the YAML asks for is what runs.

    Raises `UserError` before anything is loaded when the machine cannot do what was asked.
    """
    given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if os.environ.get(name)]
    if 0 < len(given) < 3:
        raise UserError(
            f"the environment has {', '.join(given)} but not all of RANK, WORLD_SIZE and LOCAL_RANK, which a launcher "
            "sets: start with accelerate launch, or unset them."
        )
    launch = check_launch(args.accelerate_config)
    settings = _settings(args)
    requested = _requested_kind()
    on_cpu = _flag("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    _check_devices(on_cpu)
    mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    _check_precision(args, launch.named("mixed_precision"), mixed_precision, on_cpu)
    substitutions = []
    ram_efficient_loading = _flag("FSDP_CPU_RAM_EFFICIENT_LOADING", default=True)
    if requested in ("fsdp1", "fsdp2"):
        # Loading is ours: every process reads its own slices of a checkpoint. accelerate's and transformers' way, rank
        # 0 alone reading and broadcasting, is switched off, because it leaves the other processes with empty weights.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        os.environ["FSDP_SYNC_MODULE_STATES"] = "false"
        if _flag("FSDP_OFFLOAD_PARAMS"):
            if requested == "fsdp1":
                _check_fsdp1_offload(launch.named("fsdp_offload_params"), args, num_processes, on_cpu)
            if on_cpu:
                substitutions.append("offload without pinned memory")
        if on_cpu and num_processes == 1 and requested == "fsdp1":
            substitutions.append("FSDP1 on one process shards nothing (NO_SHARD)")
    compute_precision = mixed_precision
    if on_cpu and mixed_precision in ("bf16", "fp16") and not _cpu_computes(mixed_precision):
        # Thirty times slower than float32 where the processor has no such instructions.
        compute_precision = "no"
        substitutions.append(f"{mixed_precision} computed in float32, which is what this CPU has instructions for")
    compile_options = _compile_options()
    if on_cpu and compile_options and compile_options["backend"] == "inductor":
        # The same graphs are captured; generating and compiling C++ for them takes minutes.
        compile_options["backend"] = "aot_eager"
        substitutions.append("compiled blocks run through aot_eager, without generated code")
    if requested != "single" and "RANK" not in os.environ:
        raise UserError(
            f"the environment asks for {requested.upper()}, but no launcher started this process: use accelerate "
            "launch --config_file, or torchrun with ACCELERATE_CONFIG_FILE."
        )
    timeout = timedelta(seconds=args.ddp_timeout)
    # NCCL's group is joined without waiting for the others. A process that then leaves, refusing what follows, would
    # take the store along with its launcher, and a process of another machine that comes later would wait for it.
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
    if on_cpu and requested != "single" and not dist.is_initialized():
        # accelerate joins no group for one process, but FSDP needs one.
        dist.init_process_group("gloo", timeout=timeout)
        sharding = "" if requested == "ddp" else ": real sharding, no GPU"
        substitutions.insert(0, f"rehearsal on the CPU over gloo{sharding}")
    # Read by us and hidden from accelerate, which drops prefetch under FSDP2 and builds no mesh on a CPU.
    backward_prefetch = _hide("FSDP_BACKWARD_PREFETCH") if requested == "fsdp2" else None
    forward_prefetch = requested == "fsdp2" and _flag("FSDP_FORWARD_PREFETCH")
    parallelism = _parallelism(num_processes)
    if parallelism.cp_size > 1 and (reason := args.no_slices()):
        raise UserError(f"{launch.named('parallelism_config_cp_size')}: {reason}.")
    with _quiet_accelerate():
        accelerator = Accelerator(
            # Precision is applied with the sharding: accelerate would wrap forwards and scale losses a second time.
            mixed_precision="no",
            # MPS has no FSDP or gloo; alone it is accelerate's own choice.
            cpu=on_cpu and (requested != "single" or _flag("ACCELERATE_USE_CPU")),
            # Our loop normalises by tokens; accelerate must not divide the loss again.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        )
        plugin = FullyShardedDataParallelPlugin() if requested in ("fsdp1", "fsdp2") else None
    strategy = Strategy(
        kind=requested,
        mixed_precision=compute_precision,
        asked_precision=mixed_precision,
        launch=launch,
        plugin=plugin,
        wrap_classes=tuple(wrap_class_names(os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP"))),
        context_size=parallelism.cp_size,
        replicas=parallelism.dp_replicate_size,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        ram_efficient_loading=ram_efficient_loading,
        fp8_options={
            "enable_fsdp_float8_all_gather": _flag("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"),
            "pad_inner_dim": _flag("ACCELERATE_FP8_PAD_INNER_DIM"),
        },
        compile_options=compile_options,
        substitutions=tuple(substitutions),
    )
    accelerator.scaler = LossScale() if compute_precision == "fp16" else None
    if parallelism.cp_size > 1:
        accelerator.state.parallelism_config = parallelism
    _check_effective(accelerator, num_processes)
    _check_agreement(settings, timeout)
    _set_up_process(args, accelerator, strategy)
    _check_output_dir(args)
    return accelerator, strategy


def _flag(name: str, default: bool = False) -> bool:
    return os.environ.get(name, str(default)).lower() in ("1", "true", "yes", "on")


def _requested_kind() -> Literal["single", "ddp", "fsdp1", "fsdp2"]:
    if _flag("ACCELERATE_USE_FSDP"):
        return "fsdp2" if os.environ.get("FSDP_VERSION", "1") == "2" else "fsdp1"
    return "ddp" if "RANK" in os.environ else "single"


def _cpu_computes(mixed_precision: str) -> bool:
    # Private, seen in torch 2.11-2.13: there is no public question for bf16 instructions of a CPU.
    return mixed_precision == "bf16" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _compile_options() -> dict[str, Any] | None:
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend == "no":
        return None
    return {
        "backend": backend,
        "mode": os.environ.get("ACCELERATE_DYNAMO_MODE", "default"),
        "fullgraph": _flag("ACCELERATE_DYNAMO_USE_FULLGRAPH"),
        # The launcher says "not dynamic" also where the YAML says nothing; ragged batches would compile every length.
        "dynamic": True if _flag("ACCELERATE_DYNAMO_USE_DYNAMIC") else None,
    }


def _hide(name: str) -> str | None:
    return os.environ.pop(name, None)


def _parallelism(num_processes: int) -> ParallelismConfig:
    """The YAML's parallelism_config; raises `UserError` unless its sizes make up all processes."""
    if not _flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, cp_size=1)
    _hide("ACCELERATE_USE_PARALLELISM_CONFIG")
    config = ParallelismConfig()  # of the environment
    if config.total_size != num_processes:
        sizes = {"dp_replicate_size": config.dp_replicate_size, "dp_shard_size": config.dp_shard_size}
        if config.cp_size > 1:
            sizes["cp_size"] = config.cp_size
        raise UserError(
            f"parallelism_config: {' x '.join(f'{name} {size}' for name, size in sizes.items())} = "
            f"{config.total_size}, but there are {num_processes} processes; launch with --num_processes "
            f"{config.total_size} or change the sizes."
        )
    return config


def _check_devices(on_cpu: bool) -> None:
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not on_cpu and local_processes > torch.cuda.device_count():
        raise UserError(
            f"{local_processes} processes on this machine but {torch.cuda.device_count()} GPUs; "
            f"launch with --num_processes {torch.cuda.device_count()} (times the number of machines)."
        )


def _check_precision(args: TrainArguments, key: str, mixed_precision: str, on_cpu: bool) -> None:
    if args.param_dtype == "float64" and mixed_precision != "no":
        raise UserError(
            f"{key}: {mixed_precision} contradicts --param_dtype float64; write 'no' there, or add --mixed_precision "
            "no to accelerate launch, before the script's name."
        )
    if args.param_dtype != "float32" and mixed_precision == "fp16":
        raise UserError(
            f"{key}: fp16 needs float32 parameters, and --param_dtype is {args.param_dtype}; drop it or take bf16."
        )
    if mixed_precision == "fp8":
        _check_fp8(key, on_cpu)
    if on_cpu or "bf16" not in (mixed_precision, args.param_dtype.replace("bfloat16", "bf16")):
        return
    # Natively: device, CUDA and NCCL, as the tutorial of PyTorch checks it.
    where = (
        f"{torch.cuda.get_device_name()} (compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))})"
    )
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            f"bf16 asked for, but {where} has no native bf16; add --mixed_precision no before the script's name "
            "(fp16 suits causal models only)."
        )
    if torch.cuda.nccl.version() < (2, 10):
        raise UserError(f"bf16 asked for, but NCCL {torch.cuda.nccl.version()} cannot sum it; 2.10 or newer can.")


def _check_fp8(key: str, on_cpu: bool) -> None:
    have = "this run is on the CPU" if on_cpu else None
    if not on_cpu and torch.cuda.get_device_capability() < (8, 9):
        have = f"this is {torch.cuda.get_device_name()}"
    if have:
        raise UserError(
            f"{key}: fp8 needs a GPU with fp8 matrix products (Hopper, Ada or newer), and {have}; use a YAML with bf16."
        )
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f"{key}: fp8 needs the package torchao: pip install torchao, or use a YAML with bf16.")


def _check_fsdp1_offload(key: str, args: TrainArguments, num_processes: int, on_cpu: bool) -> None:
    if on_cpu:
        raise UserError(
            f"{key}: FSDP1 offloads from a GPU only and cannot be rehearsed on the CPU; "
            "rehearse with fsdp_version: 2, or set it to false."
        )
    if (plan := plan_batch(args, num_processes)).num_micro_batches > 1:
        # Documented in torch's FullyShardedDataParallel: the newly reduced gradient takes the place of the sum.
        raise UserError(
            f"{key}: FSDP1 keeps the gradient of the last micro-batch only, and a step has "
            f"{plan.num_micro_batches}; use fsdp_version: 2 (fsdp_full_shard_offload.yaml), or "
            f"--per_device_train_batch_size {plan.per_device * plan.num_micro_batches}."
        )


def _check_effective(accelerator: Accelerator, num_processes: int) -> None:
    """As many processes work together as the launcher has started, before a model is loaded or a folder is made."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not num_processes == world == accelerator.num_processes:
        raise UserError(
            f"the launcher says that there are {num_processes} processes, the process group has {world} and accelerate "
            f"{accelerator.num_processes}; launch with accelerate launch --config_file."
        )


def _settings(args: TrainArguments) -> dict[str, str]:
    """What has to be the same on all machines: the YAML's settings, and flags that name no file."""
    names = [name for name in os.environ if re.match(r"ACCELERATE_|FSDP_|PARALLELISM_CONFIG_", name)]
    chosen = {name: os.environ[name] for name in names if "/" not in os.environ[name]}
    flags = {f"--{name}": str(value) for name, value in args.to_dict().items() if "/" not in str(value)}
    return {name.removeprefix("ACCELERATE_").lower(): value for name, value in chosen.items()} | flags


def _check_agreement(settings: dict[str, str], timeout: timedelta) -> None:
    """Each machine has a launcher of its own: other settings there would end in processes that wait for each other."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == int(os.environ.get("LOCAL_WORLD_SIZE", str(world))):
        return
    # Over gloo messages arrive also when their sender leaves at once.
    group = dist.new_group(backend="gloo", timeout=timeout)
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, settings, group=group)
    dist.destroy_process_group(group)
    if difference := first_difference(everywhere):
        name, rank = difference
        raise UserError(
            f"{name} is {everywhere[0].get(name)} for process 0 and {everywhere[rank].get(name)} for process {rank}: "
            "start all machines with the same YAML and flags."
        )


def first_difference(everywhere: Sequence[Mapping[str, Any]]) -> tuple[str, int] | None:
    """(name, process) of the first value that is not that of process 0; None: all processes have the same."""
    first = everywhere[0]
    for rank, other in enumerate(everywhere):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                return name, rank
    return None


def cores_per_process() -> int:
    """Cores of this machine, or of what its scheduler gave, shared out among the run's processes on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _set_up_process(args: TrainArguments, accelerator: Accelerator, strategy: Strategy) -> None:
    import datasets
    import transformers

    # Every message of the libraries once, from the main process.
    if not accelerator.is_local_main_process:
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity_error()
        transformers.utils.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
    if not (accelerator.is_local_main_process and sys.stderr.isatty()):  # in a file its bars are lines without end
        transformers.utils.logging.disable_progress_bar()
    if strategy.is_offloaded and accelerator.device.type == "cuda":
        torch.set_num_threads(cores_per_process())  # the launcher leaves one, and the update waits for it
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # It would fill every new tensor with NaN, also the buffers that an asynchronous checkpoint is copied into:
        # seconds of waiting, for values that nobody reads.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


CONFIG_FILE = "config.yaml"
RUN_FILES = (
    CONFIG_FILE, "metrics.jsonl", "checkpoints", "model", "best", "best.superseded", "report.html", "tensorboard",
    "wandb",
)  # fmt: skip


def _check_output_dir(args: TrainArguments) -> None:
    try:
        _check_folder(args, Path(str(args.output_dir)))
    except OSError as error:
        raise UserError(f"--output_dir {args.output_dir}: cannot be used: {error.strerror}.") from error


def _check_folder(args: TrainArguments, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file; give a folder.")
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"--output_dir {folder} is a link to {folder.readlink()}, which does not exist; make it first.")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"--output_dir {folder}: {existing} is a file; give another folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--output_dir {folder}: cannot be written: {existing} is read-only or another user's.")
    found = [name for name in RUN_FILES if (folder / name).exists()]
    if found and not args.resume_from_checkpoint and not args.overwrite_output_dir:
        raise UserError(
            f"--output_dir {folder} holds another run ({', '.join(found)}): choose another folder, go on with "
            "--resume_from_checkpoint latest, or start afresh with --overwrite_output_dir."
        )
    resumed = args.resume_from_checkpoint
    is_elsewhere = resumed not in (None, "latest") and args.max_steps != 0 and not _is_inside(str(resumed), folder)
    if found and is_elsewhere and _resumed_from(folder) != resumed:
        raise UserError(
            f"--output_dir {folder} holds another run ({', '.join(found)}) than {resumed} is of: choose another "
            "folder, or go on with the run that is there, --resume_from_checkpoint latest."
        )
    if "model" in found and args.resume_from_checkpoint == "latest" and "checkpoints" not in found:
        raise UserError(
            f"--resume_from_checkpoint latest: {folder} holds a finished run without checkpoints; train from its "
            f"weights with --model_name_or_path {folder / 'model'} into another folder, or give --overwrite_output_dir."
        )
    if args.overwrite_output_dir:
        for name, value in args.to_dict().items():
            paths = [value, *re.split("[,;]", value)] if isinstance(value, str) else []
            inside = [part for part in found if any(_is_inside(path.strip(), folder / part) for path in paths)]
            if inside and name != "output_dir":
                raise UserError(
                    f"--overwrite_output_dir would remove {folder / inside[0]}, which --{name} {value} needs: choose "
                    "another --output_dir."
                )


def _resumed_from(folder: Path) -> str | None:
    """The checkpoint that the run of this folder was told to go on from."""
    try:
        return yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))["resume_from_checkpoint"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None


def _is_inside(text: str, folder: Path) -> bool:
    return text != "" and Path(text).exists() and Path(text).resolve().is_relative_to(folder.resolve())


def claim_output_dir(args: TrainArguments, accelerator: Accelerator) -> None:
    """Make the output folder this run's, which ends an earlier run's files in it; collective.

    Called when everything that can be wrong with the arguments, the data and the model has been seen.
    """
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        folder = Path(str(args.output_dir))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _lock(folder)
            _check_folder(args, folder)  # once more: another run may have ended while this one was loading
            if not args.resume_from_checkpoint:  # else once the checkpoint is known to be this run's
                for path in [folder / name for name in RUN_FILES if (folder / name).exists()]:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                write_config(args)
        except OSError as error:
            raise UserError(f"--output_dir {folder}: cannot be written: {error}") from error
    accelerator.wait_for_everyone()


_locks: dict[Path, int] = {}  # open until the process ends, however it ends
LOCK_SECONDS = 10.0  # a killed run's data workers may live a little longer than it


def _lock(folder: Path) -> None:
    """Raise `UserError` when another run on this machine has the folder."""
    if folder.resolve() in _locks:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--output_dir {folder}: another run is writing to it; wait for its end or choose another folder."
                ) from None
            time.sleep(0.2)
            continue
        except OSError:  # a file system without locks
            return
        _locks[folder.resolve()] = descriptor
        return


_banner = ""  # as it was printed


def write_config(args: TrainArguments) -> None:
    """Write config.yaml, everything that is in effect, into the output folder; the main process calls it.

    The banner stands above the settings as a comment: what the accelerate YAML says is no setting of the recipe.
    """
    comment = "".join(f"# {line}\n" for line in _banner.splitlines())
    text = yaml.safe_dump(args.to_dict(), sort_keys=False)
    write_text(Path(str(args.output_dir)) / CONFIG_FILE, comment + text)


@contextmanager
def _quiet_accelerate():
    """Without the warnings of settings that accelerate does not act on and we do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
        yield


def banner(args: TrainArguments, accelerator: Accelerator, strategy: Strategy, **rows: str) -> None:
    """Print what is in effect, the launch and the recipe's own rows, on the main process; config.yaml has it, too."""
    global _banner
    title = Path(sys.argv[0]).stem
    all_rows = {**_launch_rows(args, accelerator, strategy), **rows}
    lines = [f"== {title} " + "=" * (96 - len(title))]
    lines += [f"  {name:<12} {value}" for name, value in all_rows.items() if value]
    _banner = "\n".join(lines)
    accelerator.print(_banner, flush=True)


def _launch_rows(args: TrainArguments, accelerator: Accelerator, strategy: Strategy) -> dict[str, str | None]:
    device = accelerator.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name()
        idle = torch.cuda.device_count() - int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if idle > 0:
            device += f"; WARNING: {idle} GPUs of this machine stay idle, --num_processes uses them"
    precision = f"parameters {args.param_dtype}, compute {compute_dtype(args, strategy)}".replace("torch.", "")
    if strategy.is_fsdp:
        precision += f", gradients summed in {reduce_dtype(args, strategy)}".replace("torch.", "")
    return {
        "preset": f"{_short(args.preset)} ({args.preset_reason})",
        "output": args.output_dir,
        "accelerate": str(strategy.launch.path) if strategy.launch.path else None,
        "strategy": strategy.describe(),
        "processes": f"{accelerator.num_processes} on {device}",
        "precision": precision,
        "activations": _describe_activations(args, strategy),
        "prefetch": _describe_prefetch(args, strategy),
        "checkpoints": strategy.plugin.state_dict_type.name if strategy.plugin else None,
        "compile": f"each block, {strategy.compile_options['backend']}" if strategy.compile_options else None,
        "substituted": "; ".join(strategy.substitutions),
        "libraries": _versions(),
    }


def _describe_activations(args: TrainArguments, strategy: Strategy) -> str | None:
    plugin = strategy.plugin
    if not (plugin.activation_checkpointing if plugin else args.gradient_checkpointing):
        return None
    text = "computed again in the backward pass, block by block"
    if args.recompute_matmuls is not None:
        text += " but for attention and " + (
            f"matrix products other than each {args.recompute_matmuls}th"
            if args.recompute_matmuls
            else "matrix products"
        )
    return text + (", their inputs kept in host memory" if plugin and plugin.activation_checkpointing_offload else "")


def _describe_prefetch(args: TrainArguments, strategy: Strategy) -> str | None:
    """Of what the YAML says; nothing where FSDP's own order is in effect."""
    backward, forward = strategy.backward_prefetch, strategy.forward_prefetch
    if strategy.kind == "fsdp1" and strategy.plugin:
        backward = getattr(strategy.plugin.backward_prefetch, "name", None)
        forward = bool(strategy.plugin.forward_prefetch)
    parts = [f"backward {backward}"] * bool(backward) + ["forward"] * forward
    if parts and args.prefetch_depth:
        parts.append(f"{args.prefetch_depth} units ahead")
    return ", ".join(parts) or None


def _short(path: str | None) -> str:
    """The path from the working directory where that is shorter."""
    return "none" if path is None else min(path, os.path.relpath(path), key=len)


def _versions() -> str:
    import accelerate
    import transformers

    return f"torch {torch.__version__}, accelerate {accelerate.__version__}, transformers {transformers.__version__}"


def param_dtype(args: TrainArguments) -> torch.dtype:
    """Type of the parameters that the optimizer updates."""
    return getattr(torch, args.param_dtype)


def compute_dtype(args: TrainArguments, strategy: Strategy) -> torch.dtype:
    """Type of matrix products in forward and backward."""
    return {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(
        strategy.mixed_precision, param_dtype(args)
    )


def reduce_dtype(args: TrainArguments, strategy: Strategy) -> torch.dtype:
    """Type in which FSDP sums gradients: float32 unless asked otherwise, because bf16 loses small gradients."""
    if args.reduce_dtype is not None:
        return getattr(torch, args.reduce_dtype)
    return torch.float64 if args.param_dtype == "float64" else torch.float32
