"""Learning rates against hand-computed values; decay groups and updates, the same under every strategy."""

import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from common.arguments import OptimizerArguments, TrainArguments, UserError
from common.launch import Strategy, build_accelerator, run
from common.losses import token_loss
from common.optim import LossScale, build_optimizer, build_scheduler, describe_schedule, learning_rate
from common.sharding import base_model, prepare_model
from tests.forked import REPOSITORY, ForkedParent

KINDS = ("t5", "llama", "gpt2")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"learning_rate": 1e-2, "adam_beta1": 0.8, "adam_beta2": 0.9},
    "adafactor": {"learning_rate": 0.1},
    "adadelta": {"learning_rate": 1.0},
}
VOCABULARY = 13


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
        return T5ForConditionalGeneration(
            T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, feed_forward_proj="gated-gelu", **sizes)
        )
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=2, n_head=2,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, attention_bias=True, mlp_bias=True,
        )
    )  # fmt: skip


BATCH = {
    "input_ids": torch.tensor([[2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]),
    "labels": torch.tensor([[3, 4, 5, 6, -100], [8, 9, 10, 11, 12]]),
}


# By hand: what a weight decay should not pull towards zero.
NOT_DECAYED = {
    "t5": {
        *(f"{half}.final_layer_norm.weight" for half in ("encoder", "decoder")),
        *(f"encoder.block.0.layer.{i}.layer_norm.weight" for i in range(2)),
        *(f"decoder.block.0.layer.{i}.layer_norm.weight" for i in range(3)),
        *(f"{x}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for x in ("encoder", "decoder")),
    },
    "llama": {
        "model.norm.weight",
        *(f"model.layers.{i}.{n}_layernorm.weight" for i in range(2) for n in ("input", "post_attention")),
        *(f"model.layers.{i}.self_attn.{x}_proj.bias" for i in range(2) for x in "qkvo"),
        *(f"model.layers.{i}.mlp.{x}_proj.bias" for i in range(2) for x in ("gate", "up", "down")),
    },
    "gpt2": {
        *(f"transformer.ln_f.{x}" for x in ("weight", "bias")),
        *(f"transformer.h.{i}.ln_{n}.{x}" for i in range(2) for n in (1, 2) for x in ("weight", "bias")),
        *(f"transformer.h.{i}.attn.c_{x}.bias" for i in range(2) for x in ("attn", "proj")),
        *(f"transformer.h.{i}.mlp.c_{x}.bias" for i in range(2) for x in ("fc", "proj")),
    },
}


def clean_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def decay_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    found = [(names[p], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    assert len(found) == len(dict(found)), "a parameter is in two groups"
    return dict(found)


def expected_decay(kind: str, weight_decay: float) -> dict[str, float]:
    names = [name for name, _ in make_model(kind).named_parameters()]  # tied ones once
    assert set(names) >= NOT_DECAYED[kind]
    return {name: 0.0 if name in NOT_DECAYED[kind] else weight_decay for name in names}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_decay_by_name(kind: str, optim: Any) -> None:
    model = make_model(kind)
    optimizer = build_optimizer(model, OptimizerArguments(optim=optim, weight_decay=0.1))
    assert decay_by_name(model, optimizer) == expected_decay(kind, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adamw_updates_in_one_pass_but_in_float64(dtype: torch.dtype) -> None:
    """Whose clipping, done within that pass, would be by a float32 number."""
    optimizer = build_optimizer(make_model("llama").to(dtype), OptimizerArguments())
    assert optimizer.defaults["fused"] == (dtype != torch.float64)


def test_decay_of_parameters_that_are_no_weight_of_a_layer() -> None:
    """Experts are matrices stacked in one parameter, with names of their own."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.ones(2, 3, 4))
            self.gate_up_proj_bias = nn.Parameter(torch.ones(2, 4))

    model = Experts()
    decay = decay_by_name(model, build_optimizer(model, OptimizerArguments(weight_decay=0.1)))
    assert decay == {"gate_up_proj": 0.1, "gate_up_proj_bias": 0.0}


def test_frozen_parameters_are_left_out() -> None:
    model = make_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerArguments(weight_decay=0.1))
    assert "model.embed_tokens.weight" not in decay_by_name(model, optimizer)


def test_settings_reach_the_optimizer() -> None:
    args = OptimizerArguments(learning_rate=3e-4, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
    optimizer = build_optimizer(make_model("llama"), args)
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.95), 1e-6)
    adadelta = build_optimizer(make_model("llama"), OptimizerArguments(optim="adadelta", learning_rate=1.0))
    assert isinstance(adadelta, torch.optim.Adadelta) and adadelta.param_groups[0]["lr"] == 1.0


def test_adafactor_refuses_flattened_matrices() -> None:
    model = make_model("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flatten())  # what FSDP1 makes of it
    with pytest.raises(UserError, match="--optim adafactor .* FSDP1 .*fsdp_version: 2"):
        build_optimizer(model, OptimizerArguments(optim="adafactor"))


# Learning rates. A step is an optimizer step, from 0.


def rates(num_steps: int, steps_per_epoch: float = 10, **settings: Any) -> list[float]:
    args = OptimizerArguments(**settings)
    return [learning_rate(args, step, num_steps, steps_per_epoch) for step in range(num_steps)]


def test_constant() -> None:
    assert rates(4, lr_scheduler_type="constant", learning_rate=0.3) == [0.3] * 4


def test_linear() -> None:
    assert rates(5, learning_rate=1.0, min_learning_rate=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(5, learning_rate=1.0) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine() -> None:
    half = math.sqrt(0.5) / 2
    expected = [1.0, 0.6 + 0.8 * half, 0.6, 0.6 - 0.8 * half, 0.2]
    assert rates(
        5, lr_scheduler_type="cosine", learning_rate=1.0, min_learning_rate=0.2
    ) == pytest.approx(expected)  # fmt: skip


def test_warmup_is_never_zero_and_the_peak_is_the_learning_rate() -> None:
    # Three warm-up steps go up a quarter each; the fourth step is at the peak, and the last at the end of the decay.
    expected = [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(8, learning_rate=1.0, warmup_steps=3) == pytest.approx(expected)
    assert rates(5, learning_rate=1.0, warmup_steps=3, lr_scheduler_type="constant") == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("warmup_steps", "num_steps", "expected"), [(0.1, 100, 10), (0.03, 100, 3), (0.1, 17, 2), (0.0, 9, 0), (1.0, 9, 1)]
)
def test_warmup_below_one_is_a_fraction(warmup_steps: float, num_steps: int, expected: int) -> None:
    series = rates(num_steps, learning_rate=1.0, warmup_steps=warmup_steps)
    assert series.index(1.0) == expected and max(series) == 1.0
    assert series == rates(num_steps, learning_rate=1.0, warmup_steps=expected)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_first_and_last_rate_are_exact(kind: str) -> None:
    for peak, least in itertools.product([1.0, 2e-3, 3e-4, 2e-4, 5e-5], [3e-5, 1e-5, 1e-6, 3e-7, 0.0]):
        series = rates(37, lr_scheduler_type=kind, learning_rate=peak, min_learning_rate=least, warmup_steps=5)
        assert series[5] == peak and series[-1] == least
        assert series == [*sorted(series[:5]), *sorted(series[5:], reverse=True)]


def test_step_schedule_counts_whole_epochs() -> None:
    """7 examples in batches of 2: epochs are 3.5 steps long and end inside steps."""
    series = rates(12, 3.5, lr_scheduler_type="step", learning_rate=1.0, lr_gamma=0.5)
    # Examples seen before step k: 2k; epochs: floor(2k / 7).
    assert (
        series == [0.5 ** (2 * k // 7) for k in range(12)] == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125]
    )


def test_step_schedule_with_many_odd_epoch_lengths() -> None:
    for num_examples, batch in itertools.product([7, 13, 157, 1000], [1, 2, 3, 7, 12]):
        num_steps = 3 * num_examples // batch
        series = rates(num_steps, num_examples / batch, lr_scheduler_type="step", learning_rate=1.0, lr_gamma=0.5)
        assert series == [0.5 ** (step * batch // num_examples) for step in range(num_steps)]


def test_step_schedule_ends_at_the_minimum() -> None:
    series = rates(
        6, 1, lr_scheduler_type="step", learning_rate=1.0, lr_gamma=0.5, min_learning_rate=0.2
    )  # fmt: skip
    assert series == [1.0, 0.5, 0.25, 0.2, 0.2, 0.2]


def test_scheduler_sets_the_rate_of_every_step_and_group() -> None:
    args = OptimizerArguments(
        learning_rate=2e-3, min_learning_rate=1e-4, warmup_steps=2, lr_scheduler_type="cosine", weight_decay=0.1
    )
    optimizer = build_optimizer(make_model("llama"), args)
    assert len(optimizer.param_groups) == 2
    scheduler = build_scheduler(optimizer, args, num_steps=9, steps_per_epoch=4.5)
    for step in range(9):
        expected = learning_rate(args, step, 9, 4.5)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected] * 2, rel=1e-15)
        assert scheduler.get_last_lr() == pytest.approx([expected] * 2, rel=1e-15)
        optimizer.step()
        scheduler.step()
    assert build_scheduler(optimizer, args, num_steps=0, steps_per_epoch=4.5).get_last_lr()  # evaluation only


def test_the_loss_scale_grows_after_good_steps_in_a_row() -> None:
    scale, scales = LossScale(scale=8.0, growth_interval=2), []
    for is_finite in (True, True, True, True, True, False, True, False, True, True):
        scale.update(is_finite)
        scales.append(scale.scale)
    assert scales == [8.0, 16.0, 16.0, 32.0, 32.0, 16.0, 16.0, 8.0, 8.0, 16.0]


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("t5_summarize", ["--rouge_samples=0"]),
        ("gpt_shakespeare", ["--prompt="]),
        ("llama_pretrain", ["--prompt=", "--forgetting_dataset="]),
        ("chess_finetune", ["--max_games=40", "--legal_move_samples=0"]),
    ],
)
def test_the_step_schedule_of_a_recipe_counts_its_epochs(
    recipe: str, more: list[str], forked: ForkedParent, tmp_path: Path
) -> None:
    if recipe == "chess_finetune":
        pytest.importorskip("chess")
    flags = [
        f"--config={recipe}_demo", f"--output_dir={tmp_path / 'run'}", "--max_train_samples=6", "--total_batch_size=4",
        "--per_device_train_batch_size=4", "--max_steps=4", "--lr_scheduler_type=step", "--lr_gamma=0.5",
        "--learning_rate=0.01", "--min_learning_rate=0", "--warmup_steps=0", "--logging_steps=1",
        "--eval_on_start=false", "--eval_strategy=no", "--save_strategy=no",
    ]  # fmt: skip
    result = forked.run(REPOSITORY / "recipes" / f"{recipe}.py", *flags, *more, config="single_device")
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["learning_rate"] for line in lines] == [0.01, 0.01, 0.005, 0.0025]


# Under every strategy: the groups have the same names and the updates are the same.


def updated(model: nn.Module, optim: Any) -> None:
    args = OptimizerArguments(optim=optim, weight_decay=0.1, **OPTIMIZERS[optim])
    optimizer = build_optimizer(model, args)
    for _ in range(3):
        token_loss(model, BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    args = TrainArguments(output_dir=f"{sys.argv[1]}/run", param_dtype="float64")
    accelerator, strategy = build_accelerator(args)
    result: dict[str, Any] = {}
    for kind in KINDS:
        model = prepare_model(make_model(kind), None, args, accelerator, strategy)
        optimizer = build_optimizer(model, OptimizerArguments(weight_decay=0.1))
        result[kind] = decay_by_name(model, optimizer)
    for optim in sys.argv[2:]:
        model = prepare_model(make_model("llama"), None, args, accelerator, strategy)
        updated(model, optim)
        source = base_model(model) if strategy.kind == "ddp" else model
        result[optim] = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
    if accelerator.is_main_process:
        torch.save(result, f"{sys.argv[1]}/result.pt")


@pytest.mark.parametrize("config", ["fsdp_full_shard", "fsdp1_full_shard", "ddp"])
def test_groups_and_updates_under(config: str, forked: ForkedParent, tmp_path: Path) -> None:
    optimizers = [optim for optim in OPTIMIZERS if (config, optim) != ("fsdp1_full_shard", "adafactor")]
    result = forked.run(
        __file__, str(tmp_path), *optimizers, config=config, num_processes=2, launcher_flags=["--mixed_precision", "no"]
    )
    assert result.exit_code == 0, result.output
    found = torch.load(tmp_path / "result.pt")
    for kind in KINDS:
        assert found[kind] == expected_decay(kind, 0.1), kind
    alone = Accelerator(cpu=True), Strategy("single", "no")
    start = make_model("llama").double().state_dict()
    for optim in optimizers:
        model = prepare_model(make_model("llama"), None, TrainArguments(param_dtype="float64"), *alone)
        updated(model, optim)
        expected = model.state_dict()
        assert found[optim].keys() == expected.keys()
        for name, weight in expected.items():
            assert not torch.equal(weight, start[name]), name
            torch.testing.assert_close(found[optim][name], weight, rtol=1e-9, atol=1e-12, msg=f"{optim}: {name}")


def test_adafactor_is_refused_under_fsdp1(forked: ForkedParent, tmp_path: Path) -> None:
    result = forked.run(
        __file__, str(tmp_path), "adafactor", config="fsdp1_full_shard", launcher_flags=["--mixed_precision", "no"]
    )
    assert result.exit_code == 2 and result.output.startswith("error: --optim adafactor"), result.output


@pytest.mark.parametrize(
    ("flags", "num_steps", "expected"),
    [
        ({"warmup_steps": 10}, 11, "linear, learning rate 0.0005 to 0 after 10 steps of warm-up"),
        ({"warmup_steps": 10}, 10, "linear, learning rate 0.0005 to 0 after 10 steps of warm-up; WARNING: never "
         "reached in 10 steps, lower --warmup_steps"),
        ({"warmup_steps": 0.1, "lr_scheduler_type": "cosine", "min_learning_rate": 1e-5}, 30000,
         "cosine, learning rate 0.0005 to 1e-05 after 3,000 steps of warm-up"),
        ({"lr_scheduler_type": "step", "lr_gamma": 0.85}, 5,
         "step, learning rate 0.0005, times 0.85 each epoch, at least 0"),
        ({"lr_scheduler_type": "constant"}, 5, "constant, learning rate 0.0005"),
    ],
)  # fmt: skip
def test_schedules_in_words(flags: dict[str, Any], num_steps: int, expected: str) -> None:
    args = OptimizerArguments(learning_rate=5e-4, **flags)
    assert describe_schedule(args, num_steps) == expected
    rates = [learning_rate(args, step, num_steps, 2.0) for step in range(num_steps)]
    assert (max(rates) < args.learning_rate) == ("WARNING" in expected)


@pytest.mark.gpu
def test_fp8_scales_found_together_are_those_found_at_each_gather(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are the weights that one kernel converts with them."""
    torchao = pytest.importorskip("torchao.float8")
    monkeypatch.setattr("common.optim.LARGE", 1)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        losses: dict[bool, list[float]] = {}
        for together in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))).cuda()
            torchao.convert_to_float8_training(
                model, config=torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
            )
            for block in model:
                fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            fully_shard(model)
            optimizer = build_optimizer(model, OptimizerArguments(learning_rate=0.1))
            inputs = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
            losses[together] = []
            for step in range(5):
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 if step else 0.0  # of rate 0 no weight changes
                weights: list[Any] = [cast(DTensor, block.weight)._local_tensor for block in model]
                for weight in weights:
                    assert (weight._precomputed_scale is not None) == (step > 1)
                    if not together:
                        weight._precomputed_scale = None
                loss = model(inputs).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[together].append(loss.item())
        assert losses[True] == losses[False] and len(set(losses[True])) == 4
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    assert "RANK" in os.environ
    run(main)
