"""TRL's losses, and ours, against a float64 reference written from the papers.

The forward pass is replaced by a table (`harness.LogpTable`), so only the objective is compared: which ratio, which
clip, which mask, which normaliser over the whole optimiser step. TRL's own micro-batches are recorded from a run of TRL
and given to the reference; the window must arrive at the same gradient although it cuts its rows elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from typing import Any

import pytest
import torch
from harness import LOSS_TYPES, LogpTable, Record, ScriptedRollouts, build, prompt_rows, scripted_reward
from reference.advantage_oracle import advantages as reference_advantages
from reference.loss_oracle import MicroBatch, Objective, Row, Window, window_gradient, window_loss
from tiny import save_tiny

# float64 throughout, except that TRL divides dapo, cispo and vespo by a float32 number of tokens and holds the
# temperatures of sapo and the exponents of vespo in float32.
TOLERANCE = {"dapo": 3e-7, "cispo": 3e-7, "vespo": 3e-7, "sapo": 3e-7}
FAST_LR = 5.0  # the table's gradients are about 0.01; ratios must leave the clip range within two steps

# What one run asks of the objective. "config" goes to the trainers, "rollouts" to the scripted rollouts.
CASES: dict[str, dict[str, Any]] = {
    "on_policy": {"config": {"beta": 0.04}},
    "no_kl": {"config": {}},
    "two_iterations": {"config": {"beta": 0.04, "num_iterations": 2, "max_steps": 4}},
    "plain_kl": {"config": {"beta": 0.1, "use_bias_correction_kl": False, "num_iterations": 2, "max_steps": 4}},
    "long_generation": {"config": {"steps_per_generation": 4, "delta": 1.1, "epsilon_high": 0.3, "max_steps": 4}},
    "straddling": {"config": {"steps_per_generation": 3, "max_steps": 3, "beta": 0.04}},
    "sequence_level": {
        "config": {"importance_sampling_level": "sequence", "num_iterations": 2, "max_steps": 4, "beta": 0.04}
    },
    "truncated_masked": {"config": {"mask_truncated_completions": True, "num_iterations": 2, "max_steps": 4}},
    "environment_tokens": {"config": {"num_iterations": 2, "max_steps": 4}, "rollouts": {"env_mask": True}},
    "entropy_terms": {"config": {"top_entropy_quantile": 0.4, "entropy_coef": 0.02, "beta": 0.04}},
    "off_policy_mask": {"config": {"off_policy_mask_threshold": 0.01, "num_iterations": 3, "max_steps": 6}},
    "batch_scaled": {"config": {"scale_rewards": "batch", "gradient_accumulation_steps": 3}},
    "unscaled": {
        "config": {"scale_rewards": "none", "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
    },
}


# In the fast suite every case meets a mean over a micro-batch and one over a step, and every loss the cases that move
# the policy away from the one that sampled; the rest of the cross product is slow.
FAST_LOSSES = ("bnpo", "dapo")
FAST_CASES = ("no_kl", "two_iterations", "long_generation", "straddling")
CROSS = [
    pytest.param(loss, case, marks=[] if loss in FAST_LOSSES or case in FAST_CASES else pytest.mark.slow)
    for loss in LOSS_TYPES
    for case in CASES
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"), layers=1, hidden=16)


def run(
    ours: bool, checkpoint: str, directory: Any, loss_type: str, case: str, **extra: Any
) -> tuple[Any, Record, Any]:
    """Train the table for a few steps; return the trainer, its record, and what ``_compute_loss`` was given."""
    spec = CASES[case]
    config = {"max_steps": 2, "learning_rate": FAST_LR, **spec["config"], **extra}
    trainer, record = build(
        ours,
        directory,
        model=checkpoint,
        rows=prompt_rows(16, dead=(2, 5)),
        rollouts=ScriptedRollouts(row_ids=True, **spec.get("rollouts", {})),
        loss_type=loss_type,
        **config,
    )
    table = LogpTable(trainer, num_rows=64)
    seen: list[dict[str, Any]] = []
    compute = trainer._compute_loss

    def recording(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        now = {"logps": table.logps.detach().clone(), "entropies": table.entropies.detach().clone()}
        seen.append({"step": trainer.state.global_step, "table": table, **now, **inputs})
        return compute(model, inputs)

    if not ours:  # what counts as a micro-batch is TRL's business only
        trainer._compute_loss = recording
    with table.installed():
        trainer.train()
    return trainer, record, seen


def objective_of(trainer: Any) -> Objective:
    """Return the reference's settings for what the trainer was configured with."""
    args = trainer.args
    same = ("loss_type", "delta", "beta", "use_bias_correction_kl", "top_entropy_quantile", "entropy_coef")
    same += ("off_policy_mask_threshold", "max_completion_length", "sapo_temperature_pos", "sapo_temperature_neg")
    same += ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return Objective(
        epsilon_low=args.epsilon,
        epsilon_high=high,
        level=args.importance_sampling_level,
        **{name: getattr(args, name) for name in same},
    )


