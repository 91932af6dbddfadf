"""The KL penalty that PPO puts into the reward: estimators and controllers.

Dimensions: ``B`` rows, ``T`` completion tokens.
"""

from __future__ import annotations

from typing import Any

import torch

ESTIMATORS = ("k1", "abs", "k2", "k3")


def summed_kl(
    logps_BT: torch.Tensor, ref_logps_BT: torch.Tensor, mask_BT: torch.Tensor, estimator: str = "k1"
) -> torch.Tensor:
    """Return the divergence of each response from the reference, summed over its tokens.

    With d = log p - log p_ref: k1 = d; abs = |d|; k2 = d**2 / 2; k3 = exp(-d) - 1 + d
    (http://joschu.net/blog/kl-approx.html; "kl", "abs" and "mse" of TRL <= 0.11, k1 and k3 of TRL 0.17 to 1.12).

    Args:
        logps_BT: (B, T) log-probabilities under the policy that sampled, without gradient.
        ref_logps_BT: (B, T) under the reference.
        mask_BT: (B, T), 1 for tokens that the policy produced.
        estimator: one of ``ESTIMATORS``.

    Returns:
        (B,) float32, nats per response. k1 may be negative; a row without tokens has 0.

    Raises:
        ValueError: for an unknown estimator.
    """
    difference = (logps_BT.float() - ref_logps_BT.float()).masked_fill(mask_BT == 0, 0.0)
    if estimator == "k1":
        kl = difference
    elif estimator == "abs":
        kl = difference.abs()
    elif estimator == "k2":
        kl = 0.5 * difference.square()
    elif estimator == "k3":
        kl = torch.expm1(-difference) + difference
    else:
        raise ValueError(f"KL estimator {estimator!r} is not one of {', '.join(ESTIMATORS)}.")
    return kl.sum(dim=1)


class FixedKLController:
    """Keep the weight of the KL penalty as it is.

    Attributes:
        value: The weight.
    """

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Do nothing; the counterpart of ``AdaptiveKLController.update``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the weight."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the weight from ``state_dict``."""
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """Steer the weight so that the divergence approaches a target.

    e = clip(kl / target - 1, -0.2, 0.2);  weight *= 1 + e * n / horizon    Ziegler et al. 1909.08593, section 2.2

    Args:
        init_kl_coef: Weight at the start.
        target: Wanted divergence in nats per response, > 0.
        horizon: Responses over which a full error changes the weight by a fifth of itself.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        super().__init__(init_kl_coef)
        self.target, self.horizon = target, horizon

    def update(self, current: float, n_steps: int) -> None:
        """Adapt the weight to ``current``, the mean divergence of the last ``n_steps`` responses."""
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon
