"""Where the time of a recipe's optimizer step goes on a GPU: kernels by kind, busy and idle time, the longest ones.

    python tools/launch.py --config_file accelerate_configs/fsdp_full_shard_compile.yaml --num_processes 4 \
        benchmarks/profile_step.py recipes/gpt_shakespeare.py --config=gpt_shakespeare_8b ...

Runs the recipe as it is and records steps 8 and 9 with torch's profiler; process 0 prints the table, then all leave.
Kernels of communication run beside the others, so the kinds add up to more than the step. Lines at which the host waits
for the device are listed first, with how often they did in both steps.
"""

import os
import re
import runpy
import sys
import time
import traceback
import warnings
from collections import Counter
from typing import Any

import torch

import common.loop

FIRST, NUM_STEPS = 8, 2
COMMUNICATION = r"nccl|Memcpy PtoP|barrier_kernel"
KINDS = {
    "copies from peers": r"Memcpy PtoP",
    "waits for peers": r"barrier_kernel",
    "sums of gradients": r"_sum_rows",
    "all-gather": r"nccl.*AllGather",
    "reduce-scatter": r"nccl.*ReduceScatter",
    "all-reduce": r"nccl.*AllReduce",
    "attention": r"attention_|fmha|flash|sdpa|cudnn_generated",
    "matrix products": r"nvjet|gemm|cutlass|xmma|cublas",
    "optimizer": r"Adam",
    "gather copies": r"split_with_sizes|chunk_cat|CatArray",
    "compiled": r"triton",
    "weights to fp8": r"_to_e4m3",
    "foreach (norm, conversion)": r"multi_tensor|lpnorm|foreach",
    "copies": r"Memcpy|Memset|copy",
}


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def watch_waits() -> Counter[str]:
    """Counts, from now on, the lines at which the host waits for the device: the last one that is not torch's."""
    waits: Counter[str] = Counter()

    def count(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            frames = [frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename]
            waits["/".join(frames[-1].filename.split("/")[-3:]) + f":{frames[-1].lineno} {frames[-1].line}"] += 1

    warnings.simplefilter("always")
    warnings.showwarning = count
    torch.cuda.set_sync_debug_mode("warn")
    return waits


def report(profiler: torch.profiler.profile, seconds: float) -> None:
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans, compute = [], []
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        start, end = event.time_range.start, event.time_range.end
        spans.append((start, end))
        if not re.search(COMMUNICATION, event.name):
            compute.append((start, end))
        by_kind[kind_of(event.name)] += end - start
        by_name[event.name] += end - start
        calls[event.name] += 1
    print(f"step {1000 * seconds / NUM_STEPS:.1f} ms (host); device busy {covered(spans) / NUM_STEPS / 1000:.1f} ms, "
          f"with other work than communication {covered(compute) / NUM_STEPS / 1000:.1f} ms")  # fmt: skip
    for kind, microseconds in by_kind.most_common():
        print(f"  {kind:<27} {microseconds / NUM_STEPS / 1000:8.1f} ms")
    for name, microseconds in by_name.most_common(32):
        print(f"  {microseconds / NUM_STEPS / 1000:8.2f} ms {calls[name] // NUM_STEPS:>5} x {name[:110]}")


def covered(spans: list[tuple[float, float]]) -> float:
    """Microseconds in which at least one of the spans runs."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def main() -> None:
    original, num_calls = common.loop.train_step, 0
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    started, waits = 0.0, Counter[str]()

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls, started, waits
        if num_calls == FIRST:
            torch.cuda.synchronize()
            profiler.start()
            waits = watch_waits()
            started = time.perf_counter()
        result = original(*args, **kwargs)
        num_calls += 1
        if num_calls == FIRST + NUM_STEPS:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            profiler.stop()
            if os.environ.get("RANK", "0") == "0":
                for line, count in waits.most_common(8):
                    print(f"waits for the device {count} times: {line}")
                report(profiler, seconds)
                sys.stdout.flush()
            torch.distributed.barrier()
            os._exit(0)
        return result

    common.loop.train_step = train_step
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
