"""What checkpointing, compiling and sharding must leave alone: gradients, types, names and that every weight moves."""

import functools
import inspect
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CohereConfig,
    CohereForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from common.arguments import OptimizerArguments, TrainArguments, UserError
from common.launch import Strategy, build_accelerator, run
from common.loop import seed_step
from common.losses import token_loss
from common.models import load_config, load_model, with_position_biases
from common.optim import build_optimizer
from common.sharding import (
    _selective_contexts,
    clip_grad_norm_,
    convert_to_fp8,
    describe_units,
    find_blocks,
    gradient_sync,
    prepare_model,
)
from tests.forked import CONFIGS, ForkedParent, Result

SINGLE = Strategy("single", "no")
KINDS = ("t5", "llama")
VOCABULARY = 19


def make_model(kind: str, dropout: float, num_layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 20, "num_layers": num_layers, "num_heads": 2}
        return T5ForConditionalGeneration(
            T5Config(vocab_size=VOCABULARY, dropout_rate=dropout, decoder_start_token_id=0, **sizes)
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=20, num_hidden_layers=num_layers,
            num_attention_heads=2, num_key_value_heads=1, attention_dropout=dropout,
        )
    )  # fmt: skip


def batch(kind: str, rank: int = 0) -> dict[str, torch.Tensor]:
    tokens = (torch.arange(10).view(2, 5) + 3 * rank) % (VOCABULARY - 3) + 3
    tokens[1, 3:] = 0
    inputs = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    inputs["labels"] = tokens.masked_fill(tokens == 0, -100)
    if kind == "t5":
        inputs["decoder_input_ids"] = torch.cat([torch.zeros(2, 1, dtype=torch.long), tokens[:, :-1]], dim=1)
    return inputs


# One process.


