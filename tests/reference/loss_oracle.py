"""A slow reference of every GRPO loss: one row and one token at a time, in Python floats, without autograd.

It is written from the papers' equations and TRL's documented conventions, and shares no code with the package or TRL:

    grpo     DeepSeekMath 2402.03300, eq. 3      mean over a row's tokens, then over rows
    bnpo     TRL's docs                          mean over the tokens of a micro-batch
    dr_grpo  2503.20783, sec. 3.1                sum over tokens, divided by rows x max_completion_length
    dapo     2503.14476, eq. 8                   mean over the tokens of the optimiser step, on all processes
    cispo    2506.13585, eq. 4                   -sg(min(r, eps_high)) A log p, normalised as dapo
    sapo     2511.20347, eq. 6                   -A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A, averaged as grpo
    luspo    2602.05261                          sum over a row's tokens, mean over rows
    vespo    2602.10693                          -sg(phi(w)) A log p with w the product of a row's ratios, as dapo

Stop-gradient ("sg") makes a value a constant, so `window_loss` takes it from `frozen` rows: calling it with moved rows
and the original `frozen` gives the function whose derivative `window_gradient` states. Central differences check that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Floats = Sequence[float]


@dataclass(frozen=True)
class Row:
    """One completion without padding.

    Attributes:
        logps: log-probabilities of its tokens under the policy.
        mask: 1 for a token that counts, 0 for one of a tool or of a masked completion.
        advantage: of the whole completion.
        old_logps: under the policy that sampled; None means the current policy, as a constant.
        ref_logps: under the reference; needed when beta != 0.
        entropies: of the next-token distributions; needed by the entropy terms.
        key: any name of the row, to find its gradient again.
    """

    logps: Floats
    mask: Sequence[int]
    advantage: float
    old_logps: Floats | None = None
    ref_logps: Floats | None = None
    entropies: Floats | None = None
    key: int = 0


@dataclass(frozen=True)
class Objective:
    """The settings of the loss, in TRL's words and with TRL's defaults."""

    loss_type: str = "dapo"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    level: str = "token"
    use_bias_correction_kl: bool = True
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    max_completion_length: int = 8


@dataclass(frozen=True)
class MicroBatch:
    """Rows that TRL puts through one forward pass.

    Attributes:
        rows: its completions.
        generation_tokens: tokens that count in the generation batch it was cut from, over all processes.
    """

    rows: Sequence[Row]
    generation_tokens: float = 0.0


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimiser step on one process.

    Attributes:
        micro_batches: in order; their number is the divisor of every mean.
        steps_per_generation: micro-batches in a generation batch.
        num_processes: processes whose gradients are averaged.
    """

    micro_batches: Sequence[MicroBatch]
    steps_per_generation: int = 1
    num_processes: int = 1


class Gradient(NamedTuple):
    """Derivatives of the window's loss, by row key: with respect to its log-probabilities and to its entropies."""

    logps: dict[int, list[float]]
    entropies: dict[int, list[float]]


@dataclass
class _Term:
    """A row's per-token losses and their derivatives: ``slopes[t][j]`` = d losses[t] / d logps[j]."""

    losses: list[float]
    slopes: list[list[float]] = field(default_factory=list)


def _num_tokens(row: Row) -> int:
    return sum(row.mask)


def _log_ratios(row: Row, frozen: Row) -> list[float]:
    old = frozen.logps if row.old_logps is None else row.old_logps
    return [new - before for new, before in zip(row.logps, old, strict=True)]


def _log_weights(row: Row, frozen: Row, level: str) -> tuple[list[float], list[list[float]]]:
    """Return each token's log importance weight and its derivatives; "sequence" is the mean over the row (GSPO)."""
    ratios = _log_ratios(row, frozen)
    size = len(ratios)
    if level == "token":
        return ratios, [[float(t == j) for j in range(size)] for t in range(size)]
    count = max(_num_tokens(row), 1)
    mean = sum(ratio * keep for ratio, keep in zip(ratios, row.mask, strict=True)) / count
    return [mean] * size, [[row.mask[j] / count for j in range(size)] for _ in range(size)]


