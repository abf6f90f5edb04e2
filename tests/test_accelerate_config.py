"""Each key of an accelerate YAML acts or is refused, and the run finds the file that it was launched with."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import constants, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from common import accelerate_config
from common.accelerate_config import KEYS, LaunchConfig, check_config, describe
from common.arguments import UserError
from tests.conftest import REPOSITORY

CONFIGS = REPOSITORY / "accelerate_configs"
SHIPPED = [
    "single_device", "ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_hybrid_shard", "fsdp_full_shard_offload",
    "fsdp_full_shard_compile", "fsdp_context_parallel", "fsdp_fp8", "fsdp1_full_shard", "fsdp1_shard_grad_op",
    "fsdp1_no_shard", "fsdp1_hybrid_shard", "fsdp1_hybrid_shard_zero2",
]  # fmt: skip
DELETE = object()
FSDP1, FSDP2, HYBRID = "fsdp1_full_shard", "fsdp_full_shard", "fsdp_hybrid_shard"
CONTEXT = "fsdp_context_parallel"


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a shipped YAML with edits, each key in its section unless it is `section.key`; DELETE takes it out."""

    def write_edited(base: str, edits: dict[str, Any] | None = None) -> Path:
        config = copy.deepcopy(load(base))
        for name, value in (edits or {}).items():
            section, _, key = name.rpartition(".") if "." in name else (accelerate_config._section(name), "", name)
            target = config.setdefault(section, {}) if section else config
            if value is DELETE:
                del target[key]
            else:
                target[key] = value
        path = tmp_path / "edited.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return path

    return write_edited


# The tables against accelerate.


def test_keys_are_those_of_accelerate() -> None:
    fields = set(ClusterConfig.__dataclass_fields__)
    ours = {key for key in KEYS if not accelerate_config._section(key)}
    assert fields == (
        ours
        | set(accelerate_config.PREFIXES)
        | set(accelerate_config.OTHER_SECTIONS)
        | set(accelerate_config.TPU_DEFAULTS)
    )
    flags = {action.dest for action in launch_command_parser()._actions}
    nested = {name for name in flags if accelerate_config._section(name)}
    assert nested <= KEYS.keys() | accelerate_config.SAID_ELSEWHERE.keys()
    assert {key for key in KEYS if accelerate_config._section(key)} <= nested


def test_values_are_those_of_accelerate() -> None:
    assert KEYS["fsdp_sharding_strategy"] == tuple(constants.FSDP_SHARDING_STRATEGY)
    assert KEYS["fsdp_auto_wrap_policy"] == tuple(constants.FSDP_AUTO_WRAP_POLICY)
    assert KEYS["fsdp_backward_prefetch"] == tuple(constants.FSDP_BACKWARD_PREFETCH)
    assert KEYS["fsdp_state_dict_type"] == tuple(constants.FSDP2_STATE_DICT_TYPE)
    assert KEYS["dynamo_mode"] == tuple(constants.TORCH_DYNAMO_MODES)


# The shipped files.


def test_all_promised_files_are_there() -> None:
    assert sorted(path.stem for path in CONFIGS.iterdir()) == sorted(SHIPPED)


