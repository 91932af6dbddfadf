"""``regex``: the completion matches a pattern. A pattern that backtracks for ever is killed, not waited for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from trl_grpo_ext.errors import ConfigurationError, MissingDependencyError, SandboxError
from trl_grpo_ext.rewards.killable import KillableWorkers
from trl_grpo_ext.rewards.verifier import Verdict, verifier
from trl_grpo_ext.rewards.verifiers.math.extract import visible_answer

_FLAGS = {"ignore_case": re.IGNORECASE, "multiline": re.MULTILINE, "dot_all": re.DOTALL}
_WORKERS = KillableWorkers(num_workers=1, preload=(__name__,), memory_gib=1.0)


def _validate(options: Mapping[str, Any]) -> None:
    if options["timeout_s"] <= 0:
        raise ConfigurationError(f"reward 'regex': timeout_s={options['timeout_s']!r} must be above 0")
    pattern = options["pattern"]
    if options["engine"] == "linear":
        _linear_engine()
    if pattern is None:
        return
    try:
        _compile(pattern, _flags(options))
    except re.error as error:
        raise ConfigurationError(f"reward 'regex': pattern={pattern!r} is no regular expression: {error}") from error
    if options["engine"] == "linear":
        _check_linear(pattern)


@verifier(name="regex", columns=(), optional_columns=("regex",), reference=None, version="1", validate=_validate)
def regex(
    text: str,
    reference: Any,
    *,
    regex: Any = None,
    pattern: str | None = None,
    where: Literal["whole", "anywhere", "start"] = "whole",
    must: Literal["match", "not_match"] = "match",
    ignore_case: bool = False,
    multiline: bool = False,
    dot_all: bool = False,
    skip_reasoning: bool = False,
    strip: bool = True,
    engine: Literal["python", "linear"] = "python",
    timeout_s: float = 1.0,
    score_value: float = 1.0,
) -> Verdict:
    """Return ``score_value`` if the completion matches (or, with ``must: not_match``, does not), else 0.

    Python's engine can take exponential time, so it runs in a worker process that is killed at the deadline; then the
    score is 0 with the reason "timeout", whatever ``must`` says.

    Args:
        text: the completion.
        reference: not used.
        regex: column with a pattern per row; used if ``pattern`` is not given.
        pattern: the pattern, in Python's syntax (RE2's for the linear engine).
        where: "whole" (the entire text), "anywhere", or "start".
        must: whether a match is wanted or forbidden.
        ignore_case: letters match in either case.
        multiline: ``^`` and ``$`` match at line ends.
        dot_all: ``.`` matches line ends.
        skip_reasoning: look only at what follows ``</think>``.
        strip: drop white space around the text first.
        engine: "python", or "linear": RE2, whose time is linear in the text, in this process (needs google-re2).
        timeout_s: deadline of the Python engine.
        score_value: score when satisfied.
    """
    wanted = pattern if pattern is not None else regex
    if not isinstance(wanted, str) or not wanted:
        return Verdict(None, "no_pattern")
    visible = visible_answer(text) if skip_reasoning else text
    if visible is None:
        return Verdict(0.0, "unfinished_reasoning")
    subject = visible.strip() if strip else visible
    flags = _flags({"ignore_case": ignore_case, "multiline": multiline, "dot_all": dot_all})
    if engine == "linear":
        found: str | None = _search_linear(wanted, flags, where, subject)
    else:
        try:
            outcome = _WORKERS.call(f"{__name__}:search", [wanted, int(flags), where, subject], timeout_s)
        except SandboxError:
            return Verdict(None, "worker_unavailable")
        if outcome.status == "timeout":
            return Verdict(0.0, "timeout")
        if outcome.status == "error":
            return Verdict(None, "bad_pattern")  # only a pattern from the data set can still be broken here
        if outcome.status == "crash":
            return Verdict(0.0, "crash")
        found = outcome.value
    right = (found is not None) == (must == "match")
    return Verdict(score_value if right else 0.0, "match" if found is not None else "no_match", found or None)


def _flags(options: Mapping[str, Any]) -> re.RegexFlag:
    flags = re.RegexFlag(0)
    for name, flag in _FLAGS.items():
        if options[name]:
            flags |= flag
    return flags


def _compile(pattern: str, flags: int) -> re.Pattern[str]:
    return re.compile(pattern, flags)


def search(pattern: str, flags: int, where: str, text: str) -> str | None:
    """Return the match's text (at most 200 characters), or None; runs in the worker process."""
    compiled = _compile(pattern, flags)
    method = {"whole": compiled.fullmatch, "anywhere": compiled.search, "start": compiled.match}[where]
    match = method(text)
    return None if match is None else match.group()[:200]


def _linear_engine() -> Any:
    try:
        import re2
    except ImportError as error:
        raise MissingDependencyError(
            "reward 'regex': engine='linear' needs google-re2; pip install google-re2, or use engine='python'"
        ) from error
    return re2


def _check_linear(pattern: str) -> None:
    re2 = _linear_engine()
    try:
        re2.compile(pattern)
    except re2.error as error:
        raise ConfigurationError(
            f"reward 'regex': pattern={pattern!r} is not in RE2's syntax ({error}); look-around and back-references "
            "need engine='python'"
        ) from error


def _search_linear(pattern: str, flags: int, where: str, text: str) -> str | None:
    re2 = _linear_engine()
    letters = "".join(letter for letter, flag in (("i", re.I), ("m", re.M), ("s", re.S)) if flags & flag)
    compiled = re2.compile(f"(?{letters}){pattern}" if letters else pattern)
    method = {"whole": compiled.fullmatch, "anywhere": compiled.search, "start": compiled.match}[where]
    match = method(text)
    return None if match is None else match.group()[:200]
