"""Random weights drawn in parts: the architecture's own distributions, and the same values however they are cut."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, init_empty_weights
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    PreTrainedModel,
    T5Config,
)
from transformers import initialization as transformers_initialization

from common import initialization
from common.arguments import OptimizerArguments, TrainArguments, UserError
from common.initialization import InitSource, recorded_init
from common.launch import Strategy, build_accelerator, run
from common.losses import token_loss
from common.models import load_config, load_model
from common.optim import build_optimizer
from common.sharding import base_model, prepare_model
from tests.forked import ForkedParent

SEED = 7


def wide_config(kind: str) -> Any:
    """Matrices large enough for their statistics."""
    match kind:
        case "gpt2":
            return GPT2Config(vocab_size=500, n_positions=64, n_embd=128, n_layer=3, n_head=4)
        case "llama":
            return LlamaConfig(
                vocab_size=500, hidden_size=128, intermediate_size=300, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, initializer_range=0.05, pad_token_id=5,
            )  # fmt: skip
        case "t5":
            return T5Config(vocab_size=500, d_model=128, d_kv=16, d_ff=300, num_layers=2, num_heads=4)
        case "t5_untied":
            return T5Config(
                vocab_size=500, d_model=128, d_kv=16, d_ff=300, num_layers=2, num_heads=4, tie_word_embeddings=False,
                feed_forward_proj="gated-gelu", initializer_factor=0.5,
            )  # fmt: skip
    raise AssertionError(kind)


def auto_class(config: Any) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def source_of(config: Any, seed: int = SEED) -> tuple[PreTrainedModel, InitSource]:
    with init_empty_weights(include_buffers=False), recorded_init() as calls:
        model = auto_class(config).from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model, InitSource(model, calls, seed)


# One process.


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "t5_untied"])
def test_the_distributions_are_those_of_transformers(kind: str) -> None:
    config = wide_config(kind)
    model, source = source_of(config)
    torch.manual_seed(0)
    expected = dict(auto_class(config).from_config(config, dtype=torch.float32).named_parameters())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, theirs in expected.items():
        ours = source.read(name)[:]
        assert ours.shape == theirs.shape and ours.dtype == torch.float32
        if theirs.std() == 0:
            assert torch.equal(ours, theirs), name
            continue
        count, std = theirs.numel(), theirs.std().item()
        # Five standard errors of a difference of two samples.
        assert (ours.mean() - theirs.mean()).abs() < 5 * std * math.sqrt(2 / count), name
        assert ours.std().item() == pytest.approx(std, rel=5 / math.sqrt(count)), name
        assert (ours.abs().max() / std).item() == pytest.approx((theirs.abs().max() / std).item(), rel=0.5), name


def test_gpt2_s_published_scheme() -> None:
    """0.02 everywhere, and less on what adds to the residual stream: by the root of the number of such layers."""
    _, source = source_of(wide_config("gpt2"))
    stds = {name: source.read(f"transformer.{name}.weight")[:].std().item() for name in (
        "wte", "wpe", "h.0.attn.c_attn", "h.1.mlp.c_fc", "h.0.attn.c_proj", "h.2.mlp.c_proj")}  # fmt: skip
    for name, std in stds.items():
        assert std == pytest.approx(0.02 / math.sqrt(2 * 3) if "c_proj" in name else 0.02, rel=0.03), name


def test_the_embedding_of_padding_is_zero() -> None:
    _, source = source_of(wide_config("llama"))
    table = source.read("model.embed_tokens.weight")[:]
    assert not table[5].any() and table[:5].std() > 0.04 and table[6:].std() > 0.04
    assert torch.equal(source.read("model.embed_tokens.weight")[4:7], table[4:7])


def test_rows_are_the_same_however_they_are_cut() -> None:
    config = LlamaConfig(
        vocab_size=3000, hidden_size=1024, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=8
    )
    name, other = "model.embed_tokens.weight", "lm_head.weight"
    _, source = source_of(config)
    whole = source.read(name)[:]
    for start, stop in ((0, 1), (1000, 1100), (1023, 1025), (1024, 2048), (500, 3000), (2999, 3000)):
        assert torch.equal(source.read(name)[start:stop], whole[start:stop])
    assert initialization.BLOCK_SIZE == 2**20, "1024 rows of this table"
    for rows in (whole[1024:2048], source.read(other)[:1024], source_of(config, SEED + 1)[1].read(name)[:1024]):
        assert (rows * whole[:1024]).mean().abs() < 5e-6, "independent draws: the variance is 4e-4"
    assert torch.equal(source_of(config)[1].read(name)[:], whole)


def test_load_model(tmp_path: Path) -> None:
    """Without --init: no weights, the source, and buffers with their values; --init device: weights and no source."""
    config = wide_config("llama")
    config.save_pretrained(tmp_path)
    args = TrainArguments(model_config_path=str(tmp_path), seed=SEED)
    model, source = load_model(args, load_config(args), AutoModelForCausalLM, Accelerator(cpu=True))
    assert isinstance(source, InitSource) and all(parameter.is_meta for parameter in model.parameters())
    args.init = "device"
    drawn, nothing = load_model(args, load_config(args), AutoModelForCausalLM, Accelerator(cpu=True))
    assert nothing is None and not any(parameter.is_meta for parameter in drawn.parameters())
    buffers = dict(drawn.named_buffers())
    assert len(buffers) == 2
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_init_device_is_for_random_weights() -> None:
    with pytest.raises(UserError, match="--init device draws random weights, but --model_name_or_path loads them"):
        TrainArguments(model_name_or_path="model", init="device")


# Schemes that are not of the architectures above.


def with_scheme(monkeypatch: pytest.MonkeyPatch, initialise: Any) -> tuple[PreTrainedModel, InitSource]:
    own = GPT2LMHeadModel._init_weights

    def init_weights(self: Any, module: Any) -> None:
        own(self, module)
        if type(module).__name__ == "GPT2MLP":
            initialise(module.c_fc.weight)

    monkeypatch.setattr(GPT2LMHeadModel, "_init_weights", init_weights)
    monkeypatch.setattr(GPT2LMHeadModel.__mro__[1], "_init_weights", init_weights)
    return source_of(wide_config("gpt2"))


def test_a_truncated_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialise(weight: torch.Tensor) -> None:
        transformers_initialization.trunc_normal_(weight, std=0.1, a=-0.1, b=0.2)

    values = with_scheme(monkeypatch, initialise)[1].read("transformer.h.0.mlp.c_fc.weight")[:]
    assert -0.1 <= values.min() < -0.099 and 0.199 < values.max() <= 0.2


@pytest.mark.parametrize(
    ("initialise", "words"),
    [
        (transformers_initialization.orthogonal_, "by orthogonal, which cannot be drawn in parts"),
        (transformers_initialization.xavier_uniform_, "by xavier_uniform, which cannot be drawn in parts"),
        (lambda weight: transformers_initialization.copy_(weight, torch.ones(weight.shape)), "by copy, which cannot"),
        (lambda weight: transformers_initialization.zeros_(weight[:, :3]), "by zeros, which cannot be drawn in parts"),
    ],
)
def test_what_cannot_be_drawn_is_named(initialise: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=words) as caught:
        with_scheme(monkeypatch, initialise)
    assert "GPT2LMHeadModel initialises transformer.h.0.mlp.c_fc.weight by" in str(caught.value)
    assert "use --init device" in str(caught.value)


def test_a_parameter_without_an_initialiser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT2LMHeadModel.__mro__[1], "_init_weights", lambda self, module: None)
    with pytest.raises(UserError, match="does not say how transformer.wte.weight is initialised"):
        source_of(wide_config("gpt2"))


# Several processes: `main` writes the weights before and after one step, whole, to `<out>/<kind>.pt`.

KINDS = ("gpt2", "llama", "t5")
VOCABULARY = 19  # shards of different sizes


def small_config(kind: str) -> Any:
    if kind == "gpt2":
        return GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    if kind == "llama":
        return LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, pad_token_id=0,
        )  # fmt: skip
    return T5Config(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=20, num_layers=2, num_heads=2, decoder_start_token_id=0
    )


def batch(kind: str) -> dict[str, torch.Tensor]:
    tokens = torch.arange(10).view(2, 5) % (VOCABULARY - 3) + 3
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    return inputs | ({"decoder_input_ids": tokens} if kind == "t5" else {})


def whole_state(model: Any) -> dict[str, torch.Tensor]:
    inner = base_model(model) if isinstance(model, DistributedDataParallel) else model
    state: dict[str, Any] = get_model_state_dict(inner, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in state.items()}


def anonymous_memory() -> int:
    """Bytes of this process that are in no file; pages that it still shares with the process it was forked from are
    counted in part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))


