"""Hugging Face folder out of a model under any strategy."""

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerBase

from common.launch import RunFailed
from common.sharding import base_model


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: str | Path, accelerator: Accelerator
) -> None:
    """Write weights (safetensors), config, generation config and tokenizer that `from_pretrained` loads.

    Collective: all processes call it. The full state is gathered parameter by parameter into the main process's host
    memory and written beside the folder first, so a folder of that name is always complete.
    """
    folder = Path(folder)
    # FSDP1's state dict crashes on the CPU when it is to be offloaded to where it is already.
    options = StateDictOptions(full_state_dict=True, cpu_offload=accelerator.device.type != "cpu")
    # DDP's own module prefix would make tied weights look missing.
    source = base_model(model) if isinstance(model, DistributedDataParallel) else model
    state = get_model_state_dict(source, options=options)
    if accelerator.is_main_process:
        for name, source in (base_model(model).all_tied_weights_keys or {}).items():
            if not torch.equal(state[name], state[source]):
                raise RunFailed(
                    f"tied weights {name} and {source} differ: the model was sharded wrongly; please report it."
                )
            del state[name]  # gathered twice, these are copies, which save_pretrained would not know for ties
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        base_model(model).save_pretrained(temporary, state_dict=state)
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    accelerator.wait_for_everyone()
