"""``reasoning_gym``: its scorers, fenced in; and the ``math`` verifier on its golds."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("reasoning_gym")

import reasoning_gym as library

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifiers.math import math
from trl_grpo_ext.rewards.verifiers.reasoning_gym import GUARDED, REFUSED, SCREENED, admissible, reasoning_gym, refusal

SLOW = {"timeout_s": 60.0}


def rows(task, size=3, seed=5):
    return [dict(entry) for entry in library.create_dataset(task, size=size, seed=seed)]


def judge(entry, answer, **options):
    reward = reasoning_gym(**{**SLOW, **options})
    metadata = json.dumps(entry["metadata"], default=str)
    return reward.judge(answer, entry["answer"], metadata=metadata, question=entry["question"])


@pytest.mark.parametrize(
    "task",
    [
        "basic_arithmetic", "chain_sum", "fraction_simplification", "prime_factorization", "caesar_cipher",
        "simple_equations", "mini_sudoku", "knights_knaves", "countdown", "puzzle24", "spiral_matrix", "n_queens",
        "binary_matrix", "string_insertion", "polynomial_multiplication", "simple_integration", "word_sorting",
    ],
)  # fmt: skip
def test_the_own_answer_scores_one_and_nonsense_nothing(task):
    for entry in rows(task):
        for scoring in ("graded", "full_marks"):
            assert judge(entry, f"<think>hm</think><answer>{entry['answer']}</answer>", scoring=scoring).score == 1.0
            for nonsense in ("I do not know", "zzqx", "<answer></answer>", "<answer>?</answer>"):
                assert judge(entry, nonsense, scoring=scoring).score == 0.0


def test_an_answer_in_the_reasoning_does_not_count():
    (entry,) = rows("chain_sum", 1)
    assert judge(entry, f"<think><answer>{entry['answer']}</answer></think>").score == 0.0
    assert judge(entry, f"<think>{entry['answer']}").reason == "unfinished_reasoning"


@pytest.mark.parametrize("task", ["lcm", "chain_sum", "leg_counting"])
def test_a_number_that_only_holds_the_right_digits_pays_nothing_by_default(task):
    for entry in rows(task):
        for wrong in (f"-{entry['answer']}", f"{entry['answer']}0", f"{entry['answer']} or 5"):
            assert judge(entry, f"<answer>{wrong}</answer>").score == 0.0


ATTACKS = [
    "__import__('os').system('touch GYMRANCODE')",
    "open('GYMRANCODE','w')",
    "[open('GYMRANCODE','w')]",
    "[1, open('GYMRANCODE','w')]",
    "(lambda: open('GYMRANCODE','w'))()",
    "1 if open('GYMRANCODE','w') else 1",
    "[x for x in [open('GYMRANCODE','w')]]",
    'f\'{open("GYMRANCODE","w")}\'',
    "().__class__.__base__.__subclasses__()",
    "exec(\"open('GYMRANCODE','w')\")",
]


@pytest.mark.parametrize("task", sorted(GUARDED))
def test_nothing_runs_in_the_nine_scorers_that_would_run_it(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (entry,) = rows(task, 1)
    for attack in ATTACKS:
        verdict = judge(entry, f"<answer>{attack}</answer>", scoring="graded")
        assert (verdict.score, verdict.reason) == (0.0, "inadmissible")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("task", "where"),
    [("number_sorting", "answer"), ("polynomial_multiplication", "answer"), ("simple_integration", "integrand")],
)
def test_nothing_of_the_row_runs_either(task, where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (entry,) = rows(task, 1)
    holder = entry if where == "answer" else entry["metadata"]
    holder[where] = "open('GYMRANCODE','w')"
    verdict = judge(entry, "<answer>1</answer>")
    assert (verdict.score, verdict.reason) == (None, "gold_unusable")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("task", "answer", "allowed"),
    [
        ("countdown", "17*(62 - 47) + 28 - 65 - 74", True),
        ("countdown", "9**9**9", False),
        ("countdown", "9* *9", False),
        ("countdown", "exit()", False),
        ("puzzle24", "6*4*1/1", True),
        ("polynomial_multiplication", "-37260*z**8 - 100992*z**7", True),
        ("polynomial_multiplication", "x.is_real", False),
        ("polynomial_multiplication", "9**9**9**9", False),
        ("polynomial_multiplication", "x**100000", False),
        ("simple_integration", "5*X**9/2 - 3*X**6/2 + C", True),
        ("simple_integration", "S('x')", False),
        ("intermediate_integration", "-3*Integral(x**2*sin(x), x) + C", True),
        ("intermediate_integration", "preview(x)", False),
        ("intermediate_integration", "lambda x, y", False),
        ("spiral_matrix", "[1, 2, -3]", True),
        ("spiral_matrix", "[1, 2] * 10**9", False),
        ("string_insertion", "['A', 'B']", True),
        ("string_insertion", "'A' * 99", False),
        ("binary_matrix", "[[0, 1], [1, 0]]", True),
        ("n_queens", "[" * 5000, False),
    ],
)
def test_what_a_scorer_that_runs_answers_may_get(task, answer, allowed):
    assert admissible(task, answer) is allowed


def test_a_scorer_that_hangs_is_killed():
    (entry,) = rows("simple_integration", 1)
    judge(entry, "<answer>1</answer>")  # start the worker
    x = entry["metadata"]["variable"]
    heavy = f"(1+{x}+sin({x})**2)**90*(1+{x}+cos({x})**2)**90*(tan({x})+log({x}))**90*exp(exp(sin({x})))**90"
    verdict = judge(entry, f"<answer>{heavy}</answer>", timeout_s=0.3)
    assert (verdict.score, verdict.reason) == (0.0, "scorer_timeout")
    assert judge(entry, f"<answer>{entry['answer']}</answer>").score == 1.0


@pytest.mark.parametrize("task", sorted(REFUSED))
def test_scorers_that_pay_for_the_wrong_thing_are_refused_by_name(task):
    with pytest.raises(ConfigurationError, match=f"{task!r} is refused"):
        reasoning_gym(task=task)
    verdict = reasoning_gym().judge("<answer>1</answer>", "1", metadata={"source_dataset": task})
    assert (verdict.score, verdict.reason) == (None, "task_refused")


def test_every_task_of_the_screened_version_is_listed_once():
    names = set(library.factory.DATASETS)
    assert SCREENED | GUARDED | set(REFUSED) >= names
    assert len(SCREENED | GUARDED | set(REFUSED)) == len(SCREENED) + len(GUARDED) + len(REFUSED)
    assert "was not screened" in str(refusal("chainsum"))
    assert "Did you mean 'chain_sum'" in str(refusal("chainsum"))


def test_metadata_as_mapping_text_or_missing():
    (entry,) = rows("chain_sum", 1)
    answer = f"<answer>{entry['answer']}</answer>"
    assert reasoning_gym(**SLOW).judge(answer, entry["answer"], metadata=entry["metadata"]).score == 1.0
    assert reasoning_gym(**SLOW, task="chain_sum").judge(answer, entry["answer"]).score == 1.0
    assert reasoning_gym(**SLOW).judge(answer, entry["answer"]).reason == "task_unknown"
    assert reasoning_gym(**SLOW).judge(answer, entry["answer"], metadata="{").reason == "metadata_unusable"


MATHS_TASKS = [
    "chain_sum", "decimal_arithmetic", "fraction_simplification", "complex_arithmetic", "prime_factorization",
    "advanced_geometry", "gsm_symbolic", "power_function", "bitwise_arithmetic",
]  # fmt: skip


@pytest.mark.parametrize("task", MATHS_TASKS)
def test_math_scores_every_gold_of_500_rows_against_itself_one(task):
    reward = math(symbolic=False)
    golds = [entry["answer"] for entry in library.create_dataset(task, size=500, seed=3)]
    for form in ("<think>hm</think>The answer is \\boxed{%s}.", "<answer>%s</answer>"):
        assert reward(completions=[form % gold for gold in golds], answer=golds) == [1.0] * 500


def test_math_refuses_the_wrong_sign_that_a_scorer_of_reasoning_gym_pays_for():
    for entry in rows("gsm_symbolic"):
        assert math().judge(f"<answer>-{entry['answer']}</answer>", entry["answer"]).score == 0.0
        assert math().judge(f"<answer>{entry['answer']} or 5</answer>", entry["answer"]).score == 0.0
