"""Accelerate's YAML files: each key acts or is refused with the reason; the plan in words; the file of the present run.

accelerate itself takes misspelt keys inside `fsdp_config` and keys of the other FSDP version without a word. What is
said here about its launcher was seen with accelerate 1.15. torch, transformers and accelerate are imported inside
functions: checking files takes a fraction of a second, these imports take seconds.
"""

import argparse
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.files import bad_utf8_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPOSITORY = Path(__file__).resolve().parent.parent
SHIPPED = REPOSITORY / "accelerate_configs"

Kind = type | tuple[str, ...]
"""What a key's value must be: bool, int or str, or one of these names."""

# Keys by the name that accelerate's launcher has for them, which inside a section starts with the section's prefix.
KEYS: dict[str, Kind] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "distributed_type": ("NO", "MULTI_GPU", "FSDP"),
    "num_processes": int,
    "num_machines": int,
    "machine_rank": int,
    "main_process_ip": str,
    "main_process_port": int,
    "gpu_ids": str,
    "mixed_precision": ("no", "bf16", "fp16", "fp8"),
    "use_cpu": bool,
    "debug": bool,
    "enable_cpu_affinity": bool,
    "same_network": bool,
    "rdzv_backend": str,
    "fsdp_version": int,
    "fsdp_sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
    "fsdp_reshard_after_forward": bool,
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "fsdp_transformer_layer_cls_to_wrap": str,
    "fsdp_min_num_params": int,
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "fsdp_forward_prefetch": bool,
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    "fsdp_use_orig_params": bool,
    "fsdp_sync_module_states": bool,
    "fsdp_cpu_ram_efficient_loading": bool,
    "fsdp_activation_checkpointing": bool,
    "fsdp_activation_checkpointing_offload": bool,
    "fsdp_offload_params": bool,
    "parallelism_config_dp_replicate_size": int,
    "parallelism_config_dp_shard_size": int,
    "parallelism_config_tp_size": int,
    "parallelism_config_cp_size": int,
    "parallelism_config_sp_size": int,
    "dynamo_backend": ("NO", "INDUCTOR", "AOT_EAGER", "EAGER"),
    "dynamo_mode": ("default", "reduce-overhead", "max-autotune"),
    "dynamo_use_fullgraph": bool,
    "dynamo_use_dynamic": bool,
    "dynamo_use_regional_compilation": bool,
    "fp8_backend": ("AO",),
    "fp8_enable_fsdp_float8_all_gather": bool,
    "fp8_pad_inner_dim": bool,
}
# The launcher adds the prefix to keys written without it, except in parallelism_config.
PREFIXES = {
    "fsdp_config": "fsdp_",
    "parallelism_config": "parallelism_config_",
    "dynamo_config": "dynamo_",
    "fp8_config": "fp8_",
}
# What `accelerate config` writes for TPUs into every file: no effect elsewhere, so only these values are taken.
TPU_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "downcast_bf16": ("no", False),
    "main_training_function": ("main",),
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
    "tpu_name": (),
    "tpu_zone": (),
    "tpu_env": ([], [""]),
    "tpu_vm": ([], [""]),
    "commands": ([],),
    "command_file": (),
}
OTHER_SECTIONS = {
    "deepspeed_config": "DeepSpeed",
    "megatron_lm_config": "Megatron-LM",
    "mpirun_config": "accelerate's own mpirun (launchers/ has a script for mpiexec)",
}
RENAMED = {
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "fp16": "mixed_precision: fp16",
}
SAID_ELSEWHERE = {
    "gradient_accumulation_steps": "the preset or --gradient_accumulation_steps says it, after the script's name",
    "gradient_clipping": "the preset or --max_grad_norm says it, after the script's name",
    "fsdp_limit_all_gathers": "no YAML key reaches it; use --limit_all_gathers after the script's name",
    "fsdp_param_dtype": "no YAML key reaches it; use --param_dtype after the script's name",
    "fsdp_reduce_dtype": "no YAML key reaches it; use --reduce_dtype after the script's name",
    "fsdp_buffer_dtype": "no YAML key reaches it; use --buffer_dtype after the script's name",
    "fsdp_mixed_precision_policy": "mixed_precision, and --reduce_dtype after the script's name, say it",
    "fsdp_ignored_modules": "not acted on here: every parameter is sharded",
} | {
    f"parallelism_config_{key}": "for accelerate's own context parallelism; here keys and values are gathered once a "
    "layer; remove the line"
    for key in ("cp_backend", "cp_comm_strategy")
} | {
    f"parallelism_config_{key}": "sequence parallelism is no part of these recipes; remove the line"
    for key in ("sp_backend", "sp_seq_length", "sp_seq_length_is_variable",
                "sp_attn_implementation")
} | {
    f"fp8_{key}": "for Transformer Engine or MS-AMP; here fp8 is torchao's (backend AO); remove the line"
    for key in ("use_autocast_during_eval", "margin", "interval", "format", "amax_history_len", "amax_history_length",
                "amax_compute_algo", "amax_compute_algorithm", "override_linear_precision", "opt_level",
                "optimization_level")
}  # fmt: skip
NO_SUCH_DEVICE = "write MULTI_GPU or FSDP; on a machine without GPUs the same file is rehearsed on the CPU"
# (key, value): why this value is refused and what to write instead; value None: any number above 1.
REFUSED: dict[tuple[str, Any], str] = {
    ("compute_environment", "AMAZON_SAGEMAKER"): "SageMaker is not supported; write LOCAL_MACHINE",
    ("distributed_type", "DEEPSPEED"): "these recipes shard with FSDP; fsdp_full_shard.yaml is ZeRO-3, "
        "fsdp_shard_grad_op.yaml is ZeRO-2",
    ("distributed_type", "MEGATRON_LM"): "these recipes shard with FSDP; take fsdp_full_shard.yaml",
    **{("distributed_type", name): NO_SUCH_DEVICE
       for name in ("XLA", "TPU", "MULTI_CPU", "MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
                    "MULTI_MUSA", "MULTI_NEURON")},
    ("fsdp_state_dict_type", "LOCAL_STATE_DICT"): "each process would save its own flat pieces, which only as many "
        "processes with the same wrapping can read; write SHARDED_STATE_DICT",
    ("fsdp_use_orig_params", False): "weight decay groups, exact resume and export need parameters by name; write true",
    ("fsdp_sync_module_states", False): "all processes start from the same weights; write true or remove the line",
    ("dynamo_use_regional_compilation", False): "compiling more than a block at once would take FSDP's hooks into the "
        "compiled code; write true",
    ("fp8_backend", "TE"): "Transformer Engine needs its own layers; write AO (torchao)",
    ("fp8_backend", "MSAMP"): "MS-AMP does not support FSDP2; write AO (torchao)",
    **{(f"parallelism_config_{short}_size", None): f"{name} parallelism is no part of these recipes; remove the line"
       for short, name in (("tp", "tensor"), ("sp", "sequence"))},
}  # fmt: skip
FP16_WITH_T5 = "T5 overflows in fp16 and its losses become NaN; use bf16 or no"
FLAG_ONLY = "accelerate launch ignores it in a file; pass --{0} to the launcher and remove the line"
TYPE_FLAGS = {
    "multi_gpu": "MULTI_GPU",
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "tpu": "XLA",
}
# FSDP1's strategies as FSDP2 says them.
STRATEGY_IN_FSDP2 = {
    "FULL_SHARD": "fsdp_reshard_after_forward: true",
    "SHARD_GRAD_OP": "fsdp_reshard_after_forward: false",
    "NO_SHARD": "no fsdp_config at all, as in ddp.yaml",
    "HYBRID_SHARD": "fsdp_reshard_after_forward: true and parallelism_config, as in fsdp_hybrid_shard.yaml",
    "HYBRID_SHARD_ZERO2": "fsdp_reshard_after_forward: false and parallelism_config, as in fsdp_hybrid_shard.yaml",
}


