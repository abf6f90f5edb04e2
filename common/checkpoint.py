"""Checkpoints that are complete or absent, and that resume into any layout.

A checkpoint is a folder `checkpoints/step_00000100`. It is written under another name, flushed, its manifest last, and
renamed; only then older ones are removed, by renaming first. So a kill at any moment leaves each folder of that name
complete. The manifest has the size and a checksum of each file, which are compared before a run goes on from it.

    manifest.json                format version, step, progress, what the run was, files with sizes and checksums
    huggingface/                 config and tokenizer, so that an export needs nothing else
    .metadata, __0_0.distcp ...  torch.distributed.checkpoint, a part each process: SHARDED_STATE_DICT, and without FSDP
    state.safetensors            FULL_STATE_DICT in the YAML: one file, gathered and written by the main process

Both forms hold tensors by the model's own parameter names (`model.<name>`, `optimizer.<name>.<state>`), and either
resumes into DDP, FSDP1, FSDP2 and any number of processes. Nothing is unpickled but torch's `.metadata`, through a list
of allowed classes.

Generators of random numbers are not saved: each step seeds them by (seed, step, process). Neither are learning rates,
which follow from the step, nor the position in the data, which is the step.
"""

import contextlib
import copy
import errno
import io
import json
import math
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, EnumType
from pathlib import Path
from typing import Any, TypeVar, cast

import accelerate
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import xxhash
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerBase

from common.arguments import BatchPlan, TrainArguments, UserError
from common.data import describe_contents
from common.files import sync
from common.launch import CONFIG_FILE, RunFailed, Strategy, first_difference, write_config
from common.sharding import base_model

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SHARED_SECONDS = 60.0  # after which a network file system shows what another machine has written
FULL_FILE = "state.safetensors"
HUGGINGFACE_FOLDER = "huggingface"
FOLDER_NAME = re.compile(r"step_(\d+)")
TEMPORARY = ".tmp"
SUPERSEDED = ".superseded"

