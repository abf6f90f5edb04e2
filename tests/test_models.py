"""Configs, tokenizers and weights: what comes out of a checkpoint equals what `from_pretrained` gives."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BloomConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from common import bias_attention, models
from common.arguments import TrainArguments, UserError
from common.export import export_model
from common.launch import Strategy, build_accelerator, run
from common.losses import token_loss
from common.models import (
    WeightSource,
    check_kind,
    check_packing,
    check_positions,
    check_vocabulary,
    describe_model,
    fetch,
    fit_config,
    load_config,
    load_model,
    load_tokenizer,
    meta_model,
)
from common.sharding import prepare_model
from tests.forked import REPOSITORY, ForkedParent

T5_DEMO = REPOSITORY / "recipes" / "configs" / "models" / "t5_demo"
TOKENIZER = REPOSITORY / "recipes" / "samples" / "tokenizer"
VOCABULARY = 19  # with two processes, the shards of the embedding differ in size
SINGLE = Strategy("single", "no")


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, rope_theta=123.0, **settings,
        )
    )  # fmt: skip


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def gpt2(model_class: type[GPT2LMHeadModel] | type[GPT2Model] = GPT2LMHeadModel) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return model_class(config)


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=2, attn_implementation="eager",
        )
    )  # fmt: skip


def untied_t5() -> T5ForConditionalGeneration:
    model = t5()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    model.config.tie_word_embeddings = False
    return model


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def to_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def checkpoint(kind: str, folder: Path) -> type:
    """Writes a checkpoint and returns the class to load it with."""
    if kind in ("t5", "t5_bin"):
        t5().save_pretrained(folder)
        if kind == "t5_bin":
            to_bin(folder)
        return AutoModelForSeq2SeqLM
    match kind:
        case "llama" | "llama_bin":
            llama().save_pretrained(folder)
        case "llama_tied":
            llama(tie_word_embeddings=True).save_pretrained(folder)
        case "llama_head":  # the tied table under its other name
            llama(tie_word_embeddings=True).save_pretrained(folder)
            rewrite(folder, lambda state: {key.replace("model.embed_tokens", "lm_head"): state[key] for key in state})
        case "llama_parts":
            llama().save_pretrained(folder, max_shard_size="1KB")
            assert len(list(folder.glob("*.safetensors"))) > 3
        case "llama_bfloat16":
            llama().bfloat16().save_pretrained(folder)
        case "llama_more":
            llama().save_pretrained(folder)
            rewrite(folder, lambda state: state | {"a.rotary_emb.inv_freq": torch.ones(3)})
        case "gpt2":
            gpt2().save_pretrained(folder)
        case "gpt2_base":
            gpt2(GPT2Model).save_pretrained(folder)
            assert "wte.weight" in load_file(folder / "model.safetensors")
        case "mixtral":  # transformers stacks its experts when it loads them
            mixtral().save_pretrained(folder)
            assert any("experts.0." in name for name in load_file(folder / "model.safetensors"))
    if kind == "llama_bin":
        to_bin(folder)
    return AutoModelForCausalLM


CHECKPOINTS = [
    "t5", "t5_bin", "llama", "llama_bin", "llama_tied", "llama_head", "llama_parts", "llama_bfloat16", "llama_more",
    "gpt2", "gpt2_base", "mixtral",
]  # fmt: skip
CONVERTED = ("t5_bin", "llama_bin", "mixtral")  # all others are read from their own files


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def arguments(folder: Path | str, **settings: Any) -> TrainArguments:
    return TrainArguments(model_name_or_path=str(folder), output_dir=f"{folder}_run", **settings)


def load(folder: Path, auto_class: Any, accelerator: Accelerator, **settings: Any) -> PreTrainedModel:
    args = arguments(folder, **settings)
    config = load_config(args)
    check_kind(config, auto_class)
    model, weights = load_model(args, config, auto_class, accelerator)
    prepared = prepare_model(model, weights, args, accelerator, SINGLE)
    assert isinstance(prepared, PreTrainedModel)
    return prepared


# Weights.


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_weights_equal_those_of_from_pretrained(
    kind: str, folder: Path, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind not in CONVERTED:
        monkeypatch.delattr(models, "_convert")
    auto_class: Any = checkpoint(kind, folder)
    expected = auto_class.from_pretrained(folder, dtype=torch.float32)
    model = load(folder, auto_class, accelerator)
    assert type(model) is type(expected)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    for name, value in expected.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], value), name
    assert len(list(model.parameters())) == len(list(expected.parameters())), "ties"
    tokens = torch.tensor([[3, 4, 5, 1]])
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if kind.startswith("t5") else {})
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, expected.eval()(**inputs).logits)
    assert not list(Path(f"{folder}_run").glob("converted_weights*"))


@pytest.mark.parametrize("kind", ["t5", "llama", "llama_parts", "gpt2_base"])
def test_parts_of_weights_are_read_from_the_files(kind: str, folder: Path, accelerator: Accelerator) -> None:
    auto_class: Any = checkpoint(kind, folder)
    args = arguments(folder)
    model, weights = load_model(args, load_config(args), auto_class, accelerator)
    assert weights is not None
    assert all(parameter.is_meta for parameter in model.parameters()), "no process may hold a copy"
    assert not any(buffer.is_meta for buffer in model.buffers())
    expected = dict(auto_class.from_pretrained(folder).named_parameters())
    for name, parameter in model.named_parameters():
        rows = parameter.shape[0]
        assert torch.equal(weights.read(name)[:], expected[name]), name
        assert torch.equal(weights.read(name)[rows // 3 : rows // 2 + 1], expected[name][rows // 3 : rows // 2 + 1])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list what is mapped")
def test_what_was_read_does_not_stay_mapped(folder: Path, accelerator: Accelerator) -> None:
    auto_class: Any = checkpoint("llama_parts", folder)
    args = arguments(folder)
    model, weights = load_model(args, load_config(args), auto_class, accelerator)
    assert weights is not None
    for name, _ in model.named_parameters():
        rows = weights.read(name)[:]
        assert str(folder) in Path("/proc/self/maps").read_text(), "the test sees a mapped file"
        del rows
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_generation_settings_of_a_checkpoint_are_kept(folder: Path, accelerator: Accelerator) -> None:
    model = llama()
    model.generation_config = GenerationConfig(eos_token_id=[3, 4], temperature=0.6, do_sample=True)
    model.save_pretrained(folder)
    loaded = load(folder, AutoModelForCausalLM, accelerator).generation_config
    assert (loaded.eos_token_id, loaded.temperature, loaded.do_sample) == ([3, 4], 0.6, True)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda state: {key: state[key] for key in state if key != name})


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n")


def broken_bin(folder: Path) -> None:
    to_bin(folder)
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\n")


def missing_part(folder: Path) -> None:
    llama().save_pretrained(folder, max_shard_size="1KB")
    (folder / "model.safetensors").unlink()
    next(folder.glob("model-00002-of-*.safetensors")).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("model.norm.weight"), ["lacks 1 weights", "model.norm.weight"]),
        (without("lm_head.weight"), ["lacks 1 weights", "lm_head.weight"]),
        (
            lambda folder: rewrite(folder, lambda state: {f"_orig_mod.{key}": state[key] for key in state}),
            ["lacks 21 weights"],
        ),
        (
            lambda folder: rewrite(folder, lambda state: state | {"model.norm.weight": torch.ones(9)}),
            ["another shape", "model.norm.weight: [9] instead of [8]"],
        ),
        (cut, ["model.safetensors: no readable weights", "cut short"]),
        (pointer, ["model.safetensors: no readable weights", "Git LFS"]),
        (broken_bin, ["no PyTorch checkpoint"]),
        (missing_part, ["model-00002-of-"]),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
            ["model.safetensors.index.json", "index"],
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), ["no file named model.safetensors"]),
    ],
    ids=[
        "no norm", "no head", "prefix", "shape", "cut", "pointer", "broken bin", "missing part", "broken index", "none",
    ],
)  # fmt: skip
def test_damaged_checkpoints(
    damage: Callable[[Path], Any], words: list[str], folder: Path, accelerator: Accelerator
) -> None:
    llama().save_pretrained(folder)
    damage(folder)
    with pytest.raises(UserError) as caught:
        load(folder, AutoModelForCausalLM, accelerator)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message and len(message) < 500
    assert all(word in message for word in words), message


def test_a_config_of_another_size_than_the_weights(folder: Path, accelerator: Accelerator) -> None:
    llama().save_pretrained(folder)
    with pytest.raises(UserError, match=r"6 weights have another shape .*down_proj.*: \[8, 20\] instead of \[8, 24\]"):
        load(folder, AutoModelForCausalLM, accelerator, config_overrides="intermediate_size=24")


def test_random_weights_depend_on_the_seed_alone(accelerator: Accelerator) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed())  # whatever was drawn before
        args = TrainArguments(model_config_path=str(T5_DEMO), seed=seed, init="device")
        model, source = load_model(args, load_config(args), AutoModelForSeq2SeqLM, accelerator)
        assert source is None
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_models_that_do_not_pack_are_refused() -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "ffn_dim": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = OPTConfig(**sizes, word_embed_proj_dim=8, max_position_embeddings=8)
    with pytest.raises(UserError, match="--packing: in OPTForCausalLM what is packed together would see each other"):
        check_packing(TrainArguments(), config, AutoModelForCausalLM, "packing")
    check_packing(TrainArguments(), llama().config, AutoModelForCausalLM, "packing")


def test_sequences_longer_than_the_positions() -> None:
    check_positions(BloomConfig(), "max_seq_length", 10**6)
    with pytest.raises(UserError, match="--max_seq_length 9: the model has 8 positions"):
        check_positions(LlamaConfig(max_position_embeddings=8), "max_seq_length", 9)


def test_a_padding_token_that_ends_texts_is_none_of_the_models() -> None:
    """A model's padding has an embedding of zeros that does not learn."""
    tokenizer = AutoTokenizer.from_pretrained(T5_DEMO.parents[2] / "samples" / "tokenizer")
    for pad, expected in ((tokenizer.eos_token, None), (tokenizer.pad_token, tokenizer.pad_token_id)):
        tokenizer.pad_token = pad
        config = LlamaConfig(vocab_size=len(tokenizer))
        args = TrainArguments(model_config_path="x")
        fit_config(args, config, tokenizer, 8, is_own_vocabulary=False)
        assert config.pad_token_id == expected and config.eos_token_id == tokenizer.eos_token_id