def launcher_environment(path: Path, *flags: str) -> dict[str, str]:
    """What accelerate's own launcher would set for the file, less what the test's own environment has."""
    argv = ["--config_file", str(path), "--main_process_port", "0", *flags, "script.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(argv))
    several = args.use_fsdp or args.multi_gpu
    env = prepare_multi_gpu_env(args) if several else prepare_simple_launcher_cmd_env(args)[1]
    return {name: value for name, value in env.items() if os.environ.get(name) != value}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_fine_and_reach_the_run_as_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = CONFIGS / f"{name}.yaml"
    assert check_config(path) == []
    lines = path.read_text().splitlines()
    assert len(lines) <= 25
    assert lines[0].startswith("# ") and any(line.startswith("# Choose it ") for line in lines)
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)  # its launcher looks for torchao
    config, env = load(name), launcher_environment(path)
    assert config["num_processes"] == (1 if name == "single_device" else 4 if "hybrid" in name else 2)
    assert config["mixed_precision"] == ("fp8" if name == "fsdp_fp8" else "bf16")
    expected = {"ACCELERATE_MIXED_PRECISION": config["mixed_precision"]}
    for key, value in config.get("fsdp_config", {}).items():
        expected[key.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    for section, prefix in (
        ("parallelism_config", ""),
        ("dynamo_config", "ACCELERATE_"),
        ("fp8_config", "ACCELERATE_"),
    ):
        expected |= {prefix + key.upper(): str(value) for key, value in config.get(section, {}).items()}
    assert expected.items() <= env.items()
    assert env.get("ACCELERATE_USE_FSDP") == ("true" if "fsdp" in name else None)
    assert env.get("ACCELERATE_USE_PARALLELISM_CONFIG") == ("true" if name in (HYBRID, CONTEXT) else None)
    version = env.get("FSDP_VERSION")
    assert version == ("1" if name.startswith("fsdp1") else "2" if name.startswith("fsdp") else None)


def test_a_flag_of_the_launcher_wins_over_a_nested_key() -> None:
    path, name = CONFIGS / "fsdp_full_shard.yaml", "FSDP_RESHARD_AFTER_FORWARD"
    environments = launcher_environment(path), launcher_environment(path, "--fsdp_reshard_after_forward", "false")
    assert [env[name] for env in environments] == ["true", "false"]


def test_shipped_files_are_different_plans() -> None:
    plans = {describe(load(name)) for name in SHIPPED}
    assert len(plans) == len(SHIPPED)


# One edit per key: (base, edits, what the plan then says).
TAKEN: list[tuple[str, dict[str, Any], str]] = [
    ("ddp", {"distributed_type": "NO", "num_processes": 1}, "one device, nothing sharded"),
    (FSDP2, {"num_processes": 6}, "6 on 1 machine"),
    (FSDP2, {"num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29501}, "1 on each"),
    ("ddp", {"num_machines": 2, "machine_rank": 1, "main_process_ip": "a", "main_process_port": 1}, "for machine 1"),
    ("ddp", {"num_machines": 2, "main_process_ip": "node7", "main_process_port": 1}, "process 0 is at node7"),
    ("ddp", {"main_process_port": 29501}, "port 29501"),
    ("ddp", {"main_process_port": 0}, "port (a free one)"),
    ("ddp", {"gpu_ids": "1,3"}, "GPUs 1,3"),
    ("ddp", {"gpu_ids": "GPU-5af,MIG-c1"}, "GPUs GPU-5af,MIG-c1"),
    ("ddp", {"mixed_precision": "no"}, "as the parameters"),
    ("ddp", {"mixed_precision": "fp16"}, "fp16 compute with loss scaling"),
    ("single_device", {"use_cpu": True}, "on the CPU"),
    ("ddp", {"debug": True}, "checks the shapes"),
    (FSDP1, {"fsdp_sharding_strategy": "shard_grad_op"}, "FSDP1 SHARD_GRAD_OP: gradients and"),
    (FSDP1, {"fsdp_sharding_strategy": "NO_SHARD"}, "holds the whole model"),
    (FSDP1, {"fsdp_sharding_strategy": "HYBRID_SHARD"}, "the 2 processes of a machine, 1 copy"),
    (FSDP2, {"fsdp_reshard_after_forward": False}, "stay gathered from the forward"),
    (FSDP2, {"fsdp_auto_wrap_policy": "NO_WRAP"}, "the whole model is one unit"),
    (FSDP2, {"fsdp_auto_wrap_policy": DELETE}, "the whole model is one unit"),
    (FSDP2, {"fsdp_transformer_layer_cls_to_wrap": "A, B"}, "one unit per A and per B"),
    (FSDP2, {"fsdp_transformer_layer_cls_to_wrap": ["A", "B"]}, "one unit per A and per B"),
    (
        FSDP2,
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 20_000_000},
        "one unit per 20,000,000 parameters",
    ),
    (FSDP1, {"fsdp_backward_prefetch": "BACKWARD_POST"}, "backward BACKWARD_POST"),
    (FSDP1, {"fsdp_backward_prefetch": DELETE}, "backward NO_PREFETCH"),
    (FSDP2, {"fsdp_backward_prefetch": "NO_PREFETCH"}, "backward NO_PREFETCH"),
    (FSDP2, {"fsdp_forward_prefetch": True}, "forward on"),
    (FSDP1, {"fsdp_forward_prefetch": True}, "forward on"),
    (FSDP2, {"fsdp_state_dict_type": "FULL_STATE_DICT"}, "one full state dict"),
    (FSDP1, {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, "sharded state dicts"),
    (FSDP2, {"fsdp_cpu_ram_efficient_loading": False}, "loads the whole model"),
    (FSDP2, {"fsdp_activation_checkpointing": True}, "recomputed block by block"),
    (
        "fsdp_full_shard_offload",
        {"fsdp_activation_checkpointing_offload": True},
        "their inputs kept in host memory",
    ),
    (FSDP2, {"fsdp_offload_params": True}, "rest in host memory"),
    (
        HYBRID,
        {"num_processes": 8, "parallelism_config_dp_replicate_size": 4},
        "groups of 2 processes, 4 copies",
    ),
    (
        HYBRID,
        {"num_processes": 8, "parallelism_config_dp_shard_size": 4},
        "groups of 4 processes, 2 copies",
    ),
    (
        CONTEXT,
        {"num_processes": 4, "parallelism_config_cp_size": 4},
        "sharded over 4 processes; gathered parameters are freed after each block's forward pass; each sequence is "
        "split over 4 processes (context parallelism)",
    ),
    (
        HYBRID,
        {"num_processes": 8, "parallelism_config_cp_size": 2},
        "groups of 4 processes, 2 copies (hybrid); gathered parameters are freed after each block's forward pass; each "
        "sequence is split over 2 processes",
    ),
    (FSDP2, {"dynamo_backend": "aot_eager"}, "each transformer block with AOT_EAGER"),
    ("fsdp_full_shard_compile", {"dynamo_mode": "max-autotune"}, "mode max-autotune"),
    ("fsdp_full_shard_compile", {"dynamo_use_fullgraph": True}, "graph breaks are errors"),
    ("fsdp_full_shard_compile", {"dynamo_use_dynamic": True}, "dynamic shapes"),
    ("fsdp_full_shard_compile", {"dynamo_use_dynamic": False}, "static shapes"),
    ("fsdp_fp8", {"fp8_enable_fsdp_float8_all_gather": False}, "gathered in bf16"),
    ("fsdp_fp8", {"fp8_pad_inner_dim": False}, "odd widths not padded"),
    # Keys without their prefix, to which the launcher adds it.
    (FSDP2, {"fsdp_config.offload_params": True, "fsdp_offload_params": DELETE}, "rest in host"),
    ("fsdp_full_shard_compile", {"dynamo_config.mode": "max-autotune", "dynamo_mode": DELETE}, "autotune"),
    ("fsdp_fp8", {"fp8_config.pad_inner_dim": False, "fp8_pad_inner_dim": DELETE}, "odd widths not padded"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "edits", "said"), TAKEN)
def test_an_edit_changes_the_plan(base: str, edits: dict[str, Any], said: str, write: Callable[..., Path]) -> None:
    path = write(base, edits)
    assert check_config(path) == []
    assert said in describe(accelerate_config.read_config(path))
    assert said not in describe(load(base))


# One refused edit: (base, edits, "key: text of the problem", with ... where it is longer).
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # Values.
    ("ddp", {"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment: ... write LOCAL_MACHINE"),
    ("ddp", {"distributed_type": "DEEPSPEED"}, "distributed_type: ... fsdp_full_shard.yaml is ZeRO-3"),
    ("ddp", {"distributed_type": "MEGATRON_LM"}, "distributed_type: ... take fsdp_full_shard.yaml"),
    ("ddp", {"distributed_type": "XLA"}, "distributed_type: found XLA; write MULTI_GPU or FSDP"),
    ("ddp", {"distributed_type": "MULTI_CPU"}, "distributed_type: ... rehearsed on the CPU"),
    ("ddp", {"distributed_type": "MULTIGPU"}, "distributed_type: ... did you mean MULTI_GPU?"),
    ("ddp", {"distributed_type": False}, "distributed_type: YAML reads an unquoted no as false; write 'NO' in quotes"),
    ("ddp", {"mixed_precision": False}, "mixed_precision: YAML reads an unquoted no as false; write 'no' in quotes"),
    ("ddp", {"mixed_precision": "bfloat16"}, "mixed_precision: ... expected one of no, bf16, fp16, fp8"),
    ("ddp", {"num_processes": "2"}, "num_processes: found the text '2'; write 2 without quotes"),
    ("ddp", {"num_processes": 2.0}, "num_processes: found 2.0; write 2."),
    ("ddp", {"num_processes": 0}, "num_processes: found 0; expected at least 1"),
    ("ddp", {"num_processes": True}, "num_processes: found True; expected a whole number"),
    ("ddp", {"num_machines": None}, "num_machines: has no value"),
    ("ddp", {"machine_rank": -1}, "machine_rank: found -1; expected at least 0"),
    ("ddp", {"main_process_port": 70000}, "main_process_port: found 70000; expected 0 to 65535"),
    ("ddp", {"main_process_ip": 10}, "main_process_ip: found 10; write it in quotes"),
    ("ddp", {"gpu_ids": 0}, "gpu_ids: found 0; write it in quotes"),
    ("ddp", {"debug": "false"}, "debug: found the text 'false'; write false without quotes"),
    ("ddp", {"downcast_bf16": "yes"}, "downcast_bf16: found 'yes'; it acts on TPUs only"),
    ("ddp", {"tpu_name": "pod"}, "tpu_name: ... it acts on TPUs only"),
    ("ddp", {"deepspeed_config": {"zero_stage": 3}}, "deepspeed_config: these recipes do not use DeepSpeed"),
    ("ddp", {"megatron_lm_config": {"tp_degree": 2}}, "megatron_lm_config: these recipes do not use Megatron-LM"),
    ("ddp", {"mpirun_config": {"mpirun_hostfile": "h"}}, "mpirun_config: ... mpiexec"),
    ("ddp", {"enable_cpu_affinity": True}, "enable_cpu_affinity: ... pass --enable_cpu_affinity to the launcher"),
    ("ddp", {"rdzv_backend": "c10d"}, "rdzv_backend: ... pass --rdzv_backend to the launcher"),
    ("ddp", {"same_network": False}, "same_network: found false; ... remove the line"),
    ("ddp", {"main_process_ip": "node7"}, "main_process_ip: acts with num_machines above 1 only; remove the line"),
    ("ddp", {"same_network": "yes please"}, "same_network: found 'yes please'; expected true or false"),
    (FSDP2, {"fsdp_version": 3}, "fsdp_version: found 3; expected 1 to 2"),
    (FSDP2, {"fsdp_version": "2"}, "fsdp_version: found the text '2'; write 2 without quotes"),
    (FSDP2, {"fsdp_offload_params": "off please"}, "fsdp_offload_params: ... expected true or false"),
    (FSDP2, {"fsdp_offload_params": None}, "fsdp_offload_params: has no value"),
    (FSDP1, {"fsdp_sharding_strategy": "FULLSHARD"}, "fsdp_sharding_strategy: ... did you mean FULL_SHARD?"),
    (FSDP1, {"fsdp_sharding_strategy": 1}, "fsdp_sharding_strategy: found 1; expected one of FULL_SHARD, "),
    (FSDP2, {"fsdp_auto_wrap_policy": "T5Block"}, "fsdp_auto_wrap_policy: ... expected one of TRANSFORMER_BA"),
    (FSDP1, {"fsdp_backward_prefetch": "PRE"}, "fsdp_backward_prefetch: ... expected one of BACKWARD_PRE, "),
    (FSDP2, {"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "fsdp_state_dict_type: ... write SHARDED_STATE_DICT"),
    (FSDP2, {"fsdp_transformer_layer_cls_to_wrap": [1]}, "fsdp_transformer_layer_cls_to_wrap: ... class names"),
    (FSDP2, {"fsdp_transformer_layer_cls_to_wrap": ""}, "fsdp_transformer_layer_cls_to_wrap: is empty"),
    (
        FSDP2,
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "1e8"},
        "fsdp_min_num_params: found the text '1e8'; write 100000000 without quotes",
    ),
    (FSDP1, {"fsdp_use_orig_params": False}, "fsdp_use_orig_params: found false; ... parameters by name"),
    (FSDP1, {"fsdp_sync_module_states": False}, "fsdp_sync_module_states: found false; ... same weights"),
    ("fsdp_full_shard_compile", {"dynamo_backend": "TENSORRT"}, "dynamo_backend: ... expected one of NO, INDUCTOR"),
    (
        "fsdp_full_shard_compile",
        {"dynamo_use_regional_compilation": False},
        "dynamo_use_regional_compilation: found false; ... more than a block at once",
    ),
    ("fsdp_fp8", {"fp8_backend": "TE"}, "fp8_backend: ... write AO"),
    ("fsdp_fp8", {"fp8_backend": "MSAMP"}, "fp8_backend: ... write AO"),
    ("fsdp_fp8", {"fp8_config.margin": 0}, "fp8_margin: ... here fp8 is torchao's"),
    (HYBRID, {"parallelism_config_tp_size": 2}, "parallelism_config_tp_size: found 2; tensor parallelism"),
    (HYBRID, {"parallelism_config_sp_size": 2}, "parallelism_config_sp_size: found 2; sequence parallelism"),
    (CONTEXT, {"parallelism_config_cp_backend": "torch"}, "parallelism_config_cp_backend: ... gathered once a layer;"),
    (HYBRID, {"parallelism_config_sp_backend": "deepspeed"}, "parallelism_config_sp_backend: ... remove the line"),
    # Renamed, said elsewhere, misplaced.
    ("ddp", {"fp16": True}, "fp16: renamed; write mixed_precision: fp16"),
    ("ddp", {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: the preset or --gradient_accum"),
    ("ddp", {"gradient_clipping": 1.0}, "gradient_clipping: the preset or --max_grad_norm"),
    (
        FSDP1,
        {"fsdp_backward_prefetch_policy": "BACKWARD_PRE"},
        "fsdp_backward_prefetch_policy: renamed; write fsdp_backward_prefetch",
    ),
    (FSDP1, {"fsdp_config.limit_all_gathers": True}, "fsdp_limit_all_gathers: ... use --limit_all_gathers"),
    (FSDP2, {"fsdp_mixed_precision_policy": "bf16"}, "fsdp_mixed_precision_policy: ... --reduce_dtype after"),
    (FSDP2, {"fsdp_config.mixed_precision": "bf16"}, "fsdp_mixed_precision: belongs at the top level"),
    (FSDP2, {".fsdp_state_dict_type": "FULL_STATE_DICT"}, "fsdp_state_dict_type: belongs under fsdp_config"),
    (HYBRID, {"parallelism_config.dp_shard_size": 2}, "dp_shard_size: ... write parallelism_config_dp_shard_size"),
    (FSDP2, {"fsdp_nonsense": 1}, "fsdp_nonsense: no key of fsdp_config"),
    # Keys of the other FSDP version.
    *[
        (FSDP2, {"fsdp_sharding_strategy": name}, f"fsdp_sharding_strategy: {name} is ... under 2 write {said}")
        for name, said in (
            ("FULL_SHARD", "fsdp_reshard_after_forward: true"),
            ("SHARD_GRAD_OP", "fsdp_reshard_after_forward: false"),
            ("NO_SHARD", "no fsdp_config at all, as in ddp.yaml"),
            ("HYBRID_SHARD", "fsdp_reshard_after_forward: true and parallelism_config"),
            ("HYBRID_SHARD_ZERO2", "fsdp_reshard_after_forward: false and parallelism_config"),
        )
    ],
    *[
        (FSDP1, {"fsdp_reshard_after_forward": value}, f"fsdp_reshard_after_forward: ... sharding_strategy: {name}")
        for value, name in ((True, "FULL_SHARD"), (False, "SHARD_GRAD_OP"), ("NO_SHARD", "NO_SHARD"))
    ],
    (FSDP2, {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "fsdp_reshard_after_forward: ... forward: false"),
    (FSDP2, {"fsdp_use_orig_params": True}, "fsdp_use_orig_params: obsolete under fsdp_version 2"),
    (FSDP2, {"fsdp_sync_module_states": True}, "fsdp_sync_module_states: obsolete under fsdp_version 2"),
    (
        FSDP1,
        {"fsdp_activation_checkpointing_offload": True, "fsdp_activation_checkpointing": True},
        "fsdp_activation_checkpointing_offload: needs fsdp_version: 2",
    ),
    # Missing.
    ("ddp", {"distributed_type": DELETE}, "distributed_type: is missing"),
    ("ddp", {"num_processes": DELETE}, "num_processes: is missing"),
    (FSDP2, {"fsdp_version": DELETE}, "fsdp_config: fsdp_version is missing, and accelerate would take 1"),
    (FSDP2, {"fsdp_config": DELETE}, "fsdp_config: fsdp_version is missing"),
    (FSDP2, {"fsdp_config": [1]}, "fsdp_config: found [1]; expected indented lines"),
    # Combinations.
    ("single_device", {"num_processes": 2}, "num_processes: found 2 processes ... 'NO' starts one"),
    ("ddp", {"use_cpu": True}, "use_cpu: accelerate's launcher drops it under MULTI_GPU"),
    ("ddp", {"fsdp_offload_params": True}, "fsdp_config: acts with distributed_type FSDP only, found 'MULTI_GPU'"),
    (FSDP2, {"distributed_type": "MULTI_GPU"}, "fsdp_config: acts with distributed_type FSDP only"),
    (
        "ddp",
        {"num_processes": 3, "num_machines": 2, "main_process_ip": "a", "main_process_port": 1},
        "num_processes: found 3, the total over all machines, ... write 6 if",
    ),
    ("ddp", {"num_machines": 2, "main_process_port": 1}, "num_machines: 2 machines need main_process_ip"),
    ("ddp", {"num_machines": 2, "main_process_ip": "a"}, "num_machines: 2 machines need main_process_port"),
    (
        "ddp",
        {"num_machines": 2, "main_process_ip": "a", "main_process_port": 0},
        "main_process_port: 0 lets each machine choose another port",
    ),
    ("ddp", {"machine_rank": 1}, "machine_rank: found 1; expected 0 to 0"),
    ("ddp", {"gpu_ids": "0,1", "num_processes": 4}, "gpu_ids: found 2 GPUs for 4 processes"),
    ("ddp", {"gpu_ids": "3", "num_processes": 1}, "gpu_ids: ... take single_device.yaml"),
    ("ddp", {"gpu_ids": "0,b"}, "gpu_ids: found 'b'; write all, or each GPU's number once, such as '0,1'"),
    ("ddp", {"gpu_ids": "1,1"}, "gpu_ids: found '1'; write all, or each GPU's number once, such as '0,1'"),
    (FSDP2, {"parallelism_config": None}, "parallelism_config: has no value; expected indented lines of `key: value`"),
    (
        FSDP2,
        {"fsdp_activation_checkpointing_offload": True},
        "fsdp_activation_checkpointing_offload: acts with fsdp_activation_checkpointing: true only",
    ),
    ("fsdp1_no_shard", {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, "fsdp_state_dict_type: ... FULL_STATE_DICT"),
    (FSDP2, {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy: ... needs fsdp_min_num_params"),
    (FSDP2, {"fsdp_min_num_params": 10}, "fsdp_min_num_params: ... SIZE_BASED_WRAP only"),
    *[
        (
            FSDP2,
            {"fsdp_transformer_layer_cls_to_wrap": "T5Block", "fsdp_auto_wrap_policy": policy},
            "fsdp_transformer_layer_cls_to_wrap: ... TRANSFORMER_BASED_WRAP only, found NO_WRAP",
        )
        for policy in (DELETE, "NO_WRAP")
    ],
    (HYBRID, {"num_processes": 6}, "parallelism_config: ... 2 x dp_shard_size 2 = 4, but there are 6"),
    (CONTEXT, {"num_processes": 4}, "parallelism_config: ... 1 x dp_shard_size 1 x cp_size 2 = 2, but there are 4"),
    (
        CONTEXT,
        {"num_processes": 4, "parallelism_config_dp_replicate_size": 2},
        "parallelism_config: accelerate takes dp_replicate_size 2 x cp_size 2 with a dp_shard_size above 1 only",
    ),
    (
        HYBRID,
        {"num_processes": 2, "parallelism_config_dp_shard_size": 1},
        "parallelism_config: dp_shard_size is 1: nothing is sharded; remove the section",
    ),
    (FSDP1, {"parallelism_config_dp_shard_size": 2}, "parallelism_config: needs distributed_type FSDP with"),
    ("ddp", {"parallelism_config_dp_replicate_size": 2}, "parallelism_config: needs distributed_type FSDP with"),
    ("fsdp_fp8", {"mixed_precision": "bf16"}, "fp8_config: acts with mixed_precision fp8 only, found bf16"),
    (FSDP1, {"mixed_precision": "fp8"}, "mixed_precision: fp8 needs fsdp_version: 2"),
    (
        "ddp",
        {"mixed_precision": "fp8", "fp8_enable_fsdp_float8_all_gather": True},
        "fp8_enable_fsdp_float8_all_gather: acts under FSDP2 only",
    ),
    (FSDP2, {"dynamo_mode": "default"}, "dynamo_mode: acts with a dynamo_backend only"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "edits", "said"), REFUSED)
def test_an_edit_is_refused(base: str, edits: dict[str, Any], said: str, write: Callable[..., Path]) -> None:
    path = write(base, edits)
    problems = check_config(path)
    assert len(problems) == 1 and "\n" not in problems[0], problems
    parts = [f" {said}".partition(" ... ")[0], *said.split(" ... ")[1:]]
    assert problems[0].startswith(str(path)) and all(part in problems[0] for part in parts), problems


def test_every_key_has_an_edit() -> None:
    edited = {name.split(".")[-1] for _, edits, *_ in [*TAKEN, *REFUSED] for name in edits}
    assert KEYS.keys() <= edited


NESTED = [key for key in KEYS if accelerate_config._section(key)]


@pytest.mark.parametrize("key", NESTED)
def test_a_typo_is_answered_with_the_right_key(key: str, tmp_path: Path) -> None:
    section = accelerate_config._section(key)
    typo = key[:-3] + key[-2] + key[-3] + key[-1] if key[-2] != key[-3] else key + "s"
    path = tmp_path / "typo.yaml"
    path.write_text(f"distributed_type: 'NO'\n{section}:\n\n  {typo}: 1\n")
    assert f"{path}:4: {typo}: no key of {section}; did you mean {key}?" in check_config(path)


def test_typos_at_the_top_level(tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text("distributed_type: 'NO'\nnum_proceses: 1\nfsdp_confg:\n  fsdp_version: 2\n")
    assert check_config(path) == [
        f"{path}:2: num_proceses: no key of an accelerate config; did you mean num_processes?",
        f"{path}:3: fsdp_confg: no key of an accelerate config; did you mean fsdp_config?",
    ]


def test_all_problems_are_reported_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "distributed_type: FSDP\nmixed_precision: fp4\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_offload_params: 'no'\n  fsdp_version: 1\n"
    )
    problems = check_config(path)
    assert [text.split(": ")[:2] for text in problems] == [
        [f"{path}:8", "fsdp_version"],
        [f"{path}:2", "mixed_precision"],
        [f"{path}:7", "fsdp_offload_params"],
    ]
    assert "given twice, first in line 5" in problems[0]


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        ("1:30", "a number to the base of 60 in YAML; write it without a colon"),
        ("010", "a number to the base of 8 in YAML; write it without the zero in front"),
    ],
)
def test_numbers_to_another_base(number: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"distributed_type: MULTI_GPU\nnum_processes: {number}\nmachine_rank: 0\n")
    assert check_config(path) == [f"{path}:2: num_processes: found {number}, {problem}."]


def test_what_the_file_has_wrong_is_the_file_s_also_beside_a_flag(write: Callable[..., Path]) -> None:
    (problem,) = check_config(write("ddp", {"num_processes": "2"}), {"num_processes": 4})
    assert ": num_processes: found the text '2'; write 2 without quotes" in problem


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: 1\nb: @\n", r"bad.yaml:2: not readable as YAML: .*; repair"),
        (b"a: 1\nb: 'x\nc: 1\nd: 2\n", r"bad.yaml:2: not readable as YAML: while scanning a quoted scalar: .*; repair"),
        (b"a: 1\nb: [x\nc: 1\n", r"bad.yaml:2: not readable as YAML: while parsing a flow sequence: .*; repair"),
        (b"a: 1\nb: \xe9\n", "bad.yaml:2: not UTF-8 text"),
        (b"a: !!int x\n", "not a readable YAML file: invalid literal"),
        (b"[" * 5000, "not a readable YAML file: maximum recursion"),
        (b"", "expected lines of `key: value`, found NoneType"),
        (b"- a\n", "found list"),
    ],
)
def test_files_that_are_no_config(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as error:
        accelerate_config.read_config(path)
    assert check_config(path) == [str(error.value)] and "\n" not in str(error.value)
    (problem,) = check_config(tmp_path / "absent.yaml")
    assert "no such file; YAML files in that folder: bad.yaml" in problem


@pytest.mark.parametrize(
    "settings",
    [
        {"distributed_type": "NO", "num_processes": 1, "fsdp_config": {}},
        {"distributed_type": "MULTI_GPU", "num_processes": 4, "gpu_ids": "all", "dynamo_config": {}},
        {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2}},
        {
            "distributed_type": "FSDP",
            "num_processes": 8,
            "num_machines": 2,
            "main_process_ip": "10.0.0.1",
            "main_process_port": 29500,
            "fsdp_config": {"fsdp_version": 1, "fsdp_use_orig_params": True, "fsdp_sync_module_states": True},
        },
    ],
)
def test_files_that_accelerate_itself_writes_are_fine(settings: dict[str, Any], tmp_path: Path) -> None:
    defaults = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16", "use_cpu": False, "debug": False}
    # As its questions fill them in.
    defaults |= {"downcast_bf16": "no", "same_network": True, "tpu_env": [], "rdzv_backend": "static"}
    path = tmp_path / "default_config.yaml"
    ClusterConfig(**defaults, **settings).to_yaml_file(path)
    assert "tpu_use_sudo" in path.read_text()
    assert check_config(path) == []


# Launcher flags and the machine.


@pytest.mark.parametrize(
    ("base", "flags", "num_gpus", "said"),
    [
        (FSDP2, {"num_processes": 8}, 8, None),
        (FSDP2, {"num_processes": 8}, 4, "which has 4 GPUs; launch with --num_processes 4"),
        (FSDP2, {"num_processes": 8, "num_machines": 2}, 4, None),
        (FSDP2, {"num_processes": 7, "num_machines": 2}, None, "2 machines cannot share equally"),
        (FSDP2, {}, 8, None),
        ("fsdp1_hybrid_shard", {}, 8, "FSDP1 shards over all 8 GPUs"),
        ("fsdp1_hybrid_shard", {"num_processes": 8}, 8, None),
        (HYBRID, {"num_processes": 2}, None, "but there are 2 processes"),
        ("single_device", {"num_processes": 2}, None, "num_processes (from the launcher): found 2 processes"),
        ("single_device", {"num_processes": 2, "multi_gpu": True}, None, None),
        ("fsdp_fp8", {"mixed_precision": "bf16"}, None, None),
        ("fsdp_full_shard_compile", {"dynamo_backend": "no"}, None, None),
        (FSDP2, {"fsdp_version": "1"}, None, "strategy: FULL_SHARD"),
        (FSDP2, {"fsdp_reshard_after_forward": "false"}, None, None),
        (FSDP2, {"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, None, "own flat pieces"),
        (FSDP2, {"fsdp_offload_params": "off please"}, None, "expected true or false"),
        (FSDP2, {"cpu": True}, None, "starts one process without FSDP"),
        ("ddp", {"enable_cpu_affinity": True, "rdzv_backend": "c10d"}, None, None),
        ("ddp", {"num_machines": 2, "main_process_ip": "node7", "main_process_port": 1}, None, None),
        ("ddp", {"use_deepspeed": True}, None, "these recipes shard with FSDP"),
        (HYBRID, {"use_fsdp": True}, None, "ignores the file's parallelism_config"),
    ],
)
def test_launcher_flags_override_the_file(
    base: str, flags: dict[str, Any], num_gpus: int | None, said: str | None
) -> None:
    problems = check_config(CONFIGS / f"{base}.yaml", flags, num_gpus)
    if said is None:
        assert problems == []
    else:
        assert len(problems) == 1 and said in problems[0]


# Wrapping.


def on_meta(kind: str) -> Any:
    with torch.device("meta"):
        if kind == "t5":
            return T5ForConditionalGeneration(
                T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9)
            )
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))


@pytest.mark.parametrize("text", ["A,B", " A , B ", ["A", "B"], str(["A", "B"]), str(["A", "B"]).split(",")])
def test_class_names_as_text_and_as_list(text: str | list[str]) -> None:
    assert accelerate_config.wrap_class_names(text) == ["A", "B"]
    assert accelerate_config.wrap_class_names(None) == []


def test_a_list_of_classes_survives_the_launcher(write: Callable[..., Path]) -> None:
    path = write(FSDP2, {"fsdp_transformer_layer_cls_to_wrap": ["T5Block", "T5Stack"]})
    text = launcher_environment(path)["FSDP_TRANSFORMER_CLS_TO_WRAP"]
    assert accelerate_config.wrap_class_names(text) == ["T5Block", "T5Stack"]


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        ("t5", {}, []),
        ("llama", {}, []),
        ("t5", {"fsdp_transformer_layer_cls_to_wrap": "T5Block"}, []),
        ("llama", {"fsdp_transformer_layer_cls_to_wrap": ["LlamaAttention", "LlamaMLP"]}, []),
        ("llama", {"fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "LlamaMLP"]}, ["inside"]),
        ("llama", {"fsdp_transformer_layer_cls_to_wrap": "LlamaForCausalLM"}, ["is the whole model"]),
        ("llama", {"fsdp_transformer_layer_cls_to_wrap": "ModuleList"}, ["ModuleList (model.layers) holds modules"]),
        ("t5", {"fsdp_transformer_layer_cls_to_wrap": "T5Stack"}, ["T5Stack (encoder) has a parameter that is used"]),
        ("t5", {"fsdp_transformer_layer_cls_to_wrap": "Embedding"}, ["Embedding (shared) has a parameter"]),
        ("llama", {"fsdp_transformer_layer_cls_to_wrap": "LlamaLayr,LlamaMLP,BertLayer"}, ["LlamaLayr", "BertLayer"]),
        ("llama", {"fsdp_transformer_layer_cls_to_wrap": "T5Block"}, ["T5Block"]),
        ("t5", {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 10}, ["encoder-decoder"]),
        ("llama", {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 10}, []),
        ("t5", {"fsdp_auto_wrap_policy": "NO_WRAP"}, []),
        ("t5", {"mixed_precision": "fp16"}, ["T5 overflows in fp16"]),
        ("llama", {"mixed_precision": "fp16"}, []),
    ],
)  # fmt: skip
def test_wrapping_is_checked_on_the_model(
    model: str, settings: dict[str, Any], said: list[str], write: Callable[..., Path]
) -> None:
    path = write("fsdp_full_shard", settings)
    problems = accelerate_config.check_model(LaunchConfig(path), on_meta(model))
    assert len(problems) == len(said)
    for problem, text in zip(problems, said, strict=True):
        place, key, _ = problem.split(": ", 2)
        assert path.read_text().splitlines()[int(place.removeprefix(f"{path}:")) - 1].strip().startswith(f"{key}:")
        assert text in problem
        assert (
            "TRANSFORMER_BASED_WRAP" in problem
            or "use bf16" in problem
            or {"llama": "LlamaDecoderLayer", "t5": "T5Block"}[model] in problem
        )


def test_a_model_without_a_block_class_of_its_own() -> None:
    model = on_meta("llama")
    model._no_split_modules = None
    (problem,) = accelerate_config.check_model(LaunchConfig(CONFIGS / "fsdp_full_shard.yaml"), model)
    assert "itself names no block class" in problem and "LlamaDecoderLayer" in problem
    assert accelerate_config.check_model(LaunchConfig(CONFIGS / "ddp.yaml"), model) == []


# The file of the present run.


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/venv/bin/python3.11", "/venv/bin/accelerate", "launch", "--config_file", "x.yaml", "r.py"], True),
        (["accelerate", "launch", "--config_file", "x.yaml", "r.py"], True),
        (["python", "-u", "-X", "dev", "/venv/bin/accelerate-launch", "--config_file", "x.yaml", "r.py"], True),
        (["python", "-m", "accelerate.commands.launch", "--config_file", "x.yaml", "r.py"], True),
        (["python3", "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "x.yaml", "r.py"], True),
        (["python", "tools/launch.py", "--config_file", "x.yaml", "r.py"], True),
        (["python", str(REPOSITORY / "tools/launch.py"), "--config_file", "x.yaml", "r.py"], True),
        (["accelerate", "config"], False),
        (["python", "other/tools/launch.py", "--config_file", "x.yaml", "r.py"], False),
        (["bash", "-c", "accelerate launch --config_file x.yaml r.py"], False),
        (["python", "r.py", "accelerate", "launch"], False),
        (["torchrun", "--nproc_per_node", "2", "r.py"], False),
        (["python", "-u"], False),
        ([], False),
    ],
)
def test_launchers_are_known_by_their_command_line(command: list[str], expected: bool) -> None:
    arguments = accelerate_config.launcher_arguments(command, REPOSITORY)
    assert arguments == (["--config_file", "x.yaml", "r.py"] if expected else None)


def test_the_launcher_s_flags_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--config_file=sub/x.yaml", "--num-processes", "3", "--mixed_precision", "no", "r.py", "--seed", "1"]
    launcher = accelerate_config._parse_launcher(arguments, tmp_path)
    assert launcher.path == Path("sub/x.yaml")
    assert launcher.flags == {"num_processes": 3, "mixed_precision": "no"}
    assert accelerate_config._parse_launcher(arguments, Path("/elsewhere")).path == Path("/elsewhere/sub/x.yaml")
    default = tmp_path / "default_config.yaml"
    monkeypatch.setattr("accelerate.commands.config.default_config_file", str(default))
    assert accelerate_config._parse_launcher(["r.py"], tmp_path).path is None
    default.write_text("distributed_type: 'NO'\n")
    assert accelerate_config._parse_launcher(["r.py"], tmp_path).path == default


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of one of two processes under torchrun, without any launcher above."""
    monkeypatch.setattr(accelerate_config, "_find_launcher", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setitem(os.environ, name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setitem(os.environ, name, "2")
    monkeypatch.setitem(os.environ, "MASTER_ADDR", "127.0.0.1")
    monkeypatch.setitem(os.environ, "MASTER_PORT", "12345")
    return monkeypatch


@pytest.mark.parametrize("from_flag", [False, True])
def test_under_torchrun_the_environment_names_the_file(from_flag: bool, torchrun: pytest.MonkeyPatch) -> None:
    path = CONFIGS / "fsdp1_shard_grad_op.yaml"
    expected = launcher_environment(path)
    before = dict(os.environ)
    if not from_flag:
        os.environ["ACCELERATE_CONFIG_FILE"] = before["ACCELERATE_CONFIG_FILE"] = str(path)
        assert accelerate_config.find_launch_config() == path
    assert accelerate_config.check_launch(str(path) if from_flag else None).path == path
    assert os.environ == before | expected  # ranks, counts and the address are as before
    assert os.environ["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP"


@pytest.mark.parametrize("from_flag", [False, True])
def test_under_torchrun_no_variable_acts_beside_the_file(from_flag: bool, torchrun: pytest.MonkeyPatch) -> None:
    path = CONFIGS / "fsdp_full_shard.yaml"
    os.environ["FSDP_OFFLOAD_PARAMS"] = "true"
    if not from_flag:
        os.environ["ACCELERATE_CONFIG_FILE"] = str(path)
    with pytest.raises(UserError, match=f"the environment has FSDP_OFFLOAD_PARAMS, .* beside what {path} says"):
        accelerate_config.check_launch(str(path) if from_flag else None)
    assert "ACCELERATE_USE_FSDP" not in os.environ


def test_what_a_launcher_has_set_is_not_set_again(torchrun: pytest.MonkeyPatch) -> None:
    path = CONFIGS / "fsdp_fp8.yaml"
    os.environ.update({"ACCELERATE_CONFIG_FILE": str(path), "ACCELERATE_DYNAMO_MODE": "default"})
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # its flag overrode the file
    before = dict(os.environ)
    found = accelerate_config.check_launch()
    assert found.path == path and found.flags["mixed_precision"] == "no"
    assert os.environ == before


def test_the_file_s_machine_rank_is_its_launcher_s(write: Callable[..., Path], torchrun: pytest.MonkeyPatch) -> None:
    path = write("ddp", {"machine_rank": 1})
    assert accelerate_config.check_launch(str(path)).path == path  # torchrun has its own
    torchrun.setattr(accelerate_config, "_find_launcher", lambda: LaunchConfig(path, {}))
    with pytest.raises(UserError, match="machine_rank: found 1; expected 0 to 0"):
        accelerate_config.check_launch()


@pytest.mark.parametrize(
    ("env", "base", "said"),
    [
        ({}, None, "2 processes, but no YAML says how they share the work"),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, None, None),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "fsdp_full_shard", None),
        ({"WORLD_SIZE": None, "LOCAL_WORLD_SIZE": None, "OMPI_COMM_WORLD_SIZE": "2"}, None, "2 processes, but no YAML"),
        ({"WORLD_SIZE": None, "LOCAL_WORLD_SIZE": None, "PMI_SIZE": "2"}, "ddp", None),
        ({"WORLD_SIZE": None}, None, None),
        ({"WORLD_SIZE": None}, "single_device", None),
        ({"WORLD_SIZE": None}, "fsdp_full_shard", "needs a launcher"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "ddp", None),
        ({}, "single_device", "'NO' starts one"),
        ({}, "fsdp_hybrid_shard", "there are 2 processes"),
        ({}, "absent", "no such file"),
        ({}, "fsdp_fp8", "FP8 is not available"),
    ],
)
def test_the_run_is_refused_when_file_and_processes_disagree(
    env: dict[str, str | None], base: str | None, said: str | None, torchrun: pytest.MonkeyPatch
) -> None:
    torchrun.setattr("accelerate.utils.launch.is_fp8_available", lambda: False)
    os.environ.update({name: value for name, value in env.items() if value is not None})
    for name in [name for name, value in env.items() if value is None]:
        del os.environ[name]
    if base:
        os.environ["ACCELERATE_CONFIG_FILE"] = str(CONFIGS / f"{base}.yaml")
    if said is None:
        assert accelerate_config.check_launch().path == (CONFIGS / f"{base}.yaml" if base else None)
    else:
        with pytest.raises(UserError, match=said):
            accelerate_config.check_launch()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_processes": 2}, "drops --num_processes where no YAML is named; add --config_file"),
        ({"fsdp_version": 2, "mixed_precision": "fp16"}, "drops --fsdp_version where"),
        ({"multi_gpu": True, "fsdp_offload_params": "true"}, "drops --fsdp_offload_params where"),
        ({"num_processes": 1, "mixed_precision": "no"}, None),
        ({"use_fsdp": True, "fsdp_version": "2"}, None),
    ],
)
def test_flags_that_accelerate_drops_without_a_file(
    flags: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerate_config, "_find_launcher", lambda: LaunchConfig(None, flags))
    if said is None:
        assert accelerate_config.check_launch() == LaunchConfig(None, flags)
    else:
        with pytest.raises(UserError, match=said):
            accelerate_config.check_launch()


def test_the_run_names_all_problems_at_once(write: Callable[..., Path], torchrun: pytest.MonkeyPatch) -> None:
    path = write(FSDP2, {"fsdp_sharding_strategy": "NO_SHARD", "debug": "yes"})
    with pytest.raises(UserError, match="2 problems in") as error:
        accelerate_config.check_launch(str(path))
    assert len(str(error.value).splitlines()) == 3


def test_the_file_is_named_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    path = CONFIGS / "ddp.yaml"
    for config_file, in_environment, from_flag in ((path, False, True), (None, True, False)):
        launcher = LaunchConfig(config_file, {})
        monkeypatch.setattr(accelerate_config, "_find_launcher", lambda launcher=launcher: launcher)
        if in_environment:
            monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(path))
        with pytest.raises(UserError, match="--config_file"):
            accelerate_config.check_launch(str(path) if from_flag else None)


PROBE = """
import json, os, sys
from common import accelerate_config
found = accelerate_config.find_launch_config()
try:
    accelerate_config.check_launch()
    problem = ""
except ValueError as error:
    problem = str(error)
settings = {name: text for name, text in os.environ.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
settings.pop("ACCELERATE_CONFIG_FILE", None)
with open(f"{sys.argv[1]}_{os.environ['RANK']}.json", "w") as file:
    json.dump({"found": str(found), "problem": problem, "settings": settings}, file)
"""


@pytest.mark.launch
def test_real_launchers(write: Callable[..., Path], tmp_path: Path) -> None:
    """accelerate launch and torchrun end in the same settings, and a misspelt key stops the run itself."""
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE)
    write("fsdp_shard_grad_op").rename(tmp_path / "good.yaml")
    write("fsdp_shard_grad_op", {"fsdp_offload_parms": True}).rename(tmp_path / "misspelt.yaml")
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    commands = {
        "accelerate": [*accelerate, "--mixed_precision", "no", "--config_file=misspelt.yaml"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    }
    env = os.environ | {"ACCELERATE_CONFIG_FILE": "good.yaml"}  # accelerate launch does not read it
    runs = [subprocess.Popen([*command, str(probe), name], cwd=tmp_path, env=env) for name, command in commands.items()]
    try:
        assert [run.wait(120) for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert found.keys() == {"accelerate_0", "accelerate_1", "torchrun_0", "torchrun_1"}
    assert {name: run["found"] for name, run in found.items()} == {
        name: "misspelt.yaml" if name.startswith("accelerate") else "good.yaml" for name in found
    }
    assert (
        "fsdp_offload_parms: no key of fsdp_config; did you mean fsdp_offload_params?"
        in found["accelerate_0"]["problem"]
    )
    assert found["torchrun_1"]["problem"] == ""
    by_flag, by_file = found["accelerate_0"]["settings"], found["torchrun_1"]["settings"]
    assert by_flag.pop("ACCELERATE_MIXED_PRECISION") == "no"
    assert by_file.pop("ACCELERATE_MIXED_PRECISION") == "bf16"
    assert by_flag == by_file and by_file["FSDP_RESHARD_AFTER_FORWARD"] == "false"
