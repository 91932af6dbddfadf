"""Questions to ask rewards before training: do right answers pay, and does anything else pay as well?

A right completion is not known, only the gold answer. So golds are put into the usual forms of a final answer, and the
form that pays best is taken as what the rewards want. Everything here is pure: how texts are scored is passed in.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Status = Literal["ok", "warn", "fail"]
# (completions) -> K lists of rewards, one per row; None where a reward has no score.
ScoreTexts = Callable[[Sequence[str]], list[list[float | None]]]

_THINK = "<think>\nLet me work it out step by step.\n</think>\n"
FORMS = {
    "bare": "{answer}",
    "boxed": "The final answer is $\\boxed{{{answer}}}$.",
    "hashes": "The answer follows.\n#### {answer}",
    "sentence": "The answer is {answer}.",
    "tag": "<answer>{answer}</answer>",
    "code": "```python\n{answer}\n```",
    "think and bare": _THINK + "{answer}",
    "think and boxed": _THINK + "The final answer is $\\boxed{{{answer}}}$.",
    "think and tag": _THINK + "<answer>{answer}</answer>",
}
_TOLERANCE = 1e-6
_FEW = 0.1  # share of rows up to which "another row's answer pays too" may be an accident of the data
_MAX_LISTED = 8


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        check: what was asked: "gold", "empty", "prompt", "wrong", "hedged", "reasoning", "constant", "unparseable",
            "failures", "same gold", "leak".
        reward: name of the reward, or "total" for the weighted sum.
        status: "ok", "warn" (worth a look) or "fail" (training on this would learn the wrong thing or nothing).
        message: one sentence.
        rows: numbers of the rows concerned, counted from 1.
    """

    check: str
    reward: str
    status: Status
    message: str
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Probe:
    """What the rewards are asked about.

    Attributes:
        prompts: text of the prompt of each row; what a copying model would answer.
        golds: gold answer of each row; None where there is none.
        names: K reward names.
        weights: K weights.
        compares: names of the rewards that compare with these golds.
        declared: those of them that say so; of the others it was found out.
        forms: {name: template with ``{answer}``}.
    """

    prompts: Sequence[str]
    golds: Sequence[str | None]
    names: Sequence[str]
    weights: Sequence[float]
    compares: frozenset[str]
    declared: frozenset[str] = frozenset()
    forms: Mapping[str, str] = field(default_factory=lambda: dict(FORMS))

    @property
    def with_gold(self) -> list[int]:
        """The rows that have a gold answer."""
        return [row for row, gold in enumerate(self.golds) if gold is not None and gold.strip()]


def probe_rewards(
    probe: Probe, score: ScoreTexts, sources: Sequence[str] | None = None
) -> tuple[list[Finding], dict[str, str]]:
    """Return what was found out, and {reward: the form of answer that it pays best}.

    Args:
        probe: rows and rewards.
        score: scores one completion per row, under every reward.
        sources: names of rewards, or "total" for the weighted sum, to ask about; None asks about all.
    """
    if sources is None:
        sources = [*probe.names, "total"] if len(probe.names) > 1 else probe.names
    gold_scores = {
        form: _by_source(probe, score([_fill(template, gold) for gold in probe.golds]))
        for form, template in probe.forms.items()
    }
    cheap = {
        "empty": _by_source(probe, score([""] * len(probe.prompts))),
        "prompt": _by_source(probe, score(list(probe.prompts))),
    }
    findings: list[Finding] = []
    best: dict[str, str] = {}
    for source in sources:
        if not probe.with_gold or not probe.compares or source not in {*probe.compares, "total"}:
            continue
        best[source] = max(probe.forms, key=lambda form: _mean(gold_scores[form][source], probe.with_gold))
    hopeless: set[str] = set()
    for source in sources:
        everything = [
            *(scores[source] for scores in gold_scores.values()),
            *(scores[source] for scores in cheap.values()),
        ]
        constant = _constant(source, everything, probe)
        if constant is not None:
            findings.append(constant)
            hopeless.add(source)
            continue
        if source not in best:
            findings += _without_gold(source, cheap, gold_scores, whole_aim=source == "total" or len(probe.names) == 1)
            continue
        golds = gold_scores[best[source]][source]
        findings += _golds_pay(source, best[source], golds, gold_scores, probe)
        for check, words in (("empty", "an empty answer"), ("prompt", "a copy of the prompt")):
            findings.append(_pays_less(check, source, words, golds, cheap[check][source], probe.with_gold))
    # The remaining questions depend on the form, so rewards that want the same form share the calls.
    for form in dict.fromkeys(best.values()):
        wanted = [source for source, chosen in best.items() if chosen == form and source not in hopeless]
        if wanted:
            findings += _hacks(probe, score, probe.forms[form], gold_scores[form], wanted)
    idle = {name for name, weight in zip(probe.names, probe.weights, strict=True) if weight == 0}
    findings = [_as_warning(finding) if finding.reward in idle else finding for finding in findings]
    return [*findings, *look_at_golds(probe)], best


