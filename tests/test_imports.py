"""The direction of imports, and what only one module may know (Layout in the README)."""

import ast
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

LEAVES = {"arguments", "data", "losses", "optim", "metrics"}
FSDP_NAMES = {"fully_shard", "FullyShardedDataParallel", "FSDPModule"}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((REPOSITORY / folder).rglob("*.py"))


def imports(source: str) -> set[str]:
    """Modules that a source imports anywhere, `a.b` for `from a import b`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they lead"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def packages(source: str) -> set[str]:
    return {name.split(".")[0] for name in imports(source)}


def names(source: str) -> set[str]:
    """Every identifier, attribute and imported name; no text and no comments."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found |= set(node.name.split("."))
    return found


def calls(source: str) -> set[str]:
    """Names of what is called, without the module in front."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                found.add(name)
    return found


def common_imports() -> dict[str, set[str]]:
    """For each module of `common` the ones that it imports."""
    modules = {path.stem: path.read_text() for path in sources("common")}
    return {
        module: {name.split(".")[1] for name in imports(source) if name.startswith("common.")}
        for module, source in modules.items()
    }


def test_the_walk_sees_every_form_of_import_and_call() -> None:
    source = """
import torch.distributed.fsdp as f
from common import loop
def inner():
    from recipes.t5_summarize import main
    f.fully_shard(main, "FSDPModule")
    return accelerate.Accelerator()
"""
    assert imports(source) == {"torch.distributed.fsdp", "common.loop", "recipes.t5_summarize.main"}
    assert packages(source) == {"torch", "common", "recipes"}
    assert names(source) & FSDP_NAMES == {"fully_shard"}
    assert calls(source) == {"fully_shard", "Accelerator"}


def test_common_imports_nothing_above_it() -> None:
    for path in sources("common"):
        assert not packages(path.read_text()) & {"recipes", "tools", "benchmarks", "tests"}, path


def test_common_is_acyclic() -> None:
    try:
        TopologicalSorter(common_imports()).prepare()
    except CycleError as error:
        pytest.fail(f"modules of common import each other: {' -> '.join(error.args[1])}")


def test_leaves_of_common_import_only_arguments_losses_and_what_imports_nothing() -> None:
    modules = common_imports()
    assert not modules["files"] | modules["masks"] | modules["triton_kernels"]
    assert modules["peer_copies"] == {"triton_kernels"}
    for module in LEAVES:
        assert modules[module] <= {"arguments", "losses", "files", "masks", "triton_kernels", "peer_copies"}, module


def test_recipes_are_scripts_that_nothing_imports() -> None:
    for path in sources("common", "recipes", "tools", "benchmarks", "tests"):
        assert "recipes" not in packages(path.read_text()), path


def owners(paths: Iterable[Path], wanted: set[str], found: Callable[[str], set[str]]) -> set[str]:
    """The files in whose source `found` finds one of the wanted names."""
    return {str(path.relative_to(REPOSITORY)) for path in paths if found(path.read_text()) & wanted}


def test_only_launch_builds_an_accelerator() -> None:
    paths = sources("common", "recipes", "tools")
    assert owners(paths, {"Accelerator"}, calls) <= {"common/launch.py"}


def test_only_sharding_and_launch_know_fsdp_classes() -> None:
    paths = sources("common", "recipes", "tools")
    assert owners(paths, FSDP_NAMES, names) <= {"common/sharding.py", "common/launch.py"}