def test_attention_kernels(accelerator: Accelerator) -> None:
    def build(kernel: str) -> PreTrainedModel:
        args = TrainArguments(model_config_path=str(T5_DEMO), attn_implementation=kernel)
        return load_model(args, load_config(args), AutoModelForSeq2SeqLM, accelerator)[0]

    assert build("eager").config._attn_implementation == "eager"
    refused = {"foo": "not supported", "flash_attention_2": "Flash", "flex_attention": "CPU", "bias_attention": "CPU"}
    for kernel, words in refused.items():
        with pytest.raises(UserError, match=f"--attn_implementation {kernel}: .*{words}"):
            build(kernel)


def test_a_learned_bias_has_its_kernels_where_they_run(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernels(**flags: Any) -> set[str | None]:
        args = TrainArguments(model_config_path=str(T5_DEMO), **flags)
        model, _ = load_model(args, load_config(args), AutoModelForSeq2SeqLM, accelerator)
        return {part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)}

    assert kernels() == {"sdpa"}
    monkeypatch.setattr(bias_attention, "is_available", lambda device: True)
    assert kernels() == kernels(init="device") == {"bias_attention"}
    assert kernels(attn_implementation="eager") == {"eager"}
    assert kernels(attn_implementation="sdpa") == {"sdpa"}


