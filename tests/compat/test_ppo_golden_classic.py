"""The classic loop against TRL 0.11.4's PPOTrainer, whose numbers ``golden/make_classic.py`` wrote down.

Set ``TRL_CLASSIC_PYTHON`` to the interpreter of an environment with trl==0.11.4 to have them recomputed first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from trl_grpo_ext.compat.ppo import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

HERE = Path(__file__).parent / "golden"
GOLDEN = json.loads((HERE / "classic_0_11.json").read_text())
# float32 in another order; the quantities are sums over at most five tokens, and scores up to 30
TOLERANCE = 2e-5

_spec = importlib.util.spec_from_file_location("golden_weights", HERE / "weights.py")
assert _spec is not None
assert _spec.loader is not None
weights = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(weights)


def trainer(**fields: Any) -> PPOTrainer:
    config = PPOConfig(batch_size=8, mini_batch_size=4, ppo_epochs=1, learning_rate=0.0, use_cpu=True, **fields)
    policy, reference = (
        AutoModelForCausalLMWithValueHead.from_pretrained(weights.fill(tiny_model(), seed)) for seed in (0, 1)
    )
    return PPOTrainer(config, policy, reference, tiny_tokenizer())


@pytest.mark.parametrize("case", list(GOLDEN["cases"]))
def test_two_steps_give_the_same_statistics(case: str) -> None:
    """KL under every penalty and its weight, entropy, scaled and clipped scores, lengths: of all rows and tokens."""
    ours = trainer(**GOLDEN["cases"][case]["fields"])
    for scores, expected in zip(GOLDEN["scores"], GOLDEN["cases"][case]["steps"], strict=True):
        queries, responses = ([torch.tensor(ids) for ids in GOLDEN[name]] for name in ("queries", "responses"))
        stats = ours.step(queries, responses, [torch.tensor(s) for s in scores])
        seen = {name: float(stats[name]) for name in expected if name != "kl_coef_after"}
        assert seen | {"kl_coef_after": ours.kl_ctl.value} == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "is_list", "fields"),
    [
        ("list", True, {}),
        ("responses", True, {"return_prompt": False}),
        ("one", False, {}),
        ("one_response", False, {"return_prompt": False}),
    ],
)
def test_generate_gives_the_same_tokens(name: str, is_list: bool, fields: dict[str, Any]) -> None:
    queries = [torch.tensor(GOLDEN["queries"][0]), torch.tensor(GOLDEN["queries"][-1]), torch.tensor([5, 6, 7, 8])]
    rows = trainer().generate(
        queries if is_list else queries[0], do_sample=False, max_new_tokens=7, pad_token_id=0, **fields
    )
    assert [row.tolist() for row in rows] == GOLDEN["greedy"][name]


@pytest.mark.skipif(
    not os.environ.get("TRL_CLASSIC_PYTHON"), reason="TRL_CLASSIC_PYTHON names no environment with TRL 0.11.4"
)
def test_the_golden_numbers_are_those_of_trl_0_11() -> None:
    run = subprocess.run(
        [os.environ["TRL_CLASSIC_PYTHON"], str(HERE / "make_classic.py")],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    fresh = json.loads(run.stdout)
    assert fresh["greedy"] == GOLDEN["greedy"]
    for name, case in fresh["cases"].items():
        for new, old in zip(case["steps"], GOLDEN["cases"][name]["steps"], strict=True):
            assert new == pytest.approx(old, abs=TOLERANCE)
