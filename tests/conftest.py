"""Fixtures of all tests, and an environment in which no test touches the network or the user's caches."""

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Before anything imports the libraries that read these: they look once, at their import.
_CACHES = tempfile.mkdtemp(prefix="test_caches_")
for _name in list(os.environ):
    if _name.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PARALLELISM_CONFIG_")):
        del os.environ[_name]
os.environ |= {
    "HF_HOME": f"{_CACHES}/huggingface",
    "HF_DATASETS_CACHE": f"{_CACHES}/datasets",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "WANDB_CACHE_DIR": f"{_CACHES}/wandb",
    "WANDB_CONFIG_DIR": f"{_CACHES}/wandb",
    "WANDB_DATA_DIR": f"{_CACHES}/wandb",
    "OMP_NUM_THREADS": "1",
    # Scripts started by tests import this checkout's `common`, whichever one is installed.
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
}

from tests.forked import ForkedParent  # noqa: E402


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHES, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def forked() -> Iterator[ForkedParent]:
    """Runs recipes about as fast as functions; see tests/forked.py."""
    parent = ForkedParent()
    yield parent
    parent.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data that lies beside the checkout and is no part of it."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"{path} is absent")
    return path


def load_recipe(path: Path) -> ModuleType:
    """A recipe as a module, for tests of its functions: recipes are scripts that nothing imports."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