def test_position_bias_fits_the_fused_attention_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They refuse a mask whose keys are not next to each other, and copy one whose rows are no multiple of 16 long."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 3, "vocab_size": 9}
    config = T5Config(**sizes, decoder_start_token_id=0)
    model = meta_model(TrainArguments(), config, AutoModelForSeq2SeqLM).to_empty(device="cpu")
    masks = []
    attention = F.scaled_dot_product_attention

    def watch(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        masks.append(attn_mask.stride())
        return attention(query, key, value, attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    ids, padding = torch.ones(2, 32, dtype=torch.int64), torch.arange(64).view(2, 32) < 50
    for mask in (None, padding):
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :16])
    assert len(masks) == 2 * 6
    assert all(last == 1 and not any(stride % 16 for stride in others) for *others, last in masks)


def test_weights_in_one_line(folder: Path) -> None:
    model = llama()
    assert describe_model(model, arguments("some/model")) == (
        f"LlamaForCausalLM, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, sdpa attention, "
        "weights of some/model"
    )
    assert describe_model(model, TrainArguments(model_config_path="c")).endswith("random weights, c")


def test_weight_source_names_what_is_missing(folder: Path) -> None:
    llama().save_pretrained(folder)
    with pytest.raises(KeyError, match=r"transformer\.w.e\.weight"):
        WeightSource(folder, gpt2())


