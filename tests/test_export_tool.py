"""tools/export.py: a Hugging Face folder out of any checkpoint, on one process and with bounded memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from tests.conftest import REPOSITORY
from tests.forked import ForkedParent
from tests.tiny import saving, train
from tools import export

LAYOUTS = [("single_device", 1), ("ddp", 2), ("fsdp_full_shard", 2), ("fsdp1_full_shard", 2)]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout[0])
def run_folder(request: pytest.FixtureRequest, forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, whose own export of the last weights is the reference."""
    config, num_processes = request.param
    folder = tmp_path_factory.mktemp("run") / "run"
    train(forked, folder, *saving(1), "--max_steps=2", config=config, num_processes=num_processes)
    return folder


def state(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()


def test_export_equals_the_run_s_own(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In several files of at most 100 kB, except the embedding table, which is larger."""
    output = tmp_path / "new" / "exported"
    assert export.main([str(run_folder), str(output), "--max_shard_size", "100KB"]) == 0
    assert "step 2 of" in capsys.readouterr().out
    exported, expected = state(output), state(run_folder / "model")
    assert exported.keys() == expected.keys()
    assert all(exported[name].equal(expected[name]) for name in expected)
    files = sorted(output.glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((output / "model.safetensors.index.json").read_text())
    stored: dict[str, object] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}
            names = set(tensors.keys())
        assert len(names) == 1 or file.stat().st_size < 100_000 + 4096
        stored |= dict.fromkeys(names, file.name)
    assert index["weight_map"] == stored
    assert set(stored) == set(load_file(run_folder / "model" / "model.safetensors"))


def test_ties_config_and_tokenizer(run_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "exported"
    assert export.main([str(run_folder / "checkpoints" / "step_00000001"), str(output)]) == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert model.lm_head.weight is model.shared.weight is model.get_encoder().embed_tokens.weight
    assert not all(model.state_dict()[name].equal(tensor) for name, tensor in state(run_folder / "model").items()), (
        "the first step's weights, not the last one's"
    )
    config, own = (json.loads((folder / "config.json").read_text()) for folder in (output, run_folder / "model"))
    assert config["architectures"] == ["T5ForConditionalGeneration"]
    for key in own.keys() - {"transformers_version", "use_cache"}:
        assert config[key] == own[key], key
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(run_folder / "model").get_vocab()
    generation = [GenerationConfig.from_pretrained(folder).to_diff_dict() for folder in (output, run_folder / "model")]
    assert generation[0] == generation[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtype(dtype: str, run_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "exported"
    assert export.main([str(run_folder), str(output), "--dtype", dtype]) == 0
    wanted = getattr(torch, dtype)
    assert json.loads((output / "config.json").read_text())["dtype"] == dtype
    stored, own = load_file(output / "model.safetensors"), load_file(run_folder / "model" / "model.safetensors")
    assert stored.keys() == own.keys()
    assert all(stored[name].equal(own[name].to(wanted)) for name in own)


@pytest.fixture
def copied_run(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "copied"))


def test_a_damaged_checkpoint_is_passed_over_in_a_run_and_an_error_when_named(
    copied_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = copied_run / "checkpoints" / "step_00000002"
    (newest / "huggingface" / "config.json").write_text("{}")
    assert export.main([str(newest), str(tmp_path / "exported")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "huggingface/config.json has 2 bytes" in error
    assert export.main([str(copied_run), str(tmp_path / "exported")]) == 0
    streams = capsys.readouterr()
    assert "skipped" in streams.err and "step 1 of" in streams.out


def test_an_existing_folder_is_left_alone(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").write_text("")
    assert export.main([str(run_folder), str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_size_that_is_none(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(run_folder), str(tmp_path / "new"), "--max_shard_size", "5Q"]) == 2
    assert capsys.readouterr().err == "error: --max_shard_size 5Q: a size such as 500MB or 5GB is expected.\n"
    assert list(tmp_path.iterdir()) == []


def test_other_folders_stay(run_folder: Path, tmp_path: Path) -> None:
    for name in ("new.tmp", "new.old.tmp"):
        (tmp_path / name).mkdir()
    assert export.main([str(run_folder), str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "new.old.tmp", "new.tmp"]


def test_a_folder_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(tmp_path), str(tmp_path / "exported")]) == 2
    assert "it has no manifest.json" in capsys.readouterr().err


def test_weights_that_the_model_does_not_have_are_an_error(
    copied_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command loads what it has written: here a config of one more layer goes in between."""
    from common import export as common_export

    check = common_export._check_reload

    def alter(folder: Path, class_name: str) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_layers": config["num_layers"] + 1}))
        check(folder, class_name)

    monkeypatch.setattr(common_export, "_check_reload", alter)
    assert export.main([str(copied_run), str(tmp_path / "exported")]) == 1
    error = capsys.readouterr().err
    assert "does not load as T5ForConditionalGeneration" in error and "missing_keys" in error
    assert not (tmp_path / "exported").exists()


MEASURE = """
import resource, sys
import torch, transformers.models.t5.modeling_t5, safetensors.torch
from tools import export
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert export.main(sys.argv[1:]) == 0
print("grown by", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.full
@pytest.mark.parametrize("config", ["fsdp_full_shard", "fsdp1_full_shard"])
def test_memory_is_bounded_by_a_file_of_weights(config: str, forked: ForkedParent, tmp_path: Path) -> None:
    """400 MB of weights and 800 MB of moments, read within 100 MB files."""
    size = "num_layers=24,num_decoder_layers=0,d_model=512,d_ff=4096"
    train(forked, tmp_path / "run", *saving(1), "--max_steps=1", f"--config_overrides={size}", config=config)
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_size > 350e6
    command = [
        sys.executable,
        "-c",
        MEASURE,
        str(tmp_path / "run"),
        str(tmp_path / "exported"),
        "--max_shard_size=50MB",
    ]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=200)
    assert int(result.stdout.split()[-1]) < 250, result.stdout
