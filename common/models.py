"""Tokenizer and model: from a checkpoint, or from a config with random weights."""

import functools
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from accelerate import Accelerator, init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from common import bias_attention, packed_attention
from common.arguments import ModelArguments, TrainArguments, UserError
from common.initialization import InitSource, recorded_init
from common.masks import keeps_sequences_apart

OFFLINE_HINT = "the demo preset runs offline"


class WeightSource:
    """Weights of a checkpoint by the model's parameter names, read piece by piece from memory-mapped safetensors.

    No process holds a copy: slicing what `read` returns touches only that slice of the files. remove: at `close`, which
    all processes call, one of each machine removes the folder.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, remove: Accelerator | None = None) -> None:
        self._folder, self._remove = folder, remove
        index = folder / "model.safetensors.index.json"
        names = [folder / "model.safetensors"]
        if index.is_file():
            try:
                names = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            except (ValueError, KeyError) as error:
                raise UserError(
                    f"{index}: no readable index of weights: {_one_line(error)}; download it again."
                ) from error
        stored: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            try:
                file = safe_open(name, framework="pt")
                keys = file.keys()
                stored |= dict.fromkeys(keys, name)
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in keys}
            except SafetensorError as error:
                raise UserError(
                    f"{name}: no readable weights: {_one_line(error)}; download the file again (is it cut short, or a "
                    "pointer that Git LFS left in its place?)."
                ) from error
        prefix = f"{model.base_model_prefix}."

        def find(*names: str) -> str | None:
            # A checkpoint of the headless base model lacks its prefix.
            return next((key for name in names for key in (name, name.removeprefix(prefix)) if key in stored), None)

        self._where: dict[str, tuple[Path, str]] = {}
        ties = model.all_tied_weights_keys or {}
        for name, parameter in model.named_parameters():
            # Of tied parameters one name is stored.
            aliases = [name, ties.get(name, name)] + [key for key, source in ties.items() if source == name]
            key = find(*aliases)
            if key is None or shapes[key] != tuple(parameter.shape):
                raise KeyError(name)
            self._where[name] = (stored[key], key)
        # Buffers are small and on no meta device: they get their values here.
        persistent = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in persistent and (key := find(name)) is not None:
                buffer.copy_(safe_open(stored[key], framework="pt").get_tensor(key))

    def read(self, name: str) -> Any:
        """Parameter `name`, to be sliced (`[:]` for the whole)."""
        path, key = self._where[name]
        # Opened anew: the pages that were read stay mapped as long as the file, and count as memory of the process.
        return safe_open(path, framework="pt").get_slice(key)

    def close(self) -> None:
        """To be called by all processes when they have read what they need."""
        if self._remove is not None:
            self._remove.wait_for_everyone()
            if self._remove.is_local_main_process:
                shutil.rmtree(self._folder)


Weights = WeightSource | InitSource
"""Weights by the model's parameter names, to be read in parts."""