# Configs and tokenizers.


def test_persistent_buffers_get_the_checkpoints_values(folder: Path) -> None:
    model = llama()
    model.register_buffer("kept", torch.tensor([3.0]))
    model.register_buffer("computed", torch.tensor([3.0]), persistent=False)
    model.save_pretrained(folder)
    model.kept.zero_()
    model.computed.zero_()
    WeightSource(folder, model)
    assert model.kept.item() == 3.0 and model.computed.item() == 0.0


def test_an_override_that_drops_weights_is_refused(folder: Path, accelerator: Accelerator) -> None:
    llama().save_pretrained(folder)
    args = arguments(folder, config_overrides="num_hidden_layers=1")
    with pytest.raises(UserError, match=r"num_hidden_layers=1': 9 weights of .* the first is model\.layers\.1\."):
        load_model(args, load_config(args), AutoModelForCausalLM, accelerator)
    args = arguments(folder, config_overrides="attention_dropout=0.5")
    assert load_model(args, load_config(args), AutoModelForCausalLM, accelerator)[0].config.attention_dropout == 0.5


def test_an_override_that_is_given_twice() -> None:
    args = TrainArguments(model_config_path=str(T5_DEMO), config_overrides="num_layers=2,d_ff=8,num_layers=3")
    with pytest.raises(UserError, match="num_layers is given twice; remove one"):
        load_config(args)


def test_overrides_of_the_config() -> None:
    def config(overrides: str) -> Any:
        return load_config(TrainArguments(model_config_path=str(T5_DEMO), config_overrides=overrides))

    changed = config("d_ff=96, dropout_rate=0,hidden_size=32")  # T5 calls it d_model
    assert (changed.d_ff, changed.dropout_rate, changed.d_model) == (96, 0.0, 32)
    assert changed.num_heads == config("d_ff=1").num_heads
    assert load_config(TrainArguments(model_config_path=str(T5_DEMO / "config.json"))).d_ff == 256


def test_dropout_of_gpt2_is_one_override(tmp_path: Path) -> None:
    GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).save_pretrained(tmp_path)
    config = load_config(
        TrainArguments(model_config_path=str(tmp_path), config_overrides="n_layer=6, dropout=0.25,n_head=4")
    )
    assert (config.n_layer, config.n_head) == (6, 4)
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.25, 0.25, 0.25)


