"""The nouns of scoring: a score, a failure, what a batch came to, and how much failure a run tolerates."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Literal, NamedTuple

from trl_grpo_ext.errors import ConfigurationError, RewardError

FailureReason = Literal["timeout", "batch_timeout", "exception", "exit", "crash", "bad_value", "non_finite"]

# A step with fewer calls is judged together with the steps before it: one unlucky sample of four is no outage.
MIN_JUDGED_CALLS = 16


class Score(NamedTuple):
    """What a reward said about one sample.

    Attributes:
        value: the reward; None if the function abstained.
        reason: the verifier's reason code; None from a reward that gives none.
        extracted: what the verifier took as the answer.
    """

    value: float | None
    reason: str | None = None
    extracted: str | None = None


class Failure(NamedTuple):
    """Why one sample has no score.

    Attributes:
        reason: "timeout" (the sample took too long), "batch_timeout" (the batch did before its turn came), "exception",
            "exit" (sys.exit or os._exit), "crash" (killed by a signal), "bad_value" (not a number),
            "non_finite" (NaN, infinity, overflow).
        detail: message or traceback.
    """

    reason: str
    detail: str


class FailedSample(NamedTuple):
    """A failure with its place: name of the reward, number of the sample in the batch."""

    function: str
    sample: int
    reason: str
    detail: str


class RewardOutcome(NamedTuple):
    """Rewards of one batch of B samples under K functions.

    Attributes:
        rewards: K lists of B floats; None where the function abstained or failed.
        reasons: K lists of B reason codes of verifiers (or of failures); None where there is none.
        failures: every failed sample.
        failure_counts: K counts, to be summed over ranks and given to ``FailureBudget.check``.
        call_counts: K counts of the samples asked for.
        seconds: K wall times in seconds, from the start of the batch until the function's last score.
        metrics: flat ``rewards/<name>/<what>`` values.
    """

    rewards: list[list[float | None]]
    reasons: list[list[str | None]]
    failures: list[FailedSample]
    failure_counts: list[int]
    call_counts: list[int]
    seconds: list[float]
    metrics: dict[str, float]


class FailureBudget:
    """Decides when rewards fail too often for the run to go on.

    The share is taken per function over the step; a step of fewer than 16 calls is taken together with earlier ones,
    and the share is of 16 calls at least. It is fed with counts summed over all ranks, so every rank decides alike
    and stops in the same step; no rank is left waiting in a collective.
    """

    def __init__(self, names: Sequence[str], max_failure_rate: float = 0.2) -> None:
        """Set the budget.

        Args:
            names: display names of the K functions.
            max_failure_rate: largest tolerated share, 0 (the first failure stops the run) to 1 (nothing does).

        Raises:
            ConfigurationError: if the rate lies outside.
        """
        if not 0 <= max_failure_rate <= 1:
            raise ConfigurationError(
                f"reward_max_failure_rate={max_failure_rate!r} is not allowed; it must lie between 0 (stop at the "
                "first failure) and 1 (never stop)"
            )
        self.names = list(names)
        self.max_failure_rate = max_failure_rate
        self._recent: list[collections.deque[tuple[int, int]]] = [
            collections.deque(maxlen=MIN_JUDGED_CALLS) for _ in self.names
        ]

    def check(
        self, failure_counts: Sequence[int], call_counts: Sequence[int], failures: Sequence[FailedSample] = ()
    ) -> None:
        """Raise RewardError if a function failed more often than allowed, quoting its commonest failure.

        Args:
            failure_counts: K failures of this step, summed over ranks.
            call_counts: K calls of this step, summed over ranks.
            failures: failed samples that this rank knows of, for the message.
        """
        for name, recent, failed, calls in zip(self.names, self._recent, failure_counts, call_counts, strict=True):
            if calls == 0:
                continue
            recent.append((int(failed), int(calls)))
            num_failed, num_calls = self._recent_counts(recent)
            over = num_failed / max(num_calls, MIN_JUDGED_CALLS) > self.max_failure_rate
            if over or (num_failed > 0 and self.max_failure_rate == 0):
                raise RewardError(self._message(name, num_failed, num_calls, failures))

    @staticmethod
    def _recent_counts(recent: collections.deque[tuple[int, int]]) -> tuple[int, int]:
        """Return (failures, calls) of the last step and as many before it as 16 calls take."""
        num_failed = num_calls = 0
        for failed, calls in reversed(recent):
            num_failed, num_calls = num_failed + failed, num_calls + calls
            if num_calls >= MIN_JUDGED_CALLS:
                break
        return num_failed, num_calls

    def _message(self, name: str, num_failed: int, num_calls: int, failures: Sequence[FailedSample]) -> str:
        own = [failure for failure in failures if failure.function == name]
        text = (
            f"Reward {name!r} failed on {num_failed} of {num_calls} samples; "
            f"reward_max_failure_rate={self.max_failure_rate:g} allows {self.max_failure_rate:.0%}."
        )
        if not own:
            return text + " The failures happened on another rank; its log has the traceback."
        reason, count = collections.Counter(failure.reason for failure in own).most_common(1)[0]
        example = next(failure for failure in own if failure.reason == reason)
        return (
            f"{text} Commonest on this rank: {reason} ({count} of {len(own)}), for example sample {example.sample}:\n"
            f"{example.detail}\n"
            "Fix the reward function, or raise reward_max_failure_rate to go on without these samples."
        )