@dataclass
class _File:
    path: Path
    content: dict[str, Any] = field(default_factory=dict)
    lines: dict[tuple[str, str], int] = field(default_factory=dict)
    """Line of each key, by section ("" at the top level) and full name."""
    slips: list[str] = field(default_factory=list)
    """Problems that are seen in the text alone: keys given twice, 1:30 for a number."""

    def place(self, line: int) -> str:
        """The file with the line, or without where there is none (0)."""
        return f"{self.path}:{line}" if line else str(self.path)


@dataclass(frozen=True)
class LaunchConfig:
    """What a run is launched with."""

    path: Path | None = None
    """The YAML; None: there is none."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """What the launcher's command line says besides, by the launcher's names without dashes; it overrides the file."""

    def named(self, key: str) -> str:
        """A key by its full name, as messages have it: after file and line where it stands, or as the launcher's."""
        return _named(_read(self.path) if self.path else None, self.flags, key, _section(key))


def _named(file: "_File | None", flags: Mapping[str, Any], key: str, section: str) -> str:
    line = file.lines.get((section, key), 0) if file and key not in flags else 0
    place = f"{file.place(line)}: " if file else ""
    return f"{place}{key}{' (from the launcher)' if key in flags else ''}"


def read_config(path: str | Path) -> dict[str, Any]:
    """The content of an accelerate YAML, unchecked.

    Raises `UserError` when there is no such file or it holds no keys and values.
    """
    return _read(Path(path)).content


def known_files(path: Path) -> str:
    """YAML files that may have been meant, for the message that `path` does not exist: beside it, else the shipped."""
    if files := sorted(path.parent.glob("*.yaml")):
        return f"YAML files in that folder: {', '.join(file.name for file in files)}"
    return f"accelerate_configs/ has {', '.join(file.stem for file in sorted(SHIPPED.glob('*.yaml')))}"


def _read(path: Path) -> _File:
    try:
        text = path.read_text(encoding="utf-8")
        root, content = yaml.compose(text), yaml.safe_load(text)
    except FileNotFoundError:
        raise _user_error(f"{path}: no such file; {known_files(path)}.") from None
    except UnicodeDecodeError as error:
        line = bad_utf8_line(path)
        raise _user_error(f"{path}:{line}: not UTF-8 text ({error.reason}); save it as UTF-8.") from error
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem
        if re.match("while (scanning a quoted|parsing a flow)", error.context or ""):  # noticed lines after it began
            mark, problem = error.context_mark, f"{error.context}: {error.problem}"
        raise _user_error(
            f"{path}:{mark.line + 1 if mark else 1}: not readable as YAML: {problem}; repair this line or the one "
            "above it."
        ) from error
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:  # values such as a 13th month, too
        raise _user_error(f"{path}: not a readable YAML file: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict):
        raise _user_error(f"{path}: expected lines of `key: value`, found {type(content).__name__}.")
    file = _File(path, content)
    assert isinstance(root, yaml.MappingNode)
    for key, value in root.value:
        _note_line(file, "", key.value, key, value)
        if key.value in PREFIXES and isinstance(value, yaml.MappingNode):
            for inner, inner_value in value.value:
                _note_line(file, key.value, _full_name(key.value, inner.value), inner, inner_value)
    return file


def _note_line(file: _File, section: str, name: str, node: yaml.Node, value: yaml.Node) -> None:
    line = node.start_mark.line + 1
    if (section, name) in file.lines:
        first = file.lines[section, name]
        file.slips.append(f"{file.path}:{line}: {name}: given twice, first in line {first}; remove one.")
    if value.tag == "tag:yaml.org,2002:int":
        for pattern, base, sign in ((":", 60, "a colon"), (r"^[-+]?0\d", 8, "the zero in front")):
            if re.search(pattern, value.value):
                file.slips.append(f"{file.path}:{line}: {name}: found {value.value}, a number to the base of {base} in "
                                  f"YAML; write it without {sign}.")  # fmt: skip
    file.lines[section, name] = line


def _user_error(text: str) -> ValueError:
    from common.arguments import UserError  # imports transformers

    return UserError(text)


def _full_name(section: str, key: Any) -> str:
    """Name of a section's key on the launcher's command line."""
    key, prefix = str(key), PREFIXES[section]
    # The launcher's own test: "fsdp" and "fp8" without the underscore.
    has_prefix = key.startswith(prefix.removesuffix("_") if section in ("fsdp_config", "fp8_config") else prefix)
    return key if has_prefix or section == "parallelism_config" else prefix + key


def _section(key: str) -> str:
    """Section in which a key stands, "" for the top level."""
    return next((section for section, prefix in PREFIXES.items() if key.startswith(prefix) and key not in PREFIXES), "")


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by full name, names of choices as in `KEYS`; keys without a value at the top level are left out."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key in PREFIXES:
            inner = value if isinstance(value, dict) else {}
            flat |= {_full_name(key, name): _normal(_full_name(key, name), inner[name]) for name in inner}
        elif value is not None:
            flat[str(key)] = _normal(str(key), value)
    return flat


def _normal(key: str, value: Any) -> Any:
    kind = KEYS.get("fsdp_sharding_strategy" if key == "fsdp_reshard_after_forward" else key)
    if isinstance(kind, tuple) and isinstance(value, str) and key not in ("distributed_type", "compute_environment"):
        return next((name for name in kind if name.lower() == value.lower()), value)
    return value


def wrap_class_names(value: str | Sequence[str] | None) -> list[str]:
    """Class names of `fsdp_transformer_layer_cls_to_wrap`: a comma-separated string or a list.

    Also takes what the launcher makes of a YAML list, the text "['A', 'B']", whole or as accelerate's plugin splits it.
    """
    text = value if isinstance(value, str) else ",".join(value or ())
    return [name.strip(" '\"") for name in text.strip("[] ").split(",") if name.strip(" '\"")]


# Checks.


def check_config(path: str | Path, flags: Mapping[str, Any] | None = None, num_gpus: int | None = None) -> list[str]:
    """Problems of an accelerate YAML, one line each, in the order of the file; empty when it can be run.

    flags: what the launcher's command line adds, by the launcher's names without dashes; they override the file.
    num_gpus: GPUs of each machine; None: not known, or none.
    """
    try:
        file = _read(Path(path))
    except ValueError as error:
        return [str(error)]
    return _Checker(file, flags or {}, num_gpus).run()


def problems_in_words(path: Path, flags: Mapping[str, Any]) -> str | None:
    """Message of all problems that a YAML has on this machine, with the launcher's flags."""
    problems = check_config(path, flags, _num_gpus())
    if len(problems) > 1:
        return "\n  ".join([f"{len(problems)} problems in {path}:", *problems])
    return problems[0] if problems else None


class _Checker:
    """Collects the problems of one file."""

    def __init__(self, file: _File, flags: Mapping[str, Any], num_gpus: int | None) -> None:
        self.file = file
        self.flags = flags
        self.num_gpus = num_gpus
        self.problems: list[tuple[int, str]] = []
        self.plan: dict[str, Any] = {}

    def report(self, key: str, text: str) -> None:
        """A problem of the settings that are in effect."""
        self.add(key, text, self.flags, _section(key))

    def add(self, key: str, text: str, flags: Mapping[str, Any], section: str) -> None:
        line = 0 if key in flags else self.file.lines.get((section, key), 0)
        end = "" if text.endswith("?") else "."
        self.problems.append((line, f"{_named(self.file, flags, key, section)}: {text}{end}"))

    def run(self) -> list[str]:
        for key, value in self.file.content.items():
            if key in PREFIXES or key in OTHER_SECTIONS:
                self.check_section(key, value)
            elif self.check_key("", str(key), value) and value is not None:
                self.plan[key] = _normal(key, value)
        for key, value in self.flags.items():
            self.add_flag(key, value)
        # Switched off by the launcher's flag: no fault of the file that it has more to say about it.
        if self.flags.get("mixed_precision", "fp8") != "fp8":
            self.plan = {key: value for key, value in self.plan.items() if _section(key) != "fp8_config"}
        if self.flags.get("dynamo_backend") == "no":
            self.plan = {key: value for key, value in self.plan.items() if _section(key) != "dynamo_config"}
        self.check_processes()
        self.check_fsdp()
        self.check_parallelism()
        self.check_precision_and_compile()
        return self.file.slips + [text for _, text in sorted(self.problems, key=lambda item: item[0])]

    # Single keys.

    def check_section(self, section: str, value: Any) -> None:
        if section in OTHER_SECTIONS:
            if value:
                self.report(section, f"these recipes do not use {OTHER_SECTIONS[section]}; remove it")
        elif isinstance(value, dict):
            for key, inner in value.items():
                name = _full_name(section, key)
                if self.check_key(section, name, inner):
                    self.plan[name] = _normal(name, inner)
        else:
            found = "has no value" if value is None else f"found {value!r}"
            self.report(section, f"{found}; expected indented lines of `key: value`, or remove the line")

    def check_key(self, section: str, key: str, value: Any) -> bool:
        """Whether the key can be used; reports it otherwise."""
        problem = None
        if section == "" and key in TPU_DEFAULTS:
            if value is not None and value not in TPU_DEFAULTS[key]:
                problem = f"found {value!r}; it acts on TPUs only, remove the line"
        elif key not in KEYS or _section(key) != section:
            problem = self.unknown_key(section, key)
        elif value is None:
            # The launcher would hand the text "none" on to the run.
            problem = (
                "has no value; give one or remove the line" if section or key.startswith(("num_", "dist")) else None
            )
        else:
            value = _normal(key, value)
            problem = _refusal(key, value) or _type_problem(key, value)
            if key == "same_network" and value is False and self.flags.get("rdzv_backend", "static") == "static":
                problem = "found false; the machines meet at main_process_ip either way, remove the line"
            if key == "enable_cpu_affinity" and value is True or key == "rdzv_backend" and value != "static":
                problem = f"found {value!r}; {FLAG_ONLY.format(key)}"
        if problem:
            self.add(key, problem, {}, section)
        return problem is None

    def unknown_key(self, section: str, key: str) -> str:
        prefix = PREFIXES.get(section, "")
        written = key.removeprefix(prefix)
        if key in RENAMED:
            return f"renamed; write {RENAMED[key]}"
        if key in SAID_ELSEWHERE:
            return SAID_ELSEWHERE[key]
        if section == "parallelism_config" and prefix + key in KEYS:
            return f"accelerate ignores it without its prefix; write {prefix}{key}"
        for name in (key, written):
            if name in KEYS:
                home = _section(name)
                return f"belongs under {home}" if home else "belongs at the top level, without indentation"
        names = [name for name in [*KEYS, *TPU_DEFAULTS, *PREFIXES] if _section(name) == section]
        near = difflib.get_close_matches(key, names, n=1) or difflib.get_close_matches(prefix + key, names, n=1)
        where = section or "an accelerate config"
        return f"no key of {where}; " + (f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}")

    def add_flag(self, name: str, value: Any) -> None:
        setting = _setting(name, value)
        if name in TYPE_FLAGS and setting:
            self.plan |= setting
            reason = REFUSED.get(("distributed_type", TYPE_FLAGS[name]))
            if reason:
                self.report(name, reason)
        elif name in KEYS:
            problem = _refusal(name, setting[name]) or _type_problem(name, setting[name])
            if problem:
                self.report(name, problem)
            else:
                self.plan |= setting
        elif name in SAID_ELSEWHERE:
            self.report(name, f"does nothing here: {SAID_ELSEWHERE[name]}")

    # Combinations. A key that is wrong in itself is not in the plan and is not reported again.

    def missing(self, key: str) -> bool:
        section = _section(key)
        is_readable = isinstance(self.file.content.get(section) or {}, dict)
        return key not in self.plan and key not in self.flags and (section, key) not in self.file.lines and is_readable

    def check_processes(self) -> None:
        plan = self.plan
        kind = plan.get("distributed_type")
        if self.missing("distributed_type") and kind is None:
            self.report("distributed_type", "is missing; write FSDP, MULTI_GPU or 'NO'")
        if self.missing("num_processes") and kind not in (None, "NO"):
            self.report("num_processes", "is missing; write the number of processes, the total over all machines")
        processes, machines = plan.get("num_processes", 1), plan.get("num_machines", 1)
        if kind == "NO" and (processes > 1 or machines > 1):
            self.report(
                "num_processes" if processes > 1 else "num_machines",
                f"found {processes} processes on {machines} machines, but distributed_type 'NO' starts one; "
                "take MULTI_GPU (ddp.yaml) or FSDP",
            )
        if kind in ("MULTI_GPU", "FSDP"):
            instead = "hide the GPUs with CUDA_VISIBLE_DEVICES= instead"
            if plan.get("use_cpu"):
                self.report("use_cpu", f"accelerate's launcher drops it under {kind}; {instead}")
            if self.flags.get("cpu"):
                self.report("cpu", f"starts one process without {'FSDP' if kind == 'FSDP' else 'DDP'}; {instead}")
        if "num_processes" in plan and processes % machines:
            self.report(
                "num_processes",
                f"found {processes}, the total over all machines, which {machines} machines cannot share equally; "
                f"write {processes * machines} if it was meant for each machine",
            )
        if plan.get("machine_rank", 0) >= machines:
            self.report(
                "machine_rank", f"found {plan['machine_rank']}; expected 0 to {machines - 1} (num_machines {machines})"
            )
        if machines == 1 and self.file.content.get("num_machines", 1) == 1 and "main_process_ip" in plan:
            self.report("main_process_ip", "acts with num_machines above 1 only; remove the line")
        # A launcher that is given --num_machines is given the address in the same way.
        if machines > 1 and "num_machines" not in self.flags:
            for key in ("main_process_ip", "main_process_port"):
                if self.missing(key):
                    self.report("num_machines", f"{machines} machines need {key}: where process 0 is reached")
        if machines > 1 and plan.get("main_process_port") == 0:
            self.report(
                "main_process_port", "0 lets each machine choose another port; write one that is free on the first"
            )
        self.check_devices(processes // machines)

    def check_devices(self, per_machine: int) -> None:
        plan = self.plan
        ids = [i.strip() for i in plan.get("gpu_ids", "all").split(",")]
        if ids != ["all"]:
            known = r"\d+|(GPU|MIG)-.+"  # what CUDA_VISIBLE_DEVICES takes
            if wrong := [i for i in ids if not re.fullmatch(known, i) or ids.count(i) > 1]:
                self.report("gpu_ids", f"found {wrong[0]!r}; write all, or each GPU's number once, such as '0,1'")
            elif len(ids) < per_machine:
                self.report("gpu_ids", f"found {len(ids)} GPUs for {per_machine} processes on each machine")
            elif len(ids) == 1 and plan.get("distributed_type") == "MULTI_GPU":
                self.report("gpu_ids", "one GPU; accelerate refuses it with MULTI_GPU, take single_device.yaml")
        if not self.num_gpus:
            return
        if per_machine > self.num_gpus:
            self.report(
                "num_processes",
                f"{per_machine} processes on each machine, which has {self.num_gpus} GPUs; "
                f"launch with --num_processes {self.num_gpus * plan.get('num_machines', 1)}",
            )
        elif str(plan.get("fsdp_sharding_strategy", "")).startswith("HYBRID") and per_machine < self.num_gpus:
            self.report(
                "num_processes",
                f"{per_machine} processes on each machine, but FSDP1 shards over all {self.num_gpus} GPUs it sees; "
                "use them all or hide the others with CUDA_VISIBLE_DEVICES",
            )

    def check_fsdp(self) -> None:
        plan = self.plan
        kind, version = plan.get("distributed_type"), plan.get("fsdp_version")
        keys = [key for key in plan if _section(key) == "fsdp_config"]
        if kind in ("NO", "MULTI_GPU") and keys:
            self.report(
                "fsdp_config",
                f"acts with distributed_type FSDP only, found {kind!r}; change the one or remove the other",
            )
        if kind != "FSDP":
            return
        if self.missing("fsdp_version"):
            self.report(
                "fsdp_config", "fsdp_version is missing, and accelerate would take 1; write fsdp_version: 2 or 1"
            )
        if version == 2:
            self.check_keys_of_fsdp1()
        elif version == 1:
            self.check_keys_of_fsdp2()
        if plan.get("fsdp_activation_checkpointing_offload") and plan.get("fsdp_activation_checkpointing") is not True:
            self.report("fsdp_activation_checkpointing_offload", "acts with fsdp_activation_checkpointing: true only")
        self.check_wrap_policy()

    def check_keys_of_fsdp1(self) -> None:
        for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            found = self.plan.get(key)
            if isinstance(found, str):
                self.report(key, f"{found} is for fsdp_version 1; under 2 write {STRATEGY_IN_FSDP2[found]}")
        for key, reason in (
            ("fsdp_use_orig_params", "FSDP2 always keeps the original parameters"),
            ("fsdp_sync_module_states", "under FSDP2 each process reads its own shards"),
        ):
            if key in self.plan:
                self.report(key, f"obsolete under fsdp_version 2 ({reason}); remove the line")
        if self.plan.get("fsdp_backward_prefetch") == "BACKWARD_POST":
            self.report(
                "fsdp_backward_prefetch",
                "BACKWARD_POST is for fsdp_version 1: FSDP2 gathers the next unit before the gradients of this one are "
                "computed, or not ahead; write BACKWARD_PRE or NO_PREFETCH",
            )

    def check_keys_of_fsdp2(self) -> None:
        # `accelerate config` itself writes FSDP1's strategy under this key; the launcher's default strategy wins.
        if "fsdp_reshard_after_forward" in self.plan:
            found = self.plan["fsdp_reshard_after_forward"]
            strategy = found if isinstance(found, str) else "FULL_SHARD" if found else "SHARD_GRAD_OP"
            self.report(
                "fsdp_reshard_after_forward", f"ignored under fsdp_version 1; write fsdp_sharding_strategy: {strategy}"
            )
        if "fsdp_activation_checkpointing_offload" in self.plan:
            self.report("fsdp_activation_checkpointing_offload", "needs fsdp_version: 2")
        is_sharded = self.plan.get("fsdp_sharding_strategy") != "NO_SHARD"
        if not is_sharded and self.plan.get("fsdp_state_dict_type") == "SHARDED_STATE_DICT":
            self.report("fsdp_state_dict_type", "under NO_SHARD nothing is sharded; write FULL_STATE_DICT")

    def check_wrap_policy(self) -> None:
        policy = self.plan.get("fsdp_auto_wrap_policy", "NO_WRAP")
        if "fsdp_auto_wrap_policy" not in self.plan and not self.missing("fsdp_auto_wrap_policy"):
            return
        for key, needed in (
            ("fsdp_transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP"),
            ("fsdp_min_num_params", "SIZE_BASED_WRAP"),
        ):
            if key in self.plan and policy != needed:
                self.report(key, f"acts with fsdp_auto_wrap_policy {needed} only, found {policy}")
        if policy == "SIZE_BASED_WRAP" and self.missing("fsdp_min_num_params"):
            self.report(
                "fsdp_auto_wrap_policy", "SIZE_BASED_WRAP needs fsdp_min_num_params: the size of a unit in parameters"
            )

    def check_parallelism(self) -> None:
        plan = self.plan
        if not any(_section(key) == "parallelism_config" for key in plan):
            return
        if any(section == "parallelism_config" and key not in plan for section, key in self.file.lines):
            return  # one of the sizes is wrong in itself
        if plan.get("distributed_type") != "FSDP" or plan.get("fsdp_version", 2) != 2:
            self.report("parallelism_config", "needs distributed_type FSDP with fsdp_version: 2")
            return
        if "use_fsdp" in self.flags and "use_parallelism_config" not in self.flags:
            self.report("use_fsdp", "with this flag accelerate ignores the file's parallelism_config; drop it")
        replicas = plan.get("parallelism_config_dp_replicate_size", 1)
        shards = plan.get("parallelism_config_dp_shard_size", 1)
        contexts = plan.get("parallelism_config_cp_size", 1)
        processes = plan.get("num_processes")
        context = f" x cp_size {contexts}" if contexts > 1 else ""
        if shards == 1 and contexts == 1:
            self.report(
                "parallelism_config",
                "dp_shard_size is 1: nothing is sharded; remove the section to shard over all processes",
            )
        elif shards == 1 and replicas > 1:
            self.report(
                "parallelism_config",
                f"accelerate takes dp_replicate_size {replicas}{context} with a dp_shard_size above 1 only; write "
                "dp_shard_size for dp_replicate_size",
            )
        elif processes is not None and replicas * shards * contexts != processes:
            self.report(
                "parallelism_config",
                f"dp_replicate_size {replicas} x dp_shard_size {shards}{context} = {replicas * shards * contexts}, but "
                f"there are {processes} processes; the product must be num_processes",
            )

    def check_precision_and_compile(self) -> None:
        plan = self.plan
        fsdp2 = plan.get("distributed_type") == "FSDP" and plan.get("fsdp_version") == 2
        precision = plan.get("mixed_precision", "no")
        known = "mixed_precision" in plan or self.missing("mixed_precision")
        if known and precision != "fp8" and any(_section(key) == "fp8_config" for key in plan):
            self.report("fp8_config", f"acts with mixed_precision fp8 only, found {precision}")
        if precision == "fp8" and plan.get("fsdp_version") == 1 and plan.get("distributed_type") == "FSDP":
            self.report(
                "mixed_precision", "fp8 needs fsdp_version: 2; FSDP1 flattens the weights that torchao converts"
            )
        if plan.get("fp8_enable_fsdp_float8_all_gather") and precision == "fp8" and not fsdp2:
            self.report("fp8_enable_fsdp_float8_all_gather", "acts under FSDP2 only; write false or remove the line")
        compile_keys = [key for key in plan if _section(key) == "dynamo_config" and key != "dynamo_backend"]
        off = plan.get("dynamo_backend", "NO") == "NO"
        if off and compile_keys and ("dynamo_backend" in plan or self.missing("dynamo_backend")):
            self.report(compile_keys[0], "acts with a dynamo_backend only (INDUCTOR)")


def _refusal(key: str, value: Any) -> str | None:
    """Why a value that accelerate would take is refused here."""
    if (key, None) in REFUSED and isinstance(value, int) and value > 1:
        return f"found {value}; {REFUSED[key, None]}"
    name = value.upper() if isinstance(value, str) else value
    reason = REFUSED.get((key, name)) if isinstance(value, (str, bool)) else None
    return f"found {str(value).lower() if isinstance(value, bool) else value}; {reason}" if reason else None


def _type_problem(key: str, value: Any) -> str | None:
    """What is wrong with the value's type or range."""
    kind = KEYS[key]
    if key == "fsdp_transformer_layer_cls_to_wrap" and isinstance(value, list):
        return (
            None if value and all(isinstance(name, str) for name in value) else f"found {value!r}; expected class names"
        )
    if key == "fsdp_reshard_after_forward" and value in STRATEGY_IN_FSDP2:
        return None  # FSDP1's names: `accelerate config` writes them here
    if isinstance(kind, tuple):
        if value in kind:
            return None
        if value is False and any(name.lower() == "no" for name in kind):
            return f"YAML reads an unquoted no as false; write '{'NO' if 'NO' in kind else 'no'}' in quotes"
        near = difflib.get_close_matches(str(value).upper(), [name.upper() for name in kind], n=1)
        return f"found {value!r}; expected one of {', '.join(kind)}" + (
            f"; did you mean {_normal(key, near[0])}?" if near else ""
        )
    if kind is bool and not isinstance(value, bool):
        wanted = {"true": "true", "false": "false"}.get(str(value).strip().lower())
        return (
            f"found the text {value!r}; write {wanted} without quotes"
            if wanted
            else f"found {value!r}; expected true or false"
        )
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, int):
            return f"found {'the text ' if isinstance(value, str) else ''}{value!r}; " + _number_hint(value)
        low, high = _limits(key)
        if not low <= value <= (high or value):
            return f"found {value}; expected " + (f"{low} to {high}" if high else f"at least {low}")
    if kind is str and not isinstance(value, str):
        return f"found {value!r}; write it in quotes"
    if kind is str and not value.strip():
        return "is empty; give a value or remove the line"
    return None


def _number_hint(value: Any) -> str:
    if isinstance(value, bool):
        return "expected a whole number"
    try:
        number = float(value)  # also 1e8, which YAML takes for text
    except (TypeError, ValueError):
        return "expected a whole number"
    quotes = " without quotes" if isinstance(value, str) else ""
    return f"write {int(number)}{quotes}" if number.is_integer() else "expected a whole number"


def _limits(key: str) -> tuple[int, int | None]:
    return {"machine_rank": (0, None), "main_process_port": (0, 65535), "fsdp_version": (1, 2)}.get(key, (1, None))


def _setting(name: str, value: Any) -> dict[str, Any]:
    """What a launcher's flag sets, by the YAML's key; empty where that is nothing."""
    if name in TYPE_FLAGS:
        return {"distributed_type": TYPE_FLAGS[name]} if value else {}
    return {name: _normal(name, _from_text(name, value))} if name in KEYS else {}


def _from_text(key: str, value: Any) -> Any:
    """A launcher flag's value as YAML would have it: the launcher keeps booleans and the FSDP version as text."""
    if isinstance(value, str) and KEYS[key] in (bool, int):
        return yaml.safe_load(value)
    return value


def check_model(launch: LaunchConfig, model: "PreTrainedModel", no_slices: str | None = None) -> list[str]:
    """Problems of checked settings with this model, which may be on the meta device; one line each.

    no_slices: why the recipe cannot train on slices of sequences (context parallelism), if it cannot.
    """
    plan = _flatten(read_config(launch.path)) if launch.path else {}
    for name, value in launch.flags.items():
        plan |= _setting(name, value)
    return [f"{launch.named(key)}: {text}." for key, text in _model_problems(plan, model, no_slices)]


def _model_problems(
    plan: Mapping[str, Any], model: "PreTrainedModel", no_slices: str | None
) -> Iterator[tuple[str, str]]:
    """Keys and what is wrong with their values."""
    name = type(model).__name__
    if plan.get("mixed_precision") == "fp16" and model.config.model_type == "t5":
        yield "mixed_precision", FP16_WITH_T5
    if plan.get("distributed_type") != "FSDP":
        return
    if plan.get("parallelism_config_cp_size", 1) > 1:
        from common.context_parallel import model_problem

        if no_slices:
            yield "parallelism_config_cp_size", no_slices
        elif problem := model_problem(model):
            yield "parallelism_config_cp_size", problem
    policy = plan.get("fsdp_auto_wrap_policy")
    if policy == "SIZE_BASED_WRAP" and model.config.is_encoder_decoder:
        yield (
            "fsdp_auto_wrap_policy",
            f"SIZE_BASED_WRAP cuts an encoder-decoder model ({name}) into units whose parameters other units use too; "
            "write TRANSFORMER_BASED_WRAP",
        )
    if policy != "TRANSFORMER_BASED_WRAP":
        return
    key = "fsdp_transformer_layer_cls_to_wrap"
    present = {type(module).__name__ for module in model.modules()}
    own = sorted(set(model._no_split_modules or ()) & present)
    wanted = wrap_class_names(plan.get(key))
    if not wanted and not own:
        yield key, f"{name} itself names no block class; write one of {', '.join(sorted(present))}"
    for missing in [name for name in wanted if name not in present]:
        candidates = own or difflib.get_close_matches(missing, sorted(present), n=3) or sorted(present)
        yield (
            key,
            f"{name} has no module of class {missing}; write {', '.join(candidates)} or remove the line (the model's "
            "own block class is taken)",
        )
    if problem := _no_units(model, wanted):
        instead = " or ".join(own) or "another class"
        yield key, f"{problem}; write {instead}, or remove the line (the model's own block class is taken)"


def _no_units(model: "PreTrainedModel", classes: Sequence[str]) -> str | None:
    """Why modules of the classes cannot each be gathered, recomputed and compiled on their own; None where they can."""
    from torch import nn

    units = {path: module for path, module in model.named_modules() if type(module).__name__ in classes}
    paths: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    for path, module in units.items():
        kind = type(module).__name__
        if module is model:
            return f"{kind} is the whole model, which is a unit in any case"
        if type(module).forward is nn.Module.forward:
            return f"{kind} ({path}) holds modules but computes nothing itself"
        if outer := next((other for other in units if path.startswith(f"{other}.")), None):
            return f"{kind} ({path}) is inside {type(units[outer]).__name__} ({outer}): name one of the two"
        for parameter in module.parameters():
            if outside := [name for name in paths[id(parameter)] if not name.startswith(f"{path}.")]:
                return f"{kind} ({path}) has a parameter that is used outside of it too ({outside[0]})"
    return None


# The plan in words.


def describe(config: Mapping[str, Any]) -> str:
    """What a checked YAML asks for, a line for each aspect; what is off is left out."""
    plan = _flatten(config)
    kind = plan["distributed_type"]
    rows = {
        "processes": _describe_processes(plan),
        "strategy": _describe_strategy(plan),
        "wrapping": _describe_wrapping(plan) if kind == "FSDP" else "",
        "prefetch": _describe_prefetch(plan) if kind == "FSDP" else "",
        "activations": _describe_activations(plan),
        "offload": "parameters, gradients and optimizer state rest in host memory"
        if plan.get("fsdp_offload_params")
        else "",
        "precision": _describe_precision(plan),
        "compile": _describe_compile(plan),
        "checkpoints": _describe_checkpoints(plan) if kind == "FSDP" else "",
        "loading": _describe_loading(plan) if kind == "FSDP" else "",
        "debug": "accelerate checks the shapes of what its collectives exchange" if plan.get("debug") else "",
    }
    return "\n".join(f"{name:<12} {text}" for name, text in rows.items() if text)


def _describe_processes(plan: Mapping[str, Any]) -> str:
    processes, machines = plan.get("num_processes", 1), plan.get("num_machines", 1)
    text = f"{processes} on {machines} machine{'s' if machines > 1 else ''}"
    if machines > 1:
        text += f", {processes // machines} on each; this file is for machine {plan.get('machine_rank', 0)}"
    if "main_process_ip" in plan:
        text += f"; process 0 is at {plan['main_process_ip']}"
    if "main_process_port" in plan:
        text += f"; port {plan['main_process_port'] or '(a free one)'}"
    if plan.get("gpu_ids", "all") != "all":
        text += f"; GPUs {plan['gpu_ids']}"
    return text + ("; on the CPU" if plan.get("use_cpu") else "")


def _describe_strategy(plan: Mapping[str, Any]) -> str:
    kind, processes = plan["distributed_type"], plan.get("num_processes", 1)
    if kind == "NO":
        return "one device, nothing sharded"
    if kind == "MULTI_GPU":
        return f"DDP: each of {processes} processes holds the whole model; gradients are averaged"
    if plan["fsdp_version"] == 2:
        replicas, contexts = (plan.get(f"parallelism_config_{key}_size", 1) for key in ("dp_replicate", "cp"))
        reshard = plan.get("fsdp_reshard_after_forward", True)
        over = f"over {processes} processes"
        if replicas > 1:
            over = f"over groups of {processes // replicas} processes, {replicas} copies (hybrid)"
        between = (
            "are freed after each block's forward pass"
            if reshard
            else "stay gathered from the forward to the backward pass"
        )
        slices = f"; each sequence is split over {contexts} processes (context parallelism)" if contexts > 1 else ""
        return f"FSDP2: parameters, gradients and optimizer state sharded {over}; gathered parameters {between}{slices}"
    strategy = plan.get("fsdp_sharding_strategy", "FULL_SHARD")
    machines = plan.get("num_machines", 1)
    over = f"over {processes} processes"
    if strategy.startswith("HYBRID"):
        over = (
            f"over the {processes // machines} processes of a machine, {machines} cop{'ies' if machines > 1 else 'y'}"
        )
    what = {
        "FULL_SHARD": f"parameters, gradients and optimizer state sharded {over}",
        "SHARD_GRAD_OP": f"gradients and optimizer state sharded {over}; "
        "parameters stay gathered from the forward to the backward pass",
        "NO_SHARD": f"each of {processes} processes holds the whole model; gradients are averaged",
    }
    what["HYBRID_SHARD"], what["HYBRID_SHARD_ZERO2"] = what["FULL_SHARD"], what["SHARD_GRAD_OP"]
    return f"FSDP1 {strategy}: {what[strategy]}"


def _describe_wrapping(plan: Mapping[str, Any]) -> str:
    policy = plan.get("fsdp_auto_wrap_policy", "NO_WRAP")
    if policy == "TRANSFORMER_BASED_WRAP":
        classes = wrap_class_names(plan.get("fsdp_transformer_layer_cls_to_wrap"))
        return (
            f"one unit per {' and per '.join(classes) or 'transformer block (the class that the model itself names)'}"
        )
    if policy == "SIZE_BASED_WRAP":
        return f"one unit per {plan['fsdp_min_num_params']:,} parameters or more"
    return "the whole model is one unit: all parameters are gathered at once"


def _describe_prefetch(plan: Mapping[str, Any]) -> str:
    default = "NO_PREFETCH" if plan["fsdp_version"] == 1 else "FSDP2's own order"
    backward = plan.get("fsdp_backward_prefetch", default)
    return f"backward {backward}, forward {'on' if plan.get('fsdp_forward_prefetch') else 'off'}"


def _describe_activations(plan: Mapping[str, Any]) -> str:
    if not plan.get("fsdp_activation_checkpointing"):
        return ""
    offload = ", their inputs kept in host memory" if plan.get("fsdp_activation_checkpointing_offload") else ""
    return f"recomputed block by block in the backward pass{offload}"


def _describe_precision(plan: Mapping[str, Any]) -> str:
    text = {
        "no": "as the parameters (fp32 unless --param_dtype says otherwise)",
        "bf16": "bf16 compute",
        "fp16": "fp16 compute with loss scaling",
        "fp8": "linear layers in fp8 (torchao), the rest in bf16",
    }[plan.get("mixed_precision", "no")]
    if plan.get("mixed_precision") != "fp8":
        return text
    if "fp8_enable_fsdp_float8_all_gather" in plan:
        text += f"; gathered in {'fp8' if plan['fp8_enable_fsdp_float8_all_gather'] else 'bf16'}"
    if "fp8_pad_inner_dim" in plan:
        text += f"; odd widths {'padded' if plan['fp8_pad_inner_dim'] else 'not padded'}"
    return text


def _describe_compile(plan: Mapping[str, Any]) -> str:
    backend = plan.get("dynamo_backend", "NO")
    if backend == "NO":
        return ""
    text = f"each transformer block with {backend}, mode {plan.get('dynamo_mode', 'default')}"
    if plan.get("dynamo_use_fullgraph"):
        text += ", graph breaks are errors"
    if "dynamo_use_dynamic" in plan:
        text += f", {'dynamic' if plan['dynamo_use_dynamic'] else 'static'} shapes"
    return text


def _describe_checkpoints(plan: Mapping[str, Any]) -> str:
    default = "FULL_STATE_DICT" if plan["fsdp_version"] == 1 else "SHARDED_STATE_DICT"
    if plan.get("fsdp_state_dict_type", default) == "FULL_STATE_DICT":
        return "one full state dict, gathered"
    return "sharded state dicts, written by all processes"


def _describe_loading(plan: Mapping[str, Any]) -> str:
    if plan.get("fsdp_cpu_ram_efficient_loading", True):
        return "each process reads its own shards"
    return "each process loads the whole model before sharding"


# The file of the present run.


def find_launch_config() -> Path | None:
    """The YAML that this process was launched with; None when there is none.

    It is the --config_file on the command line of an accelerate launcher above this process, or accelerate's default
    file where the launcher was given none. Without such a launcher (torchrun, mpiexec) it is ACCELERATE_CONFIG_FILE.
    """
    launcher = _find_launcher()
    if launcher is not None:
        return launcher.path
    named = os.environ.get("ACCELERATE_CONFIG_FILE")
    return Path(named) if named else None


def _find_launcher() -> LaunchConfig | None:
    """What an `accelerate launch` above this process was given."""
    import psutil

    for process in psutil.Process().parents():
        try:
            command, folder = process.cmdline(), Path(process.cwd())
        except psutil.Error:  # it has ended, or belongs to another user
            continue
        arguments = launcher_arguments(command, folder)
        if arguments is not None:
            return _parse_launcher(arguments, folder)
    return None


def launcher_arguments(command: Sequence[str], folder: Path) -> list[str] | None:
    """What follows `accelerate launch` in a command line run in `folder`; None when it is another program."""
    words = list(command)
    if words and re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        del words[0]
        while words and words[0].startswith("-") and words[0] != "-m":
            del words[: 2 if words[0] in ("-X", "-W") else 1]
        if words[:1] == ["-m"]:
            del words[0]
    if not words:
        return None
    name, arguments = Path(words[0]).name, words[1:]
    if name in ("accelerate", "accelerate.commands.accelerate_cli") and arguments[:1] == ["launch"]:
        return arguments[1:]
    if name in ("accelerate-launch", "accelerate.commands.launch", "tools.launch"):
        return arguments
    return arguments if (folder / words[0]).resolve() == REPOSITORY / "tools" / "launch.py" else None


def _parse_launcher(arguments: list[str], folder: Path) -> LaunchConfig:
    from accelerate.commands.config import default_config_file
    from accelerate.commands.launch import launch_command_parser

    args = launch_command_parser().parse_args(arguments)
    path = None
    if args.config_file is not None:
        path = folder / args.config_file
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())  # as the user wrote it
    elif os.path.isfile(default_config_file) and not args.cpu:
        path = Path(default_config_file)
    return LaunchConfig(path, launcher_flags(args))


