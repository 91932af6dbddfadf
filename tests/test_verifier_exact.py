"""``exact``: equal, and nothing but equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards.verifiers.exact import exact


@given(st.text(min_size=1).filter(lambda text: text.strip()))
def test_a_text_equals_itself_with_blanks_around_it(text):
    assert exact().judge(f"  {text}\n", text).score == 1.0
    assert exact().judge(f"{text}x", text).score == 0.0


@pytest.mark.parametrize(
    ("answer", "gold", "options", "score"),
    [
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"ignore_case": True}, 1.0),
        ("STRASSE", "straße", {"ignore_case": True}, 1.0),
        ("a  b\n c", "a b c", {}, 0.0),
        ("a  b\n c", "a b c", {"collapse_whitespace": True}, 1.0),
        ("cafe\u0301", "café", {}, 1.0),
        ("7", 7, {}, 1.0),
        ("17", 7, {}, 0.0),
        ("the answer is Paris", "Paris", {}, 0.0),
        ("", "Paris", {}, 0.0),
        ("Paris", " ", {}, None),
        ("Paris", None, {}, None),
        ("Paris", "Paris", {"score_value": 0.25}, 0.25),
    ],
)
def test_cases(answer, gold, options, score):
    assert exact(**options).judge(answer, gold).score == score