def fetch(name_or_path: str, what: str, patterns: list[str] | None = None) -> Path:
    """Local folder of a model or tokenizer, downloaded from the hub when it is no folder.

    Raises `UserError` that says what to download or where to accept the licence when the hub does not give it.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1:
        raise UserError(
            f"{what} {name_or_path}: no such folder; give the folder of one (with config.json and weights or "
            f"tokenizer files) or its id on the hub; {OFFLINE_HINT}."
        )
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=patterns))
    except HFValidationError as error:
        raise UserError(f"{what} {name_or_path!r}: neither a folder nor a name that the hub could have.") from error
    except GatedRepoError as error:
        raise UserError(
            f"{what} {name_or_path} is gated: accept its licence at https://huggingface.co/{name_or_path}, then "
            f"`hf auth login`; {OFFLINE_HINT}."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{what} {name_or_path}: neither a folder here nor a public repository on the hub.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{what} {name_or_path} is not in the local cache and the hub cannot be reached: run "
            f'`make download ARGS="--{what} {name_or_path}"` (all that a preset needs: `make download PRESET=NAME`) '
            "where there is a network, or give a local folder; "
            f"{OFFLINE_HINT}."
        ) from error


# Kernels that keep apart what is packed in a sequence. Flash attention does so for single sequences only.
PACKING_KERNELS = (None, "sdpa", "eager", "flex_attention", packed_attention.NAME)
TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]


def load_tokenizer(args: ModelArguments, flag: str = "--tokenizer_name_or_path") -> PreTrainedTokenizerBase:
    """Tokenizer of --tokenizer_name_or_path, or the model's own; `flag` is what messages call it.

    Raises `UserError` when there is none to be had.
    """
    source = args.tokenizer_name_or_path or args.model_name_or_path
    if not source:
        raise UserError("--tokenizer_name_or_path is needed with --model_config_path: a config has no tokenizer.")
    folder = fetch(source, "tokenizer", TOKENIZER_FILES)
    try:
        return read_tokenizer(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"tokenizer {source}: cannot be loaded: {_one_line(error)} Give the folder or hub id of one with {flag}."
        ) from error


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; raises `OSError` or `ValueError`, also where transformers makes one without words."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Of a config alone: its special tokens, and T5's mark of a word's beginning.
    if set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, "\N{LOWER ONE EIGHTH BLOCK}"}:
        raise ValueError(
            "it has no vocabulary: put the model's own tokenizer files (tokenizer.json or the like) there."
        )
    return tokenizer


def load_config(args: ModelArguments) -> Any:
    """Config of the model to train, with --config_overrides and --attn_implementation applied.

    Raises `UserError` for a missing or unreadable config and for an override of a key that the config lacks.
    """
    source = args.model_config_path or args.model_name_or_path
    if not source:
        raise UserError("give --model_name_or_path (pretrained) or --model_config_path (random weights).")
    folder = Path(source) if args.model_config_path else fetch(source, "model", ["*.json"])
    if args.model_config_path and not folder.exists():
        raise UserError(f"--model_config_path {source}: no such file or folder.")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # whatever its own checks raise
        raise UserError(f"model config {source}: cannot be read: {_one_line(error)}") from error
    if args.config_overrides:
        config = _override(config, folder, args.config_overrides)
    heads, groups = (getattr(config, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    if isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups:
        raise UserError(
            f"model config {source}: num_attention_heads {heads} is no multiple of num_key_value_heads {groups}."
        )
    return config


GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def _override(config: Any, folder: Path, text: str) -> Any:
    if config.model_type == "gpt2":  # which has no key of that name, but three that are set as one
        dropout = ",".join(rf"{key}=\1" for key in GPT2_DROPOUT)
        text = re.sub(r"\bdropout\s*=([^,]*)", dropout, text)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_theta" in rope:  # models' own files have it outside
        config.rope_theta = rope["rope_theta"]
    keys = []
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not hasattr(config, key) or "=" in value:
            raise UserError(f"--config_overrides {item!r}: expected key=value with a key of {type(config).__name__}.")
        keys.append(type(config).attribute_map.get(key, key))
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise UserError(f"--config_overrides {text!r}: {twice[0]} is given twice; remove one.")
    try:
        config.update_from_string(text.replace(" ", ""))
        asked = {key: getattr(config, key) for key in keys}
        # Made anew, because a config derives values (such as head_dim) from others when it is made.
        stored, _ = type(config).get_config_dict(folder)
        if "rope_theta" in asked:
            stored = {key: value for key, value in stored.items() if key not in ("rope_theta", "rope_scaling")}
            stored["rope_parameters"] = {**config.rope_parameters, "rope_theta": asked.pop("rope_theta")}
        config = type(config).from_dict(stored | asked)
    except Exception as error:  # whatever the config's own checks raise
        raise UserError(f"--config_overrides {text!r}: {type(error).__name__}: {_one_line(error)}") from error
    for key, value in asked.items():
        if getattr(config, key) != value:
            raise UserError(f"--config_overrides: {type(config).__name__} makes {key} {getattr(config, key)} itself.")
    return config


def check_kind(config: Any, auto_class: type[_BaseAutoModelClass]) -> None:
    """Raise `UserError` when the config's model is not of the kind that the recipe trains."""
    if type(config) not in auto_class._model_mapping:
        kind = {"AutoModelForSeq2SeqLM": "encoder-decoder", "AutoModelForCausalLM": "causal"}[auto_class.__name__]
        raise UserError(
            f"{type(config).__name__} (model type {config.model_type!r}) is no {kind} model, which this recipe trains: "
            f"give one with --model_name_or_path or --model_config_path; {OFFLINE_HINT}."
        )


def check_packing(args: ModelArguments, config: Any, auto_class: type[_BaseAutoModelClass], flag: str) -> None:
    """Raise `UserError` where the sequences of a packed row would see each other."""
    if not keeps_sequences_apart(model := meta_model(args, config, auto_class)):
        raise UserError(
            f"--{flag}: in {type(model).__name__} what is packed together would see each other, because its mask does "
            "not come from positions, or it has layers other than attention: set it to false."
        )


