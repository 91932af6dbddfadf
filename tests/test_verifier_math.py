"""The ``math`` verifier: the shared table, our own pairs, the field cases, and properties that hold for any number."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import pickle
import threading
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.registry import build_rewards
from trl_grpo_ext.rewards.verifiers.math import math

CASES = Path(__file__).parent / "cases"


def load(name):
    return [json.loads(line) for line in (CASES / name).read_text(encoding="utf-8").splitlines()]


TABLE = load("math_cases.jsonl")
PAIRS = load("math_pairs.jsonl")


def right(gold, answer, **options):
    """Return True, False or None (no score) for one completion."""
    # A long deadline: the default of 2 s could be missed on a machine that runs other things as well.
    score = math(**{"timeout_s": 60.0, **options}).judge(answer, gold).score
    assert score in (None, 0.0, 1.0)
    return None if score is None else score == 1.0


def boxed(answer):
    return f"So the answer is $\\boxed{{{answer}}}$."


# -- tables ----------------------------------------------------------------------------------------------------------


def test_shared_table_has_no_false_accept_and_at_least_97_percent_of_its_core_rows_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verdicts = [right(row["gold"], row["answer"]) for row in TABLE]
    core = [(row, got) for row, got in zip(TABLE, verdicts, strict=True) if "[policy]" not in row["note"]]
    assert [row["note"] for row, got in core if got and row["expected"] is not True] == []
    num_right = sum(got == row["expected"] for row, got in core)
    assert num_right >= 0.97 * len(core), [row["note"] for row, got in core if got != row["expected"]]
    assert list(tmp_path.iterdir()) == []  # hostile rows would have left a file


def test_shared_table_rows_that_are_matters_of_taste_come_out_as_the_defaults_are_documented():
    policy = [row for row in TABLE if "[policy]" in row["note"]]
    assert [row["note"] for row in policy if right(row["gold"], row["answer"]) != row["expected"]] == []


@pytest.mark.parametrize(
    ("row", "options"),
    [
        (r"fraction: three decimals is not exact", {"tolerance": 2e-3}),
        (r"fraction: nine decimals is close enough", {"tolerance": 1e-12}),
        (r"interval: inequality chain for interval", {"intervals_as_inequalities": False}),
        (r"inequality: interval for inequality", {"intervals_as_inequalities": False}),
        (r"inequality: chain as interval", {"intervals_as_inequalities": False}),
        (r"equation: rearranged", {"rearranged_equations": False}),
        (r"extraction: answer tag", {"extract": ["boxed"]}),
        (r"extraction: markdown", {"extract": ["boxed"]}),
        (r"boxes: last box cut off after an earlier right one", {"unclosed": "previous"}),
        (r"pi: nine decimals", {"tolerance": 0.0}),
        (r"float: rounded away", {"decimal_tolerance": 1e-5}),
    ],
)
def test_an_option_turns_each_matter_of_taste_around(row, options):
    (case,) = [case for case in TABLE if case["note"] == f"{row} [policy]"]
    assert right(case["gold"], case["answer"]) is case["expected"]
    assert right(case["gold"], case["answer"], **options) is not case["expected"]


@pytest.mark.parametrize("row", PAIRS, ids=[f"{index}-{row['note']}" for index, row in enumerate(PAIRS)])
def test_own_pair(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert right(row["gold"], row["answer"], **row.get("options", {})) is row["expected"]
    assert list(tmp_path.iterdir()) == []


def test_there_are_enough_own_pairs_of_both_kinds():
    assert len(PAIRS) >= 150
    assert sum(row["expected"] is True for row in PAIRS) >= 75
    assert sum(row["expected"] is False for row in PAIRS) >= 75


# -- field cases -------------------------------------------------------------------------------------------------------

FIELD_CASE_20 = [
    ("0.5", r"\boxed{\frac{1}{2}}"),
    ("42", r"\fbox{42}"),
    ("73", "We have 12 and 61, together\n\n**73**"),
    ("840", r"It is \boxed{840}. So the answer is \boxed{840}."),
    ("4", r"\boxed{004}"),
    ("13", r"\boxed{\text{13}}"),
    (r"\text{13}", r"\boxed{13}"),
    (r"\dfrac{9}{7}", r"\boxed{\frac{9}{7}}"),
    (r"\frac97", r"\dfrac{9}{7}"),
    (r"\left(3,\frac{\pi}{2}\right)", r"\boxed{\left(3, \frac{\pi}{2}\right)}"),
    (r"7.41\%", r"\boxed{7.41\%}"),
    ("1234", r"\boxed{$1,234.00}"),
    ("29", "The answer is $29.00."),
    ("42", "The answer is 42 km."),
    ("42", "The answer is 42."),
    ("42", "#### 42\n" + "I hope this explanation was helpful to you. " * 9),
    ("42", "She starts with 50 and gives away 8. So she has 42 apples left."),
    ("42", "Adding both, we find that the answer is 42"),
    ("E", r"\boxed{\text{E}}"),
    ("E", r"\boxed{E: some option text}"),
    ("7", r"First I thought \boxed{5}. That is wrong; the correct value is \boxed{7}."),
    ("7", r"<answer>\boxed{7}</answer>"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("{1,2}", r"\boxed{2, 1}"),
    ("1234", r"\boxed{1,234}"),
    ("(1,234)", r"\boxed{(1,234)}"),
    ("(1,234)", r"\boxed{1, 234}"),
]


@pytest.mark.parametrize(("gold", "answer"), FIELD_CASE_20)
def test_field_case_20_right_answers_in_all_their_forms(gold, answer):
    assert right(gold, answer) is True


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("840840", r"\boxed{840} and again \boxed{840}"),
        (r"\left(3,\frac{\pi}{2}\right)", r"\boxed{\left(3, \frac{2\pi}{3}\right)}"),
        ("(1,234)", r"\boxed{1,234}"),
        ("1234", r"\boxed{(1,234)}"),
        ("1234", r"\boxed{1, 234}"),
        ("5", r"First I thought \boxed{5}. That is wrong; the correct value is \boxed{7}."),
    ],
)
def test_field_case_20_and_their_wrong_neighbours(gold, answer):
    assert right(gold, answer) is False


CALLER_PAIRS = [
    *FIELD_CASE_20[:14],
    (r"7.41\%", r"\boxed{7.42\%}"),
    ("55", r"\boxed{\sum_{k=1}^{10} k}"),
    ("56", r"\boxed{\sum_{k=1}^{10} k}"),
    (r"\frac{1}{2}", r"\boxed{\int_0^1 x\,dx}"),
    (r"\sqrt{12}", r"\boxed{2\sqrt{3}}"),
    (r"\frac{1}{", r"\boxed{1}"),
    ("5", r"\boxed{9^{9^{9^{9}}}}"),
    ("5", r"\boxed{" + "x+" * 25_000 + "1}"),
    ("5", r"\boxed{" + "{" * 2000 + "5" + "}" * 2000 + "}"),
]


def test_field_case_22_the_verdicts_are_the_same_from_four_kinds_of_callers():
    reward = math(timeout_s=60.0)
    golds, answers = [gold for gold, _ in CALLER_PAIRS], [answer for _, answer in CALLER_PAIRS]

    def score():
        return reward(completions=answers, answer=golds)

    from_main = score()
    assert from_main[:14] == [1.0] * 14
    assert from_main[14:] == [0.0, 1.0, 0.0, 1.0, 1.0, None, 0.0, 0.0, 0.0]

    from_thread: list = []
    thread = threading.Thread(target=lambda: from_thread.extend(score()))
    thread.start()
    thread.join()
    assert from_thread == from_main

    async def in_loop():
        direct = score()
        return direct, await asyncio.to_thread(score)

    assert asyncio.run(in_loop()) == (from_main, from_main)

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        from_spawned = pool.apply(pickle.loads(pickle.dumps(reward)), (), {"completions": answers, "answer": golds})
    assert from_spawned == from_main


def test_a_deadline_is_no_wrong_answer_and_the_next_call_works():
    slow = r"\boxed{\sum_{n=1}^{\infty} \frac{1}{n^2}}"
    verdict = math(timeout_s=0.02).judge(slow, r"\frac{\pi^2}{6}")
    assert (verdict.score, verdict.reason) == (0.0, "timeout")
    assert right("55", r"\boxed{\sum_{k=1}^{10} k}", timeout_s=60.0) is True


def test_without_the_symbolic_stage_an_unread_answer_is_named_as_such():
    verdict = math(symbolic=False).judge(r"\boxed{\int_0^1 x\,dx}", r"\frac{1}{2}")
    assert (verdict.score, verdict.reason) == (0.0, "unreadable")


# -- golds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gold", ["", "  ", r"\frac{1}{", r"\boxed{", r"\frac{0}{0}", "one two three four " * 5, []])
def test_an_unusable_gold_gives_no_score_and_says_so(gold):
    verdict = math().judge(r"\boxed{7}", gold)
    assert (verdict.score, verdict.reason) == (None, "gold_unusable")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [(7, "7"), (0.5, r"\frac12"), (Fraction(1, 3), "1/3"), (-3, "-3"), (True, "True"), (1e-7, "1e-7")],
)
def test_golds_need_not_be_text(gold, answer):
    assert right(gold, boxed(answer)) is True


def test_a_list_of_golds_means_all_of_them_or_any_of_them():
    assert right(["3", "7"], boxed("7, 3")) is True
    assert right(["3", "7"], boxed("7")) is False
    assert right(["3", "7"], boxed("7"), several_golds="any") is True
    assert right(["3", "7"], boxed("8"), several_golds="any") is False


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("She has 3+4=7 apples.\n#### 7", "7"), (r"We get $x=\boxed{\frac{1}{2}}$.", "0.5"), ("<answer>B</answer>", "B")],
)
def test_a_worked_solution_is_read_as_the_answer_it_marks(gold, answer):
    assert right(gold, boxed(answer)) is True
    assert right(gold, boxed("9")) is False


# -- hedging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        boxed("5 \\text{ or } 7"),
        boxed("5, 7"),
        boxed("\\{5, 7\\}"),
        r"\boxed{5} \boxed{7}",
        r"\boxed{5}, \boxed{7}",
        r"\boxed{5} or \boxed{7}",
        "<answer>5</answer><answer>7</answer>",
        "The answer is 5. The answer is 7.",
        "The answer is 5 or 7.",
        "The answer is either 5 or 7.",
        r"\boxed{5} #### 7",
        r"\boxed{7} and then <answer>5</answer>",
        "5 7",
        "5, 7",
        "7 (or 5)",
        boxed("7 \\text{ (or 5)}"),
        boxed("\\pm 7"),
        boxed("7?5"),
        " ".join(map(str, range(100))),
        "".join(f"\\boxed{{{number}}}" for number in range(10)),
    ],
)
@pytest.mark.parametrize("gold", ["5", "7"])
def test_several_different_answers_are_wrong(answer, gold):
    assert right(gold, answer) is False


@pytest.mark.parametrize(
    "junk", ["", " ", "?", "nan", "inf", "None", "\\", "{", "}", "$$", "...", "I do not know", "x", "\x00", "\ud800"]
)
@pytest.mark.parametrize("gold", ["5", r"\frac{1}{2}", "x+1", "(1,2)", r"\{1,2\}", "Tuesday", "B", "[0,1]", "x>3"])
def test_junk_is_wrong(junk, gold):
    assert right(gold, boxed(junk)) is False
    assert right(gold, junk) is False


# -- properties --------------------------------------------------------------------------------------------------------

FORMS = (
    r"\boxed{%s}",
    "The answer is %s.",
    "**Answer: %s**",
    "<answer>%s</answer>",
    "Some steps.\n#### %s",
    "<think>hm, 12345</think>So the final answer is $%s$.",
    "%s",
)


@settings(deadline=None)
@given(st.integers(-(10**40), 10**40), st.sampled_from(FORMS))
def test_an_integer_in_any_form_is_right_and_any_other_integer_wrong(value, form):
    assert right(str(value), form % value) is True
    assert right(str(value), form % f"{value:,}") is True
    assert right(str(value), form % (value + 1)) is False
    assert right(str(value), form % -(value or 1)) is False


@settings(deadline=None)
@given(st.integers(-999, 999), st.integers(1, 999))
def test_a_fraction_is_right_however_it_is_written(top, bottom):
    value = Fraction(top, bottom)
    for form in (f"\\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", str(value), f"\\dfrac{{{-top}}}{{{-bottom}}}"):
        assert right(str(value), boxed(form)) is True
        assert right(form, boxed(str(value))) is True
    assert right(str(value), boxed(f"\\frac{{{top + 1}}}{{{bottom}}}")) is False
    assert right(str(value), boxed(f"\\frac{{{bottom}}}{{{top}}}" if top else "1")) is (value in (1, -1))


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**5), max_value=10**5))
def test_a_decimal_is_right_with_zeros_added_and_wrong_in_another_last_digit(value):
    assert right(str(value), boxed(f"{value}000")) is True
    assert right(str(value), boxed(str(value + value.__class__("0.000001")))) is False


@settings(deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6, unique=True), st.randoms(use_true_random=False))
def test_sets_ignore_order_and_tuples_do_not(items, random):
    shuffled = random.sample(items, len(items))
    listed, mixed = (", ".join(map(str, side)) for side in (items, shuffled))
    assert right(f"\\{{{listed}\\}}", boxed(f"\\{{{mixed}\\}}")) is True
    assert right(f"\\{{{listed}\\}}", boxed(mixed)) is True
    assert right(f"({listed})", boxed(f"({mixed})")) is (items == shuffled)
    assert right(listed, boxed(", ".join(map(str, items[:-1])))) is False
    assert right(listed, boxed(f"{listed}, 99")) is False


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=5), st.integers(1, 9))
def test_a_polynomial_equals_its_shuffle_and_not_its_neighbour(coefficients, shift):
    terms = [f"({value})x^{{{power}}}" for power, value in enumerate(coefficients)]
    gold, shuffled = " + ".join(terms), " + ".join(reversed(terms))
    assert right(gold, boxed(shuffled)) is True
    assert right(gold, boxed(f"{gold} + {shift}")) is False


@settings(deadline=None)
@given(st.text(max_size=200))
def test_no_text_raises_and_no_text_earns_a_number_it_does_not_hold(text):
    assert right("918273645", text.replace("9", "")) is not True
    assert right("918273645", boxed(text.replace("9", ""))) is not True


# -- the reward --------------------------------------------------------------------------------------------------------


def test_recipe_options_and_conversations():
    (reward,) = build_rewards([{"math": {"tolerance": 1e-2, "percent": "strict", "reference": "solution"}}]).functions
    completions = [[{"role": "assistant", "content": boxed("0.333")}], [{"role": "assistant", "content": boxed("1")}]]
    assert reward(completions=completions, solution=["1/3", "1/3"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extract": ["boxd"]}, "Did you mean 'boxed'"),
        ({"extract": []}, "empty"),
        ({"tolerance": -1.0}, "between 0 and 1"),
        ({"percent": "maybe"}, "'either', 'strict', 'ignore'"),
        ({"think_tags": ["<think>"]}, "opening and the closing"),
        ({"tolerence": 1.0}, "Did you mean 'tolerance'"),
    ],
)
def test_bad_options_are_refused_with_the_way_out(options, message):
    with pytest.raises(ConfigurationError, match=message):
        math(**options)
