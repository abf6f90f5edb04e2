"""Checkpoints in one process: complete or absent, checked before use, refused where they are another run's."""

import copy
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from common import checkpoint
from common.arguments import BatchPlan, TrainArguments, UserError
from common.checkpoint import Checkpoints, Incomplete, check_contents, read_checkpoint, step_folders
from common.launch import RunFailed, Strategy
from common.optim import build_optimizer
from tests.conftest import REPOSITORY
from tests.tiny import mounted

DATA = Dataset.from_dict({"input_ids": [[i, i + 1] for i in range(10)], "labels": [[i] for i in range(10)]})


@dataclass
class Arguments(TrainArguments):
    presets: ClassVar[tuple[str, str]] = ("", "")


class OneProcess:
    """What `Checkpoints` needs of an Accelerator."""

    device = torch.device("cpu")
    is_main_process = True
    process_index = 0
    num_processes = 1

    def __init__(self) -> None:
        self.printed: list[str] = []

    def print(self, *lines: str) -> None:
        self.printed += lines


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(REPOSITORY / "recipes" / "samples" / "tokenizer")


class Run:
    """A training of a small T5 whose checkpoints are under test."""

    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, *, full: bool = False, dataset: Dataset = DATA,
        config: dict[str, Any] | None = None, start: bool = True, num_steps: int = 10_000, num_saves: int = 1,
        held_out: str = "9 sequences",
        **settings: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        defaults: dict[str, Any] = {
            "save_strategy": "steps",
            "save_steps": 1,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
        }
        self.args = Arguments(output_dir=str(folder), **(defaults | settings))
        folder.mkdir(exist_ok=True)
        sizes: dict[str, Any] = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1}
        sizes |= {"vocab_size": 64, "decoder_start_token_id": 0, "dropout_rate": 0.0}
        self.model = T5ForConditionalGeneration(T5Config(**(sizes | (config or {}))))
        self.optimizer = build_optimizer(self.model, self.args)
        plugin: Any = (
            SimpleNamespace(state_dict_type="StateDictType.FULL_STATE_DICT", cpu_offload=None) if full else None
        )
        self.accelerator: Any = OneProcess()
        strategy = Strategy(kind="single", mixed_precision="no", plugin=plugin)
        self.checkpoints = Checkpoints(self.args, self.accelerator, strategy, tokenizer)
        self.checkpoints.evaluation_data = {"eval_": "5 sequences", "eval_stories_": held_out}
        self.state: dict[str, Any] | None = None
        if start:
            plan = BatchPlan(self.args.total_batch_size or 4, 4, 1, 1)
            self.state = self.checkpoints.start(
                self.model, self.optimizer, plan, dataset, None, num_steps=num_steps, num_saves=num_saves
            )

    def update(self, times: int = 1) -> None:
        ids = torch.arange(8).view(2, 4)
        for _ in range(times):
            self.model(input_ids=ids, labels=ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, step: int, best_step: int | None = None, **options: Any) -> Path:
        self.checkpoints.save(step, {"progress": step}, best_step=best_step, **options)
        return self.checkpoints.folder / f"step_{step:08d}"

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.folder.iterdir())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and the optimizer's state, copied."""
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, values in self.optimizer.state.items():
            state |= {f"{names[parameter]}/{key}": value.clone() for key, value in values.items()}
        return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Saving and loading


