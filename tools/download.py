"""Download the models, tokenizers and data sets of a run into the cache, for machines without a network.

    python tools/download.py --config chess_finetune_7b
    python tools/download.py --model codellama/CodeLlama-7b-hf --dataset laion/strategic_game_chess

The cache is the one that the recipes read: HF_HOME (default ~/.cache/huggingface), on a file system that the other
machines share. There, runs need HF_HUB_OFFLINE=1 and the same HF_HOME. A broken connection is resumed; after an
interruption, the same command goes on with the files that are not whole. Every file is compared with the hub's size
and, where the hub has one, checksum. Exit code 0 when everything is there, 1 when a download failed, 2 when there is
nothing of that name or no room for it.
"""

import argparse
import hashlib
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import filter_repo_objects

from common.arguments import UserError, load_preset
from common.models import TOKENIZER_FILES

REPOSITORY = Path(__file__).resolve().parent.parent
GB = 10**9
TYPICAL_BYTES_PER_SECOND = 10**8  # to say how long a download may take, before there is anything to measure
# What the recipes load. A model comes with its tokenizer.
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
OLD_MODEL_FILES = [*TOKENIZER_FILES, "*.bin"]
EXIT_ERROR, EXIT_USER_ERROR = 1, 2


class DownloadFailed(Exception):
    """The hub or the network failed, or what arrived is damaged."""


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="PRESET", help="everything that a preset names: a file, or its name")
    parser.add_argument("--model", action="append", default=[], metavar="ID", help="model on the hub, with tokenizer")
    parser.add_argument("--tokenizer", action="append", default=[], metavar="ID", help="its tokenizer files alone")
    parser.add_argument("--dataset", action="append", default=[], metavar="ID", help="data set on the hub")
    parser.add_argument("--dataset_config_name", help="configuration of the data set")
    args = parser.parse_args(argv)
    try:
        if args.config:
            add_preset(args)
        if not (args.model or args.tokenizer or args.dataset):
            raise UserError("nothing to download: the preset names nothing on the hub, or give --model, --dataset, ...")
        if constants.HF_HUB_OFFLINE:
            raise UserError("HF_HUB_OFFLINE is set: unset it here, where there is a network.")
        for name in args.model:
            download(name, "model", MODEL_FILES)
        for name in args.tokenizer:
            download(name, "model", TOKENIZER_FILES)
        for name in args.dataset:
            download(name, "dataset", None)
            prepare_dataset(name, args.dataset_config_name)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except DownloadFailed as error:
        print(
            f"error: {error}. Run the same command again where there is a network: files that are whole are kept.",
            file=sys.stderr,
        )
        return EXIT_ERROR
    print(f"Everything is in {constants.HF_HOME}. Runs without a network: HF_HUB_OFFLINE=1 HF_HOME={constants.HF_HOME}")
    return 0


def add_preset(args: argparse.Namespace) -> None:
    """Put what a preset names among what is asked for; its local files are there already."""
    preset = load_preset(args.config)
    for key, names in {
        "model_name_or_path": args.model, "tokenizer_name_or_path": args.tokenizer, "dataset_name": args.dataset,
    }.items():  # fmt: skip
        if (name := preset.get(key)) and not (REPOSITORY / name).exists():
            names.append(name)
    args.dataset_config_name = args.dataset_config_name or preset.get("dataset_config_name")


def download(name: str, kind: str, patterns: list[str] | None) -> None:
    """Bring the repository's files of these patterns into the cache and compare them with the hub's numbers.

    Raises UserError for a name that the hub does not have or does not show, and where the disk is too small.
    """
    try:
        _download(name, kind, patterns)
    except (UserError, DownloadFailed):
        raise
    except GatedRepoError as error:
        page = f"https://huggingface.co/{'datasets/' * (kind == 'dataset')}{name}"
        raise UserError(f"{kind} {name} is gated: accept its licence at {page}, then `hf auth login`.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(f"{kind} {name}: no public {kind} of that name on the hub (owner/name).") from error
    except Exception as error:  # the HTTP library's, which is another one in each version of the hub's client
        text = " ".join(str(error).split()) or type(error).__name__
        raise DownloadFailed(
            f"{kind} {name}: {constants.ENDPOINT} cannot be reached, or the connection broke ({text[:300]})"
        ) from error


def _download(name: str, kind: str, patterns: list[str] | None) -> None:
    revision = HfApi().repo_info(name, repo_type=kind).sha
    tree = [
        entry
        for entry in HfApi().list_repo_tree(name, recursive=True, revision=revision, repo_type=kind)
        if isinstance(entry, RepoFile)
    ]
    if patterns == MODEL_FILES and not any(entry.path.endswith(".safetensors") for entry in tree):
        patterns = OLD_MODEL_FILES
    files = list(filter_repo_objects(tree, allow_patterns=patterns, key=lambda entry: entry.path))
    missing = sum(entry.size for entry in files if not is_whole(name, kind, revision, entry))
    print(
        f"{kind} {name}: {len(files)} files, {sum(entry.size for entry in files) / GB:,.2f} GB; "
        f"{missing / GB:,.2f} GB to download, about {missing / TYPICAL_BYTES_PER_SECOND / 60:,.0f} min at 100 MB/s",
        flush=True,
    )
    Path(constants.HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(constants.HF_HUB_CACHE).free
    if missing > free:
        raise UserError(
            f"{kind} {name} needs {missing / GB:,.2f} GB, but {constants.HF_HUB_CACHE} has {free / GB:,.2f} GB free: "
            "set HF_HOME to a larger disk."
        )
    for entry in files:  # a cached file that is cut short counts as there for the library
        path = try_to_load_from_cache(name, entry.path, revision=revision, repo_type=kind)
        if isinstance(path, str) and not is_whole(name, kind, revision, entry):
            print(f"  {entry.path}: damaged in the cache, downloaded again")
            Path(path).resolve().unlink()
            Path(path).unlink()
    started = time.perf_counter()
    snapshot_download(name, repo_type=kind, revision=None, allow_patterns=patterns)
    seconds = time.perf_counter() - started
    if damaged := [entry.path for entry in files if not is_whole(name, kind, revision, entry, with_checksum=True)]:
        raise DownloadFailed(f"{kind} {name}: {', '.join(damaged)} differ from the hub's size or checksum")
    speed = f" at {missing / seconds / 1e6:,.0f} MB/s" if missing else ""
    print(f"{kind} {name}: complete and verified, {seconds:,.0f} s{speed}", flush=True)


def is_whole(name: str, kind: str, revision: str | None, entry: RepoFile, with_checksum: bool = False) -> bool:
    """Whether the cache has the file with the hub's size, and its SHA-256 where asked for and known."""
    path = try_to_load_from_cache(name, entry.path, revision=revision, repo_type=kind)
    if not isinstance(path, str) or Path(path).stat().st_size != entry.size:
        return False
    if not with_checksum or entry.lfs is None:
        return True
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.lfs.sha256


def prepare_dataset(name: str, config_name: str | None) -> None:
    """Convert the data set as the recipes read it: without a network, `datasets` takes nothing but that."""
    import datasets

    try:
        datasets.load_dataset(name, config_name)
    except ValueError as error:
        raise UserError(f"--dataset {name}: {' '.join(str(error).split())} (--dataset_config_name)") from error


if __name__ == "__main__":
    sys.exit(main())