def micro_batch_of(seen: dict[str, Any]) -> MicroBatch:
    """Return the reference's view of one recorded micro-batch: rows without padding."""
    ids, table = seen["completion_ids"], seen["table"]
    rows = []
    for index, key in enumerate(LogpTable.rows(ids).tolist()):
        length = len(ScriptedRollouts(row_ids=True).completion(key))
        mask = seen["completion_mask"][index] * (seen["tool_mask"][index] if "tool_mask" in seen else 1)
        old = seen.get("old_per_token_logps")
        rows.append(
            Row(
                logps=seen["logps"][key, :length].tolist(),
                mask=mask[:length].tolist(),
                advantage=seen["advantages"][index].item(),
                old_logps=None if old is None else old[index, :length].tolist(),
                ref_logps=table.reference[key, :length].tolist(),
                entropies=seen["entropies"][key, :length].tolist(),
                key=key,
            )
        )
    return MicroBatch(rows, generation_tokens=seen["num_items_in_batch"].item())


def windows_of(trainer: Any, seen: list[dict[str, Any]]) -> list[Window]:
    """Return one window per optimiser step of a run of TRL."""
    steps = sorted({entry["step"] for entry in seen})
    return [
        Window(
            [micro_batch_of(entry) for entry in seen if entry["step"] == step],
            steps_per_generation=trainer.args.steps_per_generation,
        )
        for step in steps
    ]


def table_gradient(window: Window, objective: Objective, shape: torch.Size) -> dict[str, torch.Tensor]:
    """Return the reference's gradient in the table's layout."""
    gradient = window_gradient(window, objective)
    tables = {"table_logps": torch.zeros(shape).double(), "table_entropies": torch.zeros(shape).double()}
    for name, rows in (("table_logps", gradient.logps), ("table_entropies", gradient.entropies)):
        for key, slopes in rows.items():
            tables[name][key, : len(slopes)] += torch.tensor(slopes, dtype=torch.float64)
    return tables


def assert_matches(record: Record, windows: list[Window], objective: Objective) -> None:
    """Compare each optimiser step's gradient and loss with the reference."""
    assert len(record.gradients) == len(windows)
    tolerance = TOLERANCE.get(objective.loss_type, 1e-11)
    shape = record.gradients[0]["table_logps"].shape
    expected = [table_gradient(window, objective, shape) for window in windows]
    scale = max(value.abs().max().item() for step in expected for value in step.values())
    assert scale > 1e-4, "the reference has no gradient: the case tests nothing"
    for step, (window, found) in enumerate(zip(windows, record.gradients, strict=True)):
        for name, value in expected[step].items():
            gap = (found[name] - value).abs().max().item()
            assert gap <= tolerance * scale, f"step {step}, {name}: {gap / scale:.2e} of the largest gradient"
        # the trainer adds the micro-batches' losses up in float32
        assert record.logs[step]["loss"] == pytest.approx(window_loss(window, objective), rel=2e-6, abs=2e-7)


