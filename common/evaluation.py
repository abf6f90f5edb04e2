"""Evaluation over a whole dataset under any strategy: exact sums over tokens, and generated texts in dataset order."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.arguments import TrainArguments, UserError
from common.context_parallel import context_size, data_parallel, sliced
from common.data import Collator, EvalBatch, EvalBatches, column_array
from common.losses import IGNORE_INDEX, compute_logits, cross_entropy_sum
from common.sharding import generation_model, is_sharded, reshard

# Called before each batch of an evaluation; see `polling`.
_poll: Callable[[], None] | None = None

Batch = dict[str, torch.Tensor]
Statistics = Callable[[nn.Module, Batch], dict[str, torch.Tensor]]


@contextmanager
def polling(poll: Callable[[], None]) -> Iterator[None]:
    """Evaluations inside call `poll` before each batch, on all processes together; it may raise to end them."""
    global _poll
    _poll = poll
    try:
        yield
    finally:
        _poll = None


def evaluation_batches(
    args: TrainArguments, accelerator: Accelerator, dataset: Dataset, collate_fn: Collator
) -> EvalBatches | None:
    """This process's batches of `dataset`, each example once over all processes, as --max_eval_batches limits them.

    Batches are grouped by the column `length` where there is one. Under context parallelism they are slices of them.
    None for an empty dataset.
    """
    if len(dataset) == 0:
        return None
    index, number = data_parallel(accelerator)
    return EvalBatches(
        dataset,
        sliced(collate_fn, accelerator),
        process_index=index,
        num_processes=number,
        per_device_batch_size=args.per_device_eval_batch_size,
        lengths=column_array(dataset, "length") if "length" in dataset.column_names else None,
        max_batches=args.max_eval_batches,
        pin_memory=accelerator.device.type == "cuda",
    )


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def perplexity(loss: float) -> float:
    """exp of a mean loss per token; infinite where that is too large a number."""
    return math.inf if loss > 700 else math.exp(loss)


def sum_over_dataset(
    accelerator: Accelerator, model: nn.Module, batches: Iterable[EvalBatch], statistics: Statistics
) -> dict[str, float]:
    """Sums of the statistics over the dataset, equal on all processes and for every number of processes.

    `statistics(model, batch)` returns 0-dim sums over one batch. It runs in eval mode without gradients, on each
    process for each of its batches, because a sharded forward pass is collective; what it returns for padding is
    dropped. Sums are kept in float64 on the device and come to the host once, at the end. The result also has
    `examples`, the number of examples that were counted.
    """
    device = accelerator.device if has_float64(accelerator.device) else torch.device("cpu")
    totals: dict[str, torch.Tensor] = {}
    num_examples = 0
    with _evaluation_mode(model):
        for item in _progress(accelerator, batches, "evaluating"):
            sums = statistics(model, _to_device(item.batch, accelerator))
            for name, value in sums.items():
                total = totals.setdefault(name, torch.zeros((), dtype=torch.float64, device=device))
                if not item.is_padding:
                    total += value.to(device)
            num_examples += 0 if item.is_padding else len(item.indices)
    assert totals, "evaluation needs at least one batch on each process"
    names = sorted(totals)
    count = torch.tensor(num_examples, dtype=torch.float64, device=device)
    sums_of_all = accelerator.reduce(torch.stack([*(totals[name] for name in names), count]), reduction="sum")
    result = dict(zip([*names, "examples"], sums_of_all.tolist(), strict=True))
    result["examples"] /= context_size(accelerator)  # each process of a group has counted the same
    return result


def token_sums(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over target tokens: `nll` (natural logarithm), `tokens`, and `correct`, those that are the likeliest token.

    logits: (..., vocabulary); labels: (...), the target of the same position, -100 where there is none.
    """
    return {
        "nll": cross_entropy_sum(logits, labels),
        "tokens": (labels != IGNORE_INDEX).sum(),
        "correct": (logits.argmax(-1) == labels).sum(),  # -100 is no token's number, so padding is never correct
    }


