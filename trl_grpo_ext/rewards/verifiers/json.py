"""``json``: the completion is JSON, strictly read, and fits a schema."""

from __future__ import annotations

import json as _json
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal

from trl_grpo_ext.errors import ConfigurationError, SandboxError
from trl_grpo_ext.rewards.killable import KillableWorkers
from trl_grpo_ext.rewards.verifier import Verdict, verifier
from trl_grpo_ext.rewards.verifiers.math.extract import visible_answer

_FENCE = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[ \t]*\r?\n(.*?)\r?\n?[ \t]*```", re.DOTALL)
# Keywords whose check can take longer than linear time, or recurse. A schema with one of them is checked in a worker.
_COSTLY = (
    "pattern",
    "patternProperties",
    "$ref",
    "$dynamicRef",
    "uniqueItems",
    "format",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
)
_MAX_DIGITS = 1000
_MAX_ERROR_CHARS = 200
_WORKERS = KillableWorkers(num_workers=1, preload=(f"{__name__}:preload",), memory_gib=1.0)


class NotStrictJson(ValueError):  # noqa: N818  carries a reason code, it is a verdict
    """Text that is not JSON, or JSON that readers disagree about; the message is the reason code."""


def _validate(options: Mapping[str, Any]) -> None:
    for key in ("max_chars", "max_depth", "timeout_s"):
        if options[key] <= 0:
            raise ConfigurationError(f"reward 'json': {key}={options[key]!r} must be above 0")
    if options["max_depth"] > 200:
        raise ConfigurationError(f"reward 'json': max_depth={options['max_depth']} must be at most 200")
    if options["schema"] is not None:
        _check_schema(options["schema"])


def _check_schema(schema: Any) -> None:
    """Raise ConfigurationError unless the schema is a valid JSON Schema."""
    import jsonschema

    text = schema_text(schema)
    try:
        loaded = _json.loads(text)
        jsonschema.validators.validator_for(loaded, default=jsonschema.Draft202012Validator).check_schema(loaded)
    except (ValueError, jsonschema.SchemaError, RecursionError) as error:
        message = str(error).splitlines()[0]
        raise ConfigurationError(f"reward 'json': the schema is not a valid JSON Schema: {message}") from error


@verifier(
    name="json", columns=(), optional_columns=("schema_column", "answer"), reference=None, version="1",
    validate=_validate,
)  # fmt: skip
def json(
    text: str,
    reference: Any,
    *,
    schema_column: Any = None,
    answer: Any = None,
    schema: Any = None,
    compare: Literal["no", "equal", "contains"] = "no",
    fence: Literal["allow", "require", "forbid"] = "allow",
    skip_reasoning: bool = True,
    max_chars: int = 200_000,
    max_depth: int = 100,
    valid_score: float = 0.0,
    timeout_s: float = 1.0,
    score_value: float = 1.0,
) -> Verdict:
    """Return ``score_value`` if the completion is one strict JSON value that satisfies everything asked for, else 0.

    Strict: no NaN or Infinity, no key twice in an object, no half surrogates, no number of more than 1000 digits;
    decimals are read exactly, so 0.3 is a multiple of 0.1. References to other documents are never fetched.

    Args:
        text: the completion: JSON alone, or one Markdown code block with nothing but JSON in it.
        reference: not used.
        schema_column: column with a JSON Schema per row, best stored as text (data sets fill up missing keys); used
            if ``schema`` is not given. Rename it with ``columns``.
        answer: column with the expected value, for ``compare``: JSON text, or a number, list or mapping.
        schema: JSON Schema for all rows, as a mapping or JSON text; draft 2020-12 unless it says otherwise.
        compare: "no", "equal" (the value is the expected one; key order and 1 against 1.0 do not matter), "contains"
            (objects may have further keys).
        fence: whether a code block may, must or must not surround the JSON.
        skip_reasoning: look only at what follows ``</think>``.
        max_chars: longer texts score 0.
        max_depth: deeper nesting scores 0; at most 200.
        valid_score: partial score for strict JSON that fails the schema or the comparison.
        timeout_s: deadline of a schema check that could run long (patterns, references); it ends in a kill and 0.
        score_value: full score.
    """
    visible = visible_answer(text) if skip_reasoning else text
    if visible is None:
        return Verdict(0.0, "unfinished_reasoning")
    body = _unfenced(visible, fence)
    if body is None:
        return Verdict(0.0, f"fence_{fence}")
    try:
        value = read_strict(body, max_chars, max_depth)
    except NotStrictJson as error:
        return Verdict(0.0, str(error))
    extracted = body.strip()[:_MAX_ERROR_CHARS]
    wanted = schema if schema is not None else schema_column
    if wanted is not None:
        verdict = _schema_verdict(schema_text(wanted), body, timeout_s, valid_score, extracted)
        if verdict is not None:
            return verdict
    if compare != "no":
        try:
            expected = read_strict(answer if isinstance(answer, str) else _json.dumps(answer), max_chars, 200)
        except (NotStrictJson, TypeError, ValueError):
            return Verdict(None, "gold_unusable", extracted)
        if answer is None:
            return Verdict(None, "no_reference", extracted)
        if not same_value(expected, value, extra_keys=compare == "contains"):
            return Verdict(valid_score, "different", extracted)
    return Verdict(score_value, "valid", extracted)


def _unfenced(text: str, fence: str) -> str | None:
    """Return the JSON text, without the code block around it; None where the block breaks the rule."""
    stripped = text.strip()
    if not stripped.startswith("```"):
        return None if fence == "require" else stripped
    match = _FENCE.fullmatch(stripped)
    if match is None or match.group(1).lower() not in ("", "json", "json5", "jsonc") or fence == "forbid":
        return None
    return match.group(2)