def test_overrides_reach_what_a_config_derives(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    args = TrainArguments(
        model_config_path=str(tmp_path), config_overrides="hidden_size=96,num_attention_heads=6,num_key_value_heads=2"
    )
    config = load_config(args)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (96, 16, 2)
    args.config_overrides = "num_attention_heads=2"
    assert (load_config(args).head_dim, load_config(args).num_key_value_heads) == (32, 2)


@pytest.mark.parametrize(
    "stored",
    [
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {},
    ],
)
def test_the_base_of_the_rotary_positions_is_overridden(stored: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **stored}))
    args = TrainArguments(model_config_path=str(tmp_path))
    as_it_is = load_config(args).rope_parameters
    args.config_overrides = "max_position_embeddings=64,rope_theta=8e6"
    config = load_config(args)
    assert config.rope_parameters == {**as_it_is, "rope_theta": 8e6} and config.max_position_embeddings == 64


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("layers=2", ["'layers=2'", "T5Config"]),
        ("rope_theta=2", ["'rope_theta=2'", "T5Config"]),
        ("num_layers", ["'num_layers'", "key=value"]),
        ("num_layers=2,", ["''", "key=value"]),
        ("num_layers=2=3", ["key=value"]),
        ("num_layers=two", ["'two'"]),
        ("num_layers=2.5", ["'2.5'"]),
        ("use_cache=maybe", ["maybe"]),
        ("architectures=x", ["architectures"]),
        ("to_dict=1", ["to_dict"]),
    ],
)
def test_mistakes_in_overrides(overrides: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_config(TrainArguments(model_config_path=str(T5_DEMO), config_overrides=overrides))
    assert all(word in str(caught.value) for word in ["--config_overrides", *words]), caught.value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("hidden_size=66", ["--config_overrides 'hidden_size=66'", "66"]),
        ("num_attention_heads=0", ["--config_overrides 'num_attention_heads=0'", "ZeroDivisionError"]),
        ("num_key_value_heads=3", ["num_attention_heads 4 is no multiple of num_key_value_heads 3"]),
    ],
)
def test_sizes_that_contradict_each_other(overrides: str, words: list[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 9}
    key, value = overrides.split("=")
    for name, content in (("good", sizes), ("bad", sizes | {key: int(value)})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", **content}))
    with pytest.raises(UserError) as caught:
        load_config(TrainArguments(model_config_path=str(tmp_path / "good"), config_overrides=overrides))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value
    with pytest.raises(UserError, match=f"model config {tmp_path / 'bad'}: "):
        load_config(TrainArguments(model_config_path=str(tmp_path / "bad")))


@pytest.mark.parametrize("overrides", ["num_heads=0", "vocab_size=-3", "dropout_rate=2.0"])
def test_overrides_that_no_model_can_have(overrides: str, accelerator: Accelerator) -> None:
    args = TrainArguments(model_config_path=str(T5_DEMO), config_overrides=overrides)
    with pytest.raises(UserError, match=f"--config_overrides '{overrides}': no model can be built"):
        load_model(args, load_config(args), AutoModelForSeq2SeqLM, accelerator)


def test_missing_and_unreadable_configs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--model_name_or_path .*--model_config_path"):
        load_config(TrainArguments())
    with pytest.raises(UserError, match="--model_config_path .*absent: no such file"):
        load_config(TrainArguments(model_config_path=str(tmp_path / "absent")))
    for name, content in (("broken", "{"), ("untyped", "{}"), ("unknown", '{"model_type": "zzz"}')):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(content)
        for args in (TrainArguments(model_config_path=str(folder)), arguments(folder)):
            with pytest.raises(UserError, match=f"model config .*{name}: cannot be read: ") as caught:
                load_config(args)
            assert "\n" not in str(caught.value)


def test_kinds_of_models() -> None:
    check_kind(T5Config(), AutoModelForSeq2SeqLM)
    check_kind(LlamaConfig(), AutoModelForCausalLM)
    with pytest.raises(UserError, match=r"LlamaConfig \(model type 'llama'\) is no encoder-decoder model"):
        check_kind(LlamaConfig(), AutoModelForSeq2SeqLM)
    with pytest.raises(UserError, match=r"T5Config \(model type 't5'\) is no causal model"):
        check_kind(T5Config(), AutoModelForCausalLM)


def test_vocabulary_must_hold_all_tokens() -> None:
    tokenizer = load_tokenizer(TrainArguments(tokenizer_name_or_path=str(TOKENIZER)))
    check_vocabulary(T5Config(vocab_size=len(tokenizer)), tokenizer)  # larger ones, padded for speed, are usual
    check_vocabulary(T5Config(vocab_size=2 * len(tokenizer)), tokenizer)
    message = f"{len(tokenizer)} tokens .* {len(tokenizer) - 1}: .*--tokenizer_name_or_path"
    with pytest.raises(UserError, match=message):
        check_vocabulary(T5Config(vocab_size=len(tokenizer) - 1), tokenizer)


def test_tokenizers(folder: Path) -> None:
    text = "Boil the water."
    expected = load_tokenizer(TrainArguments(tokenizer_name_or_path=str(TOKENIZER)))(text).input_ids
    llama().save_pretrained(folder)
    with pytest.raises(
        UserError, match="tokenizer .*checkpoint: cannot be loaded: .*--tokenizer_name_or_path"
    ) as caught:
        load_tokenizer(arguments(folder))
    assert "\n" not in str(caught.value)
    load_tokenizer(TrainArguments(tokenizer_name_or_path=str(TOKENIZER))).save_pretrained(folder)
    assert load_tokenizer(arguments(folder))(text).input_ids == expected
    with pytest.raises(UserError, match="--tokenizer_name_or_path is needed with --model_config_path"):
        load_tokenizer(TrainArguments(model_config_path=str(T5_DEMO)))


@pytest.mark.parametrize("model_type", ["gpt2", "t5"])
def test_a_tokenizer_made_of_a_config_alone_is_refused(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UserError, match="cannot be loaded: it has no vocabulary: .*--tokenizer_name_or_path"):
        load_tokenizer(TrainArguments(tokenizer_name_or_path=str(tmp_path)))


def test_overrides_of_the_tokenizer(folder: Path) -> None:
    args = arguments(folder, tokenizer_name_or_path=str(TOKENIZER))
    assert load_tokenizer(args)("Boil").input_ids


# The hub.


RESPONSE: Any = httpx.Response(401, request=httpx.Request("GET", "https://huggingface.co/a/b"))


DOWNLOAD = 'make download ARGS="--'


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError("gated", response=RESPONSE), ["is gated", "https://huggingface.co/a/b", "hf auth login"]),
        (RepositoryNotFoundError("absent", response=RESPONSE), ["neither a folder here nor a public repository"]),
        (LocalEntryNotFoundError("offline"), ["cannot be reached", DOWNLOAD, "local folder"]),
        (HfHubHTTPError("server error", response=RESPONSE), ["cannot be reached", DOWNLOAD]),
        (ConnectionError("no route"), ["cannot be reached", DOWNLOAD]),
    ],
)
def test_hub_errors_say_what_to_do(error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(models, "snapshot_download", fail)
    for action in (load_config, load_tokenizer):
        with pytest.raises(UserError) as caught:
            action(arguments("a/b"))
        message = str(caught.value)
        assert "a/b" in message and "\n" not in message
        assert all(word in message for word in words), message
    if isinstance(error, (GatedRepoError, LocalEntryNotFoundError)):
        assert "demo preset runs offline" in message


def test_without_a_network() -> None:
    """HF_HUB_OFFLINE is set in all tests: what a machine without a network sees, unless the hub's cache has it."""
    with pytest.raises(UserError, match="google-t5/t5-small is not in the local cache and the hub cannot be reached"):
        fetch("google-t5/t5-small", "model", ["*.json"])


def test_names_that_are_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the repository may have runs of its own
    for name in ("/absent/folder", "./absent", "runs/demo/model", "~/model", str(tmp_path / "absent")):
        with pytest.raises(UserError, match=f"model {name}: no such folder"):
            fetch(name, "model")
    with pytest.raises(UserError, match="neither a folder nor a name"):
        fetch("bad name!", "model")
    (tmp_path / "model").mkdir()
    assert fetch("model", "model") == Path("model")


def test_the_hub_gives_only_what_is_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator
) -> None:
    checkpoint("llama_bin", folder)
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(models, "snapshot_download", download)
    args = TrainArguments(model_name_or_path="a/b", output_dir=f"{folder}_run")
    load_model(args, load_config(args), AutoModelForCausalLM, accelerator)
    # Older .bin files, of the same size, only where there is no safetensors.
    expected = [["*.json"], ["*.json", "*.safetensors"], ["*.json", "*.bin"]]
    assert asked == [("a/b", patterns) for patterns in expected]