def check_vocabulary(config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` when the tokenizer has tokens that the model has no embedding for."""
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens but the model's vocab_size is {config.vocab_size}: give the "
            "model's own tokenizer with --tokenizer_name_or_path."
        )


def fit_config(
    args: ModelArguments,
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    *,
    is_own_vocabulary: bool,
) -> None:
    """Make the config of a causal model from random weights follow the tokenizer; check that it fits the data.

    is_own_vocabulary: the tokenizer was made for the data, and the model's vocabulary is to be exactly its.
    """
    if args.model_config_path:
        if is_own_vocabulary:
            config.vocab_size = len(tokenizer)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
        if config.pad_token_id in (config.bos_token_id, config.eos_token_id):
            config.pad_token_id = None  # the embedding of the model's padding is zero and learns nothing
    check_vocabulary(config, tokenizer)
    check_positions(config, "max_seq_length", max_seq_length)


def max_positions(config: Any) -> int | None:
    """Positions of the model; None where their number is not limited."""
    number: int | None = getattr(config, "max_position_embeddings", None)
    return number


def check_positions(config: Any, flag: str, length: int) -> None:
    """Raise `UserError` for sequences that are longer than the model has positions."""
    limit = max_positions(config)
    if limit is not None and length > limit:
        raise UserError(f"--{flag} {length}: the model has {limit} positions; lower it, or raise the config's number.")


def meta_model(args: ModelArguments, config: Any, auto_class: type[_BaseAutoModelClass]) -> PreTrainedModel:
    """The model on the meta device: its modules, without memory; also of 8B parameters in a moment.

    Raises `UserError` when no model can be built of the config.
    """
    with torch.device("meta"):
        return _build(args, config, auto_class)


def _build(args: ModelArguments, config: Any, auto_class: type[_BaseAutoModelClass]) -> PreTrainedModel:
    kwargs: dict[str, Any] = {"attn_implementation": args.attn_implementation} if args.attn_implementation else {}
    try:
        model = auto_class.from_config(config, dtype=torch.float32, **kwargs)
    except Exception as error:  # whatever impossible sizes run into
        if args.attn_implementation and isinstance(error, (ValueError, ImportError)):
            raise UserError(f"--attn_implementation {args.attn_implementation}: {_one_line(error)}") from error
        if args.config_overrides:
            raise UserError(
                f"--config_overrides {args.config_overrides!r}: no model can be built with it "
                f"({type(error).__name__}: {_one_line(error)})"
            ) from error
        raise
    for module in model.modules():
        if hasattr(module, "compute_bias"):
            module.compute_bias = _contiguous(module.compute_bias)
    return model


def _with_own_kernels(
    model: PreTrainedModel, args: ModelArguments, device: torch.device, packs: bool
) -> PreTrainedModel:
    """The model, with this repository's kernels instead of SDPA where it learns a bias or `packs` and they fit."""
    if args.attn_implementation is not None or model.config._attn_implementation != "sdpa":
        return model
    learns_bias = any(hasattr(module, "compute_bias") for module in model.modules())
    if learns_bias and bias_attention.is_available(device):
        kernel = bias_attention.NAME
    elif packs and packed_attention.fits(model, device):
        kernel = packed_attention.NAME
    else:
        return model
    for part in model.modules():
        if isinstance(part, PreTrainedModel):  # T5's encoder and decoder, too: they have configs of their own
            part.set_attn_implementation(kernel)
    return model


def _contiguous(compute_bias: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """T5's relative position bias, (1, heads, queries, keys), with its keys next to each other in memory.

    It is looked up with the heads innermost. As a mask it makes torch's fused attention kernels refuse (transformers
    5.17: the weights of all pairs are computed and kept) or be copied in each layer (5.24).
    """

    @functools.wraps(compute_bias)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        return compute_bias(*args, **kwargs).contiguous()

    return wrapped


def with_position_biases(block: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a block, given the biases that T5's first block computes itself; the others' as it is.

    Outside what is compiled: the first blocks are then compiled together with the others, and Inductor fails on the
    decoder's bucket numbers under dynamic shapes (torch 2.11: an AssertionError of their value ranges).
    """
    layers: Any = getattr(block, "layer", [None])
    attention: Any = getattr(layers[0], "SelfAttention", None)
    if not getattr(attention, "has_relative_attention_bias", False):
        return forward
    names = list(inspect.signature(block.forward).parameters)
    if "position_bias" not in names:  # UMT5, whose blocks all have a bias of their own
        return forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden, encoder_hidden = given["hidden_states"], given.get("encoder_hidden_states")
        length = hidden.shape[1]
        biases = {"position_bias": attention.compute_bias(length, length, device=hidden.device)}
        if encoder_hidden is not None:
            shape = 1, attention.n_heads, length, encoder_hidden.shape[1]
            biases["encoder_decoder_position_bias"] = hidden.new_zeros(shape)
        # By position or by name as they came: another way of calling it would be compiled once more.
        args = tuple(biases.get(name, value) for name, value in zip(names, args, strict=False))
        return forward(*args, **kwargs | {name: bias for name, bias in biases.items() if name in kwargs})

    return wrapped


def load_model(
    args: TrainArguments,
    config: Any,
    auto_class: type[_BaseAutoModelClass],
    accelerator: Accelerator,
    packs: bool = False,
) -> tuple[PreTrainedModel, Weights | None]:
    """Model to give to `prepare_model`, with the source of its weights.

    packs: rows in training hold several sequences that do not see each other.

    The model is on the meta device; its weights are read or drawn into the shards later. Of a checkpoint at most one
    full copy per machine is in host memory, and none where the files can be read by slices (safetensors under the
    model's own names). With --init device, random weights are there already, equal on all processes (same seed), and
    the source is None.
    Raises `UserError` when the checkpoint lacks weights or --init meta does not know how a parameter is initialised.
    """
    kernel = args.attn_implementation
    if kernel in ("flex_attention", bias_attention.NAME, packed_attention.NAME) and accelerator.device.type == "cpu":
        raise UserError(f"--attn_implementation {kernel}: it cannot train on a CPU; drop the flag to rehearse.")
    set_seed(args.seed)
    if args.model_config_path and args.init == "device":
        with torch.device(accelerator.device):
            return _with_own_kernels(_build(args, config, auto_class), args, accelerator.device, packs), None
    with init_empty_weights(include_buffers=False), recorded_init() as calls:
        model = _with_own_kernels(_build(args, config, auto_class), args, accelerator.device, packs)
    model.tie_weights()
    if args.model_config_path:
        return model, InitSource(model, calls, args.seed)
    assert args.model_name_or_path is not None
    if args.config_overrides:
        as_it_is = replace(args, config_overrides=None)
        with init_empty_weights(include_buffers=False):
            own = _build(as_it_is, load_config(as_it_is), auto_class)
        own.tie_weights()
        kept = {name for name, _ in model.named_parameters()}
        if dropped := [name for name, _ in own.named_parameters() if name not in kept]:
            raise UserError(
                f"--config_overrides {args.config_overrides!r}: {len(dropped)} weights of {args.model_name_or_path} "
                f"would have no place in the model, the first is {dropped[0]}; drop the override, or train from random "
                "weights (--model_config_path)."
            )
    folder = fetch(args.model_name_or_path, "model", ["*.json", "*.safetensors"])
    if not list(folder.glob("*.safetensors")):
        folder = fetch(args.model_name_or_path, "model", ["*.json", "*.bin"])
    if (folder / "generation_config.json").is_file():  # end tokens and sampling, which belong to the exported model too
        model.generation_config = GenerationConfig.from_pretrained(folder)
    try:
        return model, WeightSource(folder, model)
    except (KeyError, OSError):
        return model, _convert(args, folder, config, auto_class, model, accelerator)


def _convert(
    args: TrainArguments, folder: Path, config: Any, auto_class: Any, model: PreTrainedModel, accelerator: Accelerator
) -> WeightSource:
    """Weights of an older format or with other key names: converted once per machine by transformers' own loader."""
    # Machines may share the folder: each converts into its own, named by its first process.
    first = accelerator.process_index - accelerator.local_process_index
    converted = Path(str(args.output_dir)) / f"converted_weights_{first}"
    if accelerator.is_local_main_process:
        try:
            with _quiet_loading():
                full, report = auto_class.from_pretrained(
                    folder, config=config, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
                )
        except UnpicklingError as error:
            raise UserError(f"model {folder}: its .bin file is no PyTorch checkpoint; download it again.") from error
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"model {folder}: its weights cannot be loaded: {_one_line(error)}") from error
        if report["mismatched_keys"]:
            name, stored, wanted = sorted(report["mismatched_keys"])[0]
            raise UserError(
                f"model {folder}: {len(report['mismatched_keys'])} weights have another shape than the config says, "
                f"the first is {name}: {list(stored)} instead of {list(wanted)}."
            )
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise UserError(f"model {folder}: the checkpoint lacks {len(missing)} weights, the first is {missing[0]}.")
        full.save_pretrained(converted, save_original_format=False)  # under the names that the model has in memory
        del full
    accelerator.wait_for_everyone()
    return WeightSource(converted, model, remove=accelerator)


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without transformers' table of keys: what matters of it becomes an error here."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.set_verbosity(verbosity)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."


def describe_model(model: PreTrainedModel, args: ModelArguments) -> str:
    """Model in one line: class, parameters, attention kernel, where its weights come from."""
    count = sum(p.numel() for p in model.parameters())
    origin = (
        f"weights of {args.model_name_or_path}"
        if args.model_name_or_path
        else f"random weights, {args.model_config_path}"
    )
    kernel = model.config._attn_implementation
    return f"{type(model).__name__}, {count / 1e6:,.1f}M parameters, {kernel} attention, {origin}"
