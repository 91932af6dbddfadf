"""``model``: a marker for TRL's own path."""

from __future__ import annotations

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.registry import build_rewards


def test_a_recipe_gets_the_name_that_trl_takes():
    rewards = build_rewards([{"model": {"model": "org/reward-model", "weight": 0.5}}, "exact"])
    assert rewards.functions[0] == "org/reward-model"
    assert rewards.weights == [0.5, 1.0]
    assert rewards.names == ["reward-model", "exact"]


@pytest.mark.parametrize("options", [{"model": ""}, {"model": "x", "modell": "y"}])
def test_bad_options(options):
    with pytest.raises(ConfigurationError):
        build_rewards([{"model": options}])
