"""``json``: strict JSON, exact schemas, bounded time."""

from __future__ import annotations

import json as stdlib_json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifiers.json import json

OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(VALUES)
def test_what_a_json_writer_writes_is_valid_and_equal_to_itself(value):
    text = stdlib_json.dumps(value)
    if "\\ud" in text:  # half a surrogate pair is refused, as UTF-8 has no room for it
        return
    assert json().judge(text).score == 1.0
    assert json().judge(f"```json\n{text}\n```").score == 1.0
    if value is not None:
        assert json(compare="equal").judge(text, answer=text).score == 1.0
    assert json().judge(text + "x").score == 0.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("{", "not_json"),
        ("{'a': 1}", "not_json"),
        ('{"a": 1,}', "not_json"),
        ('{"a": NaN}', "not_finite"),
        ("Infinity", "not_finite"),
        ("-Infinity", "not_finite"),
        ('{"a": 1, "a": 2}', "duplicate_key"),
        ('{"x": {"a": 1, "a": 1}}', "duplicate_key"),
        ('"\\ud800"', "bad_unicode"),
        ("9" * 5000, "number_too_long"),
        ("1e100000", "number_too_long"),
        ("[" * 100_000, "too_deep"),
        ("[" * 101 + "]" * 101, "too_deep"),
        ('"' + "a" * 200_001 + '"', "too_long"),
        ('{"a": 1} and more', "not_json"),
        ('{"a": 1} {"b": 2}', "not_json"),
        ('Here: {"a": 1}', "not_json"),
        ('<think>{"a": 1}', "unfinished_reasoning"),
    ],
)
def test_what_is_refused_and_why(text, reason):
    started = time.process_time()
    assert json().judge(text) == (verdict := json().judge(text))
    assert (verdict.score, verdict.reason) == (0.0, reason)
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("text", "fence", "score"),
    [
        ("[1]", "allow", 1.0),
        ("```json\n[1]\n```", "allow", 1.0),
        ("```\n[1]\n```", "allow", 1.0),
        ("```python\n[1]\n```", "allow", 0.0),
        ("```json\n[1]\n```\nDone.", "allow", 0.0),
        ("```json\n[1]\n```\n```json\n[2]\n```", "allow", 0.0),
        ("[1]", "require", 0.0),
        ("```json\n[1]\n```", "require", 1.0),
        ("```json\n[1]\n```", "forbid", 0.0),
        ("[1]", "forbid", 1.0),
        ("<think>hm</think>\n```json\n[1]\n```", "require", 1.0),
    ],
)
def test_code_blocks(text, fence, score):
    assert json(fence=fence).judge(text).score == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"name": "Ann", "age": 7}', 1.0),
        ('{"age": 7.0, "name": "Ann"}', 1.0),
        ('{"name": "Ann"}', 0.0),
        ('{"name": "Ann", "age": -1}', 0.0),
        ('{"name": "Ann", "age": 7.5}', 0.0),
        ('{"name": "Ann", "age": true}', 0.0),
        ('{"name": "Ann", "age": 7, "x": 1}', 0.0),
        ("[]", 0.0),
    ],
)
def test_a_schema(text, score):
    assert json(schema=OBJECT).judge(text).score == score
    assert json(schema=stdlib_json.dumps(OBJECT)).judge(text).score == score
    assert json(columns={"schema_column": "schema"})(completions=[text], schema=[stdlib_json.dumps(OBJECT)]) == [score]


def test_partial_credit_is_for_valid_json_only():
    reward = json(schema=OBJECT, valid_score=0.2)
    assert reward.judge("{}").score == 0.2
    assert reward.judge("{").score == 0.0


def test_decimals_are_exact():
    assert json(schema={"multipleOf": 0.1}).judge("0.3").score == 1.0
    assert json(schema={"multipleOf": 0.1}).judge("0.35").score == 0.0
    assert json(schema={"maximum": 0.3}).judge("0.30000000000000001").score == 0.0


@pytest.mark.parametrize(
    ("schema", "text", "score", "reason"),
    [
        ({"type": "string", "pattern": "^(a+)+$"}, '"' + "a" * 40 + '!"', 0.0, "timeout"),
        ({"type": "string", "pattern": "^a+$"}, '"aaa"', 1.0, "valid"),
        ({"$ref": "#"}, "1", None, "recursion"),
        ({"$ref": "https://example.com/schema"}, "1", None, "unresolved_reference"),
        ({"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}, "[1, 2]", 1.0, "valid"),
        ({"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}, '[1, "2"]', 0.0, "schema_mismatch"),
    ],
)
def test_schemas_that_can_run_long_are_checked_in_a_worker(schema, text, score, reason):
    json(schema={"pattern": "a"}, timeout_s=60.0).judge('"a"')  # start the worker
    verdict = json(schema=schema, timeout_s=1.0 if reason == "timeout" else 60.0).judge(text)
    assert (verdict.score, verdict.reason) == (score, reason)


@pytest.mark.parametrize(
    ("compare", "text", "gold", "score"),
    [
        ("equal", '{"b": 2, "a": [1, {"c": null}]}', '{"a": [1.0, {"c": null}], "b": 2}', 1.0),
        ("equal", '{"a": 1, "b": 2}', {"a": 1}, 0.0),
        ("contains", '{"a": 1, "b": 2}', {"a": 1}, 1.0),
        ("contains", '{"a": 2, "b": 2}', {"a": 1}, 0.0),
        ("contains", "[1, 2]", [1], 0.0),
        ("equal", "true", "1", 0.0),
        ("equal", "1", "true", 0.0),
        ("equal", '"1"', "1", 0.0),
        ("equal", "1", "{", None),
        ("equal", "1", None, None),
    ],
)
def test_comparison_with_the_gold(compare, text, gold, score):
    assert json(compare=compare).judge(text, answer=gold).score == score


@pytest.mark.parametrize(
    "options",
    [{"schema": {"type": "strnig"}}, {"schema": "{"}, {"max_depth": 0}, {"max_depth": 1000}, {"compare": "x"}],
)
def test_bad_options(options):
    with pytest.raises(ConfigurationError):
        json(**options)
