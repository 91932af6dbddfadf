"""``reasoning_gym``: the scorer that a reasoning-gym task brings, fenced in.

These scorers were written for trusted answers. Nine of them run the answer as Python or hand it to SymPy's
``parse_expr``, which does the same; some raise on odd text, some pay a little for nonsense, one pays full marks for
any text. So:

- a scorer runs in a worker process that is killed at its deadline, never here;
- of the nine, each gets only answers of a harmless form (digits and operators, or literals), see ``admissible``;
- only screened tasks (``tests/bench/screen_reasoning_gym.py``) are scored at all; the rest is refused by name;
- what nonsense would earn on the same row is subtracted, NaN counts as 0, and the result lies in [0, 1].
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from trl_grpo_ext.errors import ConfigurationError, MissingDependencyError, SandboxError, nearest
from trl_grpo_ext.rewards.killable import KillableWorkers
from trl_grpo_ext.rewards.verifier import Verdict, verifier
from trl_grpo_ext.rewards.verifiers.math import extract as extraction

SCREENED_VERSION = "0.1.25"

# Own answer: full marks. Nonsense: less than full marks, and what it earns is subtracted. A second answer beside the
# right one, a lost sign, a digit more: no full marks, or the scorer reads the first answer only.
_SCREENED_NAMES = """
    ab acre advanced_geometry aiw arc_1d base_conversion basic_arithmetic bf binary_alternation bitwise_arithmetic
    caesar_cipher calendar_arithmetic chain_sum circuit_logic codeio color_cube_rotation count_bits count_primes
    course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships
    figlet_font fraction_simplification futoshiki game_of_life gcd group_anagrams isomorphic_strings jugs kakurasu
    knight_swap knights_knaves largest_island lcm leg_counting letter_counting letter_jumble list_functions
    mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid needle_haystack number_filtering number_format
    number_sequence number_sorting palindrome_generation palindrome_partitioning path_star polynomial_equations
    pool_matrix power_function prime_factorization products quantum_lock ransom_note rectangle_count rotate_matrix
    rotten_oranges self_reference sentence_reordering shortest_path simple_equations simple_geometry sokoban
    spell_backward string_manipulation string_splitting string_synthesis sudoku survo syllogism time_intervals
    tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles
