"""Every recipe that ships is a legal one, and the demo's data are what its comment says."""

from __future__ import annotations

from pathlib import Path

import pytest

from trl_grpo_ext.data.prompts import question_text
from trl_grpo_ext.errors import ConfigurationError, MissingDependencyError
from trl_grpo_ext.recipe import load_recipe
from trl_grpo_ext.rewards.registry import build_rewards

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipe_is_legal(path: Path) -> None:
    try:
        recipe = load_recipe(path)
    except (MissingDependencyError, ConfigurationError) as error:
        if isinstance(error, ConfigurationError) and "there is no file" not in str(error):
            raise
        pytest.skip(str(error))  # a package or a data file that the recipe's comment says how to get
    rewards = build_rewards(recipe.rewards, base_dir=recipe.base_dir)
    assert len(rewards.functions) == len(rewards.weights) > 0
    assert path.read_text(encoding="utf-8").startswith("#"), "says in its first line what it does"
    assert f"trl-grpo train recipes/{path.name}" in path.read_text(encoding="utf-8")


def test_demo_data() -> None:
    """No question in both parts, and only a part of the task's problems is trained on."""
    pytest.importorskip("reasoning_gym")
    from trl_grpo_ext.data.splits import load_splits

    splits = load_splits(load_recipe(RECIPES / "cpu_demo.yaml").data)
    train, held_out = ({question_text(row["prompt"]) for row in part} for part in splits[:2])
    assert not train & held_out
    assert len(held_out) == len(splits.held_out) == 200
    # Two terms: 10 x 10 pairs, + and -; three terms: 10 x 10 x 10, four pairs of signs.
    assert len(train) + len(held_out) < 0.25 * (2 * 10**2 + 4 * 10**3)
