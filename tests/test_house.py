"""The rules of the house (docs/architecture.md): who may import what, and how long a file may get."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dualpath

SOURCE = Path(dualpath.__file__).parent
CORE = {"types", "units", "layout", "config", "paths"}
ABOVE = CORE | {"scheduler", "store", "transfer", "models", "engine", "node", "metrics"}
MAY_IMPORT = {
    "types": set(),
    "units": {"types"},
    "layout": {"types"},
    "config": {"types", "layout", "units"},
    "paths": {"types", "layout"},
    "scheduler": {"types"},
    "store": {"types", "layout"},
    "transfer": {"types", "layout", "units"},
    "models": {"types", "layout"},
    "engine": CORE | {"scheduler", "store", "transfer", "models"},
    "node": {"types", "layout", "config", "units", "store", "transfer"},
    "workload": {"types", "units"},
    "planner": {"types", "layout", "config", "paths"},
    "metrics": {"types"},
    "cluster": ABOVE | {"workload", "planner"},
    "demo": ABOVE | {"workload", "cluster"},
    "bench": ABOVE | {"workload", "cluster"},
    "cli": ABOVE | {"workload", "cluster", "demo", "bench"},
}
"""For each room, the rooms it may import besides itself."""

TORCH_ROOMS = {"models", "engine"}
TORCH_FREE_MODULES = ["cli", "demo", "cluster.cluster", "cluster.node_process", "models.card", "models.bundled"]


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("dualpath.")}
    assert ours - {room, "__version__"} <= MAY_IMPORT[room]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_models_and_engine_import_torch(path: Path) -> None:
    if any(name.split(".")[0] in ("torch", "transformers") for name in imports(path)):
        assert room_of(path) in TORCH_ROOMS


@pytest.mark.parametrize("module", TORCH_FREE_MODULES)
def test_controller_and_nodes_run_without_torch(module: str) -> None:
    code = f"import sys, dualpath.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CORE_MODULES = ["types", "units", "layout", "config", "paths", "planner", "scheduler.scheduler", "scheduler.pack"]
CORE_MODULES += ["scheduler.read_plan", "store.root", "store.verify", "workload.agents", "workload.replay"]
CORE_MODULES += ["metrics.summary", "cli"]


@pytest.mark.parametrize("module", CORE_MODULES)
def test_the_core_runs_with_nothing_of_the_extras_installed(module: str) -> None:
    blocked = "torch", "safetensors", "tokenizers", "gguf", "transformers"
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {blocked!r}:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        f"import dualpath.{module}\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_is_much_over_500_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 520


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_pickle_no_eval_no_shell(path: Path) -> None:
    """CASES.md, C25."""
    tree = ast.parse(path.read_text())
    assert not imports(path) & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            assert name not in ("eval", "exec", "compile")
            assert not any(keyword.arg == "shell" for keyword in node.keywords)