def _as_warning(finding: Finding) -> Finding:
    """Return the finding on a reward of weight 0, which only watches, as a warning at most."""
    return finding._replace(status="warn") if finding.status == "fail" else finding


def look_at_golds(probe: Probe) -> list[Finding]:
    """Return what the gold answers alone give away: all the same, or written in the prompt."""
    rows = probe.with_gold
    findings = []
    if probe.compares and len(rows) < len(probe.golds):
        without = [row for row in range(len(probe.golds)) if row not in rows]
        message = f"{len(without)} of {len(probe.golds)} rows have no gold answer; they are never rewarded"
        status: Status = "fail" if not rows else "warn"
        findings.append(Finding("gold", "data", status, message, _numbers(without)))
    if len(rows) > 3 and len({probe.golds[row] for row in rows}) == 1:
        message = f"every row has the gold answer {_short(probe.golds[rows[0]])}; is this the right column?"
        findings.append(Finding("same gold", "data", "fail", message))
    numbers = [int(str(probe.golds[row])) for row in rows if re.fullmatch(r"\d{1,15}", str(probe.golds[row]))]
    if len(numbers) == len(rows) >= 8 and all(before < after for before, after in itertools.pairwise(numbers)):
        message = "the gold answers count up from row to row like row numbers; is this the right column?"
        findings.append(Finding("same gold", "data", "warn", message))
    told = [row for row in rows if len(str(probe.golds[row])) >= 4 and str(probe.golds[row]) in probe.prompts[row]]
    if rows and len(told) > len(rows) / 2:
        message = f"{len(told)} of {len(rows)} prompts contain their gold answer word for word"
        findings.append(Finding("leak", "data", "warn", message, _numbers(told)))
    return findings


def wrong_answer(row: int, golds: Sequence[str | None]) -> str:
    """Return an answer that is wrong for the row: one more if the gold is a number, else another row's gold."""
    gold = str(golds[row]).strip()
    if re.fullmatch(r"[+-]?\d{1,15}", gold):
        return str(int(gold) + 1)
    if re.fullmatch(r"[+-]?\d{1,15}\.\d{1,15}", gold):
        return str(float(gold) + 1)
    others = itertools.chain(golds[row + 1 :], golds[:row])
    return next((other for other in others if other is not None and other.strip() != gold), "none of these")


def _hacks(
    probe: Probe, score: ScoreTexts, template: str, gold_scores: Mapping[str, list[float | None]], wanted: Sequence[str]
) -> list[Finding]:
    """Ask whether wrong, hedged and hidden answers pay in the form that right ones are given in."""
    golds = [gold if gold is not None else "" for gold in probe.golds]
    wrongs = [wrong_answer(row, probe.golds) for row in range(len(golds))]
    further = [wrong_answer(0, [wrong, *golds]) for wrong in wrongs]
    pairs = list(zip(golds, wrongs, further, strict=True))
    hidden = re.sub(r"<think>.*?</think>\n?", "", template, flags=re.DOTALL)
    questions: list[tuple[str, str, Status, list[list[str]]]] = [
        ("wrong", "a wrong answer", "fail", [[_fill(template, wrong) for wrong in wrongs]]),
        (
            "hedged",
            "a list of several answers",
            "fail",
            [
                [_fill(template, " or ".join(answers)) for answers in pairs],
                [_fill(template, ", ".join(answers)) for answers in pairs],
                [" ".join(_fill(template, answer) for answer in answers) for answers in pairs],
            ],
        ),
        (
            "reasoning",
            "an answer that only the reasoning contains",
            "warn",
            [
                [f"<think>\n{_fill(hidden, gold)}\n</think>\nI do not know." for gold in golds],
                [f"<think>\n{_fill(hidden, gold)}" for gold in golds],
            ],
        ),
    ]
    findings = []
    for check, words, status, variants in questions:
        answers = [_by_source(probe, score(texts)) for texts in variants]
        for source in wanted:
            worst = [_largest([scores[source][row] for scores in answers]) for row in range(len(golds))]
            findings.append(_pays_less(check, source, words, gold_scores[source], worst, probe.with_gold, status))
    return findings


def _golds_pay(
    source: str,
    form: str,
    golds: Sequence[float | None],
    gold_scores: Mapping[str, Mapping[str, list[float | None]]],
    probe: Probe,
) -> list[Finding]:
    """Ask whether every gold answer gets full marks in the best form."""
    rows = probe.with_gold
    unusable = [row for row in rows if all(scores[source][row] is None for scores in gold_scores.values())]
    findings = []
    if unusable and source != "total":
        findings.append(_unparseable(source, unusable, probe))
    judged = [row for row in rows if row not in unusable]
    full = _largest([golds[row] for row in judged])
    if full is None:
        return findings
    poor = [row for row in judged if (score := golds[row]) is None or score < full - _TOLERANCE * max(1.0, abs(full))]
    if not poor:
        message = f"every gold answer gets {full:g} (form: {form})"
        return [*findings, Finding("gold", source, "ok", message)]
    if source == "total":  # parts such as a length reward differ from row to row; being ahead is what counts
        return findings
    example = _short(probe.golds[poor[0]])
    message = (
        f"{len(poor)} of {len(judged)} gold answers get less than full marks ({full:g}) in every form tried "
        f"(best: {form}), for example {example} gets {_number(golds[poor[0]])}; is this the right gold column?"
    )
    return [*findings, Finding("gold", source, "fail", message, _numbers(poor))]