def main() -> None:
    out = Path(sys.argv[1])
    args = TrainArguments(output_dir=str(out / "run"), seed=SEED)
    accelerator, strategy = build_accelerator(args)
    if sys.argv[2] == "memory":
        measure_memory(args, accelerator, strategy, out)
        return
    initialization.BLOCK_SIZE = 64  # several blocks in each matrix
    for kind in KINDS:
        args.model_config_path = str(out.parent / kind)
        config = load_config(args)
        model = prepare_model(
            *load_model(args, config, auto_class(config), accelerator), args, accelerator, strategy
        )  # fmt: skip
        before = whole_state(model)
        optimizer = build_optimizer(model, OptimizerArguments(learning_rate=1e-2))
        accelerator.backward(token_loss(model.train(), batch(kind)))
        optimizer.step()
        after = whole_state(model)
        if accelerator.is_main_process:
            buffers = {
                name.replace("_fsdp_wrapped_module.", ""): buffer for name, buffer in base_model(model).named_buffers()
            }
            torch.save((before, after, buffers), out / f"{kind}.pt")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("configs")
    for kind in KINDS:
        small_config(kind).save_pretrained(root / kind)
    return root


@pytest.mark.parametrize(
    ("config", "num_processes"),
    [
        ("single_device", 1),
        ("ddp", 2),
        ("fsdp_full_shard", 2),
        ("fsdp_full_shard", 4),
        pytest.param("fsdp_hybrid_shard", 4, marks=pytest.mark.full),
        ("fsdp1_full_shard", 2),
        ("fsdp1_full_shard", 4),
        pytest.param("fsdp1_hybrid_shard", 4, marks=pytest.mark.full),
    ],
)
def test_the_first_weights_under(
    config: str, num_processes: int, configs: Path, forked: ForkedParent, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = configs / f"{config}_{num_processes}"
    out.mkdir()
    result = forked.run(
        __file__, str(out), "weights", config=config, num_processes=num_processes,
        launcher_flags=["--mixed_precision", "no"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    monkeypatch.setattr(initialization, "BLOCK_SIZE", 64)
    for kind in KINDS:
        before, after, buffers = torch.load(out / f"{kind}.pt")
        model, source = source_of(small_config(kind))
        for name, _ in model.named_parameters():
            assert torch.equal(before[name], source.read(name)[:]), (kind, name)
            assert not torch.equal(after[name], before[name]), f"{kind}: {name} does not move"
        for name, tied in model.all_tied_weights_keys.items():
            assert torch.equal(before[name], before[tied]) and torch.equal(after[name], after[tied]), (kind, name)
        expected = dict(auto_class(model.config).from_config(model.config).named_buffers())
        assert buffers.keys() == expected.keys() and (kind != "llama" or len(expected) == 2)
        assert all(torch.equal(buffer, expected[name]) for name, buffer in buffers.items()), kind


# Memory.


def measure_memory(args: TrainArguments, accelerator: Accelerator, strategy: Strategy, out: Path) -> None:
    def build(name: str) -> Any:
        args.model_config_path = str(out / name)
        weights = load_model(args, load_config(args), AutoModelForCausalLM, accelerator)
        model = prepare_model(*weights, args, accelerator, strategy)
        accelerator.wait_for_everyone()
        return model

    tiny = build("tiny")  # what the libraries load when they are first used is no part of a model
    before = anonymous_memory()
    model = build("model")
    added = anonymous_memory() - before
    shard = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert tiny is not model
    (out / f"{accelerator.process_index}.json").write_text(json.dumps({"added": added, "shard": shard}))


@pytest.mark.parametrize(
    ("hidden_size", "num_layers"),
    [(768, 12), pytest.param(2048, 16, marks=pytest.mark.full)],
    ids=["100M", "1B"],
)
def test_no_process_holds_more_than_its_shard(
    hidden_size: int, num_layers: int, forked: ForkedParent, tmp_path: Path
) -> None:
    for name, width, depth in (("tiny", 64, 1), ("model", hidden_size, num_layers)):
        LlamaConfig(
            vocab_size=16_000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=depth,
            num_attention_heads=width // 64,
        ).save_pretrained(tmp_path / name)  # fmt: skip
    result = forked.run(
        __file__, str(tmp_path), "memory", config="fsdp_full_shard", num_processes=2,
        launcher_flags=["--mixed_precision", "no"], timeout=300,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for rank in (0, 1):
        measured = json.loads((tmp_path / f"{rank}.json").read_text())
        assert measured["shard"] > 200e6
        assert measured["added"] < 1.3 * measured["shard"], measured


if __name__ == "__main__":
    run(main)
