"""A folder that `from_pretrained` loads: the trained model's logits, whatever the strategy, and never half a folder."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
)

from common.arguments import TrainArguments
from common.export import export_model
from common.launch import RunFailed, build_accelerator, run
from common.losses import token_loss
from common.optim import build_optimizer
from common.sharding import prepare_model
from tests.forked import REPOSITORY, ForkedParent

TOKENIZER = REPOSITORY / "recipes" / "samples" / "tokenizer"
CLASSES: dict[str, Any] = {
    "t5": AutoModelForSeq2SeqLM,
    "llama": AutoModelForCausalLM,
    "llama_tied": AutoModelForCausalLM,
}
VOCABULARY = 19


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 2}
        return T5ForConditionalGeneration(
            T5Config(vocab_size=VOCABULARY, dropout_rate=0.1, decoder_start_token_id=0, **sizes)
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=kind == "llama_tied",
        )
    )  # fmt: skip


def inputs(kind: str) -> dict[str, torch.Tensor]:
    tokens = torch.arange(10).view(2, 5) + 3
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if kind == "t5" else {})


def logits(model: nn.Module, kind: str) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(**inputs(kind)).logits


def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOKENIZER)


# In forked processes: train and export; then load in a process that has never seen the model.


def train_and_export(out: Path, flags: dict[str, Any]) -> None:
    args = TrainArguments(output_dir=str(out / "run"), learning_rate=1e-2, **flags)
    accelerator, strategy = build_accelerator(args)
    for kind in CLASSES:
        model = prepare_model(make_model(kind), None, args, accelerator, strategy)
        optimizer = build_optimizer(model, args)
        model.train()
        for _ in range(3):
            token_loss(model, inputs(kind) | {"labels": inputs(kind)["input_ids"]}).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = logits(model, kind)
        export_model(model, tokenizer(), out / kind, accelerator)
        after = logits(model, kind)  # the model in training is left alone
        if accelerator.is_main_process:
            torch.save((trained, after), out / f"{kind}_trained.pt")


def reload(out: Path) -> None:
    for kind, auto_class in CLASSES.items():
        model, report = auto_class.from_pretrained(out / kind, output_loading_info=True)
        assert not any(report.values()), report
        torch.save((logits(model, kind), model.dtype, model.config.dtype), out / f"{kind}_reloaded.pt")


@pytest.mark.parametrize(
    ("config", "num_processes"),
    [("single_device", 1), ("ddp", 2), ("fsdp_full_shard", 2), ("fsdp1_full_shard", 2)],
)
def test_a_new_process_gives_the_trained_models_logits(
    config: str, num_processes: int, forked: ForkedParent, tmp_path: Path
) -> None:
    export(forked, tmp_path, config, num_processes)
    for kind in CLASSES:
        trained, after = torch.load(tmp_path / f"{kind}_trained.pt")
        reloaded, dtype, config_dtype = torch.load(tmp_path / f"{kind}_reloaded.pt")
        assert dtype == config_dtype == torch.float32
        assert not torch.allclose(trained, logits(make_model(kind), kind), atol=1e-2), "it has learnt something"
        torch.testing.assert_close(reloaded, trained, rtol=1e-5, atol=1e-5, msg=kind)
        assert torch.equal(after, trained)


def test_the_exported_type_is_that_of_the_parameters(forked: ForkedParent, tmp_path: Path) -> None:
    export(forked, tmp_path, "fsdp_full_shard", 2, param_dtype="bfloat16")
    for kind in CLASSES:
        tensors = load_file(tmp_path / kind / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        _, *types = torch.load(tmp_path / f"{kind}_reloaded.pt")
        assert types == [torch.bfloat16] * 2


def export(forked: ForkedParent, out: Path, config: str, num_processes: int, **flags: Any) -> None:
    result = forked.run(
        __file__, "export", str(out), json.dumps(flags), config=config, num_processes=num_processes,
        launcher_flags=["--mixed_precision", "no"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    result = forked.run(__file__, "reload", str(out), config="single_device")
    assert result.exit_code == 0, result.output


# In one process.


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def test_files_of_the_folder(tmp_path: Path, accelerator: Accelerator) -> None:
    model = make_model("llama")
    model.generation_config = GenerationConfig(eos_token_id=[3, 4], temperature=0.6, do_sample=True)
    export_model(model, tokenizer(), tmp_path / "model", accelerator)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert reloaded.generation_config.eos_token_id == [3, 4]
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("Boil").input_ids == tokenizer()("Boil").input_ids


@pytest.mark.parametrize(("kind", "table"), [("t5", "shared.weight"), ("llama_tied", "model.embed_tokens.weight")])
def test_tied_weights_are_stored_once(kind: str, table: str, tmp_path: Path, accelerator: Accelerator) -> None:
    model = make_model(kind)
    export_model(model, tokenizer(), tmp_path / "model", accelerator)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert stored.keys() == {name for name, _ in model.named_parameters()}
    assert [name for name, tensor in stored.items() if tensor.shape[0] == VOCABULARY] == [table]
    reloaded = CLASSES[kind].from_pretrained(tmp_path / "model")
    assert reloaded.get_output_embeddings().weight is reloaded.get_input_embeddings().weight


@pytest.mark.parametrize("kind", ["t5", "llama_tied"])
def test_tied_weights_that_differ_are_an_error(kind: str, tmp_path: Path, accelerator: Accelerator) -> None:
    """What a sharding that loses a tie would give; on reload the trained head would be gone without a word."""
    model = make_model(kind)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1e-3)
    with pytest.raises(RunFailed, match=r"tied weights lm_head\.weight and \S+ differ"):
        export_model(model, tokenizer(), tmp_path / "model", accelerator)
    assert not list(tmp_path.iterdir())


def test_an_older_folder_is_replaced_as_a_whole(
    tmp_path: Path, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    for path in (folder / "older.json", tmp_path / "model.tmp" / "left_by_a_killed_run.json"):
        path.parent.mkdir()
        path.write_text("{}")
    words = tokenizer()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(words, "save_pretrained", fail)
    with pytest.raises(RunFailed, match=rf"{folder} cannot be written: No space left"):
        export_model(make_model("llama"), words, folder, accelerator)
    assert [path.name for path in folder.iterdir()] == ["older.json"], "the older folder must survive"
    flushed, flush = [], os.fsync

    def recorded_flush(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", recorded_flush)
    export_model(make_model("llama"), tokenizer(), folder, accelerator)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (folder / "model.safetensors").is_file()
    assert {Path("model.tmp"), Path("model.tmp/model.safetensors"), Path("model.tmp/config.json")} < set(flushed)
    assert not {"older.json", "left_by_a_killed_run.json"} & {path.name for path in folder.iterdir()}


def main() -> None:
    if sys.argv[1] == "export":
        train_and_export(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        reload(Path(sys.argv[2]))


if __name__ == "__main__":
    assert os.environ["ACCELERATE_MIXED_PRECISION"]
    run(main)