def gradients(model: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    model.train()
    model.zero_grad()
    torch.manual_seed(3)
    token_loss(model, batch(kind)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def prepare(model: PreTrainedModel, **settings: Any) -> nn.Module:
    return prepare_model(model, None, TrainArguments(**settings), Accelerator(cpu=True), SINGLE)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_draws_the_same_dropout_masks(kind: str) -> None:
    plain = gradients(prepare(make_model(kind, 0.1)), kind)
    again = gradients(prepare(make_model(kind, 0.1), gradient_checkpointing=True), kind)
    assert plain.keys() == again.keys() == dict(make_model(kind, 0.1).named_parameters()).keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    without = gradients(prepare(make_model(kind, 0.0)), kind)
    assert any(not torch.equal(plain[name], without[name]) for name in plain), "dropout is on"


def test_checkpointing_runs_the_blocks_again() -> None:
    def runs(**settings: Any) -> int:
        model: Any = prepare(make_model("llama", 0.0), **settings)
        seen: list[torch.Tensor] = []
        model.model.layers[1].self_attn.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
        token_loss(model, batch("llama")).backward()
        return len(seen)

    assert (runs(), runs(gradient_checkpointing=True)) == (1, 2)


class CountCalls(TorchDispatchMode):
    """Matrix products, and the most rows of logits that one of them gives, of what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_matmuls = self.max_logit_rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.num_matmuls += 1
            if result.shape[1] == VOCABULARY:
                self.max_logit_rows = max(self.max_logit_rows, result.shape[0])
        return result


def test_selective_checkpointing_recomputes_as_many_products_as_asked() -> None:
    def matmuls(**settings: Any) -> int:
        model = prepare(make_model("llama", 0.0), **settings)
        loss = token_loss(model, batch("llama"))
        with CountCalls() as calls:
            loss.backward()
        return calls.num_matmuls

    plain = matmuls()
    more = [matmuls(gradient_checkpointing=True, recompute_matmuls=every) - plain for every in (None, 1, 2, 3, 7, 8, 0)]
    # Two blocks with 7 products each, of which no gradient needs the last one's result.
    assert more == [12, 12, 6, 4, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [0, 2])
def test_selective_checkpointing_draws_the_same_dropout_masks(kind: str, every: int) -> None:
    plain = gradients(prepare(make_model(kind, 0.1)), kind)
    again = gradients(prepare(make_model(kind, 0.1), gradient_checkpointing=True, recompute_matmuls=every), kind)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_nothing_is_recomputed_without_checkpointing() -> None:
    with pytest.raises(UserError, match="--recompute_matmuls needs --gradient_checkpointing"):
        prepare(make_model("llama", 0.0), recompute_matmuls=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 10, 99])
def test_the_loss_in_chunks(kind: str, chunk: int) -> None:
    """10 positions, of which 2 are no targets."""
    plain = gradients(prepare(make_model(kind, 0.0), param_dtype="float64"), kind)
    model = prepare(make_model(kind, 0.0), param_dtype="float64", loss_chunk_tokens=chunk)
    with CountCalls() as calls:
        again = gradients(model, kind)
    assert plain.keys() == again.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-12, atol=1e-14)
    assert calls.max_logit_rows <= chunk
    model.eval()
    plain_model = prepare(make_model(kind, 0.0), param_dtype="float64").eval()
    logits = [m(**{k: v for k, v in batch(kind).items() if k != "labels"}).logits for m in (model, plain_model)]
    assert torch.equal(*logits), "evaluation and generation see logits"
    torch.testing.assert_close(token_loss(model, batch(kind)), token_loss(plain_model, batch(kind)))


def test_the_loss_in_chunks_of_a_model_that_scales_its_logits() -> None:
    config = CohereConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        logit_scale=0.1,
    )  # fmt: skip
    model = prepare(CohereForCausalLM(config), loss_chunk_tokens=4).train()
    with pytest.raises(UserError, match="--loss_chunk_tokens .*; drop the flag"):
        token_loss(model, batch("llama"))


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_e4m3", "rowwise", "rowwise_with_gw_hp"])
def test_fp8_recipes_convert_the_blocks_linear_layers(recipe: str) -> None:
    pytest.importorskip("torchao")
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    convert_to_fp8(model, list(model.model.layers), recipe, {"pad_inner_dim": True})
    converted = {name: module for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    # The head is outside, and a width of 24 is no multiple of 16.
    assert {name.rpartition(".")[2] for name in converted} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    expected = Float8LinearConfig.from_recipe_name(recipe.removesuffix("_e4m3"))
    if recipe == "tensorwise_e4m3":  # all casts alike: the one of gradients differs elsewhere
        casts = {"cast_config_grad_output", "cast_config_grad_output_for_grad_weight"}
        expected = replace(expected, **dict.fromkeys(casts, expected.cast_config_input))
    for module in converted.values():
        assert module.config == replace(expected, pad_inner_dim=True)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_have_no_graph_break_and_settle(kind: str) -> None:
    """Ragged batches with and without padding: after the first ones nothing is compiled again."""
    torch._dynamo.reset()
    counters.clear()
    options = {"backend": "aot_eager", "mode": "default", "fullgraph": False, "dynamic": None}
    model = make_model(kind, 0.0)
    prepare_model(model, None, TrainArguments(), Accelerator(cpu=True), replace(SINGLE, compile_options=options))
    model.train()
    num_graphs = []
    for step, length in enumerate([12, 20, 8, 16, 28, 4, 24, 32]):
        inputs = {"input_ids": torch.full((2, length), 5), "attention_mask": torch.ones(2, length, dtype=torch.long)}
        if step % 2:
            inputs["attention_mask"][1, length // 2 :] = 0
        inputs["labels"] = torch.full((2, length + 1 if kind == "t5" else length), 5)
        if kind == "t5":
            inputs["decoder_input_ids"] = inputs["labels"]
        token_loss(model, inputs).backward()
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    # T5: encoder and decoder, first and later blocks alike, without padding and with; and the loss.
    assert num_graphs[0] > 0 and num_graphs[4:] == [num_graphs[3] if kind != "t5" else 5] * 4
    torch._dynamo.reset()


def test_position_biases_computed_outside_the_first_blocks() -> None:
    model: Any = prepare(make_model("t5", 0.1))
    expected = gradients(model, "t5")
    given: list[bool] = []

    def watch(forward: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = inspect.signature(forward).bind(*args, **kwargs).arguments
        names = ["position_bias", "encoder_decoder_position_bias"]
        given.extend(
            inputs.get(name) is not None for name in names[: 1 + (inputs["encoder_hidden_states"] is not None)]
        )
        return forward(*args, **kwargs)

    for block in (*model.encoder.block, *model.decoder.block):
        watched = functools.wraps(block.forward)(functools.partial(watch, block.forward))
        block.forward = with_position_biases(block, watched)
    found = gradients(model, "t5")
    assert given == [True] * (model.config.num_layers + 2 * model.config.num_decoder_layers)
    assert all(torch.equal(expected[name], grad) for name, grad in found.items())


@pytest.mark.parametrize("kind", KINDS)
def test_names_stay_clean(kind: str) -> None:
    model = prepare(make_model(kind, 0.0), gradient_checkpointing=True)
    assert model.state_dict().keys() == make_model(kind, 0.0).state_dict().keys()
    assert {type(module) for module in model.modules()} == {type(module) for module in make_model(kind, 0.0).modules()}


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_clipping_as_torch_does_it(max_norm: float) -> None:
    ours, theirs = (make_model("t5", 0.0) for _ in range(2))
    for model in (ours, theirs):
        gradients(model, "t5")
    norm = clip_grad_norm_(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or float("inf"))
    assert norm.shape == () and norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert norm > 0.5
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_a_fused_optimizer_clips_while_it_updates(max_norm: float) -> None:
    updated = []
    for fused in (False, True):
        model = make_model("t5", 0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, fused=fused)
        for limit in (max_norm, 1e6):  # the second step must not be clipped by the first one's factor
            gradients(model, "t5")
            clip_grad_norm_(model, limit, optimizer=optimizer)
            optimizer.step()
        updated.append([p.detach().clone() for p in model.parameters()])
    for plain, fused_one in zip(*updated, strict=True):
        torch.testing.assert_close(plain, fused_one, rtol=1e-5, atol=1e-6)


def test_the_norm_of_float64_gradients_is_float64() -> None:
    model = prepare(make_model("llama", 0.0), param_dtype="float64")
    squares = sum(grad.square().sum() for grad in gradients(model, "llama").values())
    norm = clip_grad_norm_(model, 0)
    assert norm.dtype == torch.float64 and norm.item() == pytest.approx(float(squares) ** 0.5, rel=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_float64_stays_float64_inside(kind: str) -> None:
    """transformers' norms and softmax go through float32; that error of 1e-7 would hide differences of strategies."""
    model = prepare(make_model(kind, 0.0), param_dtype="float64")
    exact = gradients(model, kind)
    name = max(exact, key=lambda name: exact[name].abs().max().item())
    parameter = dict(model.named_parameters())[name]
    index = divmod(int(exact[name].abs().argmax()), parameter.shape[-1])
    losses = []
    for shift in (1e-6, -2e-6):
        with torch.no_grad():
            parameter[index if parameter.dim() > 1 else index[1]] += shift
        losses.append(token_loss(model, batch(kind)).item())
    slope = (losses[0] - losses[1]) / 2e-6  # a finite difference needs all 15 digits
    assert slope == pytest.approx(exact[name].flatten()[int(exact[name].abs().argmax())].item(), rel=1e-7)


def test_blocks_are_the_models_own() -> None:
    t5, llama = make_model("t5", 0.0), make_model("llama", 0.0)
    assert find_blocks(t5, SINGLE) == [*t5.encoder.block, *t5.decoder.block]
    assert find_blocks(llama, SINGLE) == list(llama.model.layers)
    llama._no_split_modules = ["LlamaDecoderLayer", "VisionLayer"]  # T5Gemma names a block that it has not
    assert find_blocks(llama, SINGLE) == list(llama.model.layers)


def test_a_model_without_blocks() -> None:
    model = make_model("llama", 0.0)
    model._no_split_modules = None
    assert find_blocks(model, SINGLE) == []
    with pytest.raises(UserError, match="LlamaForCausalLM names no block class; set fsdp_transformer_layer_cls_to_"):
        find_blocks(model, Strategy("fsdp2", "no", plugin=FullyShardedDataParallelPlugin(fsdp_version=2)))
    for strategy in (Strategy("single", "fp8"), Strategy("ddp", "no", compile_options={"backend": "eager"})):
        with pytest.raises(UserError, match="compile and fp8 work on blocks: take an FSDP YAML and set fsdp_transf"):
            find_blocks(model, strategy)
    with pytest.raises(UserError, match="--gradient_checkpointing: LlamaForCausalLM names no blocks to recompute"):
        prepare(model, gradient_checkpointing=True)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_parameters_keep_float32_buffers(kind: str) -> None:
    """Rotary frequencies rounded to bf16 are up to 0.4 % off: after some hundred tokens angles are wrong."""
    expected = dict(make_model(kind, 0.0).named_buffers())
    model = prepare(make_model(kind, 0.0), param_dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


# Two processes. `main` runs in the forked ranks and writes what it saw to `<out>/<kind>_<rank>.pt`.


def clean_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def main() -> None:
    root, out, flags = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    args = TrainArguments(output_dir=str(out / "run"), **flags)
    accelerator, strategy = build_accelerator(args)
    rank = accelerator.process_index
    for kind in KINDS:
        args.model_name_or_path = str(root / kind)
        auto_class: Any = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
        source, weights = load_model(args, load_config(args), auto_class, accelerator)
        assert weights is not None and all(p.is_meta for p in source.parameters())
        model = prepare_model(source, weights, args, accelerator, strategy)
        optimizer = build_optimizer(model, OptimizerArguments(learning_rate=1e-2, weight_decay=0.1))
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in model.parameters()}
        local = {
            clean_name(name): p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()
        }
        before = {name: p.detach().clone() for name, p in local.items()}
        model.train()
        seed_step(1, 0, rank)
        loss = token_loss(model, batch(kind, rank))
        accelerator.backward(loss)
        grads = {}
        for name, parameter in model.named_parameters():
            grad = parameter.grad  # FSDP1: None where this process has no piece of the parameter
            grads[clean_name(name)] = grad.to_local() if isinstance(grad, DTensor) else grad
        norm = clip_grad_norm_(model, 0)
        optimizer.step()
        after = {clean_name(n): p.to_local() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
        result = {
            "loss": loss.item(),
            "norm": norm.item(),
            "gradients": {name: grad.clone() for name, grad in grads.items() if grad is not None},
            "moved": {name for name in after if not torch.equal(after[name].detach(), before[name])},
            "types": {p.dtype for p in model.parameters()},
            "gradient_types": {p.grad.dtype for p in model.parameters() if p.grad is not None},
            "state_types": {
                value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"
            },
            "buffers": {clean_name(name): buffer for name, buffer in model.named_buffers()},
            "units": describe_units(model),
        }
        torch.save(result, out / f"{kind}_{rank}.pt")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    folders = {}
    for dropout in (0.0, 0.1):
        folders[dropout] = tmp_path_factory.mktemp(f"dropout_{dropout}")
        for kind in KINDS:
            make_model(kind, dropout).save_pretrained(folders[dropout] / kind)
    return folders


def edited(config: str, folder: Path, *edits: tuple[str, str]) -> Path:
    text = (CONFIGS / f"{config}.yaml").read_text()
    for old, new in edits:
        assert text.count(old) == 1, (config, old)
        text = text.replace(old, new)
    path = folder / "edited.yaml"
    path.write_text(text)
    return path


CHECKPOINTING = ("fsdp_activation_checkpointing: false", "fsdp_activation_checkpointing: true")
COMPILE = (
    "fsdp_config:",
    "dynamo_config:\n  dynamo_backend: AOT_EAGER\n  dynamo_use_regional_compilation: true\nfsdp_config:",
)


UNITS = {
    "ddp": {"t5": "none", "llama": "none"},
    "fsdp_full_shard": {
        "t5": "5 FSDP units: 1 x T5ForConditionalGeneration, 4 x T5Block",
        # An untied embedding and head have units of their own.
        "llama": "5 FSDP units: 1 x LlamaForCausalLM, 1 x Embedding, 2 x LlamaDecoderLayer, 1 x Linear",
    },
    "fsdp1_full_shard": {
        "t5": "5 FSDP units: 1 x T5ForConditionalGeneration, 4 x T5Block",
        "llama": "3 FSDP units: 1 x LlamaForCausalLM, 2 x LlamaDecoderLayer",
    },
}

Ranks = dict[str, list[dict[str, Any]]]


def train_once(
    forked: ForkedParent, out: Path, checkpoints: Path, config: str | Path, *, precision: str = "no",
    num_processes: int = 2, **flags: Any,
) -> Ranks:  # fmt: skip
    """What each rank saw in one step, by kind."""
    out.mkdir()
    result = start(forked, out, checkpoints, config, precision, num_processes, **flags)
    assert result.exit_code == 0, result.output
    ranks = range(num_processes)
    return {kind: [torch.load(out / f"{kind}_{rank}.pt", weights_only=False) for rank in ranks] for kind in KINDS}


def start(
    forked: ForkedParent, out: Path, checkpoints: Path, config: str | Path, precision: str = "no",
    num_processes: int = 2, **flags: Any,
) -> Result:  # fmt: skip
    return forked.run(
        __file__, str(checkpoints), str(out), json.dumps(flags), config=config, num_processes=num_processes,
        launcher_flags=["--mixed_precision", precision],
    )  # fmt: skip


def assert_equal(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    for a, b in zip(first, second, strict=True):
        assert (a["loss"], a["norm"], a["units"]) == (b["loss"], b["norm"], b["units"])
        assert a["gradients"].keys() == b["gradients"].keys()
        for name, grad in a["gradients"].items():
            assert torch.equal(grad, b["gradients"][name]), name


def assert_close(first: Ranks, second: Ranks) -> None:
    """Losses and gradients agree up to float32's rounding."""
    for kind in KINDS:
        for a, b in zip(first[kind], second[kind], strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
            assert a["gradients"].keys() == b["gradients"].keys()
            for name, grad in a["gradients"].items():
                torch.testing.assert_close(b["gradients"][name], grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("config", ["fsdp_full_shard", "fsdp1_full_shard", "ddp"])
def test_checkpointing_with_dropout_under(
    config: str, forked: ForkedParent, tmp_path: Path, checkpoints: dict[float, Path]
) -> None:
    plain = train_once(forked, tmp_path / "plain", checkpoints[0.1], config)
    if config == "ddp":
        again = train_once(forked, tmp_path / "again", checkpoints[0.1], config, gradient_checkpointing=True)
    else:
        again = train_once(forked, tmp_path / "again", checkpoints[0.1], edited(config, tmp_path, CHECKPOINTING))
    for kind in KINDS:
        assert_equal(plain[kind], again[kind])
        assert {rank["units"] for rank in plain[kind]} == {UNITS[config][kind]}
        names = set(dict(make_model(kind, 0.0).named_parameters()))
        moved = [rank["moved"] for rank in plain[kind]]
        assert moved[0] | moved[1] == names, "each weight must move; on which process depends on the sharding"
        if config == "ddp":
            assert moved[0] == moved[1]
        expected = dict(make_model(kind, 0.0).named_buffers())
        for rank in plain[kind]:
            assert rank["buffers"].keys() == expected.keys()
            assert all(torch.equal(buffer, expected[name]) for name, buffer in rank["buffers"].items())


@pytest.mark.gpu
def test_selective_checkpointing_with_dropout_in_the_attention_kernel() -> None:
    """The kernel draws random numbers: it has to run again, or the dropout after it would have another mask."""
    linear = nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)

    def block(x: torch.Tensor) -> torch.Tensor:
        x = linear(x)
        return nn.functional.dropout(nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5), 0.5)

    x = torch.randn(2, 4, 32, 64, device="cuda", dtype=torch.bfloat16)
    gradients = []
    for forward in (block, functools.partial(
        checkpoint, block, use_reentrant=False, context_fn=functools.partial(_selective_contexts, 0)
    )):  # fmt: skip
        torch.manual_seed(0)
        (grad,) = torch.autograd.grad(forward(x).float().square().sum(), [linear.weight])
        gradients.append(grad)
    assert torch.equal(*gradients)


def test_compiled_and_checkpointed_blocks(forked: ForkedParent, tmp_path: Path) -> None:
    """One layer on one process, because compiling takes seconds a block."""
    for kind in KINDS:
        make_model(kind, 0.0, num_layers=1).save_pretrained(tmp_path / kind)
    plain = train_once(forked, tmp_path / "plain", tmp_path, "fsdp_full_shard", num_processes=1)
    path = edited("fsdp_full_shard", tmp_path, COMPILE, CHECKPOINTING)
    compiled = train_once(forked, tmp_path / "compiled", tmp_path, path, num_processes=1)
    assert_close(plain, compiled)


@pytest.mark.parametrize("config", ["fsdp_full_shard", "fsdp1_full_shard", "ddp"])
def test_the_loss_in_chunks_under_every_strategy(
    config: str, forked: ForkedParent, tmp_path: Path, checkpoints: dict[float, Path]
) -> None:
    plain = train_once(forked, tmp_path / "plain", checkpoints[0.0], config)
    chunked = train_once(forked, tmp_path / "chunked", checkpoints[0.0], config, loss_chunk_tokens=4)
    assert_close(plain, chunked)


@pytest.mark.parametrize("config", ["fsdp_full_shard", "fsdp1_full_shard", "ddp"])
def test_mixed_precision_keeps_float32_weights(
    config: str, forked: ForkedParent, tmp_path: Path, checkpoints: dict[float, Path]
) -> None:
    result = train_once(forked, tmp_path / "out", checkpoints[0.0], config, precision="bf16")
    for rank in (rank for kind in KINDS for rank in result[kind]):
        assert rank["types"] == rank["state_types"] == rank["gradient_types"] == {torch.float32}


@pytest.mark.parametrize("config", ["fsdp_full_shard", "fsdp1_full_shard"])
def test_bfloat16_weights_under(
    config: str, forked: ForkedParent, tmp_path: Path, checkpoints: dict[float, Path]
) -> None:
    result = train_once(forked, tmp_path / "out", checkpoints[0.0], config, param_dtype="bfloat16")
    for kind in KINDS:
        expected = dict(make_model(kind, 0.0).named_buffers())
        for rank in result[kind]:
            assert rank["types"] == rank["state_types"] == {torch.bfloat16}
            assert all(torch.equal(buffer, expected[name]) for name, buffer in rank["buffers"].items()), kind


@pytest.mark.parametrize(
    ("config", "edit", "flags", "words"),
    [
        (
            "fsdp_full_shard",
            ("fsdp_config:", "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: BertLayer"),
            {},
            ["fsdp_transformer_layer_cls_to_wrap", "T5ForConditionalGeneration", "BertLayer", "T5Block"],
        ),
        (
            "fsdp_full_shard",
            ("fsdp_config:", "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: T5Block,BertLayer"),
            {},
            ["no module of class BertLayer;"],
        ),
        (
            "fsdp1_full_shard",
            ("fsdp_use_orig_params: true", "fsdp_use_orig_params: false"),
            {},
            ["fsdp_use_orig_params"],
        ),
        ("fsdp_full_shard", None, {"gradient_checkpointing": True}, ["--gradient_checkpointing", "fsdp_activation"]),
        ("ddp", None, {"reduce_dtype": "float32"}, ["--reduce_dtype", "FSDP"]),
        ("fsdp1_full_shard", None, {"peer_copies": False}, ["--peer_copies", "FSDP2"]),
    ],
    ids=["class", "one of two classes", "use_orig_params", "two mechanisms", "reduce_dtype", "peer_copies"],
)
def test_settings_that_cannot_act(
    config: str, edit: tuple[str, str] | None, flags: dict[str, Any], words: list[str], forked: ForkedParent,
    tmp_path: Path, checkpoints: dict[float, Path],
) -> None:  # fmt: skip
    path = edited(config, tmp_path, edit) if edit else config
    result = start(forked, tmp_path, checkpoints[0.0], path, **flags)
    lines = [line for line in result.output.splitlines() if line.strip()]
    assert result.exit_code == 2 and len(lines) == 1 and lines[0].startswith("error: "), result.output
    assert all(word in lines[0] for word in words), lines


def test_ddp_alone_sums_gradients_once_a_step() -> None:
    model: Any = FSDP1.__new__(FSDP1)
    nn.Module.__init__(model)
    # FSDP1's no_sync would keep gradients unsharded.
    assert isinstance(gradient_sync(model, is_last_micro_batch=False), nullcontext)
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    model.require_backward_grad_sync = True
    with gradient_sync(model, is_last_micro_batch=False):
        assert not model.require_backward_grad_sync
    with gradient_sync(model, is_last_micro_batch=True):
        assert model.require_backward_grad_sync


if __name__ == "__main__":
    assert "RANK" in os.environ
    run(main)