"""
SCREENED = frozenset(_SCREENED_NAMES.split())
REFUSED = {
    **dict.fromkeys(
        ("arc_agi", "rearc"),
        "its own answer loses its marks once the row has been through JSON, as in any data set",
    ),
    **dict.fromkeys(
        ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"),
        "it stores no answer, so nobody can check that a right one earns full marks",
    ),
    "coin_flip": "it pays full marks for 0, whatever the probability",
    "complex_arithmetic": "it pays full marks for nan; the verifier 'math' judges its answers",
    "composite": "it is a mixture; name the task of each row in its metadata",
    "game_of_life_halting": "it pays full marks for any text on some rows",
    "gsm_symbolic": "it pays full marks for a lost sign; the verifier 'math' judges its answers",
}
# Tasks whose scorer runs the answer, with the form of answer that it may get.
_ARITHMETIC = ("countdown", "puzzle24")
_ALGEBRA = ("polynomial_multiplication", "simple_integration", "intermediate_integration")
_LITERALS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
GUARDED = frozenset((*_ARITHMETIC, *_ALGEBRA, *_LITERALS))

_NONSENSE = ("", "I do not know", "zzqx", "?", "None", "nan")
_MAX_ANSWER_CHARS = 20_000
_MAX_EXPRESSION_CHARS = 500
_ARITHMETIC_FORM = re.compile(r"(?:\d{1,6}|[-+*/() ])+")
_ALGEBRA_FORM = re.compile(r"(?:\d{1,12}(?:\.\d{1,12})?|[A-Za-z]+|[-+*/^(), ])+")
_EXPONENT = re.compile(r"(?:\*\*|\^)\s*\(?\s*-?\s*(\d+)")
_FUNCTION_NAMES = "sin cos tan exp log sqrt pi asin acos atan sinh cosh tanh Integral ln cot sec csc"
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())

DEFAULT_EXTRACT = ["tag", "boxed", "hashes", "sentence", "whole"]
_WORKERS = KillableWorkers(num_workers=1, preload=(f"{__name__}:preload",), memory_gib=2.0)


def _validate(options: Mapping[str, Any]) -> None:
    extraction.check_order(options["extract"])
    task = options["task"]
    if task is not None:
        reason = refusal(task)
        if reason is not None:
            raise ConfigurationError(f"reward 'reasoning_gym': {reason}")
    if options["timeout_s"] <= 0:
        raise ConfigurationError(f"reward 'reasoning_gym': timeout_s={options['timeout_s']!r} must be above 0")


def refusal(task: str) -> str | None:
    """Return why a task is not scored, or None if it is."""
    if task in SCREENED or task in GUARDED:
        return None
    if task in REFUSED:
        return f"the task {task!r} is refused: {REFUSED[task]}. Write a verifier of your own for it"
    known = sorted(SCREENED | GUARDED)
    return f"the task {task!r} was not screened.{nearest(task, known)} Screened are {', '.join(known)}"


@verifier(
    name="reasoning_gym", columns=("answer",), optional_columns=("metadata", "question"), reference="answer",
    version=SCREENED_VERSION, validate=_validate,
)  # fmt: skip
def reasoning_gym(
    text: str,
    reference: Any,
    *,
    metadata: Any = None,
    question: Any = None,
    task: str | None = None,
    extract: Any = DEFAULT_EXTRACT,
    scoring: Literal["full_marks", "graded"] = "full_marks",
    think_tags: Any = ("<think>", "</think>"),
    opened_by_template: bool = False,
    timeout_s: float = 5.0,
) -> Verdict:
    """Return whether the task's own scorer gives the final answer full marks; or its score, less what nonsense earns.

    Args:
        text: the completion.
        reference: the row's answer, as reasoning-gym gave it.
        metadata: column with the row's metadata, best stored as JSON text; its ``source_dataset`` names the task.
        question: column with the row's question, which a few scorers read.
        task: the task of all rows, where the metadata does not say.
        extract: sources of the answer, tried in turn; as for ``math``.
        scoring: "full_marks" (1 for a score of 1, else 0) or "graded": partial credit as the task gives it, less what
            nonsense earns. Most tasks give partial credit for *containing* the right answer: 0.8 for 15540 or -1554
            where 1554 is right, so "graded" invites cheating.
        think_tags: opening and closing tag of the reasoning, which never holds the answer.
        opened_by_template: the chat template already wrote the opening tag.
        timeout_s: deadline of the scorer; reaching it kills the worker and scores 0.
    """
    entry = _entry(reference, metadata, question)
    if entry is None:
        return Verdict(None, "metadata_unusable")
    name = task or entry["metadata"].get("source_dataset")
    if not isinstance(name, str) or refusal(name) is not None:
        return Verdict(None, "task_refused" if isinstance(name, str) else "task_unknown")
    found = extraction.extract(
        text,
        order=extraction.check_order(extract),
        think_tags=think_tags,
        opened_by_template=opened_by_template,
    )
    if found.text is None:
        return Verdict(0.0, found.source)
    if len(found.text) > _MAX_ANSWER_CHARS:
        return Verdict(0.0, "too_long")
    try:
        outcome = _WORKERS.call(f"{__name__}:score", [name, found.text, json.dumps(entry, default=str)], timeout_s)
    except SandboxError:
        return Verdict(None, "worker_unavailable", found.text)
    if outcome.status != "ok":
        return Verdict(None if outcome.status == "error" else 0.0, f"scorer_{outcome.status}", found.text)
    value, baseline, reason = outcome.value
    if reason == "gold_unusable":
        return Verdict(None, reason, found.text)
    if baseline >= 0.75:
        return Verdict(None, "scorer_pays_nonsense", found.text)
    net = min(1.0, max(0.0, (value - baseline) / (1.0 - baseline)))
    if scoring == "full_marks":
        net = float(value >= 1.0)
    return Verdict(net, reason, found.text)


def _entry(reference: Any, metadata: Any, question: Any) -> dict[str, Any] | None:
    """Return the row in reasoning-gym's layout, or None if the metadata cannot be read."""
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            return None
    if metadata is not None and not isinstance(metadata, Mapping):
        return None
    return {"question": question, "answer": reference, "metadata": dict(metadata or {})}