def _unparseable(source: str, unusable: Sequence[int], probe: Probe) -> Finding:
    share = len(unusable) / len(probe.with_gold)
    message = (
        f"{len(unusable)} of {len(probe.with_gold)} gold answers ({share:.0%}) cannot be judged, for example "
        f"{_short(probe.golds[unusable[0]])}; such rows are never rewarded"
    )
    return Finding("unparseable", source, "fail" if share > _FEW else "warn", message, _numbers(unusable))


def _pays_less(
    check: str,
    source: str,
    words: str,
    golds: Sequence[float | None],
    scores: Sequence[float | None],
    rows: Sequence[int],
    status: Status = "fail",
) -> Finding:
    """Ask whether something that is not right is paid less than the gold answer, row by row."""
    paid = [
        row
        for row in rows
        if (score := scores[row]) is not None and (gold := golds[row]) is not None and score >= gold - _TOLERANCE
    ]
    if not paid:
        return Finding(check, source, "ok", f"{words} is paid less than the gold answer")
    row = paid[0]
    message = (
        f"{words} is paid as much as the gold answer on {len(paid)} of {len(rows)} rows "
        f"(row {row + 1}: {_number(scores[row])} against {_number(golds[row])})"
    )
    # Two rows may have the same answer in different words, so a few such rows prove nothing.
    if check == "wrong" and len(paid) <= _FEW * len(rows):
        status = "warn"
    return Finding(check, source, status, message, _numbers(paid))


def _without_gold(
    source: str,
    cheap: Mapping[str, Mapping[str, list[float | None]]],
    gold_scores: Mapping[str, Mapping[str, list[float | None]]],
    *,
    whole_aim: bool,
) -> list[Finding]:
    """Ask a reward without a gold answer whether saying nothing is the best one can do."""
    others = [score for scores in gold_scores.values() for score in scores[source] if score is not None]
    empties = [score for score in cheap["empty"][source] if score is not None]
    if not others or not empties:
        return []
    if min(empties) >= max(others) - _TOLERANCE:
        message = f"no text tried is paid more than an empty one ({_number(min(empties))})"
        # A penalty is highest for saying nothing; beside another reward that is fine, alone it is the whole aim.
        return [Finding("empty", source, "fail" if whole_aim else "warn", message)]
    return [Finding("empty", source, "ok", "an empty answer is not the best one")]


def _constant(source: str, everything: Sequence[Sequence[float | None]], probe: Probe) -> Finding | None:
    """Return a finding if all texts got the same score or none.

    A reward that nothing satisfied may want a form that was not tried; that is no proof of a mistake, unless it is a
    verifier that says which column holds its gold answers.
    """
    seen = {score for scores in everything for score in scores if score is not None}
    surely = source in probe.declared or (source == "total" and bool(probe.declared))
    unknown: Status = "fail" if surely else "warn"
    hint = "; name the form of a right completion with --form, or the column of right ones with --gold"
    if not seen and source in probe.declared and probe.with_gold:
        return _unparseable(source, probe.with_gold, probe)
    if not seen:
        return Finding("constant", source, unknown, "no text tried got a score" + hint)
    if max(seen) - min(seen) > _TOLERANCE:
        return None
    if max(seen) <= 0:
        return Finding("constant", source, unknown, f"no text tried got more than {max(seen):g}" + hint)
    return Finding("constant", source, "fail", f"every text tried got {max(seen):g}, so there is nothing to learn from")


def _by_source(probe: Probe, rewards: Sequence[Sequence[float | None]]) -> dict[str, list[float | None]]:
    """Return {reward: scores by row}, with the weighted sum as "total"."""
    result = {name: list(scores) for name, scores in zip(probe.names, rewards, strict=True)}
    total: list[float | None] = []
    for row in range(len(probe.prompts)):
        parts = [
            weight * score
            for weight, scores in zip(probe.weights, rewards, strict=True)
            if (score := scores[row]) is not None
        ]
        total.append(math.fsum(parts) if parts else None)
    return {**result, "total": total}


def _fill(template: str, answer: str | None) -> str:
    return template.format(answer="" if answer is None else answer)


def _mean(scores: Sequence[float | None], rows: Sequence[int]) -> float:
    found = [score for row in rows if (score := scores[row]) is not None]
    return math.fsum(found) / len(rows) if found else -math.inf


def _largest(scores: Sequence[float | None]) -> float | None:
    return max((score for score in scores if score is not None), default=None)


def _numbers(rows: Sequence[int]) -> tuple[int, ...]:
    return tuple(row + 1 for row in rows)


def _number(value: float | None) -> str:
    return "no score" if value is None else f"{value:g}"


def _short(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else shown[:57] + "...'"
