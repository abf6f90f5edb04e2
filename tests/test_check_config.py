"""tools/check_config.py: what it prints, and its exit code."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tools import check_config

CONFIGS = REPOSITORY / "accelerate_configs"
LLAMA = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
            "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}"""


def test_without_arguments_it_checks_all_shipped_files_fast() -> None:
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-X", "importtime", str(REPOSITORY / "tools" / "check_config.py")],
        cwd=REPOSITORY,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    seconds = time.monotonic() - started
    assert run.returncode == 0, run.stderr
    headings = [line for line in run.stdout.splitlines() if not line.startswith(" ")]
    assert headings == [f"accelerate_configs/{path.name}: fine" for path in sorted(CONFIGS.glob("*.yaml"))]
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "yaml" in imported and not imported & {"torch", "transformers", "accelerate", "numpy"}
    assert seconds < 10  # 0.3 s on an idle machine


def test_good_and_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text((CONFIGS / "fsdp_full_shard.yaml").read_text() + "  fsdp_foward_prefetch: true\n")
    assert check_config.main(["ddp", str(bad), "fsdp1_no_shard"]) == 2
    out, err = capsys.readouterr()
    assert (
        "ddp.yaml: fine\n    processes    2 on 1 machine\n    strategy     DDP" in out
        and "fsdp1_no_shard.yaml: fine" in out
    )
    assert err == f"{bad}:18: fsdp_foward_prefetch: no key of fsdp_config; did you mean fsdp_forward_prefetch?\n"


def test_the_launcher_s_flags_and_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        check_config.main(["fsdp_full_shard", "--num_processes", "16", "--num_machines", "2", "--num_gpus", "8"]) == 0
    )
    assert "16 on 2 machines, 8 on each" in capsys.readouterr().out
    assert check_config.main(["fsdp_full_shard", "--num_processes", "16", "--num_gpus", "8"]) == 2
    assert "has 8 GPUs" in capsys.readouterr().err
    assert check_config.main(["fsdp_fp8", "--mixed_precision", "bf16"]) == 0
    assert "bf16 compute\n" in capsys.readouterr().out


def test_wrapping_with_the_model_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (CONFIGS / "fsdp_full_shard.yaml").read_text()
    named, sized = tmp_path / "named.yaml", tmp_path / "sized.yaml"
    named.write_text(text + "  fsdp_transformer_layer_cls_to_wrap: T5Block, LlamaDecoderLayer\n")
    sized.write_text(text.replace("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP") + "  fsdp_min_num_params: 1000\n")
    files = ["fsdp_full_shard", str(named), str(sized)]
    assert check_config.main([*files, "--recipe", "t5_summarize"]) == 2
    out, err = capsys.readouterr()
    assert out.count(": fine") == 1
    assert (
        f"{named}:18: fsdp_transformer_layer_cls_to_wrap: T5ForConditionalGeneration has no module of class LlamaD"
        in err
    )
    assert f"{sized}:13: fsdp_auto_wrap_policy: SIZE_BASED_WRAP cuts an encoder-decoder model" in err

    (tmp_path / "config.json").write_text(LLAMA)
    preset = tmp_path / "preset.yaml"
    preset.write_text(f"model_config_path: {tmp_path}\nconfig_overrides: num_hidden_layers=2\nlearning_rate: 1e-3\n")
    for source in (["--model_config_path", str(tmp_path)], ["--config", str(preset)]):
        assert check_config.main([*files, *source]) == 2
        out, err = capsys.readouterr()
        assert out.count(": fine") == 2 and "LlamaForCausalLM has no module of class T5Block" in err


def test_a_recipe_is_found_as_a_user_calls_it() -> None:
    run = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "check_config.py"), "ddp", "--recipe", "t5_summarize"],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0 and "ddp.yaml: fine" in run.stdout, run.stderr


def test_numbers_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        check_config.main(["ddp", "--num_gpus", "-1"])
    assert exit.value.code == 2 and "--num_gpus is -1; it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--recipe=gpt_shakespeare"], ""),
        (["--recipe=chess_finetune"], "this recipe does not train on slices of sequences"),
        (["--config=t5_summarize_demo"], "this recipe does not train on slices of sequences"),
        (["--recipe=llama_pretrain"], "context parallelism has plain causal attention only"),
        (["--recipe=llama_pretrain", "--config={folder}/plain.yaml"], ""),
    ],
)
def test_context_parallelism_with_a_recipe(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = (REPOSITORY / "recipes" / "configs" / "llama_pretrain_demo.yaml").read_text()
    (tmp_path / "plain.yaml").write_text(preset.replace("document_masking: true", "document_masking: false"))
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    assert check_config.main(["fsdp_context_parallel", *arguments]) == (2 if problem else 0)
    err = capsys.readouterr().err
    (line,) = [
        number
        for number, text in enumerate((CONFIGS / "fsdp_context_parallel.yaml").read_text().splitlines(), start=1)
        if "parallelism_config_cp_size" in text
    ]
    expected = f"accelerate_configs/fsdp_context_parallel.yaml:{line}: parallelism_config_cp_size: {problem}"
    assert err.startswith(expected) and err.count("\n") == 1 if problem else err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["fsdp_fullshard"],
            "file fsdp_fullshard: no such file, and none of that name in accelerate_configs/: ddp, fsdp1_",
        ),
        (["--recipe", "t5"], "--recipe t5: no such recipe; recipes: "),
        (["--recipe", "t5_summarize", "--config", "t5_summarize_huge"], "no such preset; there are "),
        (["--model_config_path", "absent"], "--model_config_path absent: no such file or folder"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_config.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err and err.count("\n") == 1