def token_statistics(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """`token_sums` of a causal or encoder-decoder model, whose labels stand at their own position."""
    return token_sums(compute_logits(model, batch), batch["labels"])


def loss_and_accuracy(sums: dict[str, float]) -> dict[str, float]:
    """Evaluation metrics from the dataset's `token_sums`: means over target tokens, whatever the batches were.

    Raises `UserError` where there are no target tokens.
    """
    if not sums["tokens"]:
        raise UserError(
            f"nothing to evaluate: all labels of {int(sums['examples'])} held-out examples are {IGNORE_INDEX}."
        )
    return {
        "eval_loss": sums["nll"] / sums["tokens"],
        "eval_token_accuracy": sums["correct"] / sums["tokens"],
        "eval_examples": int(sums["examples"]),
    }


def generate_texts(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    batches: Iterable[EvalBatch],
    *,
    max_new_tokens: int,
    num_beams: int = 1,
    seed: int | None = None,
    **generation_settings: Any,
) -> list[str] | None:
    """Texts that the model generates, each example once, in dataset order; None except on the main process.

    Encoder-decoder models read a batch's `input_ids` and `attention_mask`; causal models continue them, so prompts must
    be padded on the left, and the texts are without the prompts. Greedy or beam search unless `generation_settings`
    (fields of transformers' GenerationConfig) say otherwise; the numbers of start, end and padding tokens are the
    model's. What is sampled with a seed does not depend on the number of processes. Collective: each process needs the
    same number of batches.
    """
    settings = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "do_sample": False} | generation_settings
    texts: list[tuple[int, str]] = []
    with _evaluation_mode(model), generation_model(model) as hf_model, generation_config(hf_model, settings):
        # Sharded: a process that is done keeps calling the model until all are, because its forward pass is collective.
        synced = accelerator.num_processes > 1 and is_sharded(model)
        for item in _progress(accelerator, batches, "generating"):
            inputs = _to_device({key: item.batch[key] for key in ("input_ids", "attention_mask")}, accelerator)
            if seed is not None:
                torch.manual_seed(seed + item.indices[0])
            output = hf_model.generate(**inputs, synced_gpus=synced)
            if not hf_model.config.is_encoder_decoder:
                assert bool(inputs["attention_mask"][:, -1].all()), "prompts must be padded on the left"
                output = output[:, inputs["input_ids"].shape[1] :]
            if not item.is_padding:
                texts += zip(item.indices, decode_texts(tokenizer, output), strict=True)
    by_index = dict(gathered := gather_object(texts))
    assert sorted(index for index, _ in gathered) == list(range(len(gathered))), "each example comes exactly once"
    return [by_index[index] for index in range(len(gathered))] if accelerator.is_main_process else None


def continue_text(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int,
    context_length: int,
    start_token_id: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """The prompt as a causal model goes on with it, equal on all processes, until its end token or `max_new_tokens`.

    start_token_id: of the token that the model's documents begin with, if any.
    Sampled by `seed` at the temperature; 0 takes the likeliest token each time. Where the text outgrows the
    `context_length` of the model, the model sees the last half of that again and goes on from there. Collective.
    """
    settings: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        settings |= {"temperature": temperature, "top_k": 200, "top_p": 1.0}
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = ids if start_token_id is None else [start_token_id, *ids]
    tokens = torch.tensor([ids], device=accelerator.device)
    final_length = tokens.shape[1] + max_new_tokens
    torch.manual_seed(seed)
    with _evaluation_mode(model), generation_model(model) as hf_model:
        synced = accelerator.num_processes > 1 and is_sharded(model)
        ends = end_tokens(hf_model)
        while tokens.shape[1] < final_length and int(tokens[0, -1]) not in ends:
            context = tokens if tokens.shape[1] < context_length else tokens[:, -(context_length // 2) :]
            num_new = min(final_length - tokens.shape[1], context_length - context.shape[1])
            with generation_config(hf_model, settings | {"max_new_tokens": num_new}):
                output = hf_model.generate(
                    input_ids=context, attention_mask=torch.ones_like(context), synced_gpus=synced
                )
            tokens = torch.cat([tokens, output[:, context.shape[1] :]], dim=1)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


def decode_texts(tokenizer: PreTrainedTokenizerBase, token_ids: torch.Tensor | Sequence[Sequence[int]]) -> list[str]:
    """Texts of rows of token ids, without special tokens and without label padding (-100), which is no token."""
    rows = token_ids.tolist() if isinstance(token_ids, torch.Tensor) else token_ids
    kept = [[token for token in row if token != IGNORE_INDEX] for row in rows]
    return [text.strip() for text in tokenizer.batch_decode(kept, skip_special_tokens=True)]


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; the model's mode comes back afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        reshard(model)
        model.train(was_training)


@contextmanager
def generation_config(hf_model: PreTrainedModel, settings: dict[str, Any]) -> Iterator[None]:
    """The settings instead of the model's own generation config, which comes back afterwards.

    Its special tokens stay, and for an encoder-decoder model the rest as well: it belongs to what it was trained for.
    """
    own = hf_model.generation_config
    if hf_model.config.is_encoder_decoder:
        config = copy.deepcopy(own)
    else:  # a penalty for repetitions, and the like, is not what was asked for
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        config = GenerationConfig(**{name: getattr(own, name) for name in names})
    # A limit of the checkpoint's, or else transformers' 20 tokens, gives way. Training alone goes without the cache.
    unknown = config.update(max_length=None, use_cache=True, **settings)
    assert not unknown, f"no fields of GenerationConfig: {unknown}"
    # In the model and not as an argument of generate, which would fill in the checkpoint's limit again.
    hf_model.generation_config = config
    try:
        yield
    finally:
        hf_model.generation_config = own


def end_tokens(hf_model: PreTrainedModel) -> set[int]:
    """Numbers of the tokens that a text ends with."""
    ends = hf_model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


def _to_device(batch: Batch, accelerator: Accelerator) -> Batch:
    return {key: value.to(accelerator.device, non_blocking=True) for key, value in batch.items()}


def bar_is_disabled(accelerator: Accelerator) -> bool | None:
    """tqdm's `disable`: one process draws bars, and on a terminal only (None): a log file would get a line a time."""
    return None if accelerator.is_main_process else True


def _progress(accelerator: Accelerator, batches: Iterable[EvalBatch], description: str) -> Iterator[EvalBatch]:
    """The batches with a progress bar on one process, only when it takes longer than two seconds."""
    bar = tqdm(batches, desc=description, unit="batch", delay=2, leave=False, disable=bar_is_disabled(accelerator))
    for batch in bar:
        if _poll is not None:
            _poll()
        yield batch
