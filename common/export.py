"""Hugging Face folder out of a model under any strategy, or out of a checkpoint."""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import Accelerator
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerBase

from common.arguments import UserError
from common.checkpoint import EXPECTED_WARNINGS, Checkpoint
from common.files import publish
from common.launch import RunFailed
from common.sharding import base_model


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: str | Path, accelerator: Accelerator
) -> None:
    """Write weights (safetensors), config, generation config and tokenizer that `from_pretrained` loads.

    Collective: all processes call it. The full state is gathered parameter by parameter into the main process's host
    memory and written beside the folder first, so a folder of that name is always complete. Raises `RunFailed` when it
    cannot be written.
    """
    folder = Path(folder)
    # FSDP1's state dict crashes on the CPU when it is to be offloaded to where it is already.
    options = StateDictOptions(full_state_dict=True, cpu_offload=accelerator.device.type != "cpu")
    # DDP's own module prefix would make tied weights look missing.
    gathered_from = base_model(model) if isinstance(model, DistributedDataParallel) else model
    state: dict[str, Any] = get_model_state_dict(gathered_from, options=options)
    if accelerator.is_main_process:
        for name, source in (base_model(model).all_tied_weights_keys or {}).items():
            if not torch.equal(state[name], state[source]):
                raise RunFailed(
                    f"tied weights {name} and {source} differ: the model was sharded wrongly; please report it."
                )
            del state[name]  # gathered twice, these are copies, which save_pretrained would not know for ties
        with _written_beside(folder, folder.with_name(folder.name + ".tmp")) as temporary:
            base_model(model).save_pretrained(temporary, state_dict=state)
            tokenizer.save_pretrained(temporary)
    accelerator.wait_for_everyone()


def export_checkpoint(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None = None, max_shard_size: int | str = "5GB"
) -> None:
    """Write a checkpoint's weights, config, generation config and tokenizer as a folder for `from_pretrained`.

    Works in one process on the CPU and holds one file of weights in memory at a time. dtype: of the floating-point
    weights; None keeps the saved one. The folder appears once transformers has found in it each weight that the model
    has and no other. Raises `RunFailed` when it does not or cannot be written, `UserError` for a size that is none.
    """
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    saved: dict[str, torch.Tensor] = {}
    for name, entry in checkpoint.reader().read_metadata().state_dict_metadata.items():
        if name.startswith("model."):
            assert isinstance(entry, TensorStorageMetadata)
            saved[name.removeprefix("model.")] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    dtypes = {name: dtype if dtype and tensor.is_floating_point() else tensor.dtype for name, tensor in saved.items()}
    as_written = {name: tensor.to(dtypes[name]) for name, tensor in saved.items()}
    try:
        split = split_torch_state_dict_into_shards(as_written, max_shard_size=max_shard_size)
    except ValueError as error:
        raise UserError(f"--max_shard_size {max_shard_size}: a size such as 500MB or 5GB is expected.") from error
    # A name that no one else has.
    with _written_beside(folder, folder.with_name(f".{folder.name}.{os.getpid()}.tmp")) as temporary:
        _write_export(checkpoint, temporary, saved, dtypes, split)


@contextmanager
def _written_beside(folder: Path, temporary: Path) -> Iterator[Path]:
    """Takes `folder`'s place once the block has written it; nothing stays otherwise, on a full disk least of all."""
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        publish(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"{folder} cannot be written: {' '.join(str(error).split())}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_export(
    checkpoint: Checkpoint,
    folder: Path,
    saved: dict[str, torch.Tensor],
    dtypes: dict[str, torch.dtype],
    split: StateDictSplit,
) -> None:
    shutil.copytree(checkpoint.huggingface_folder, folder)
    for file_name, names in split.filename_to_tensors.items():
        tensors = {f"model.{name}": torch.empty_like(saved[name], device="cpu") for name in names}
        dcp.load(tensors, storage_reader=checkpoint.reader(), no_dist=True)
        converted = {name: tensors.pop(f"model.{name}").to(dtypes[name]) for name in names}
        save_file(converted, folder / file_name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(next(dtypes[name] for name, tensor in saved.items() if tensor.is_floating_point()))[6:]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    _check_reload(folder, config["architectures"][0])


def _check_reload(folder: Path, class_name: str) -> None:
    """Names and shapes through transformers' own loading, without the values."""
    model_class = getattr(transformers, class_name)
    _, report = model_class.from_pretrained(folder, output_loading_info=True, device_map="meta")
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        raise RunFailed(f"{folder} does not load as {class_name}: {wrong}")
