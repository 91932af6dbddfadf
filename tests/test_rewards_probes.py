"""Questions to ask rewards before training."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trl_grpo_ext.rewards.probes import FORMS, Finding, Probe, look_at_golds, probe_rewards, wrong_answer

GOLDS = [str(number) for number in (12, 7, 33, 5, 81, 64, 20, 9)]
PROMPTS = [f"What is question {number}?" for number in "abcdefgh"]


def ask(
    *rewards: Callable[[str, str], float | None],
    golds: Sequence[str | None] = GOLDS,
    weights: Sequence[float] | None = None,
    prompts: Sequence[str] = PROMPTS,
    compares: Sequence[int] | None = None,
) -> tuple[dict[tuple[str, str], Finding], dict[str, str]]:
    """Return {(check, reward): finding} and the best forms for rewards (text, gold) -> score."""
    names = [f"r{number}" for number in range(len(rewards))]
    chosen = range(len(rewards)) if compares is None else compares
    compared = frozenset(names[number] for number in chosen)
    probe = Probe(prompts, golds, names, weights or [1.0] * len(rewards), compares=compared, declared=compared)

    def score(texts: Sequence[str]) -> list[list[float | None]]:
        return [[reward(text, gold or "") for text, gold in zip(texts, golds, strict=True)] for reward in rewards]

    findings, best = probe_rewards(probe, score)
    assert len({(finding.check, finding.reward) for finding in findings}) == len(findings)
    return {(finding.check, finding.reward): finding for finding in findings}, best


def boxed(text: str, gold: str) -> float:
    found = re.findall(r"\\boxed\{([^}]*)\}", text.rsplit("</think>", 1)[-1])
    return float(bool(found) and found[-1] == gold and "<think>" not in text.rsplit("</think>", 1)[-1])


def anywhere(text: str, gold: str) -> float:
    return float(gold in text)


def test_a_good_reward_passes_everything() -> None:
    findings, best = ask(boxed)
    assert {finding.status for finding in findings.values()} == {"ok"}
    assert {check for check, _ in findings} == {"gold", "empty", "prompt", "wrong", "hedged", "reasoning"}
    assert best == {"r0": "boxed"}


@pytest.mark.parametrize(
    ("reward", "check", "status", "words"),
    [
        (anywhere, "hedged", "fail", "several answers is paid as much as the gold answer on 8 of 8 rows"),
        (anywhere, "reasoning", "warn", "only the reasoning contains"),
        (lambda text, gold: 1.0 if not text else boxed(text, gold), "empty", "fail", "an empty answer is paid as much"),
        (lambda text, gold: float("question" in text) or boxed(text, gold), "prompt", "fail", "a copy of the prompt"),
        (lambda text, gold: float("boxed" in text and "<" not in text), "wrong", "fail", "a wrong answer is paid"),
        (lambda text, gold: 1.0, "constant", "fail", "every text tried got 1"),
        (lambda text, gold: 0.0, "constant", "fail", "no text tried got more than 0"),
        (lambda text, gold: None, "unparseable", "fail", "8 of 8"),
        (lambda text, gold: boxed(text, gold) * (0.5 if gold == "33" else 1), "gold", "fail", "'33' gets 0.5"),
        (lambda text, gold: None if gold in ("5", "7") else boxed(text, gold), "unparseable", "fail", "2 of 8"),
    ],
)
def test_each_mistake_is_found(reward: Any, check: str, status: str, words: str) -> None:
    findings, _ = ask(reward)
    finding = findings[check, "r0"]
    assert finding.status == status
    assert words in finding.message


def test_rows_are_named() -> None:
    findings, _ = ask(lambda text, gold: None if gold in ("5", "7") else boxed(text, gold))
    assert findings["unparseable", "r0"].rows == (2, 4)


def test_the_total_counts_with_its_weights() -> None:
    def brief(text: str, gold: str) -> float:
        return float(len(text) < 5)

    findings, _ = ask(boxed, brief, weights=[1.0, 2.0], compares=[0])
    # Saying nothing gets 0 + 2, the boxed answer 1 + 0; a bare answer 0 + 2 is the best form of the total.
    assert findings["empty", "total"].status == "fail"
    assert findings["empty", "r0"].status == "ok"
    assert findings["empty", "r1"].status == "warn"  # a part may prefer silence, the whole may not
    findings, _ = ask(boxed, brief, weights=[1.0, 0.5], compares=[0])
    assert findings["empty", "total"].status == "ok"


def test_a_reward_that_only_watches_cannot_fail_the_check() -> None:
    findings, _ = ask(boxed, anywhere, weights=[1.0, 0.0])
    assert findings["hedged", "r1"].status == "warn"
    assert findings["hedged", "total"].status == "ok"


def test_a_reward_without_gold_must_not_prefer_silence_alone() -> None:
    findings, _ = ask(lambda text, gold: -float(len(text)), compares=[])
    assert findings["empty", "r0"].status == "fail"
    findings, _ = ask(lambda text, gold: float(len(text)), compares=[])
    assert findings["empty", "r0"].status == "ok"


def test_a_form_that_was_not_tried_is_no_proof() -> None:
    names = ["custom"]
    probe = Probe(PROMPTS, GOLDS, names, [1.0], compares=frozenset(names))
    findings, _ = probe_rewards(probe, lambda texts: [[0.0] * len(texts)])
    assert [(finding.check, finding.status) for finding in findings] == [("constant", "warn")]
    assert "--form" in findings[0].message
    probe = Probe(PROMPTS, GOLDS, names, [1.0], compares=frozenset(names), forms={**FORMS, "own 1": "ANSWER={answer};"})
    findings, best = probe_rewards(
        probe, lambda texts: [[float(text == f"ANSWER={gold};") for text, gold in zip(texts, GOLDS, strict=True)]]
    )
    assert best == {"custom": "own 1"}
    assert {finding.status for finding in findings} == {"ok"}


@pytest.mark.parametrize(
    ("golds", "prompts", "check", "status"),
    [
        (["3"] * 8, PROMPTS, "same gold", "fail"),
        ([str(number) for number in range(8)], PROMPTS, "same gold", "warn"),
        ([None] * 8, PROMPTS, "gold", "fail"),
        (["7", None, "5", "", "2", "9", "1", "3"], PROMPTS, "gold", "warn"),
        (["Paris", "London"] * 4, ["Is it Paris or London?"] * 8, "leak", "warn"),
    ],
)
def test_golds_are_looked_at(golds: Any, prompts: Any, check: str, status: str) -> None:
    probe = Probe(prompts, golds, ["r0"], [1.0], compares=frozenset(["r0"]))
    assert [(finding.check, finding.status) for finding in look_at_golds(probe)] == [(check, status)]


def test_usual_golds_are_not_suspicious() -> None:
    assert look_at_golds(Probe(PROMPTS, GOLDS, ["r0"], [1.0], compares=frozenset(["r0"]))) == []


@pytest.mark.parametrize(
    ("golds", "wrong"),
    [
        (["12", "3"], "13"),
        (["-1", "3"], "0"),
        (["0.5", "3"], "1.5"),
        (["A", "A", "B"], "B"),
        (["A", None], "none of these"),
    ],
)
def test_wrong_answers_are_wrong(golds: Any, wrong: str) -> None:
    assert wrong_answer(0, golds) == wrong