# Settings that the numbers of a run depend on; more steps, other devices and other paths are no change.
COMPARED = (
    "seed", "total_batch_size", "optim", "learning_rate", "min_learning_rate", "lr_scheduler_type", "lr_gamma",
    "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "param_dtype",
)  # fmt: skip
NEVER_CHANGED = {
    "model": "its weights would not fit",
    "optim": "its state would not fit",
    "total_batch_size": "the position in the data is counted in batches",
}
ALLOWABLE = (
    *(key for key in COMPARED if key not in NEVER_CHANGED), "model_config", "tokenizer", "data", "evaluation_data",
)  # fmt: skip
# Beginnings of the names of flags that may be why data differs.
_OF_ROWS = (
    "max_seq", "max_source", "max_target", "max_summary", "dataset", "document", "summary", "source", "text",
    "validation", "max_games",
)  # fmt: skip
_FLAGS_OF = {
    "data": (*_OF_ROWS, "train", "max_train", "streaming", "shuffle"),
    "evaluation_data": (
        *_OF_ROWS, "forgetting", "max_eval", "per_device_eval", "rouge", "legal", "num_beams", "max_new",
    ),
}  # fmt: skip
# Keys of a model's config that say how it is run or who wrote it, not what it computes.
_NOT_COMPARED_CONFIG = {"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "name_or_path"}
# State tensors of the optimizers in units of the parameters.
_OPTIMIZER_COPIES = {"adamw": 2, "adadelta": 2, "adafactor": 0}

_SAFETENSORS_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

# Of torch: one process needs no group; FSDP1's state dicts are what it has.
EXPECTED_WARNINGS = (
    "torch.distributed is disabled", "Please use DTensor instead", "`_get_pg_default_device` will be deprecated",
    "Multiple backends are registered", "When using ``NO_SHARD``",
)  # fmt: skip

METRICS_OF_A_SET = {"loss", "token_accuracy", "perplexity", "bits_per_byte", "forgetting"}
"""How names of metrics end that each held-out set has, after the beginning that is the set's."""
ABSENT = "absent"  # a held-out set that one of two runs has not

Manifest = dict[str, Any]
Digests = dict[str, tuple[int, str]]
"""Size in bytes and checksum by file name, relative to the checkpoint's folder."""
T = TypeVar("T")


class Incomplete(Exception):
    """The folder is no complete checkpoint; says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose manifest has been read."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest["step"]

    def reader(self) -> dcp.StorageReader:
        """Reader of the tensors for `torch.distributed.checkpoint.load`."""
        if self.manifest["state_dict_type"] == "full":
            return dcp.HuggingFaceStorageReader(str(self.folder))
        return _Reader(self.folder)

    @property
    def huggingface_folder(self) -> Path:
        """Config and tokenizer."""
        return self.folder / HUGGINGFACE_FOLDER


# ---------------------------------------------------------------------------------------------------------------------
# Finding and checking


def step_folders(parent: Path) -> list[Path]:
    """Folders named like checkpoints, complete or not, the highest step first, by number and not by text."""
    found = [(int(match[1]), path) for path in _entries(parent) if (match := FOLDER_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _entries(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []


def _has_optimizer(folder: Path) -> bool:
    try:
        return bool(read_checkpoint(folder).manifest["has_optimizer"])
    except (Incomplete, UserError, OSError):
        return False


def read_checkpoint(folder: Path) -> Checkpoint:
    """Manifest of a folder whose files are all there with the right sizes; contents are not read.

    Raises `Incomplete` with the reason, and `UserError` for a format that this version does not know.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = int(manifest["format_version"])
        checksum = manifest.pop("checksum")
    except FileNotFoundError:
        if not folder.is_dir():
            raise Incomplete("there is no such folder") from None
        raise Incomplete(f"it has no {MANIFEST}, so it was not written to the end, or by another program") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Incomplete(f"its {MANIFEST} is damaged ({error})") from error
    if version > FORMAT_VERSION:
        raise UserError(
            f"{folder}: format version {version} of a newer program; this one reads up to {FORMAT_VERSION}: update it."
        )
    if checksum != _hash(manifest):
        raise Incomplete(f"its {MANIFEST} is damaged (its checksum is another one)")
    if (match := FOLDER_NAME.fullmatch(folder.name)) and int(match[1]) != manifest["step"]:
        raise Incomplete(f"it is a copy or a link of step {manifest['step']} under another step's name")
    for name, (size, _) in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise Incomplete(f"{name} is missing")
        if path.stat().st_size != size:
            raise Incomplete(f"{name} has {path.stat().st_size:,} bytes instead of {size:,}")
    return Checkpoint(folder, manifest)


def check_contents(checkpoint: Checkpoint, process_index: int = 0, num_processes: int = 1) -> str | None:
    """Compare the checksums of this process's share of the files; says what is wrong, if anything."""
    files = sorted(checkpoint.manifest["files"].items())
    for name, (_, expected) in files[process_index::num_processes]:
        digest = xxhash.xxh3_64()
        with (checkpoint.folder / name).open("rb") as file:
            while block := file.read(2**24):
                digest.update(block)
        if digest.hexdigest() != expected:
            return f"{name} is damaged (its checksum is another one)"
    return None


def set_aside(folder: Path) -> Path:
    """Rename what belongs to a course of the run that is given up; returns the new name."""
    aside = folder.with_name(folder.name + SUPERSEDED)
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def find_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in the folder, whose contents are whole, or the newest such one of a run's folder.

    Names on standard error those that it passes over. Raises `UserError` when there is none.
    """
    candidates = step_folders(folder / "checkpoints") or step_folders(folder) or [folder]
    reasons = []
    for candidate in candidates:
        try:
            checkpoint = read_checkpoint(candidate)
            reason = check_contents(checkpoint)
        except Incomplete as error:
            reason = str(error)
        if reason is None:
            return checkpoint
        reasons.append(f"{candidate}: {reason}")
        if candidate != candidates[-1]:
            print(f"skipped {reasons[-1]}", file=sys.stderr)
    exported = [folder / name for name in ("model", "best") if (folder / name / "config.json").is_file()]
    hint = f", but an exported model: {exported[0]}" if exported else ""
    raise UserError(f"{reasons[-1]}; no complete checkpoint in {folder}{hint}.")


class _Reader(dcp.FileSystemReader):
    """torch's reader, with `.metadata` unpickled through a list of allowed classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    ALLOWED = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {"Size", *(str(dtype).removeprefix("torch.") for dtype in _SAFETENSORS_TYPES)},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"PosixPath", "WindowsPath"},
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # by which Python 3.11.2 pickles a member of an enum
            return self._member
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, which is not allowed")
        return super().find_class(module, name)

    @staticmethod
    def _member(owner: Any, name: str) -> Enum:
        if not (isinstance(owner, EnumType) and name in owner.__members__):
            raise pickle.UnpicklingError(f".metadata asks for {name} of {owner}, which is not allowed")
        member: Enum = owner[name]
        return member


# ---------------------------------------------------------------------------------------------------------------------
# What a run is


def describe_run(
    args: TrainArguments,
    plan: BatchPlan,
    model: nn.Module,
    tensors: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    lengths: np.ndarray | None,
    evaluation_data: Mapping[str, str],
) -> dict[str, Any]:
    """What must stay the same for a run to go on, as JSON values; `tensors` is the model's state by name."""
    shapes = sorted((name, tuple(tensor.size())) for name, tensor in tensors.items())
    config = base_model(model).config
    vocabulary = [sorted(tokenizer.get_vocab().items()), sorted(map(str, tokenizer.special_tokens_map.items()))]
    settings = args.to_dict() | {"total_batch_size": plan.total}
    return json.loads(
        json.dumps(
            {
                "model": f"{class_name(model)}, {len(shapes)} tensors, shapes {_hash(shapes)}",
                "model_config": {
                    key: value
                    for key, value in config.to_dict().items()
                    if key not in _NOT_COMPARED_CONFIG and not key.startswith("_")
                },
                "tokenizer": f"{len(tokenizer)} tokens, vocabulary {_hash(vocabulary)}",
                "data": describe_contents(dataset, lengths),
                "evaluation_data": dict(evaluation_data),
                "settings": settings,
            },
            default=str,
        )
    )


def class_name(model: nn.Module) -> str:
    """Class of the Hugging Face model: FSDP2 puts its own name before it."""
    return type(base_model(model)).__name__.removeprefix("FSDP")


def _hash(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, ensure_ascii=False, default=str).encode())


