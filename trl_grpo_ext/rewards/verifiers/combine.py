"""``combine``: one reward made of several, by a rule a weighted sum cannot express.

    rewards:
      - combine:
          how: gate
          gates: [format]
          parts: [format, {math: {weight: 1.0}}, {length: {shape: range, max_length: 800, weight: 0.1}}]

Each part is logged under its own name, as a column of the completions table and as a metric, so that one sees which
part pays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from trl_grpo_ext.errors import ConfigurationError, RewardError, nearest

How = Literal["sum", "product", "gate", "best_of", "bonus", "cosine"]
Missing = Literal["skip", "abstain", "zero"]


def build(**options: Any) -> Combination:
    """Return the combination a recipe asks for; see :class:`Combination`."""
    if "parts" not in options:
        raise ConfigurationError("reward 'combine' needs 'parts', a list of rewards as under 'rewards:'")
    return Combination(**options)


class Combination:
    """Several rewards as one, callable with TRL's signature.

    sum:      sum of w_k s_k
    product:  product of s_k; weights must be 1
    gate:     the weighted sum of the other parts if every gate reaches ``threshold``, else ``closed``
    best_of:  the largest w_k s_k
    bonus:    s_main + clip(sum of the other w_k s_k, -bonus_limit, bonus_limit). With bonus_limit < 0.5 and a main part
              of 0 and 1, no bonus can lift a wrong answer above a right one; positive bonuses for a wrong main part
              (<= 0) are dropped unless ``bonus_for_wrong``.
    cosine:   the value for a right (main part > 0) or wrong completion moves from its first to its second number by
              (1 - cos(pi min(L, max_length) / max_length)) / 2, L in tokens: 2503.02373, appendix C.1.

    Attributes:
        columns: data-set columns that some part needs.
        per_sample: whether the parts judge samples one by one.
        deterministic: whether all parts do so repeatably.
    """

    def __init__(
        self,
        parts: Any,
        *,
        how: How = "sum",
        name: str = "combine",
        gates: Sequence[str] = (),
        threshold: float = 1.0,
        closed: float = 0.0,
        main: str | None = None,
        bonus_limit: float = 0.2,
        bonus_for_wrong: bool = False,
        max_length: int | None = None,
        right: Sequence[float] = (1.0, 0.5),
        wrong: Sequence[float] = (-1.0, -0.5),
        missing: Missing = "skip",
        clip: Sequence[float] | None = None,
        scale: float = 1.0,
    ) -> None:
        """Build the parts.

        Args:
            parts: rewards, written as under ``rewards:`` in a recipe; each may have a weight and a name.
            how: the rule, see above.
            name: display name; the parts are logged as ``name/part``.
            gates: "gate": names of the parts that must hold.
            threshold: score from which a gate is open.
            closed: value while a gate is closed.
            main: "bonus" and "cosine": name of the part that decides.
            bonus_limit: largest sum of bonuses, in the main part's units; below 0.5.
            bonus_for_wrong: also pay positive bonuses where the main part pays nothing.
            max_length: "cosine": length in tokens at which the second value is reached.
            right: "cosine": value of a right completion at length 0 and at ``max_length``.
            wrong: "cosine": the same for a wrong one.
            missing: what a part without a score does in a sum or best-of: "skip" leaves it out and scales the other
                weights up to the same total, "abstain" leaves the sample without a score, "zero" counts it as 0. A
                gate, a factor or a main part without a score always makes the sample abstain.
            clip: lower and upper bound of the result, before ``scale``.
            scale: factor of the result.

        Raises:
            ConfigurationError: for an unknown part, a bad number, or an option that the rule does not use.
        """
        from trl_grpo_ext.rewards.registry import build_rewards
        from trl_grpo_ext.rewards.signature import is_async, is_deterministic, is_per_sample

        built = build_rewards(parts)
        for function, part in zip(built.functions, built.names, strict=True):
            if isinstance(function, str) or is_async(function):
                kind = "a reward model" if isinstance(function, str) else "asynchronous"
                raise ConfigurationError(
                    f"reward 'combine': part {part!r} is {kind}, which cannot be combined; list it alone"
                )
        self.__name__ = name
        self.functions: list[Callable[..., Any]] = built.functions
        self.names, self.weights = built.names, built.weights
        self.columns = tuple(dict.fromkeys(column for part in built.names for column in built.columns[part]))
        self.per_sample = all(is_per_sample(function) for function in self.functions)
        self.deterministic = all(is_deterministic(function) for function in self.functions)
        self.version = "/".join(str(getattr(function, "version", "")) for function in self.functions)
        self.how, self.missing = how, missing
        self.gates, self.threshold, self.closed = tuple(gates), threshold, closed
        self.main, self.bonus_limit, self.bonus_for_wrong = main, bonus_limit, bonus_for_wrong
        self.max_length, self.right, self.wrong = max_length, tuple(right), tuple(wrong)
        self.clip, self.scale = None if clip is None else tuple(clip), scale
        self._check()

    def _check(self) -> None:
        for value, choices, key in ((self.how, get_args(How), "how"), (self.missing, get_args(Missing), "missing")):
            if value not in choices:
                raise ConfigurationError(
                    f"reward 'combine': {key}={value!r} must be one of {', '.join(choices)}."
                    + nearest(str(value), choices)
                )
        for part in (*self.gates, *(() if self.main is None else (self.main,))):
            if part not in self.names:
                raise ConfigurationError(
                    f"reward 'combine': there is no part {part!r}; the parts are {', '.join(self.names)}."
                    + nearest(part, self.names)
                )
        if (self.how == "gate") != bool(self.gates):
            raise ConfigurationError("reward 'combine': how='gate' needs 'gates', and no other rule uses them")
        if self.how == "gate" and len(self.gates) == len(self.names):
            raise ConfigurationError("reward 'combine': every part is a gate, so nothing is left to score")
        if (self.how in ("bonus", "cosine")) != (self.main is not None):
            raise ConfigurationError(
                "reward 'combine': how='bonus' and how='cosine' need 'main', and no other rule uses it"
            )
        if self.how == "product" and any(weight != 1.0 for weight in self.weights):
            raise ConfigurationError("reward 'combine': how='product' has no use for weights; remove them")
        if self.main is not None and self.weights[self.names.index(self.main)] != 1.0:
            raise ConfigurationError(
                f"reward 'combine': the main part {self.main!r} must have weight 1; use scale instead"
            )
        if self.how == "bonus" and not 0 < self.bonus_limit < 0.5:
            raise ConfigurationError(
                f"reward 'combine': bonus_limit={self.bonus_limit} must be above 0 and below 0.5, or bonuses could "
                "outvote the main part"
            )
        if self.how == "cosine" and (self.max_length is None or self.max_length <= 0 or len(self.names) != 1):
            raise ConfigurationError("reward 'combine': how='cosine' needs max_length above 0 and exactly one part")
        if any(len(pair) != 2 for pair in (self.right, self.wrong)):
            raise ConfigurationError("reward 'combine': right and wrong must be two numbers each")
        if self.clip is not None and (len(self.clip) != 2 or not self.clip[0] <= self.clip[1]):
            raise ConfigurationError(f"reward 'combine': clip={self.clip} must be [lower, upper]")

    def warm_up(self) -> None:
        """Load what the parts need."""
        for function in self.functions:
            warm = getattr(function, "warm_up", None)
            if callable(warm):
                warm()

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Any] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one combined score per completion, None where it abstains.

        Raises:
            RewardError: if a part returns a wrong number of scores.
        """
        scores: dict[str, list[float | None]] = {}
        for part, function in zip(self.names, self.functions, strict=True):
            found = list(function(**self._arguments(function, prompts, completions, completion_ids, columns)))
            if len(found) != len(completions):
                raise RewardError(
                    f"reward {self.__name__!r}: part {part!r} returned {len(found)} scores for {len(completions)} "
                    "completions"
                )
            scores[part] = [None if score is None or not math.isfinite(score) else float(score) for score in found]
        for part, column in scores.items():
            known = [score for score in column if score is not None]
            if log_extra is not None:
                log_extra(f"{self.__name__}/{part}", column)
            if log_metric is not None and column:
                if known:
                    log_metric(f"{self.__name__}/{part}", sum(known) / len(known))
                log_metric(f"{self.__name__}/{part}_missing", 1.0 - len(known) / len(column))
        lengths = [0 if completion_ids is None else len(ids) for ids in completion_ids or [()] * len(completions)]
        if self.how == "cosine" and completion_ids is None:
            return [None] * len(completions)
        return [
            self.combine({part: column[row] for part, column in scores.items()}, lengths[row])
            for row in range(len(completions))
        ]

    @staticmethod
    def _arguments(function: Any, prompts: Any, completions: Any, completion_ids: Any, columns: Any) -> dict[str, Any]:
        """Return what a part takes of a batch."""
        from trl_grpo_ext.rewards.signature import accepted_keywords

        accepted = accepted_keywords(function)
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        return {key: value for key, value in given.items() if accepted.takes(key)}

    def combine(self, scores: Mapping[str, float | None], length: int = 0) -> float | None:
        """Return the combined score of one completion.

        Args:
            scores: {part: score, or None}.
            length: number of tokens, for "cosine".
        """
        value = getattr(self, f"_{self.how}")(scores, length)
        if value is None:
            return None
        if self.clip is not None:
            value = min(max(value, self.clip[0]), self.clip[1])
        return float(value * self.scale)

    def _weighted(self, scores: Mapping[str, float | None], names: Sequence[str]) -> list[float] | None:
        """Return w_k s_k of the named parts with the rule for missing ones applied; None to abstain."""
        weights = dict(zip(self.names, self.weights, strict=True))
        if self.missing == "zero":
            return [weights[part] * (scores[part] or 0.0) for part in names]
        known = [part for part in names if scores[part] is not None]
        if not known or (self.missing == "abstain" and len(known) < len(names)):
            return None
        total = sum(abs(weights[part]) for part in names)
        share = sum(abs(weights[part]) for part in known)
        raised = total / share if share else 1.0
        return [weights[part] * raised * (scores[part] or 0.0) for part in known]

    def _sum(self, scores: Mapping[str, float | None], _length: int) -> float | None:
        terms = self._weighted(scores, self.names)
        return None if terms is None else sum(terms)

    def _product(self, scores: Mapping[str, float | None], _length: int) -> float | None:
        factors = [score for score in scores.values() if score is not None]
        return math.prod(factors) if len(factors) == len(scores) else None

    def _gate(self, scores: Mapping[str, float | None], _length: int) -> float | None:
        gates = [scores[part] for part in self.gates]
        if any(gate is not None and gate < self.threshold for gate in gates):
            return self.closed
        if any(gate is None for gate in gates):
            return None
        terms = self._weighted(scores, [part for part in self.names if part not in self.gates])
        return None if terms is None else sum(terms)

    def _best_of(self, scores: Mapping[str, float | None], _length: int) -> float | None:
        if self.missing == "abstain" and None in scores.values():
            return None
        weights = dict(zip(self.names, self.weights, strict=True))
        known = {part: 0.0 if score is None else score for part, score in scores.items()}
        considered = [part for part, score in scores.items() if score is not None or self.missing == "zero"]
        return max((weights[part] * known[part] for part in considered), default=None)

    def _bonus(self, scores: Mapping[str, float | None], _length: int) -> float | None:
        assert self.main is not None
        main = scores[self.main]
        if main is None:
            return None
        others = [part for part in self.names if part != self.main]
        bonus = sum(self._weighted(scores, others) or ()) if others else 0.0
        highest = self.bonus_limit if main > 0 or self.bonus_for_wrong else 0.0
        return main + min(max(bonus, -self.bonus_limit), highest)

    def _cosine(self, scores: Mapping[str, float | None], length: int) -> float | None:
        assert self.main is not None
        assert self.max_length is not None
        main = scores[self.main]
        if main is None:
            return None
        first, second = self.right if main > 0 else self.wrong
        progress = min(length, self.max_length) / self.max_length
        return first + (second - first) * 0.5 * (1.0 - math.cos(math.pi * progress))