def _clipped(weight: float, advantage: float, objective: Objective) -> tuple[float, float]:
    """Return PPO's clipped loss of one token and its derivative in log weight, with INTELLECT-2's upper bound delta."""
    low, high = 1 - objective.epsilon_low, 1 + objective.epsilon_high
    free = weight if objective.delta is None else min(weight, objective.delta)
    free_slope = weight if objective.delta is None or weight < objective.delta else 0.0
    held = min(max(weight, low), high)
    held_slope = weight if low < weight < high else 0.0
    if free * advantage <= held * advantage:
        return -free * advantage, -free_slope * advantage
    return -held * advantage, -held_slope * advantage


def _soft(weight: float, advantage: float, objective: Objective) -> tuple[float, float]:
    """Return SAPO's loss of one token and its derivative in log weight."""
    tau = objective.sapo_temperature_pos if advantage > 0 else objective.sapo_temperature_neg
    gate = 1 / (1 + math.exp(-tau * (weight - 1)))
    return -gate * 4 / tau * advantage, -4 * gate * (1 - gate) * weight * advantage


def _vespo_phi(row: Row, frozen: Row, objective: Objective) -> float:
    """Return phi(w) = e^lambda w^k e^(-lambda w) with w the row's product of ratios, in TRL's clamped range."""
    product = sum(
        min(max(ratio, -20.0), 20.0) * keep
        for ratio, keep in zip(_log_ratios(frozen, frozen), frozen.mask, strict=True)
    )
    product = min(max(product, math.log(1e-8)), 20.0)
    positive = row.advantage >= 0
    power = objective.vespo_k_pos if positive else objective.vespo_k_neg
    decay = max(objective.vespo_lambda_pos if positive else objective.vespo_lambda_neg, 1e-4)
    return math.exp(decay + power * product - decay * math.exp(product))


def _policy_term(row: Row, frozen: Row, objective: Objective) -> _Term:
    """Return the policy loss of each token of a row."""
    size = len(row.logps)
    if objective.loss_type in ("cispo", "vespo"):
        if objective.loss_type == "vespo":
            factors = [_vespo_phi(row, frozen, objective)] * size
        else:
            held, _ = _log_weights(frozen, frozen, objective.level)
            factors = [min(math.exp(value), objective.epsilon_high) for value in held]
        losses = [-factor * row.advantage * logp for factor, logp in zip(factors, row.logps, strict=True)]
        return _Term(losses, [[-factors[t] * row.advantage * (t == j) for j in range(size)] for t in range(size)])
    log_weights, weight_slopes = _log_weights(row, frozen, objective.level)
    rule = _soft if objective.loss_type == "sapo" else _clipped
    values = [rule(math.exp(value), row.advantage, objective) for value in log_weights]
    return _Term(
        [loss for loss, _ in values],
        [[slope * value for value in weight_slopes[t]] for t, (_, slope) in enumerate(values)],
    )


def _kl_term(row: Row, frozen: Row, objective: Objective) -> _Term:
    """Return Schulman's k3 estimate of the KL to the reference for each token, times the ratio when corrected."""
    assert row.ref_logps is not None
    log_weights, weight_slopes = _log_weights(row, frozen, objective.level)
    losses, slopes = [], []
    for t, (ref, logp) in enumerate(zip(row.ref_logps, row.logps, strict=True)):
        kl, kl_slope = math.exp(ref - logp) - (ref - logp) - 1, 1 - math.exp(ref - logp)
        weight = math.exp(log_weights[t]) if objective.use_bias_correction_kl else 1.0
        losses.append(kl * weight)
        slopes.append(
            [
                kl_slope * weight * (t == j)
                + (kl * weight * weight_slopes[t][j] if objective.use_bias_correction_kl else 0.0)
                for j in range(len(row.logps))
            ]
        )
    return _Term(losses, slopes)


def _keeps_row(row: Row, frozen: Row, objective: Objective) -> float:
    """Return 0 for a row that DeepSeek-V3.2 (2512.02556, eq. 9) drops: a negative advantage and too far off policy."""
    if objective.off_policy_mask_threshold is None or row.advantage >= 0:
        return 1.0
    drift = -sum(ratio * keep for ratio, keep in zip(_log_ratios(frozen, frozen), frozen.mask, strict=True))
    return float(drift / max(_num_tokens(frozen), 1) <= objective.off_policy_mask_threshold)