@pytest.fixture(scope="module")
def reference_run(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function (loss type, case) -> (TRL's record, windows, objective); each run is made once."""

    @functools.cache
    def cached(loss_type: str, case: str) -> tuple[Record, list[Window], Objective]:
        trainer, record, seen = run(False, checkpoint, tmp_path_factory.mktemp("trl"), loss_type, case)
        return record, windows_of(trainer, seen), objective_of(trainer)

    return cached


@pytest.mark.parametrize(("loss_type", "case"), CROSS)
def test_trl_equals_reference(loss_type: str, case: str, reference_run: Any) -> None:
    assert_matches(*reference_run(loss_type, case))


@pytest.mark.parametrize(("loss_type", "case"), CROSS)
def test_ours_equals_reference(loss_type: str, case: str, reference_run: Any, checkpoint: str, tmp_path: Any) -> None:
    _, windows, objective = reference_run(loss_type, case)
    # 16 tokens cannot hold a group of four, so that groups are cut; dead groups are skipped where that is exact
    _, record, _ = run(True, checkpoint, tmp_path, loss_type, case, max_tokens_per_micro_batch=16)
    assert_matches(record, windows, objective)


def _random_window(seed: int, objective: Objective) -> Window:
    """Return two micro-batches of three ragged rows, with masked tokens, off policy."""
    draw = random.Random(seed)
    batches = []
    for number in range(2):
        rows = []
        for index in range(3):
            length = draw.randint(2, 4)
            logps = [-3 * draw.random() for _ in range(length)]
            rows.append(
                Row(
                    logps=logps,
                    mask=[int(draw.random() < 0.8) for _ in logps],
                    advantage=draw.uniform(-2, 2),
                    old_logps=None if seed % 2 else [value + draw.gauss(0, 0.2) for value in logps],
                    ref_logps=[value + draw.gauss(0, 0.2) for value in logps],
                    entropies=[4 * draw.random() for _ in logps],
                    key=3 * number + index,
                )
            )
        batches.append(MicroBatch(rows, generation_tokens=17))
    return Window(batches, steps_per_generation=3)


def _moved(window: Window, key: int, name: str, token: int, by: float) -> Window:
    """Return the window with one log-probability or entropy moved."""

    def move(row: Row) -> Row:
        if row.key != key:
            return row
        values = list(getattr(row, name))
        values[token] += by
        return dataclasses.replace(row, **{name: values})

    batches = [dataclasses.replace(b, rows=[move(row) for row in b.rows]) for b in window.micro_batches]
    return dataclasses.replace(window, micro_batches=batches)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_reference_gradient_is_the_derivative_of_its_loss(loss_type: str, level: str) -> None:
    for seed in range(4):
        objective = Objective(
            loss_type=loss_type, level=level, beta=0.1, delta=1.15, entropy_coef=0.05, top_entropy_quantile=0.6
        )
        window = _random_window(seed, objective)
        gradient = window_gradient(window, objective)
        for name, slopes_of in (("logps", gradient.logps), ("entropies", gradient.entropies)):
            for key, slopes in slopes_of.items():
                for token, slope in enumerate(slopes):
                    step = 1e-5
                    above = window_loss(_moved(window, key, name, token, step), objective, window)
                    below = window_loss(_moved(window, key, name, token, -step), objective, window)
                    assert (above - below) / (2 * step) == pytest.approx(slope, rel=1e-7, abs=1e-9)


def test_reference_by_hand() -> None:
    """Two rows of 1 and 3 tokens, on policy: the derivative of -A r is -A, shared out by each normaliser."""
    rows = [Row([-1.0], [1], 2.0, key=0), Row([-1.0, -1.0, -1.0], [1, 1, 1], -1.0, key=1)]
    window = Window([MicroBatch(rows, generation_tokens=4)])
    expected = {  # d loss / d logp of a token of the first row, and of the second
        "grpo": (-2 / 2, 1 / 6),
        "bnpo": (-2 / 4, 1 / 4),
        "dr_grpo": (-2 / 20, 1 / 20),
        "dapo": (-2 / 4, 1 / 4),
        "cispo": (-2 / 4, 1 / 4),
        "sapo": (-2 / 2, 1 / 6),
        "luspo": (-2 / 2, 1 / 2),
        "vespo": (-2 / 4, 1 / 4),
    }
    for loss_type, (short, long) in expected.items():
        gradient = window_gradient(window, Objective(loss_type=loss_type, max_completion_length=10, epsilon_high=5.0))
        assert gradient.logps[0] == pytest.approx([short])
        assert gradient.logps[1] == pytest.approx([long] * 3)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_comparison_notices_a_wrong_objective(loss_type: str, reference_run: Any) -> None:
    """Negative control: the comparison fails when the reference is given other settings or another partition."""
    record, windows, objective = reference_run(loss_type, "two_iterations")
    with pytest.raises(AssertionError):
        assert_matches(record, windows, dataclasses.replace(objective, beta=objective.beta * 1.001))
    if loss_type in ("grpo", "sapo", "luspo", "bnpo", "dr_grpo"):
        longer = [dataclasses.replace(w, micro_batches=[*w.micro_batches, MicroBatch([])]) for w in windows]
    else:
        longer = [
            dataclasses.replace(
                w,
                micro_batches=[
                    dataclasses.replace(b, generation_tokens=b.generation_tokens + 1) for b in w.micro_batches
                ],
            )
            for w in windows
        ]
    with pytest.raises(AssertionError):
        assert_matches(record, longer, objective)


def _no_reward_twice(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Return no reward for some completions and for one whole group."""
    rewards = scripted_reward(prompts, completion_ids)
    return [
        None if "3 + 3" in prompt or sum(ids) % 3 == 0 else reward
        for prompt, ids, reward in zip(prompts, completion_ids, rewards, strict=True)
    ]


def _length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) / 4 for ids in completion_ids]


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize(
    ("scale", "aggregation"),
    [
        ("group", "sum_then_normalize"),
        ("batch", "sum_then_normalize"),
        ("none", "sum_then_normalize"),
        ("group", "normalize_then_sum"),
    ],
)
@pytest.mark.parametrize("rewards", [[scripted_reward], [_no_reward_twice], [_no_reward_twice, _length_reward]])
def test_advantages_equal_reference(
    rewards: list[Any], scale: str, aggregation: str, ours: bool, checkpoint: str, tmp_path: Any
) -> None:
    weights = [1.0, 0.5][: len(rewards)]
    trainer, _ = build(
        ours,
        tmp_path,
        model=checkpoint,
        rows=prompt_rows(8, dead=(1,)),
        reward=rewards,
        rollouts=ScriptedRollouts(),
        scale_rewards=scale,
        multi_objective_aggregation=aggregation,
        reward_weights=weights,
        gradient_accumulation_steps=8,
        max_steps=1,
        shuffle_dataset=False,
    )
    found: list[Any] = []
    calculate, score = trainer._calculate_rewards, trainer._generate_and_score_completions
    trainer._calculate_rewards = lambda *args: found.append(calculate(*args)) or found[-1]
    trainer._generate_and_score_completions = lambda *args: found.append(score(*args)) or found[-1]
    trainer.train()
    expected = reference_advantages(found[0].tolist(), 4, weights=weights, scale=scale, aggregation=aggregation)
    assert any(math.isnan(value) for row in found[0].tolist() for value in row) or rewards == [scripted_reward]
    assert any(expected)
    # float32 in the trainer: means and deviations of eight numbers near 1
    torch.testing.assert_close(found[1]["advantages"].double(), torch.tensor(expected).double(), rtol=2e-5, atol=2e-6)
