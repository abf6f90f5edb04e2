"""tools/prepare_data.py beside the tokenizers library alone, in turns: same text, tokenizer and number of processes.

    python benchmarks/prepare_data.py text/*.jsonl --tokenizer FOLDER --num_workers 2 --rounds 2

A round prints megabytes of text a second, and a CPU second, which other programs of the machine disturb less. The
library gets the text in memory and its tokens are thrown away; the tool's time is all of it, from its start to the
complete folder. Memory is that of all the tool's processes, what they share counted once, at the quarters of its time.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import psutil
from tokenizers import Tokenizer

from common.documents import BATCH_PIECES, list_documents, read_pieces

TOOL = Path(__file__).resolve().parent.parent / "tools" / "prepare_data.py"
SAMPLE_SECONDS = 0.5


def tokenize(texts: list[str], tokenizer_file: str, start: Barrier) -> None:
    """`encode_batch` of the texts, as the library's documentation has it."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    start.wait()
    for begin in range(0, len(texts), BATCH_PIECES):
        tokenizer.encode_batch(texts[begin : begin + BATCH_PIECES], add_special_tokens=False)
    start.wait()
    start.wait()  # until the CPU time was read


def cpu_seconds(processes: list[psutil.Process], found: dict[int, float]) -> float:
    """CPU time of the processes, and of those in `found` (by process id, updated) that have ended since."""
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended
            continue
        found[process.pid] = times.user + times.system
    return sum(found.values())


def library(texts: list[str], tokenizer_file: str, num_workers: int) -> tuple[float, float]:
    """Wall and CPU seconds."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(num_workers + 1)
    workers = [
        context.Process(target=tokenize, args=(texts[number::num_workers], tokenizer_file, start))
        for number in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    processes = [psutil.Process(worker.pid) for worker in workers]
    start.wait()
    began, cpu_began = time.monotonic(), cpu_seconds(processes, {})
    start.wait()
    seconds, cpu = time.monotonic() - began, cpu_seconds(processes, {}) - cpu_began
    start.wait()
    for worker in workers:
        worker.join()
    return seconds, cpu


def tool(files: list[Path], tokenizer: str, num_workers: int, output: Path) -> tuple[float, float, list[int]]:
    """Wall and CPU seconds, and bytes at the quarters of the time."""
    command = [sys.executable, str(TOOL), *map(str, files), f"--tokenizer={tokenizer}", f"--output={output}"]
    began = time.monotonic()
    process = subprocess.Popen([*command, f"--num_workers={num_workers}"], stdout=sys.stderr)
    cpu: dict[int, float] = {}
    memory: list[int] = []
    while process.poll() is None:
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            cpu_seconds(family, cpu)
            memory.append(sum(member.memory_full_info().pss for member in family))
        except psutil.Error:  # one of them has ended
            continue
        finally:
            time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise SystemExit(process.returncode)
    return time.monotonic() - began, sum(cpu.values()), [memory[len(memory) * part // 4 - 1] for part in (1, 2, 3, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json")
    parser.add_argument("--num_workers", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    paths = list_documents(",".join(map(str, args.files)), "FILE", "text")
    texts = [piece.text for path in paths for piece in read_pieces(path, "text") if piece.text is not None]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    for number in range(1, args.rounds + 1):
        seconds, cpu = library(texts, f"{args.tokenizer}/tokenizer.json", args.num_workers)
        print(f"round {number}: library {megabytes / seconds:.2f} MB/s, {megabytes / cpu:.3f} MB a CPU second")
        with tempfile.TemporaryDirectory() as folder:
            seconds, cpu, memory = tool(paths, args.tokenizer, args.num_workers, Path(folder) / "prepared")
        print(
            f"round {number}: tool {megabytes / seconds:.2f} MB/s, {megabytes / cpu:.3f} MB a CPU second; MiB "
            f"{', '.join(str(each >> 20) for each in memory)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