def _quantile(values: Floats, share: float) -> float:
    """Return the quantile with linear interpolation between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _selected_tokens(batch: Sequence[Row], objective: Objective) -> list[list[int]]:
    """Return per row the tokens on which the policy term acts: the top quantile by entropy (2506.01939), or all."""
    if objective.top_entropy_quantile >= 1.0:
        return [[1] * len(row.logps) for row in batch]
    counted = [entropy for row in batch for entropy, keep in zip(row.entropies or (), row.mask, strict=True) if keep]
    if not counted:
        return [[0] * len(row.logps) for row in batch]
    threshold = _quantile(counted, 1 - objective.top_entropy_quantile)
    return [
        [int(bool(keep) and entropy >= threshold) for entropy, keep in zip(row.entropies or (), row.mask, strict=True)]
        for row in batch
    ]


def _token_weight(row: Row, batch: MicroBatch, window: Window, objective: Objective) -> float:
    """Return the factor of each of the row's per-token losses in the window's loss."""
    num_steps = len(window.micro_batches)
    if objective.loss_type in ("grpo", "sapo"):
        return 1 / (max(_num_tokens(row), 1) * len(batch.rows) * num_steps)
    if objective.loss_type == "luspo":
        return 1 / (len(batch.rows) * num_steps)
    if objective.loss_type == "dr_grpo":
        return 1 / (len(batch.rows) * objective.max_completion_length * num_steps)
    if objective.loss_type == "bnpo":
        return 1 / (max(sum(_num_tokens(other) for other in batch.rows), 1) * num_steps)
    # dapo, cispo, vespo: the generation batch's tokens, scaled to the share of it that one window uses. The processes'
    # gradients are averaged, so each divides by the tokens of one process.
    window_tokens = max(batch.generation_tokens, 1.0) * num_steps / window.steps_per_generation
    return window.num_processes / window_tokens


def _batch_parts(batch: MicroBatch, frozen: MicroBatch, window: Window, objective: Objective) -> tuple[float, Gradient]:
    """Return one micro-batch's share of the loss and its derivatives."""
    selected = _selected_tokens(frozen.rows, objective)
    gradient = Gradient({}, {})
    loss, num_active = (
        0.0,
        sum(m * s for row, sel in zip(batch.rows, selected, strict=True) for m, s in zip(row.mask, sel, strict=True)),
    )
    bonus = -objective.entropy_coef / (max(num_active, 1) * len(window.micro_batches))
    for row, still, chosen in zip(batch.rows, frozen.rows, selected, strict=True):
        policy = _policy_term(row, still, objective)
        kl = _kl_term(row, still, objective) if objective.beta else None
        keeps, weight = _keeps_row(row, still, objective), _token_weight(row, batch, window, objective)
        slopes = [0.0] * len(row.logps)
        entropy_slopes = [0.0] * len(row.logps)
        for t, counts in enumerate(row.mask):
            factor = weight * counts
            loss += factor * policy.losses[t] * keeps * chosen[t]
            slopes = [s + factor * keeps * chosen[t] * d for s, d in zip(slopes, policy.slopes[t], strict=True)]
            if kl is not None:
                loss += factor * objective.beta * kl.losses[t]
                slopes = [s + factor * objective.beta * d for s, d in zip(slopes, kl.slopes[t], strict=True)]
            if objective.entropy_coef:
                assert row.entropies is not None
                loss += bonus * counts * chosen[t] * row.entropies[t]
                entropy_slopes[t] = bonus * counts * chosen[t]
        gradient.logps[row.key], gradient.entropies[row.key] = slopes, entropy_slopes
    return loss, gradient


def window_loss(window: Window, objective: Objective, frozen: Window | None = None) -> float:
    """Return the loss of one optimiser step on one process; ``frozen`` gives the values under stop-gradient."""
    frozen = frozen or window
    pairs = zip(window.micro_batches, frozen.micro_batches, strict=True)
    return sum(_batch_parts(batch, still, window, objective)[0] for batch, still in pairs)


def window_gradient(window: Window, objective: Objective) -> Gradient:
    """Return the derivatives of ``window_loss`` at ``window``, by the rows' keys, from the formulas by hand."""
    total = Gradient({}, {})
    for batch in window.micro_batches:
        _, part = _batch_parts(batch, batch, window, objective)
        total.logps.update(part.logps)
        total.entropies.update(part.entropies)
    return total