def launcher_flags(args: argparse.Namespace) -> dict[str, Any]:
    """What was given on the launcher's command line besides the YAML and the script."""
    given = args.nondefault - {"config_file", "training_script", "training_script_args"}
    return {name: getattr(args, name) for name in given}


def check_launch(accelerate_config: str | None = None) -> LaunchConfig:
    """Check the YAML that this run was launched with, and apply it where no accelerate launcher has done so.

    To be called before settings are read from the environment.
    accelerate_config: a YAML for torchrun and mpiexec; ACCELERATE_CONFIG_FILE in the environment does the same.
    Returns the file that is in effect, with what overrides it.
    Raises `UserError` with all problems of the file, and when several processes run without any.
    """
    launcher = _find_launcher()
    in_environment = os.environ.get("ACCELERATE_CONFIG_FILE")
    named = accelerate_config or in_environment
    if launcher is not None:
        if accelerate_config is not None:
            raise _user_error(
                "--accelerate_config is for torchrun and mpiexec; give accelerate launch --config_file instead."
            )
        if in_environment and launcher.path is None:
            raise _user_error(
                f"accelerate launch does not read ACCELERATE_CONFIG_FILE; add --config_file {in_environment}."
            )
        path, flags = launcher.path, dict(launcher.flags)
    else:
        path, flags = Path(named) if named else None, {}
    num_processes, per_machine = _world()  # what really runs
    if path is None:
        if (num_processes or 1) > 1 and not TYPE_FLAGS.keys() & flags.keys():
            raise _user_error(
                f"{num_processes} processes, but no YAML says how they share the work: use accelerate launch "
                "--config_file, or with torchrun and mpiexec set ACCELERATE_CONFIG_FILE (accelerate_configs/)."
            )
        idle = [name for name in flags if _section(name) == "fsdp_config" and not flags.get("use_fsdp")]
        if flags.get("num_processes", 1) > 1 and num_processes is None:
            idle.append("num_processes")
        if idle:
            raise _user_error(
                f"accelerate launch drops --{' and --'.join(idle)} where no YAML is named; add --config_file "
                "(accelerate_configs/)."
            )
        return LaunchConfig(None, flags)
    config = read_config(path)
    if num_processes is not None:
        flags |= {"num_processes": num_processes, "num_machines": num_processes // per_machine}
        if launcher is None:  # the file's rank is the launcher's
            flags["machine_rank"] = 0
    is_applied = "ACCELERATE_DYNAMO_MODE" in os.environ  # every accelerate launch sets it, and nothing else does
    if is_applied and os.environ["ACCELERATE_MIXED_PRECISION"] != config.get("mixed_precision"):
        flags["mixed_precision"] = os.environ["ACCELERATE_MIXED_PRECISION"]
    if problems := problems_in_words(path, flags):
        raise _user_error(problems)
    if launcher is None and num_processes is None and config["distributed_type"] != "NO":
        raise _user_error(f"{path} needs a launcher: accelerate launch --config_file {path}, or torchrun.")
    if not is_applied:
        check_environment(path)
        apply_config(path)
    return LaunchConfig(path, flags)


def check_environment(path: Path) -> None:
    """Refuse variables that accelerate's launcher hands on to the run where the YAML does not say the same key."""
    names = [name for name in os.environ if re.match(r"FSDP_|PARALLELISM_CONFIG_|ACCELERATE_USE_(?!CPU)", name)]
    if names:
        raise _user_error(
            f"the environment has {', '.join(sorted(names))}, which would act beside what {path} says; unset "
            f"{'it' if len(names) == 1 else 'them'}, and write what you want into the YAML."
        )


def _world() -> tuple[int | None, int]:
    """Number of processes of this run, and of those on this machine; (None, 1) when nothing has started several."""
    environ = os.environ
    total = next(
        (n for n in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE") if n in environ), None
    )
    local_names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")
    local = next((name for name in local_names if name in environ), total)
    return (None, 1) if total is None or local is None else (int(environ[total]), int(environ[local]))


def _num_gpus() -> int | None:
    import torch

    return torch.cuda.device_count() or None


def apply_config(path: str | Path) -> None:
    """Set in this process's environment what accelerate's launcher would set for the YAML: for torchrun and mpiexec.

    Ranks, process counts and the address of process 0 stay as they are.
    Raises `UserError` when the launcher would refuse the file here (fp8 without torchao).
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    # Private names, seen in accelerate 1.15: the launcher's own reading of the file, short of starting processes.
    # Port 0 spares a test whether process 0's port, by now in use, is free.
    arguments = ["--config_file", str(path), "--main_process_port", "0", "script.py"]
    try:
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
        several = args.use_fsdp or args.multi_gpu
        settings = prepare_multi_gpu_env(args) if several else prepare_simple_launcher_cmd_env(args)[1]
    except (RuntimeError, ValueError) as error:
        raise _user_error(f"{path}: {' '.join(str(error).split())}") from error
    os.environ.update({name: text for name, text in settings.items() if not name.startswith("MASTER_")})