# Every strategy reads the same weights: same loss, same exported files. `main` runs in the forked processes.


def batch(kind: str) -> dict[str, torch.Tensor]:
    tokens = torch.tensor([[3, 4, 5, 6, 1], [7, 8, 9, 1, 0]])
    labels = tokens.masked_fill(tokens == 0, -100)
    inputs = {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}
    if kind.startswith("t5"):
        return inputs | {"decoder_input_ids": torch.cat([torch.zeros(2, 1, dtype=torch.long), tokens[:, :-1]], dim=1)}
    return inputs


def main() -> None:
    root = Path(sys.argv[1])
    args = TrainArguments(output_dir=str(root / "run"))
    accelerator, strategy = build_accelerator(args)
    tokenizer = load_tokenizer(TrainArguments(tokenizer_name_or_path=str(TOKENIZER)))
    losses = {}
    for kind in sys.argv[2:]:
        args.model_name_or_path = str(root.parent / kind)
        config = load_config(args)
        auto_class: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = prepare_model(*load_model(args, config, auto_class, accelerator), args, accelerator, strategy)
        export_model(model, tokenizer, root / kind, accelerator)
        losses[kind] = token_loss(model, batch(kind)).item()
        sums = torch.stack([buffer.double().sum() for buffer in model.buffers()] or [torch.zeros(())])
        assert torch.equal(accelerator.gather(sums[None]), sums.expand(accelerator.num_processes, -1)), "buffers"
    if accelerator.is_main_process:
        (root / "losses.json").write_text(json.dumps(losses))