@pytest.mark.parametrize("form", ["sharded", "full", "async"])
@pytest.mark.parametrize("optim", ["adamw", "adafactor", "adadelta"])
def test_state_comes_back(form: str, optim: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    settings: dict[str, Any] = {"optim": optim, "full": form == "full", "async_save": form == "async"}
    run = Run(tmp_path, tokenizer, **settings)
    assert run.state is None
    run.update(3)
    run.save(3)
    saved = run.tensors()
    run.update()  # while an asynchronous one is being written
    run.checkpoints.finish()
    resumed = Run(tmp_path, tokenizer, resume_from_checkpoint="latest", **settings)
    assert resumed.state == {"progress": 3}
    assert same(resumed.tensors(), saved)
    resumed.update()
    assert same(resumed.tensors(), run.tensors())
    assert resumed.model.lm_head.weight is resumed.model.shared.weight


@pytest.mark.parametrize("first", [True, False])
def test_one_form_resumes_into_the_other(first: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tmp_path, tokenizer, full=first)
    run.update(2)
    run.save(2)
    resumed = Run(tmp_path, tokenizer, full=not first, resume_from_checkpoint="latest")
    assert same(resumed.tensors(), run.tensors())


@pytest.mark.parametrize("optim", ["adamw", "adafactor", "adadelta"])
def test_a_checkpoint_before_the_first_update_changes_nothing(
    optim: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    undisturbed = Run(tmp_path / "undisturbed", tokenizer, optim=optim)
    undisturbed.update(2)
    run = Run(tmp_path / "run", tokenizer, optim=optim)
    run.save(0)
    resumed = Run(tmp_path / "run", tokenizer, optim=optim, resume_from_checkpoint="latest")
    for other in (run, resumed):
        other.update(2)
        assert same(other.tensors(), undisturbed.tensors())


def test_files_of_both_forms(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    sharded, full = Run(tmp_path / "sharded", tokenizer), Run(tmp_path / "full", tokenizer, full=True)
    folders = {}
    for name, run in (("sharded", sharded), ("full", full)):
        run.update()
        folders[name] = run.save(1)
    assert {path.name for path in folders["full"].iterdir()} == {"huggingface", "manifest.json", "state.safetensors"}
    assert {path.name for path in folders["sharded"].iterdir()} == {
        "huggingface", "manifest.json", ".metadata", "__0_0.distcp",
    }  # fmt: skip
    stored = load_file(folders["full"] / "state.safetensors")
    assert stored["model.shared.weight"].equal(full.model.shared.weight)
    assert "model.lm_head.weight" not in stored, "tied weights are stored once"
    parameter = full.model.encoder.block[0].layer[1].DenseReluDense.wo.weight
    moments = full.optimizer.state[parameter]
    for key in ("exp_avg", "exp_avg_sq", "step"):
        name = f"optimizer.encoder.block.0.layer.1.DenseReluDense.wo.weight.{key}"
        assert stored[name].equal(moments[key]) and stored[name].shape == moments[key].shape
    assert len([name for name in stored if name.startswith("model.")]) == len(list(full.model.parameters()))


def test_manifest(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tmp_path, tokenizer)
    run.update()
    manifest = read_checkpoint(run.save(1, tracker_run_id="abc")).manifest
    assert manifest["format_version"] == 1 and manifest["step"] == 1 and manifest["world_size"] == 1
    assert manifest["strategy"] == "one device"
    assert manifest["libraries"]["torch"] == torch.__version__
    assert manifest["run"]["model"].startswith("T5ForConditionalGeneration, ")
    assert manifest["state"] == {"progress": 1}
    resumed = Run(tmp_path, tokenizer, resume_from_checkpoint="latest")
    assert resumed.checkpoints.tracker_run_id == "abc"


def test_everything_is_on_disk_before_the_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power keeps what was flushed: all files, then the folder, then the name, then its folder."""
    events: list[str] = []
    flush, rename = os.fsync, Path.rename

    def recorded_flush(descriptor: int) -> None:
        events.append(str(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path / "checkpoints")))
        flush(descriptor)

    def recorded_rename(path: Path, target: Path) -> Path:
        events.append(f"{path.name} -> {Path(target).name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_flush)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    run = Run(tmp_path, tokenizer)
    run.save(7)
    final, temporary = "step_00000007", "step_00000007.tmp"
    at = events.index(f"{temporary} -> {final}")
    assert events[at - 2 : at] == [f"{temporary}/manifest.json", temporary]
    assert events[at + 1] == "."
    files = [path for path in (tmp_path / "checkpoints" / final).rglob("*") if path.is_file()]
    for path in files:
        name = str(path.relative_to(tmp_path / "checkpoints" / final))
        # torch writes its metadata under another name first.
        assert f"{temporary}/{name}" in events[:at] or f"{temporary}/{name}.tmp" in events[:at], name


# Finding


def test_what_another_run_has_written_meanwhile_is_not_set_aside(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Both in the same folder: the first is still running when the second looks for the latest checkpoint."""
    first = Run(tmp_path, tokenizer)
    first.save(1)
    second = Run(tmp_path, tokenizer, resume_from_checkpoint="latest", start=False)
    first.save(2)
    plan = BatchPlan(4, 4, 1, 1)
    with pytest.raises(UserError, match=r"step_00000002 was written by another run while this one was loading"):
        second.checkpoints.start(second.model, second.optimizer, plan, DATA, None, num_steps=9, num_saves=9)
    assert second.names == ["step_00000001", "step_00000002"]


def test_folders_are_sorted_by_number(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tmp_path, tokenizer)
    for step in (900, 1000):
        run.update()
        run.save(step).rename(tmp_path / "checkpoints" / f"step_{step}")
    (tmp_path / "checkpoints" / "checkpoint-2000").mkdir()
    assert [path.name for path in step_folders(tmp_path / "checkpoints")] == ["step_1000", "step_900"]
    resumed = Run(tmp_path, tokenizer, resume_from_checkpoint="latest")
    assert resumed.state == {"progress": 1000}


def test_without_a_checkpoint_latest_starts_at_step_0(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "checkpoints" / "step_00000002.tmp").mkdir(parents=True)  # a run killed in its first save
    run = Run(tmp_path, tokenizer, resume_from_checkpoint="latest")
    assert run.state is None and run.checkpoints.found is None
    assert any("starting at step 0" in line for line in run.accelerator.printed)
    assert run.names == []


def damage(kind: str, folder: Path) -> str:
    """Break the checkpoint; returns what must be said about it."""
    largest = max(folder.glob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    manifest = folder / "manifest.json"
    if kind == "truncated":
        os.truncate(largest, largest.stat().st_size - 1)
        return f"{largest.name} has [0-9,]+ bytes instead of [0-9,]+"
    if kind == "missing":
        largest.unlink()
        return f"{largest.name} is missing"
    if kind == "corrupted":
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
        return f"{largest.name} is damaged"
    if kind == "tokenizer":
        (folder / "huggingface" / "tokenizer.json").write_text("{}")
        return "huggingface/tokenizer.json has"
    if kind == "no manifest":
        manifest.unlink()
        return "it has no manifest.json"
    if kind == "half a manifest":
        os.truncate(manifest, manifest.stat().st_size // 2)
        return "manifest.json is damaged"
    assert kind == "altered manifest"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    return "manifest.json is damaged"


DAMAGES = ["truncated", "missing", "corrupted", "tokenizer", "no manifest", "half a manifest", "altered manifest"]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("two_checkpoints")
    run = Run(folder, tokenizer)
    for step in (1, 2):
        run.update()
        run.save(step)
    return folder


@pytest.mark.parametrize("kind", DAMAGES)
def test_latest_passes_over_a_damaged_checkpoint_and_says_why(
    kind: str, two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    reason = damage(kind, tmp_path / "run" / "checkpoints" / "step_00000002")
    run = Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest")
    assert run.state == {"progress": 1}
    assert re.search(f"skipped .*step_00000002: .*{reason}", run.accelerator.printed[0])
    run.update()
    run.save(2)  # takes the place of the damaged one
    assert Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest").state == {"progress": 2}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_that_is_named_is_an_error(
    kind: str, two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step_00000002"
    reason = damage(kind, folder)
    with pytest.raises(UserError, match=f"step_00000002 is no complete checkpoint: .*{reason}"):
        Run(tmp_path / "run", tokenizer, resume_from_checkpoint=str(folder))


def test_latest_is_an_error_where_every_checkpoint_is_damaged(
    two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    for step in (1, 2):
        damage("missing", tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    with pytest.raises(UserError, match=r"(?s)step_00000002: .* is missing.*step_00000001.*--overwrite_output_dir"):
        Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest")


def test_a_newer_format_is_refused_and_not_passed_over(
    two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step_00000002" / "manifest.json"
    path.write_text(json.dumps({"format_version": 2, "checksum": "of another kind", "anything": []}))
    with pytest.raises(UserError, match="format version 2 of a newer program"):
        Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest")


def test_a_foreign_checkpoint_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    foreign = tmp_path / "checkpoint-900"  # as transformers' Trainer and accelerate's save_state leave it
    (foreign / "pytorch_model_fsdp_0").mkdir(parents=True)
    (foreign / "trainer_state.json").write_text("{}")
    with pytest.raises(UserError, match=r"checkpoint-900 is no complete checkpoint: it has no manifest.json.*another"):
        Run(tmp_path / "run", tokenizer, resume_from_checkpoint=str(foreign))


def test_a_folder_that_is_not_there(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=r"absent is no complete checkpoint: there is no such folder\. .*`latest`"):
        Run(tmp_path / "run", tokenizer, resume_from_checkpoint=str(tmp_path / "absent"))


def test_a_checkpoint_under_another_steps_name_is_not_the_latest(
    two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step_00000098").symlink_to("step_00000001")
    run = Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest")
    assert run.state == {"progress": 2}
    assert "step_00000098: it is a copy or a link of step 1 under another" in run.accelerator.printed[0]


def test_a_run_folder_named_instead_of_a_checkpoint_gets_a_hint(
    two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    for named in (two_checkpoints, two_checkpoints / "checkpoints"):
        with pytest.raises(UserError, match="It holds checkpoints; the newest is .*step_00000002"):
            Run(tmp_path / "run", tokenizer, resume_from_checkpoint=str(named))


def test_leftovers_of_a_killed_save_are_removed_and_never_chosen(
    two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(two_checkpoints, tmp_path / "run")
    shutil.copytree(folder / "step_00000002", folder / "step_00000003.tmp")
    shutil.copytree(folder / "step_00000002", folder / "step_00000001.old.tmp")
    leftovers = ["step_00000001.old.tmp", "step_00000003.tmp"]
    # Until the folder is this run's alone, they may be what a run that still goes on is writing.
    run = Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest", start=False)
    assert set(leftovers) < set(run.names)
    run = Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest")
    assert run.state == {"progress": 2}
    assert run.names == ["step_00000001", "step_00000002"]


def test_later_checkpoints_are_set_aside_when_an_earlier_one_is_named(
    two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Else `latest` would come back to the course that was given up."""
    shutil.copytree(two_checkpoints, tmp_path / "run")
    earlier = tmp_path / "run" / "checkpoints" / "step_00000001"
    run = Run(tmp_path / "run", tokenizer, resume_from_checkpoint=str(earlier))
    assert run.names == ["step_00000001", "step_00000002.superseded"]
    assert Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest").state == {"progress": 1}
    aside = tmp_path / "run" / "checkpoints" / "step_00000002.superseded"
    assert Run(tmp_path / "other", tokenizer, resume_from_checkpoint=str(aside)).state == {"progress": 2}


def test_a_run_that_only_evaluates_leaves_the_folder_alone(
    two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    earlier = tmp_path / "run" / "checkpoints" / "step_00000001"
    run = Run(
        tmp_path / "run", tokenizer, resume_from_checkpoint=str(earlier), max_steps=0, num_steps=0, optim="adadelta",
        learning_rate=5.0, dataset=DATA.select(range(3)),
    )  # fmt: skip
    assert run.state == {"progress": 1} and not run.optimizer.state
    with pytest.raises(UserError, match="model_config: dropout_rate"):
        Run(
            tmp_path / "run", tokenizer, resume_from_checkpoint=str(earlier), max_steps=0, num_steps=0,
            config={"dropout_rate": 0.5},
        )  # fmt: skip
    assert run.names == ["step_00000001", "step_00000002"] and not (tmp_path / "run" / "config.yaml").exists()


def test_a_checkpoint_beyond_the_end_is_refused(
    two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    assert Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest", num_steps=2).state == {"progress": 2}
    with pytest.raises(UserError, match="step_00000002 is beyond the 1 steps of this run: raise --max_steps"):
        Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest", num_steps=1)


def test_members_of_enums_are_read_as_any_python_writes_them() -> None:
    """Python 3.11.2 pickles them as a call of getattr, which is allowed for nothing else."""

    class Member:
        def __init__(self, owner: Any, name: str) -> None:
            self.asked = owner, name

        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
            return getattr, self.asked

    def read(owner: Any, name: str) -> Any:
        return checkpoint._MetadataUnpickler(io.BytesIO(pickle.dumps(Member(owner, name)))).load()

    formats = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    assert read(formats, "TORCH_CONTIGUOUS_FORMAT") is formats.TORCH_CONTIGUOUS_FORMAT
    for owner, name in ((formats, "__subclasses__"), (torch.Size, "__init__"), ("text", "format")):
        with pytest.raises(pickle.UnpicklingError, match="not allowed"):
            read(owner, name)


def test_nothing_is_unpickled_that_could_run_code(
    two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    shutil.copytree(two_checkpoints, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step_00000002"
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious()))
    reader = checkpoint.Checkpoint(folder, {"state_dict_type": "sharded"}).reader()
    with pytest.raises(pickle.UnpicklingError, match="not allowed"):
        reader.read_metadata()
    assert not (tmp_path / "executed").exists()
    # Harmless metadata goes through the same list.
    good = checkpoint.Checkpoint(two_checkpoints / "checkpoints" / "step_00000002", {"state_dict_type": "sharded"})
    assert good.reader().read_metadata().state_dict_metadata.keys() == (
        dcp.FileSystemReader(good.folder).read_metadata().state_dict_metadata.keys()
    )


def test_no_module_loads_anything_but_weights() -> None:
    for path in [*(REPOSITORY / "common").glob("*.py"), *(REPOSITORY / "tools").glob("*.py")]:
        text = path.read_text()
        assert "weights_only=False" not in text and "pickle.load" not in text, path
        assert not re.search(r"torch\.load\((?!.*weights_only=True)", text), path


# Pruning


@pytest.mark.parametrize(
    ("limit", "best_step", "left"),
    [
        (None, None, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (2, 1, [1, 4]),
        (1, 2, [2, 4]),
        (1, 4, [4]),
        (3, 1, [1, 3, 4]),
    ],
)
def test_pruning_keeps_the_newest_and_the_best(
    limit: int | None, best_step: int | None, left: list[int], tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    run = Run(tmp_path, tokenizer, save_total_limit=limit)
    for step in (1, 2, 3, 4):
        run.save(step, best_step=best_step if best_step and step >= best_step else None)
    assert run.names == [f"step_{step:08d}" for step in left]


def test_pruning_goes_by_number(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tmp_path, tokenizer, save_total_limit=2)
    run.save(900).rename(tmp_path / "checkpoints" / "step_900")
    run.save(1000).rename(tmp_path / "checkpoints" / "step_1000")
    run.save(1100)
    assert run.names == ["step_00001100", "step_1000"]


def test_pruning_removes_a_link_and_not_what_it_points_to(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tmp_path, tokenizer, save_total_limit=1)
    folder = run.save(1)
    stored = folder.rename(tmp_path / folder.name)
    folder.symlink_to(stored)
    run.save(2)
    assert [path.name for path in folder.parent.iterdir()] == ["step_00000002"]
    assert read_checkpoint(stored).step == 1


def test_old_checkpoints_stay_while_a_new_one_cannot_be_written(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, tokenizer, save_total_limit=1)
    run.save(1)

    def fails(path: Path, target: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(RunFailed, match=r"step 2 cannot be written.*Input/output error.*last complete .*step_00000001"):
        run.save(2)
    assert run.names == ["step_00000001"]


# Which run it is


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("learning_rate", {"learning_rate": 2e-2}, "learning_rate: 0.01 -> 0.02"),
    ("lr_scheduler_type", {"lr_scheduler_type": "cosine"}, "lr_scheduler_type: linear -> cosine"),
    ("warmup_steps", {"warmup_steps": 5.0}, "warmup_steps: 0.0 -> 5.0"),
    ("seed", {"seed": 1}, "seed: 42 -> 1"),
    ("weight_decay", {"weight_decay": 0.0}, "weight_decay: 0.1 -> 0.0"),
    ("max_grad_norm", {"max_grad_norm": 2.0}, "max_grad_norm: 1.0 -> 2.0"),
    ("min_learning_rate", {"min_learning_rate": 1e-3}, "min_learning_rate: 0.0 -> 0.001"),
    ("lr_gamma", {"lr_gamma": 0.5}, "lr_gamma: 0.85 -> 0.5"),
    ("adam_beta1", {"adam_beta1": 0.8}, "adam_beta1: 0.9 -> 0.8"),
    ("adam_beta2", {"adam_beta2": 0.9}, "adam_beta2: 0.999 -> 0.9"),
    ("adam_epsilon", {"adam_epsilon": 1e-6}, "adam_epsilon: 1e-08 -> 1e-06"),
    ("param_dtype", {"param_dtype": "bfloat16"}, "param_dtype: float32 -> bfloat16"),
    ("model_config", {"config": {"dropout_rate": 0.5}}, "model_config: dropout_rate 0.0 -> 0.5"),
    ("data", {"dataset": DATA.select(range(9)), "max_train_samples": 9},
     r"data: 10 training examples.*9 training examples.*--max_train_samples None -> 9"),
    ("data", {"dataset": DATA.select([1, 0, *range(2, 10)])}, "data: 10 training examples"),
    ("evaluation_data", {"held_out": "2 sequences"}, r"evaluation_data: eval_stories_\* 9 sequences -> 2 sequences"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "change", "why"),
    [
        ("eval_loss", {}, None),
        ("eval_loss", {"held_out": "2 sequences"}, None),
        ("eval_stories_loss", {}, "was chosen by eval_loss"),
        ("eval_stories_loss", {"held_out": "2 sequences"}, "was chosen by eval_loss"),
    ],
)
def test_the_choice_of_the_best_depends_on_its_own_examples(
    metric: str, change: dict[str, Any], why: str | None, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    Run(tmp_path, tokenizer).save(1)
    more: dict[str, Any] = {"resume_from_checkpoint": "latest", "allow_changed": "evaluation_data"}
    run = Run(tmp_path, tokenizer, **more, metric_for_best_model=metric, **change)
    assert run.checkpoints.other_choice(metric) == why
    run.save(2)
    again = Run(tmp_path, tokenizer, **more, metric_for_best_model=metric, held_out="3 sequences")
    assert again.checkpoints.other_choice(metric) == (None if metric == "eval_loss" else "was chosen on other examples")


def test_a_set_whose_name_begins_like_a_metric(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A set called `token`: the validation text's accuracy is not its, its own is."""
    settings: dict[str, Any] = {"metric_for_best_model": "eval_token_accuracy", "start": False}
    plan = BatchPlan(4, 4, 1, 1)
    for changed, why in (("eval_token_", None), ("eval_", "was chosen on other examples")):
        for step, more in (
            (1, {"overwrite_output_dir": True}),
            (2, {"resume_from_checkpoint": "latest", "allow_changed": "evaluation_data"}),
        ):
            run = Run(tmp_path / changed, tokenizer, **settings, **more)
            run.checkpoints.evaluation_data = {"eval_": "5 sequences", "eval_token_": "9 sequences"}
            if step == 2:
                run.checkpoints.evaluation_data[changed] = "2 sequences"
            run.checkpoints.start(run.model, run.optimizer, plan, DATA, None, num_steps=9, num_saves=9)
            assert run.checkpoints.other_choice("eval_token_accuracy") == (why if step == 2 else None)
            run.save(step)


def test_what_was_known_before_training_is_handed_on(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tmp_path, tokenizer)
    run.checkpoints.before_training["stories"] = {"data": "9 sequences", "loss": 1 / 3}
    for step in (1, 2):
        run.save(step)
        run = Run(tmp_path, tokenizer, resume_from_checkpoint="latest")
        assert run.checkpoints.before_training == {"stories": {"data": "9 sequences", "loss": 1 / 3}}


@pytest.mark.parametrize(("key", "change", "text"), CHANGES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_change_needs_permission(
    key: str,
    change: dict[str, Any],
    text: str,
    two_checkpoints: Path,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    options: dict[str, Any] = {"resume_from_checkpoint": "latest"} | change
    with pytest.raises(UserError, match=rf"is of a different run: .*{text}.*--allow_changed {key}"):
        Run(tmp_path / "run", tokenizer, **options)
    run = Run(tmp_path / "run", tokenizer, allow_changed=key, **options)
    assert run.state == {"progress": 2}
    assert any(re.search(text, line) for line in run.accelerator.printed)
    said = [line for line in run.accelerator.printed if line.startswith("changed since the checkpoint, as allowed: ")]
    assert len(said) == 1 and f"allowed: {key}: " in said[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"config": {"d_ff": 32}}, r"model: T5ForConditionalGeneration, .*its weights would not fit"),
        ({"config": {"num_layers": 2}}, r"model: T5ForConditionalGeneration, .*its weights would not fit"),
        ({"optim": "adadelta"}, r"optim: adamw -> adadelta.*its state would not fit"),
        ({"total_batch_size": 8}, r"total_batch_size: 4 -> 8.*counted in batches"),
    ],
)
def test_what_cannot_change(
    change: dict[str, Any], text: str, two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    with pytest.raises(UserError, match=rf"(?s)is of a different run: .*{text}.*cannot change within a run"):
        Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest", **change)


def test_another_tokenizer_needs_permission(
    two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["unheard-of"])
    with pytest.raises(UserError, match=r"tokenizer: \d+ tokens.*--allow_changed tokenizer"):
        Run(tmp_path / "run", other, resume_from_checkpoint="latest")


def test_what_needs_no_permission(two_checkpoints: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    run = Run(
        tmp_path / "run", tokenizer, resume_from_checkpoint="latest", max_steps=1000, num_train_epochs=7.0,
        per_device_train_batch_size=2, logging_steps=3, save_steps=5, save_total_limit=9, run_name="again",
        model_config_path="moved/elsewhere", dataloader_num_workers=2, attn_implementation="eager",
        config={"use_cache": False},
    )  # fmt: skip
    assert run.state == {"progress": 2}
    assert not any("changed" in line for line in run.accelerator.printed)


def test_a_config_key_that_only_one_version_of_transformers_has_is_no_change(two_checkpoints: Path) -> None:
    older = read_checkpoint(two_checkpoints / "checkpoints" / "step_00000002").manifest["run"]
    newer = older | {"model_config": older["model_config"] | {"unheard_of": 1}}
    assert checkpoint.differences(older, newer) == checkpoint.differences(newer, older) == {}


@pytest.mark.parametrize(
    ("keys", "text"),
    [("learning_rat", "unknown key 'learning_rat'; it takes seed, "), ("seed,model", "model: it cannot change")],
)
def test_permissions_are_checked(keys: str, text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=text):
        Run(tmp_path, tokenizer, allow_changed=keys)


def test_a_checkpoint_without_the_optimizer_refuses_to_resume(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    run = Run(tmp_path, tokenizer, save_only_model=True)
    run.update()
    complete, only_model = run.save(1), run.save(2, only_model=True)
    sizes = [(folder / "__0_0.distcp").stat().st_size for folder in (complete, only_model)]
    assert sizes[1] < sizes[0] / 2
    with pytest.raises(
        UserError, match="saved with --save_only_model: .*tools/export.py.*, or go back: .*step_00000001.$"
    ):
        Run(tmp_path, tokenizer, resume_from_checkpoint="latest")
    evaluated = Run(tmp_path, tokenizer, resume_from_checkpoint="latest", max_steps=0, num_steps=0)
    assert evaluated.state == {"progress": 2}
    assert evaluated.model.shared.weight.equal(run.model.shared.weight)


def test_config_yaml_is_kept_until_a_resume_is_accepted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tmp_path, tokenizer)
    run.save(1)
    (tmp_path / "config.yaml").write_text("learning_rate: 0.01\n")
    with pytest.raises(UserError):
        Run(tmp_path, tokenizer, resume_from_checkpoint="latest", learning_rate=5.0)
    assert (tmp_path / "config.yaml").read_text() == "learning_rate: 0.01\n"
    Run(tmp_path, tokenizer, resume_from_checkpoint="latest", max_steps=77)
    assert "max_steps: 77" in (tmp_path / "config.yaml").read_text()


def test_a_run_knows_whether_its_step_can_be_gone_on_from(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A stop at a step that has such a checkpoint saves none."""
    run = Run(tmp_path / "run", tokenizer)
    assert run.checkpoints.last_saved_step is None
    run.save(1, only_model=True)
    assert run.checkpoints.last_saved_step is None
    folder = run.save(2)
    assert run.checkpoints.last_saved_step == 2
    resumed = Run(tmp_path / "run", tokenizer, resume_from_checkpoint="latest")
    assert resumed.checkpoints.last_saved_step == 2
    elsewhere = Run(tmp_path / "another", tokenizer, resume_from_checkpoint=str(folder))
    assert elsewhere.checkpoints.last_saved_step is None


# Disks


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_room_is_checked_at_the_start(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "measured", tokenizer)
    size = sum(parameter.numel() * 4 for parameter in run.model.parameters())
    run.update()
    written = run.save(1) / "__0_0.distcp"
    assert 3 * size < written.stat().st_size < 3 * size + 200_000, "weights and two moments, and torch's framing"
    disk(monkeypatch, 4 * size - 1)
    with pytest.raises(UserError, match="make room, choose another folder, or save no checkpoints with --save_strat"):
        Run(tmp_path / "a", tokenizer)
    disk(monkeypatch, size)
    assert Run(tmp_path / "b", tokenizer, num_saves=0).state is None
    disk(monkeypatch, size - 1)
    with pytest.raises(UserError, match=r"the last weights need 2e-05 GiB: make room, or choose another folder\."):
        Run(tmp_path / "g", tokenizer, num_saves=0)
    assert Run(tmp_path / "b", tokenizer, num_saves=0, max_steps=0, num_steps=0).state is None, "writes no weights"
    disk(monkeypatch, 4 * size)
    assert not Run(tmp_path / "c", tokenizer, save_total_limit=1, start=False).accelerator.printed
    run = Run(tmp_path / "d", tokenizer, num_saves=5)
    assert "WARNING" in run.accelerator.printed[-1] and "5 checkpoints at once" in run.accelerator.printed[-1]
    run = Run(tmp_path / "e", tokenizer, num_saves=5, save_total_limit=2)
    assert "3 checkpoints at once" in run.accelerator.printed[-1]
    disk(monkeypatch, 3 * 3 * size + 2 * size)
    assert not Run(tmp_path / "f", tokenizer, num_saves=5, save_total_limit=2).accelerator.printed
    disk(monkeypatch, 2 * 3 * size + 2 * size)  # the third has been written already
    run = Run(tmp_path / "measured", tokenizer, num_saves=5, save_total_limit=2, resume_from_checkpoint="latest")
    assert [line.split()[0] for line in run.accelerator.printed] == ["going"]


@pytest.mark.parametrize(("optim", "copies"), [("adamw", 3), ("adadelta", 3), ("adafactor", 1)])
def test_room_for_the_state_of_each_optimizer(
    optim: str, copies: int, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So many tokens that torch's framing and Adafactor's sums over rows and columns count for little.
    settings: dict[str, Any] = {"optim": optim, "config": {"vocab_size": 32_000}}
    run = Run(tmp_path / "measured", tokenizer, **settings)
    size = sum(parameter.numel() * 4 for parameter in run.model.parameters())
    run.update()
    assert (run.save(1) / "__0_0.distcp").stat().st_size == pytest.approx(copies * size, rel=0.2)
    disk(monkeypatch, (copies + 1) * size)
    assert Run(tmp_path / "enough", tokenizer, **settings).state is None
    disk(monkeypatch, (copies + 1) * size - 1)
    with pytest.raises(UserError, match="a checkpoint and the last weights need"):
        Run(tmp_path / "too little", tokenizer, **settings)


def test_room_is_checked_at_each_save(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, tokenizer)
    run.save(1)
    disk(monkeypatch, 1000)
    with pytest.raises(RunFailed, match=r"step 2 cannot be written: .*free, .* needed.*last complete .*step_00000001"):
        run.save(2)
    assert run.names == ["step_00000001"]
    disk(monkeypatch, sum(parameter.numel() * 4 for parameter in run.model.parameters()))
    run.save(2, only_model=True)
    assert run.names == ["step_00000001", "step_00000002"]


@pytest.fixture(params=["sharded", "full", "async"])
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"full": request.param == "full", "async_save": request.param == "async"}


def test_a_full_disk_keeps_the_previous_checkpoint_and_cleans_up(
    form: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full in the middle of a file: the check before the save has seen room that others have taken since."""
    with mounted(tmp_path / "disk", "size=8m") as folder:
        run = Run(folder / "run", tokenizer, **form)
        run.update()
        run.save(1)
        run.checkpoints.finish()
        saved = run.tensors()
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        (folder / "others").write_bytes(bytes(shutil.disk_usage(folder).free - used // 2))
        disk(monkeypatch, 2**40)
        with pytest.raises(RunFailed, match=r"step 2 cannot be written: .*step_00000001"):
            run.save(2)
            run.checkpoints.finish()
        assert run.names == ["step_00000001"]
        monkeypatch.undo()
        (folder / "others").unlink()
        resumed = Run(folder / "run", tokenizer, resume_from_checkpoint="latest", **form)
        assert same(resumed.tensors(), saved)


def test_an_unwritable_folder_keeps_the_previous_checkpoint(
    form: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with mounted(tmp_path / "disk", "size=64m") as folder:
        run = Run(folder / "run", tokenizer, **form)
        run.save(1)
        run.checkpoints.finish()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.raises(RunFailed, match=r"step 2 cannot be written: .*Read-only file system.*step_00000001"):
            run.save(2)
        assert check_contents(read_checkpoint(folder / "run" / "checkpoints" / "step_00000001")) is None


def test_a_file_in_the_way(form: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tmp_path, tokenizer, **form)
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RunFailed, match=r"step 1 cannot be written: .*there is no complete checkpoint yet"):
        run.save(1)


# Asynchronous saving


def test_training_goes_on_while_a_checkpoint_is_written_and_only_one_is(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, tokenizer, async_save=True)
    run.update()
    may_publish, publishing = threading.Event(), threading.Event()
    publish = Checkpoints._publish

    def held_back(*args: Any) -> None:
        publishing.set()
        assert may_publish.wait(30)
        publish(*args)

    monkeypatch.setattr(Checkpoints, "_publish", held_back)
    saved = run.tensors()
    run.save(1)
    assert publishing.wait(30)
    run.update()
    assert run.names == ["step_00000001.tmp"], "not complete yet, and training has gone on"
    second = threading.Thread(target=run.save, args=[2])
    second.start()
    second.join(0.3)
    assert second.is_alive() and run.names == ["step_00000001.tmp"], "the second waits for the first"
    may_publish.set()
    second.join(30)
    run.checkpoints.finish()
    assert run.names == ["step_00000001", "step_00000002"]
    earlier = str(tmp_path / "checkpoints" / "step_00000001")
    assert same(Run(tmp_path, tokenizer, resume_from_checkpoint=earlier).tensors(), saved)


def test_an_error_while_writing_surfaces_at_the_next_save(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, tokenizer, async_save=True)
    run.save(1)
    run.checkpoints.finish()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint._Writer, "write_data", fails)
    run.save(2)  # says nothing yet
    with pytest.raises(RunFailed, match=r"step 2 cannot be written: .*No space left.*step_00000001"):
        run.save(3)
    assert run.names == ["step_00000001"]
    run.checkpoints.finish()


def test_asynchronous_saving_refuses_a_state_gathered_on_one_process(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UserError, match="--async_save: .*FULL_STATE_DICT.*SHARDED_STATE_DICT"):
        Run(tmp_path, tokenizer, full=True, async_save=True)


def test_incomplete_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(Incomplete, match=r"it has no manifest.json"):
        read_checkpoint(tmp_path)