# -- in the worker process --------------------------------------------------------------------------------------------
def preload() -> None:
    """Import reasoning-gym; runs once in the template of the workers.

    Raises:
        MissingDependencyError: if it is not installed.
    """
    try:
        import reasoning_gym.factory  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("the reward 'reasoning_gym' needs pip install reasoning-gym") from error


def score(task: str, answer: str, entry_json: str) -> list[Any]:
    """Return [score, score of nonsense, reason] of one answer."""
    entry = json.loads(entry_json)
    if not _gold_is_harmless(task, entry):
        return [0.0, 0.0, "gold_unusable"]
    baseline = _baseline(task, entry_json)
    if task in GUARDED and answer != entry["answer"] and not admissible(task, answer):
        return [baseline, baseline, "inadmissible"]
    value = _call(task, answer, entry)
    if value is None:
        return [baseline, baseline, "scorer_raised"]
    return [value, baseline, "full_marks" if value >= 1.0 else "scored"]


@lru_cache(maxsize=256)
def _baseline(task: str, entry_json: str) -> float:
    entry = json.loads(entry_json)
    return max(_call(task, nonsense, entry) or 0.0 for nonsense in _NONSENSE)


@lru_cache(maxsize=64)
def _scorer(task: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(task)


def _call(task: str, answer: str, entry: dict[str, Any]) -> float | None:
    """Return the task's score; None if it raises; 0 if it is no finite number."""
    try:
        value = float(_scorer(task)(answer, entry))
    except Exception:
        return None
    return value if math.isfinite(value) else 0.0


def _gold_is_harmless(task: str, entry: dict[str, Any]) -> bool:
    """Return whether what a scorer runs of the row itself is harmless: a data set may come from anywhere."""
    if task == "number_sorting":
        return _is_literal(str(entry["answer"]))
    if task == "polynomial_multiplication":
        return admissible(task, str(entry["answer"]), max_chars=_MAX_ANSWER_CHARS)
    if task in _ALGEBRA:
        return admissible(task, str(entry["metadata"].get("integrand", "")), max_chars=_MAX_ANSWER_CHARS)
    return True


def admissible(task: str, answer: str, *, max_chars: int = _MAX_EXPRESSION_CHARS) -> bool:
    """Return whether an answer has a form that is harmless even where it is run as code."""
    if task in _LITERALS:
        return _is_literal(answer)
    if len(answer) > max_chars:
        return False
    if task in _ARITHMETIC:
        return _ARITHMETIC_FORM.fullmatch(answer) is not None and "**" not in answer.replace(" ", "")
    if _ALGEBRA_FORM.fullmatch(answer) is None or any(int(power) > 100 for power in _EXPONENT.findall(answer)):
        return False
    compact = answer.replace(" ", "")
    if re.search(r"(?:\*\*|\^)[^*+\-/]*(?:\*\*|\^)", compact) and re.search(
        r"\d\)*(?:\*\*|\^)\(*\d+\)*(?:\*\*|\^)", compact
    ):
        return False  # a tower
    names = re.findall(r"[A-Za-z]+", answer)
    return all(name in _FUNCTIONS or (len(name) == 1 and name not in "SNQOI") for name in names)


def _is_literal(answer: str) -> bool:
    """Return whether the text is a Python literal of lists, texts and numbers."""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    allowed = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Load, ast.UnaryOp, ast.USub)
    return all(isinstance(node, allowed) for node in ast.walk(tree))
