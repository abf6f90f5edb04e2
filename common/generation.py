"""Prompts answered by an exported model or by a training checkpoint, on one process."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import TextStreamer

from common.arguments import UserError
from common.checkpoint import EXPECTED_WARNINGS, Checkpoint, find_checkpoint, step_folders
from common.evaluation import end_tokens, generation_config
from common.launch import RunFailed
from common.models import max_positions, read_tokenizer


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, on the CPU in the type of its weights, and tokenizer of an exported folder, a checkpoint or a run.

    A run's folder stands for its newest complete checkpoint, or for its exported model where it saved none. Raises
    `UserError` when there is nothing to load, or not all of it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give an exported model, a checkpoint or a run.")
    if not step_folders(folder / "checkpoints") and (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    if not (folder / "config.json").is_file():
        checkpoint = find_checkpoint(folder)
        return load_checkpoint(checkpoint), read_tokenizer(checkpoint.huggingface_folder)
    try:
        model_class = _model_class(AutoConfig.from_pretrained(folder), folder)
        model, report = model_class.from_pretrained(folder, dtype="auto", output_loading_info=True)
        tokenizer = read_tokenizer(folder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise UserError(f"{folder}: cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(f"{folder}: {len(missing)} weights are missing, the first is {missing[0]}; export it again.")
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has {len(tokenizer)} tokens and its model {model.config.vocab_size}: put the "
            "model's own tokenizer files into the folder."
        )
    return model, tokenizer


def load_checkpoint(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model of a checkpoint of any layout, on the CPU; what is read of it goes straight into the model's weights.

    Raises `RunFailed` when the checkpoint's weights are not those of the model that its config describes.
    """
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    config = AutoConfig.from_pretrained(checkpoint.huggingface_folder)
    with init_empty_weights(include_buffers=False):
        model = _model_class(config, checkpoint.huggingface_folder)(config)
    state: dict[str, Any] = {}
    for name, entry in checkpoint.reader().read_metadata().state_dict_metadata.items():
        if name.startswith("model."):
            assert isinstance(entry, TensorStorageMetadata)
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(state, storage_reader=checkpoint.reader(), no_dist=True)
    weights = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    report = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    lacking = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lacking or report.unexpected_keys:
        raise RunFailed(
            f"{checkpoint.folder}: not the weights of its {type(model).__name__}: {len(lacking)} are missing and "
            f"{len(report.unexpected_keys)} unknown, the first is {[*lacking, *report.unexpected_keys][0]}."
        )
    if (checkpoint.huggingface_folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.huggingface_folder)
    return model.eval()


def _model_class(config: Any, folder: Path) -> Any:
    if not config.architectures:
        raise UserError(f"{folder / 'config.json'}: names no architecture; export the model again.")
    name = config.architectures[0]
    model_class = getattr(transformers, name, None)
    if model_class is None or not model_class.can_generate():
        raise UserError(
            f"{folder / 'config.json'}: architecture {name} is not one of transformers that generates text."
        )
    return model_class


class _Printer(TextStreamer):
    """Prints text as soon as its words are whole; the end of one call of generate is not the end of the text."""

    def end(self) -> None:
        self.next_tokens_are_prompt = True  # of the next call

    def finish(self) -> None:
        super().end()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(text, end="", flush=True)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    stream: bool = False,
    **settings: Any,
) -> list[str]:
    """What the model generates for each prompt, without the prompt and without special tokens.

    A causal model goes on with the prompts; where a text outgrows the model's positions, the model sees the last half
    of them again and goes on from there. `settings`: fields of GenerationConfig. `stream` prints the text of a single
    prompt while it is generated.
    Raises `UserError` for a prompt that the tokenizer cannot encode.
    """
    texts = [encode(model, tokenizer, prompt) for prompt in prompts]
    ends = end_tokens(model)
    streamer = _Printer(tokenizer, skip_prompt=not model.config.is_encoder_decoder, skip_special_tokens=True)
    limit = None if model.config.is_encoder_decoder else max_positions(model.config)
    generated: list[list[int]] = [[] for _ in texts]
    unfinished = list(range(len(texts)))
    num_generated = 0
    while unfinished:
        inputs = [texts[index] + ([] if limit is None else generated[index]) for index in unfinished]
        num_new = max_new_tokens - num_generated
        if limit is not None:
            inputs = [ids if len(ids) < limit else ids[-(limit // 2) :] for ids in inputs]
            num_new = min(num_new, limit - max(map(len, inputs)))
        output = _generate(model, inputs, streamer if stream else None, settings | {"max_new_tokens": num_new})
        num_generated += num_new
        for index, ids in zip(unfinished, output, strict=True):
            stop = next((place for place, token in enumerate(ids) if token in ends), None)
            generated[index] += ids if stop is None else ids[: stop + 1]
        unfinished = [
            index for index in unfinished if num_generated < max_new_tokens and not ends & set(generated[index][-1:])
        ]
    if stream:
        streamer.finish()
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in generated]


def encode(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt, with the special tokens that the tokenizer puts around a text; what a causal model is to
    go on with has no end token, what an encoder-decoder model reads begins with the prefix that it was trained with.
    Raises `UserError` when there are none or the tokenizer lacks a character."""
    prefix = getattr(model.config, "prefix", None) or ""
    text = prompt if prompt.startswith(prefix) else prefix + prompt
    try:
        ids = tokenizer(text, verbose=False)["input_ids"]
    except Exception as error:  # what `tokenizers` raises for a character that it has neither a token nor <unk> for
        raise UserError(f"prompt {prompt!r}: the checkpoint's tokenizer cannot encode it ({error}).") from error
    if not model.config.is_encoder_decoder and ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    if not ids:
        raise UserError(f"prompt {prompt!r}: there is no token in it to go on from; give a text.")
    return ids


def _generate(
    model: PreTrainedModel, inputs: list[list[int]], streamer: TextStreamer | None, settings: dict[str, Any]
) -> list[list[int]]:
    """New tokens of each row; rows that ended early go on with padding."""
    causal = not model.config.is_encoder_decoder
    ends = model.generation_config.eos_token_id
    padding = model.generation_config.pad_token_id
    if padding is None:  # any token does: it is masked, and rows are cut at their end token
        padding = ends if isinstance(ends, int) else (ends or [0])[0]
    length = max(map(len, inputs))
    padded, mask = [], []
    for ids in inputs:
        gap, ones = length - len(ids), [1] * len(ids)
        padded.append([padding] * gap + ids if causal else ids + [padding] * gap)
        mask.append([0] * gap + ones if causal else ones + [0] * gap)
    tokens = torch.tensor(padded, device=model.device)
    with torch.no_grad(), generation_config(model, settings | {"pad_token_id": padding}):
        output: Any = model.generate(
            input_ids=tokens, attention_mask=torch.tensor(mask, device=model.device), streamer=streamer
        )
    return output[:, length if causal else 1 :].tolist()