def changed_sets(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Held-out sets that differ, by the beginning of their metrics' names: what they were, what they are."""
    sets = saved["evaluation_data"], now["evaluation_data"]
    pairs = {name: (sets[0].get(name, ABSENT), sets[1].get(name, ABSENT)) for name in {**sets[0], **sets[1]}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """What differs between two descriptions of a run: key -> "then, now" in words."""
    found: dict[str, str] = {}
    for key in ("model", "tokenizer", "data"):
        if saved[key] != now[key]:
            found[key] = f"{saved[key]} in the checkpoint, {now[key]} now"
    # A set that is new or left out changes no number; what was measured on it before is not compared with.
    if sets := {name: pair for name, pair in changed_sets(saved, now).items() if ABSENT not in pair}:
        found["evaluation_data"] = ", ".join(f"{name}* {then} -> {today}" for name, (then, today) in sets.items())
    # Keys of one side only come from another version of transformers.
    configs = saved["model_config"], now["model_config"]
    changed = [key for key in sorted(set(configs[0]) & set(configs[1])) if configs[0][key] != configs[1][key]]
    if changed and "model" not in found:
        found["model_config"] = ", ".join(f"{key} {configs[0][key]!r} -> {configs[1][key]!r}" for key in changed)
    settings = saved["settings"], now["settings"]
    for key in COMPARED:
        if settings[0][key] != settings[1][key]:
            found[key] = f"{settings[0][key]} -> {settings[1][key]}"
    for key in _FLAGS_OF.keys() & found.keys():
        flags = [
            f"--{name} {value} -> {settings[1].get(name)}"
            for name, value in settings[0].items()
            if name.startswith(_FLAGS_OF[key]) and value != settings[1].get(name)
        ]
        if flags:
            found[key] += f" ({'; '.join(flags)})"
    return found


def _allowed_keys(args: TrainArguments) -> set[str]:
    keys = {key.strip() for key in (args.allow_changed or "").split(",") if key.strip()}
    for key in sorted(keys):
        if key in NEVER_CHANGED:
            raise UserError(f"--allow_changed {key}: it cannot change within a run, {NEVER_CHANGED[key]}.")
        if key not in ALLOWABLE:
            raise UserError(f"--allow_changed: unknown key {key!r}; it takes {', '.join(ALLOWABLE)}.")
    return keys


# ---------------------------------------------------------------------------------------------------------------------
# Writing


class _HashingFile(io.BufferedWriter):
    """A file that computes its checksum as it is written and is on disk when it is closed."""

    def __init__(self, path: str | os.PathLike[str], digests: Digests) -> None:
        super().__init__(io.FileIO(path, "wb"), buffer_size=2**20)
        self._name, self._digests = Path(path).name, digests
        self._digest, self._size = xxhash.xxh3_64(), 0

    def write(self, data: Any, /) -> int:
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        return super().write(data)

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
                self._digests[self._name] = self._size, self._digest.hexdigest()
            finally:
                super().close()


class _DigestFileSystem(FileSystem):
    def __init__(self) -> None:
        self.digests: Digests = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with _HashingFile(path, self.digests) as file:
            yield file

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _Writer(dcp.FileSystemWriter):
    """torch's writer, one file a process, with checksums and flushed files."""

    def __init__(self, folder: Path) -> None:
        # One thread: with more, torch 2.13 loses an error of a writing thread and the file's part of the state with it.
        super().__init__(folder, thread_count=1, sync_files=False)
        self.fs = self.digesting = _DigestFileSystem()

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        torch.serialization.set_crc32_options(False)  # a second checksum, which takes a quarter of the time
        return super().write_data(plan, planner)


def _write_full(path: Path, tensors: Mapping[str, Any], is_main_process: bool) -> Digests:
    """Gather tensor by tensor and write them to one safetensors file; collective where tensors are DTensors.

    Raises OSError on the main process, after it has taken part in all gathers.
    """
    digests: Digests = {}
    gathered = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values())
    try:
        with _HashingFile(path, digests) if is_main_process else contextlib.nullcontext() as file:
            if file is not None:
                file.write(_safetensors_header(tensors))
            for tensor in gathered:
                if file is not None:
                    file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    except OSError:
        for _ in gathered:  # the other processes are in these gathers
            pass
        raise
    return digests


def _safetensors_header(tensors: Mapping[str, Any]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.size()),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _remove(folder: Path) -> None:
    """Remove a complete checkpoint, or a link to one: under its name it is complete until it is gone."""
    if folder.is_symlink():
        folder.unlink()  # what it points to is somebody else's
        return
    temporary = folder.with_name(f"{folder.name}.old{TEMPORARY}")
    shutil.rmtree(temporary, ignore_errors=True)
    folder.rename(temporary)
    shutil.rmtree(temporary)


class Checkpoints:
    """The checkpoints of a run: finds the one to resume from when it is made, then loads and saves.

    All processes call the methods together. `found` is the checkpoint to go on from, None for a run from step 0.
    Raises `UserError` when --resume_from_checkpoint names none that is complete, or none that a run can go on from.
    """

    def __init__(
        self, args: TrainArguments, accelerator: Accelerator, strategy: Strategy, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.args = args
        self.accelerator = accelerator
        self.strategy = strategy
        self.tokenizer = tokenizer
        self.folder = Path(str(args.output_dir)) / "checkpoints"
        self.is_full = strategy.plugin is not None and "FULL" in str(strategy.plugin.state_dict_type)
        if self.is_full and args.async_save:
            raise UserError(
                "--async_save: the YAML's fsdp_state_dict_type FULL_STATE_DICT gathers the state on one process while "
                "training waits; set it to SHARDED_STATE_DICT, or drop the flag."
            )
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        self._allowed = _allowed_keys(args)
        self.evaluation_data: dict[str, str] = {}
        """Held-out sets that must stay the same: how the names of their metrics begin -> `EvalBatches.description`.

        The recipe's to fill in, before `start`.
        """
        self.before_training: dict[str, Any] = {}
        """What the recipe knows of the model before training, as JSON values: each checkpoint hands it on."""
        self._only_evaluates = args.max_steps == 0
        # Groups of their own, on the host: saving must not meet the training's collectives, nor wait for the device.
        self._votes, self._saving = self._new_group(), self._new_group()
        self._pending: Future[None] | None = None  # a checkpoint that is being written
        self._staged: Future[None] | None = None  # its copy in host memory
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.last_saved_step: int | None = None
        self.found = self._find()
        if self.found:
            self.before_training = dict(self.found.manifest.get("before_training", {}))

    def _new_group(self) -> dist.ProcessGroup | None:
        if not dist.is_initialized():
            return None
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.args.ddp_timeout))

    # Agreement between the processes.

    def any_process(self, is_so: bool) -> bool:
        """Whether it is so on any process; on the host, without waiting for the device."""
        if self._votes is None:
            return is_so
        vote = torch.tensor(int(is_so))
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._votes)
        return bool(vote)

    def _gather(self, value: T) -> list[T]:
        if self._saving is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._saving)
        return values

    def _together(self, what: str, action: Callable[[], T]) -> T:
        """Run the action; an error of the file system on any process is raised on all, after cleaning up."""
        problem, result = None, None
        try:
            result = action()
        except OSError as error:
            problem = str(error)
        except dcp.CheckpointException as error:
            reasons = [failure for failure, _ in error.failures.values()]
            for reason in reasons:
                if not _is_file_error(reason):
                    raise RuntimeError(f"{what}: {reason}") from reason
            problem = str(reasons[0])
        problems = [text for text in self._gather(problem) if text]
        if problems:
            if self.accelerator.is_main_process:
                self._remove_leftovers()
            raise RunFailed(f"{what}: {problems[0]}; {self.last_complete()}.")
        return cast(T, result)

    def last_complete(self) -> str:
        """In words, which checkpoint a run can go on from."""
        complete = step_folders(self.folder)
        return f"the last complete checkpoint is {complete[0]}" if complete else "there is no complete checkpoint yet"

    def _on_main(self, action: Callable[[], None]) -> Callable[[], None]:
        return action if self.accelerator.is_main_process else lambda: None

    # Resuming.

    def _find(self) -> Checkpoint | None:
        asked = self.args.resume_from_checkpoint
        if asked is None:
            return None
        folders = self._gather(step_folders(self.folder) if asked == "latest" else [Path(asked)])[0]
        self._seen = folders
        skipped = []
        for folder in folders:
            checkpoint, reason = self._check(folder)
            if checkpoint is not None:
                if not checkpoint.manifest["has_optimizer"] and not self._only_evaluates:
                    others = [other for other in folders if other != folder and _has_optimizer(other)]
                    raise UserError(
                        f"{folder} was saved with --save_only_model: without the optimizer's state a run cannot go on "
                        "from it. Export it with tools/export.py, and train from that with --model_name_or_path"
                        + (f", or go back: --resume_from_checkpoint {others[0]}." if others else ".")
                    )
                return checkpoint
            skipped.append(f"{folder}: {reason}")
            if asked == "latest":
                self.accelerator.print(f"skipped {skipped[-1]}")
        if asked != "latest":
            inside = step_folders(folders[0]) or step_folders(folders[0] / "checkpoints")
            hint = " Give another folder, or `latest`."
            if inside:
                hint = f" It holds checkpoints; the newest is {inside[0]}."
            raise UserError(f"--resume_from_checkpoint {asked} is no complete checkpoint: {reason}.{hint}")
        if skipped:
            raise UserError(
                f"--resume_from_checkpoint latest: no folder in {self.folder} is a complete checkpoint "
                f"({'; '.join(skipped)}). Start afresh with --overwrite_output_dir instead."
            )
        self.accelerator.print(f"no checkpoint in {self.folder} yet: starting at step 0")
        return None

    def _check(self, folder: Path) -> tuple[Checkpoint | None, str]:
        """(the checkpoint, "") or (None, what is wrong with it); each process reads its share of the files."""
        checkpoint, problem, refusal = None, None, None
        try:
            checkpoint = read_checkpoint(folder)
            problem = check_contents(checkpoint, self.accelerator.process_index, self.accelerator.num_processes)
        except Incomplete as error:
            problem = str(error)
        except OSError as error:
            problem = f"it cannot be read ({error})"
        except UserError as error:
            refusal = str(error)
        reports = self._gather((problem, refusal))
        for _, text in reports:
            if text:
                raise UserError(text)
        for text, _ in reports:
            if text:
                return None, text
        return checkpoint, ""

    @property
    def tracker_run_id(self) -> str | None:
        """Identity of the run in wandb, to go on with it."""
        return self.found.manifest["tracker_run_id"] if self.found else None

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: BatchPlan,
        dataset: Dataset,
        lengths: np.ndarray | None,
        *,
        num_steps: int,
        num_saves: int,
    ) -> dict[str, Any] | None:
        """Take the prepared model and its optimizer; load the checkpoint that was found into them.

        With --max_steps 0, which only evaluates, the optimizer and the output folder stay as they are.
        num_steps: of the whole run. num_saves: checkpoints that it will write. Returns the `state` that was saved with
        the one that was found, None for a run from step 0. Raises `UserError` when it is another run's or beyond
        num_steps, or there is no room for a new one.
        """
        self._model, self._optimizer = model, optimizer
        # DDP's own module prefix would make tied weights look missing.
        self._module = base_model(model) if isinstance(model, DistributedDataParallel) else model
        tensors = get_model_state_dict(self._module)
        self._run = describe_run(
            self.args, plan, model, tensors, self.tokenizer, dataset, lengths, self.evaluation_data
        )
        self._bytes_of_model = sum(
            math.prod(tensor.size()) * tensor.dtype.itemsize for tensor in self._without_ties(tensors).values()
        )
        self._num_bytes = self._bytes_of_model * (1 + _OPTIMIZER_COPIES[self.args.optim])
        del tensors
        self._huggingface_files = _huggingface_files(model, self.tokenizer)
        self._refuse_other_files()
        if self.found:
            if num_steps < self.found.step and not self._only_evaluates:
                raise UserError(f"{self.found.folder} is beyond the {num_steps} steps of this run: raise --max_steps.")
            self._refuse_other_run(self.found)
            self._load(self.found)
            self.last_saved_step = self.found.step if self.found.folder.parent == self.folder else None
        if not self._only_evaluates:
            if self.args.resume_from_checkpoint == "latest":
                self._refuse_newer()
            self._together("--output_dir", self._on_main(self._take_over_output_dir))
            if num_saves > 0:
                self._check_shared()
            self._check_room(num_saves)
            if self.args.async_save:
                self._stager = self._make_stager()
                optimizer.register_step_pre_hook(self._wait_until_staged)
        return self.found.manifest["state"] if self.found else None

    def other_choice(self, metric: str) -> str | None:
        """Why the checkpoint's best model was chosen by other numbers than `metric` now is; None: by the same."""
        if self.found is None:
            return None
        then = self.found.manifest["run"]
        if (name := then["settings"]["metric_for_best_model"]) != metric:
            return f"was chosen by {name}"
        begins = [name for name in {**then["evaluation_data"], **self.evaluation_data} if metric.startswith(name)]
        # A set may be called `token`: eval_token_accuracy is not its.
        whole = [name for name in begins if metric.removeprefix(name) in METRICS_OF_A_SET]
        set_name = max(whole or begins, key=len, default="")
        return "was chosen on other examples" if set_name in changed_sets(then, self._run) else None

    def _take_over_output_dir(self) -> None:
        if self.args.resume_from_checkpoint:
            write_config(self.args)
        self._remove_leftovers()  # not before: until the folder is this run's, they may be what another one is writing
        # Checkpoints of later steps belong to a course that is given up: they must not be the latest any more.
        for folder in step_folders(self.folder):
            if _step(folder) > (self.found.step if self.found else 0):
                aside = set_aside(folder)
                self.accelerator.print(f"set aside as {aside}: it is later than the step that the run goes on from")

    def _make_stager(self) -> AsyncStager:
        """Copies the state to host memory; on GPUs beside the next forward and backward pass."""
        if self.strategy.kind == "fsdp1":
            return BlockingAsyncStager()  # the other one does not know FSDP1's kind of sharded tensors
        is_cuda = self.accelerator.device.type == "cuda"
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=is_cuda,
                use_shared_memory=False,
                use_async_staging=is_cuda,
                use_non_blocking_copy=is_cuda,
            )
        )
        # Private, seen in torch 2.11: the stager closes the part of it that copies after each state, and the next one
        # fails. 2.13 does not.
        stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]
        if is_cuda:
            # It keeps its buffers: pinned now, they do not hold up training at the first checkpoint.
            staging = stager.stage(self._tensors(only_model=False))
            assert isinstance(staging, Future)
            staging.result()
        return stager

    def _refuse_newer(self) -> None:
        """Of a run that went on in this folder while this one, which has its lock now, was loading."""
        newer = set(self._gather(step_folders(self.folder))[0]) - set(self._seen)
        if newer:
            raise UserError(
                f"--resume_from_checkpoint latest: {max(newer, key=_step)} was written by another run while this one "
                "was loading; start it again."
            )

    def _refuse_other_run(self, found: Checkpoint) -> None:
        changed = differences(found.manifest["run"], self._run)
        if self._only_evaluates:
            changed = {key: text for key, text in changed.items() if key in ("model", "model_config", "tokenizer")}
        refused = {key: text for key, text in changed.items() if key not in self._allowed}
        if refused:
            text = "; ".join(f"{key}: {what}" for key, what in refused.items())
            fixed = [f"{key} ({NEVER_CHANGED[key]})" for key in refused if key in NEVER_CHANGED]
            advice = (
                f"{', '.join(fixed)} cannot change within a run: start another one in another --output_dir."
                if fixed
                else f"Give the same settings, or permit it with --allow_changed {','.join(refused)}."
            )
            raise UserError(f"{found.folder} is of a different run: {text}. {advice}")
        for key, what in changed.items():
            self.accelerator.print(f"changed since the checkpoint, as allowed: {key}: {what}")

    def _load(self, found: Checkpoint) -> None:
        started = time.perf_counter()
        model_state = self._without_ties(get_model_state_dict(self._module))
        optimizer_state: dict[str, Any] = {"state": {}}
        if not self._only_evaluates:
            self._make_optimizer_state()
            optimizer_state = dict(get_optimizer_state_dict(self._module, self._optimizer))
        tensors = _flat(model_state, optimizer_state["state"])
        self._together(  # in place
            f"{found.folder} cannot be read",
            lambda: dcp.load(tensors, storage_reader=found.reader(), process_group=self._saving),
        )
        for name, source in self._ties().items():
            model_state[name] = model_state[source]
        set_model_state_dict(self._module, model_state)
        if not self._only_evaluates:
            set_optimizer_state_dict(self._module, self._optimizer, optimizer_state)
        seconds = time.perf_counter() - started
        self.accelerator.print(
            f"going on from {found.folder}: step {found.step}, saved by {found.manifest['world_size']} processes under "
            f"{found.manifest['strategy']}; loaded in {seconds:.1f} s"
        )

    def _refuse_other_files(self) -> None:
        """Machines may read files of their own: other ones there would be trained on without a word."""
        everyone = self._gather({key: self._run[key] for key in ("model", "tokenizer", "data", "evaluation_data")})
        if difference := first_difference(everyone):
            key, rank = difference
            raise UserError(
                f"the {key} of process {rank} is not that of process 0 ({everyone[rank][key]} and {everyone[0][key]}): "
                "all machines need the same files."
            )

    def _check_shared(self) -> None:
        """Refuse an output folder that not all machines see, before training and not at the first checkpoint."""
        if self._saving is None:
            return
        file, deadline = self.folder.parent / CONFIG_FILE, time.monotonic() + SHARED_SECONDS
        while not (is_seen := file.is_file()) and time.monotonic() < deadline:
            time.sleep(0.5)
            with contextlib.suppress(OSError):
                os.listdir(file.parent)  # what a network file system takes as a reason to look again
        if blind := [rank for rank, sees in enumerate(self._gather(is_seen)) if not sees]:
            raise UserError(
                f"--output_dir {self.args.output_dir}: process {blind[0]} does not see what process 0 has written "
                "there. Checkpoints need a file system that all machines share; or save none, --save_strategy no."
            )

    def _check_room(self, num_saves: int) -> None:
        """Refuse a run whose first checkpoint or last weights cannot be written; warn when later ones will not fit."""
        free = self._gather(shutil.disk_usage(_existing(self.folder)).free)[0]
        needed, what, way_out = self._bytes_of_model, "the last weights need", "or choose another folder"
        if num_saves > 0:
            needed, what = needed + self._num_bytes, "a checkpoint and the last weights need"
            way_out = "choose another folder, or save no checkpoints with --save_strategy no"
        if free < needed:
            where = f"--output_dir {self.args.output_dir}"
            raise UserError(f"{where}: {_gib(free)} free, but {what} {_gib(needed)}: make room, {way_out}.")
        if num_saves == 0:
            return
        at_once = min(num_saves, (self.args.save_total_limit or num_saves) + 1)
        already = sum(_size_on_disk(folder) for folder in step_folders(self.folder))
        needed = at_once * self._num_bytes + 2 * self._bytes_of_model - already  # model/ and best/
        if free < needed:
            self.accelerator.print(
                f"WARNING: {_gib(free)} free in {self.args.output_dir}, but {at_once} checkpoints at once and the "
                f"exported weights need {_gib(needed)} more; --save_total_limit keeps fewer."
            )

    # Saving.

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        best_step: int | None,
        tracker_run_id: str | None = None,
        only_model: bool = False,
    ) -> str:
        """Write the checkpoint of `step`, or begin to with --async_save; says what was done.

        state: JSON values that `start` gives back. Raises `RunFailed` on all processes when it cannot be written, or
        the one before it could not be, which was still being written; earlier checkpoints stay.
        """
        started = time.perf_counter()
        self.finish()
        what = f"the checkpoint of step {step} cannot be written"
        folder = self.folder / f"step_{step:08d}"
        temporary = folder.with_name(folder.name + TEMPORARY)
        manifest: Manifest = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "has_optimizer": not only_model,
            "state_dict_type": "full" if self.is_full else "sharded",
            "strategy": self.strategy.describe(),
            "world_size": self.accelerator.num_processes,
            "state": dict(state),
            "tracker_run_id": tracker_run_id,
            "run": self._run,
            "before_training": self.before_training,
            "libraries": {module.__name__: module.__version__ for module in (torch, accelerate, transformers)},
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        digests: Digests = {}
        self._together(what, self._on_main(lambda: digests.update(self._open(temporary, only_model))))
        tensors = self._tensors(only_model)
        self.last_saved_step = None if only_model else step
        if self.args.async_save:
            written = self._begin_writing(tensors, writer := _Writer(temporary))

            def complete() -> None:
                self._together(what, written.result)
                self._publish(what, temporary, manifest, digests | writer.digesting.digests, best_step)

            self._pending = self._executor.submit(complete)
            return f"writing checkpoint {folder}; training waited {time.perf_counter() - started:.2f} s"
        if self.is_full:
            path, is_main = temporary / FULL_FILE, self.accelerator.is_main_process
            digests |= self._together(what, lambda: _write_full(path, tensors, is_main))
        else:
            writer = _Writer(temporary)
            self._together(what, lambda: dcp.save(tensors, storage_writer=writer, process_group=self._saving))
            digests |= writer.digesting.digests
        self._publish(what, temporary, manifest, digests, best_step)
        return f"checkpoint {folder}, {time.perf_counter() - started:.1f} s"

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if one is; raises what `save` would have raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _open(self, temporary: Path, only_model: bool) -> Digests:
        """On the main process: the new folder, with config and tokenizer in it."""
        free = shutil.disk_usage(_existing(self.folder)).free
        needed = self._bytes_of_model if only_model else self._num_bytes
        if free < needed:
            raise OSError(errno.ENOSPC, f"{_gib(free)} free, {_gib(needed)} needed", str(self.folder))
        shutil.rmtree(temporary, ignore_errors=True)
        folder = temporary / HUGGINGFACE_FOLDER
        folder.mkdir(parents=True)
        digests: Digests = {}
        for name, content in self._huggingface_files.items():
            with _HashingFile(folder / name, digests) as file:
                file.write(content)
        sync(folder)
        return {f"{HUGGINGFACE_FOLDER}/{name}": digest for name, digest in digests.items()}

    def _begin_writing(self, tensors: dict[str, Any], writer: _Writer) -> "Future[Any]":
        if self.accelerator.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the stager copies on a stream of its own
        response = dcp.async_save(tensors, storage_writer=writer, process_group=self._saving, async_stager=self._stager)
        if isinstance(response, Future):
            return response
        self._staged = response.staging_completion
        return response.upload_completion

    def _wait_until_staged(self, *_: Any) -> None:
        """The copy to host memory goes on during forward and backward; the update has to wait for its end."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.result()

    def _publish(self, what: str, temporary: Path, manifest: Manifest, digests: Digests, best_step: int | None) -> None:
        """Manifest last, then the name, then older ones may go."""
        everyone = self._gather(digests)

        def publish() -> None:
            files = {name: digest for part in everyone for name, digest in sorted(part.items())}
            for name, (size, _) in files.items():
                if not (temporary / name).is_file() or (temporary / name).stat().st_size != size:
                    raise OSError(f"{temporary / name} is not there: all machines must share the file system")
            content = manifest | {"files": files}
            with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
                json.dump(content | {"checksum": _hash(content)}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            sync(temporary)
            folder = temporary.with_suffix("")
            if folder.exists():
                _remove(folder)
            temporary.rename(folder)
            sync(self.folder)

        self._together(what, self._on_main(publish))
        self._together("older checkpoints cannot be removed", self._on_main(lambda: self._prune(best_step)))

    def _prune(self, best_step: int | None) -> None:
        if self.args.save_total_limit is None:
            return
        newest, *older = step_folders(self.folder)
        removable = [folder for folder in older if _step(folder) != best_step]
        num_removed = max(0, 1 + len(older) - self.args.save_total_limit)
        for folder in removable[::-1][:num_removed]:
            _remove(folder)

    def _remove_leftovers(self) -> None:
        for path in _entries(self.folder):
            if path.name.endswith(TEMPORARY):
                shutil.rmtree(path, ignore_errors=True)

    # State.

    def _tensors(self, only_model: bool) -> dict[str, Any]:
        """What is saved, by name. FSDP1's full state is gathered here and is on the main process alone on GPUs."""
        gather = self.is_full and self.strategy.kind == "fsdp1"
        # FSDP1's state dict crashes on the CPU when it is to be offloaded to where it is already.
        options = StateDictOptions(full_state_dict=gather, cpu_offload=gather and self.accelerator.device.type != "cpu")
        model_state = self._without_ties(get_model_state_dict(self._module, options=options))
        if only_model:
            return _flat(model_state, {})
        self._make_optimizer_state()
        optimizer_state = get_optimizer_state_dict(self._module, self._optimizer, options=options)
        return _flat(model_state, cast(dict[str, Any], optimizer_state.get("state", {})))

    def _make_optimizer_state(self) -> None:
        """Before the first update the optimizer has no state: give it the zeros that it would start with."""
        if not self._optimizer.state:
            self._optimizer.zero_grad(set_to_none=True)  # torch leaves an optimizer with gradients as it is
            get_optimizer_state_dict(self._module, self._optimizer)  # takes a step of rate 0
            for state in self._optimizer.state.values():
                for value in state.values():
                    value.zero_()

    def _ties(self) -> dict[str, str]:
        return base_model(self._model).all_tied_weights_keys or {}

    def _without_ties(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        ties = self._ties()
        return {name: tensor for name, tensor in tensors.items() if name not in ties}


def _huggingface_files(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Config, generation config and tokenizer by file name: made once, because a large tokenizer takes a second."""
    config = copy.deepcopy(base_model(model).config)
    config.architectures = [class_name(model)]
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        if base_model(model).can_generate():
            base_model(model).generation_config.save_pretrained(name)
        tokenizer.save_pretrained(name)
        return {path.name: path.read_bytes() for path in sorted(Path(name).iterdir())}


def _flat(model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {f"model.{name}": tensor for name, tensor in model_state.items()}
    for name, values in optimizer_state.items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    return dict(sorted(tensors.items()))


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _is_file_error(error: BaseException) -> bool:
    # torch's zip writer hides the reason of a failed write behind an error of its own.
    return isinstance(error, OSError) or "PytorchStreamWriter" in str(error)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
