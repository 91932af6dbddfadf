"""``choice``: the right letter, alone."""

from __future__ import annotations

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifiers.choice import choice

RIGHT = [
    "B", "(B)", "B.", "B)", "b", "[B]", "B) the second one", "(B) the second one", "B: the second one", "Option B",
    "The answer is B.", "The answer is (B).", "Answer: B", "**Answer: B**", "**B**", "\\boxed{B}",
    "\\boxed{\\text{(B)}}",    "\\boxed{\\textbf{(B) }7}", "<answer>B</answer>", "#### B",
    "The correct option is B.", "The best choice is: B",
    "<think>A or B? surely not C.</think>B", "First I thought \\boxed{A}. But it is \\boxed{B}.",
    "Some thoughts.\n\nB",
    "The correct answer is B because C is too large.",
]  # fmt: skip
WRONG = [
    "", "A", "C", "A, B, C, D", "A or B", "B or C", "\\boxed{A} \\boxed{B}", "\\boxed{B, C}", "(A) (B) (C) (D)",
    "(A) 3 (B) 4 (C) 5", "Because", "I like B and C", "a banana", "\\boxed{\\text{a banana}}", "The answer is not B.",
    "<think>B", "<think>B</think>", "\\boxed{B", "The answer is B. The answer is C.", "BB", "Z", "AB",
]  # fmt: skip


@pytest.mark.parametrize("text", RIGHT)
def test_the_right_letter_in_every_form(text):
    assert choice().judge(text, "B").score == 1.0
    assert choice().judge(text, "D").score == 0.0


@pytest.mark.parametrize("text", WRONG)
def test_no_letter_a_wrong_letter_or_several(text):
    assert choice().judge(text, "B").score == 0.0


@pytest.mark.parametrize(
    ("gold", "score"),
    [("B", 1.0), ("(B)", 1.0), ("B) two", 1.0), ("b", 1.0), ("", None), ("two", None), (1, None), ("Z", None)],
)
def test_golds(gold, score):
    assert choice().judge("B", gold).score == score


def test_numbered_golds_need_to_know_where_counting_starts():
    assert choice(first_index=0).judge("B", 1).score == 1.0
    assert choice(first_index=1).judge("B", 2).score == 1.0
    assert choice(first_index=1).judge("B", "2").score == 1.0
    assert choice(first_index=0).judge("B", 30).score is None


def test_the_text_of_the_right_option_counts_if_no_other_reads_the_same():
    options = ["three", "four", "Five", "three"]
    assert choice().judge("<answer>five</answer>", "C", choices=options).score == 1.0
    assert choice().judge("<answer>four</answer>", "C", choices=options).score == 0.0
    assert choice().judge("<answer>three</answer>", "A", choices=options).score == 0.0
    assert choice().judge("<answer>five</answer>", "C", choices={"text": options, "label": list("ABCD")}).score == 1.0
    assert choice().judge("<answer>five or so</answer>", "C", choices=options).score == 0.0


def test_letters_beyond_the_options_are_no_choice():
    assert choice(letters="ABCD").judge("E", "B").reason == "no_choice"
    assert choice(letters="ABCD").judge("E", "E").score is None


@pytest.mark.parametrize("letters", ["A", "abcd", "AAB", "A1"])
def test_bad_letters(letters):
    with pytest.raises(ConfigurationError, match="letters"):
        choice(letters=letters)