SHARDED_CHECKPOINTS = ["t5", "t5_bin", "llama", "llama_tied", "llama_parts", "gpt2_base", "mixtral"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in SHARDED_CHECKPOINTS:
        checkpoint(kind, root / kind)
    return root


@pytest.mark.parametrize("config", ["fsdp_full_shard", "fsdp_shard_grad_op", "fsdp1_full_shard", "ddp"])
def test_weights_under(config: str, forked: ForkedParent, checkpoints: Path) -> None:
    out = checkpoints / config
    result = forked.run(
        __file__, str(out), *SHARDED_CHECKPOINTS, config=config, num_processes=2,
        launcher_flags=["--mixed_precision", "no"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    losses = json.loads((out / "losses.json").read_text())
    for kind in SHARDED_CHECKPOINTS:
        auto_class: Any = AutoModelForSeq2SeqLM if kind.startswith("t5") else AutoModelForCausalLM
        expected = auto_class.from_pretrained(checkpoints / kind)
        exported = auto_class.from_pretrained(out / kind)
        others = {"_name_or_path": str(out / kind), "architectures": [type(expected).__name__]}
        assert exported.config.to_dict() == expected.config.to_dict() | others, kind
        assert exported.state_dict().keys() == expected.state_dict().keys()
        for name, value in expected.state_dict().items():
            assert torch.equal(exported.state_dict()[name], value), (kind, name)
        assert losses[kind] == pytest.approx(token_loss(expected, batch(kind)).item(), rel=1e-5), kind


if __name__ == "__main__":
    assert "RANK" in os.environ
    run(main)