def read_strict(text: str, max_chars: int, max_depth: int) -> Any:
    """Return the value of a strict JSON text, decimals as Decimal.

    Raises:
        NotStrictJson: with the reason: "empty", "too_long", "too_deep", "not_json", "duplicate_key", "not_finite",
            "number_too_long", "bad_unicode".
    """
    if len(text) > max_chars:
        raise NotStrictJson("too_long")
    if not text.strip():
        raise NotStrictJson("empty")
    if _depth(text) > max_depth:
        raise NotStrictJson("too_deep")
    try:
        value = _json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer, parse_float=_decimal
        )
    except NotStrictJson:
        raise
    except (ValueError, RecursionError):
        raise NotStrictJson("not_json") from None
    if "\\u" in text or not text.isascii():
        try:
            _json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise NotStrictJson("bad_unicode") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise NotStrictJson("duplicate_key")
    return found


def _no_constant(name: str) -> Any:
    raise NotStrictJson("not_finite")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise NotStrictJson("number_too_long")
    return int(digits)


def _decimal(digits: str) -> Decimal:
    exponent = re.search(r"[eE][+-]?(\d+)", digits)
    if len(digits) > _MAX_DIGITS or (exponent and int(exponent.group(1)[:6]) > 400):
        raise NotStrictJson("number_too_long")
    return Decimal(digits)


def _depth(text: str) -> int:
    depth = deepest = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text, re.DOTALL):
        char = token.group()
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def same_value(expected: Any, value: Any, *, extra_keys: bool) -> bool:
    """Return whether two JSON values are equal; true is not 1, and ``extra_keys`` lets objects have further keys."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, dict) and isinstance(value, dict):
        if not (expected.keys() <= value.keys() if extra_keys else expected.keys() == value.keys()):
            return False
        return all(same_value(item, value[key], extra_keys=extra_keys) for key, item in expected.items())
    if isinstance(expected, list) and isinstance(value, list):
        return len(expected) == len(value) and all(
            same_value(one, other, extra_keys=extra_keys) for one, other in zip(expected, value, strict=True)
        )
    numbers = (int, Decimal)
    if isinstance(expected, numbers) and isinstance(value, numbers):
        return expected == value
    return type(expected) is type(value) and bool(expected == value)


# -- schema -----------------------------------------------------------------------------------------------------------
def schema_text(schema: Any) -> str:
    """Return a schema as JSON text."""
    return schema if isinstance(schema, str) else _json.dumps(schema, sort_keys=True)


def _schema_verdict(schema: str, body: str, timeout_s: float, valid_score: float, extracted: str) -> Verdict | None:
    """Return the verdict of a failed schema check, or None if the value fits."""
    if not any(f'"{key}"' in schema for key in _COSTLY):
        problem = check_schema(schema, body)
    else:
        try:
            outcome = _WORKERS.call(f"{__name__}:check_schema", [schema, body], timeout_s)
        except SandboxError:
            return Verdict(None, "worker_unavailable", extracted)
        if outcome.status == "timeout":
            return Verdict(0.0, "timeout", extracted)
        if outcome.status == "crash":
            return Verdict(0.0, "crash", extracted)
        problem = outcome.value if outcome.status == "ok" else "bad_schema"
    if problem is None:
        return None
    if problem in ("bad_schema", "unresolved_reference", "recursion"):
        return Verdict(None, problem, extracted)
    return Verdict(valid_score, "schema_mismatch", problem[:_MAX_ERROR_CHARS])


def preload() -> None:
    """Import what a check needs; runs once in the template of the workers."""
    import jsonschema

    jsonschema.Draft202012Validator({}).is_valid({})


def check_schema(schema: str, body: str) -> str | None:
    """Return the first problem of a JSON text under a schema, None if it fits; a broken schema is named by a code."""
    import jsonschema
    import referencing.exceptions

    try:
        validator = _validator(schema)
        value = read_strict(body, 10**9, 10**6)
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except referencing.exceptions.Unresolvable:
        return "unresolved_reference"
    except RecursionError:
        return "recursion"
    except (ValueError, jsonschema.SchemaError, re.error):
        return "bad_schema"
    return None if error is None else f"{error.json_path}: {error.message}"


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    import jsonschema
    import referencing

    loaded = _json.loads(schema, parse_float=Decimal)
    base = jsonschema.validators.validator_for(loaded, default=jsonschema.Draft202012Validator)
    base.check_schema(_json.loads(schema))
    checker = base.TYPE_CHECKER.redefine("integer", _is_integer)
    # A registry of its own resolves nothing but the schema itself: no file, no network.
    return jsonschema.validators.extend(base, type_checker=checker)(loaded, registry=referencing.Registry())


def _is_integer(_checker: Any, value: Any) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)
