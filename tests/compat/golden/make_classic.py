"""Write the golden numbers of TRL 0.11.4's PPOTrainer, the last release with ``generate`` and ``step``.

    python3.11 -m venv VENV
    VENV/bin/pip install trl==0.11.4 transformers==4.46.3 accelerate==0.34.2 peft==0.13.2 datasets==3.1.0 rich
    VENV/bin/python tests/compat/golden/make_classic.py > tests/compat/golden/classic_0_11.json

Made with torch 2.13 on a CPU. The learning rate is 0, so that a second step sees the same weights; queries, responses
and scores are given.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tiny import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.trainer.utils import RunningMoments
from weights import fill

QUERIES = [[40, 41, 42]] * 3 + [[50, 51]] * 5
# Of different lengths, with and without EOS (2) at the end.
RESPONSES = [[17, 2], [33, 34, 35, 36, 37], [51, 52, 2], [71], [72, 73, 2], [90, 91, 92, 93], [101, 102], [103, 104, 2]]
SCORES = [[0.0, 1.0, 3.0, 0.5, -2.0, 2.5, 1.0, 4.0], [10.0, 1.0, -30.0, 0.5, 2.0, 2.5, 1.0, 4.0]]
KEPT = (
    "objective/kl",
    "objective/kl_coef",
    "objective/entropy",
    "ppo/mean_non_score_reward",
    "ppo/mean_scores",
    "ppo/std_scores",
    "tokens/queries_len_mean",
    "tokens/queries_len_std",
    "tokens/responses_len_mean",
    "tokens/responses_len_std",
)
CASES: dict[str, dict[str, Any]] = {
    "kl": {"init_kl_coef": 0.3},
    "abs": {"kl_penalty": "abs", "init_kl_coef": 0.3, "target": 0.5, "horizon": 100},
    "mse": {"kl_penalty": "mse", "adap_kl_ctrl": False},
    "scaled": {"use_score_scaling": True},
    "normed": {"use_score_scaling": True, "use_score_norm": True, "score_clip": 1.5},
}


def trainer(**fields: Any) -> PPOTrainer:
    """Return a trainer whose reference has other weights than its policy."""
    config = PPOConfig(batch_size=8, mini_batch_size=4, ppo_epochs=1, learning_rate=0.0, **fields)
    policy, reference = (
        AutoModelForCausalLMWithValueHead.from_pretrained(
            fill(AutoModelForCausalLM.from_config(tiny_config("llama")), seed)
        )
        for seed in (0, 1)
    )
    return PPOTrainer(config, policy, reference, tiny_tokenizer())


class TensorMoments(RunningMoments):
    """The moments as tensors: 0.11.4 keeps floats, on which its own ``step`` then calls ``to`` and fails."""

    def update(self, xs: torch.Tensor) -> tuple[float, float]:
        """Update and return the batch's mean and deviation."""
        self.mean = float(self.mean)
        result = super().update(xs)
        self.mean, self.std = torch.tensor(self.mean), torch.tensor(self.std)
        return result


def two_steps(fields: dict[str, Any]) -> list[dict[str, float]]:
    """Return the statistics of two steps, and the KL weight after each."""
    built = trainer(**fields)
    built.running = TensorMoments(built.accelerator)
    rows = []
    for scores in SCORES:
        queries, responses = ([torch.tensor(ids) for ids in rows] for rows in (QUERIES, RESPONSES))
        stats = built.step(queries, responses, [torch.tensor(s) for s in scores])
        rows.append({name: float(stats[name]) for name in KEPT} | {"kl_coef_after": float(built.kl_ctl.value)})
    return rows


def greedy() -> dict[str, list[list[int]]]:
    """Return what ``generate`` gives without drawing, for a list and for one query."""
    built = trainer()
    queries = [torch.tensor(QUERIES[0]), torch.tensor(QUERIES[-1]), torch.tensor([5, 6, 7, 8])]
    kwargs = {"do_sample": False, "max_new_tokens": 7, "pad_token_id": 0}
    return {
        "list": [row.tolist() for row in built.generate(queries, **kwargs)],
        "responses": [row.tolist() for row in built.generate(queries, return_prompt=False, **kwargs)],
        "one": built.generate(queries[0], **kwargs).tolist(),
        "one_response": built.generate(queries[0], return_prompt=False, **kwargs).tolist(),
    }


def main() -> None:
    """Print everything as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        golden = {
            "command": "VENV/bin/python tests/compat/golden/make_classic.py > tests/compat/golden/classic_0_11.json",
            "trl": "0.11.4",
            "queries": QUERIES,
            "responses": RESPONSES,
            "scores": SCORES,
            "cases": {name: {"fields": fields, "steps": two_steps(fields)} for name, fields in CASES.items()},
            "greedy": greedy(),
        }
    print(json.dumps(golden, indent=1))


if __name__ == "__main__":
    main()
