"""Compare a gold answer with an answer: what of the form must agree, and what may differ.

Every function returns True, False, or None for "this stage cannot tell", which hands the pair to the symbolic stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from trl_grpo_ext.rewards.verifiers.math.answers import (
    Answer,
    Collection,
    Matrix,
    Named,
    Quantity,
    Relation,
    Text,
    Union,
    Unread,
    plain_number,
)
from trl_grpo_ext.rewards.verifiers.math.cursor import Node
from trl_grpo_ext.rewards.verifiers.math.quantities import Policy, same_quantity
from trl_grpo_ext.rewards.verifiers.math.relations import (
    MIRROR,
    as_set,
    same_equation,
    same_inequality,
    value_of_equation,
    variable,
)

_MAX_UNORDERED = 200
_UNITS_AND_TEENS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBER_WORDS = {
    **{word: value for value, word in enumerate(_UNITS_AND_TEENS.split())},
    **{word: 10 * value for value, word in enumerate(_TENS.split(), start=2)},
    "hundred": 100,
}


def same_answer(gold: Answer, answer: Answer, policy: Policy) -> bool | None:
    """Return whether ``answer`` says the same as ``gold``.

    Raises:
        TooLarge: if the answer is not worth computing.
    """
    if gold.key == answer.key and not isinstance(gold.body, (Quantity, Unread)):
        return True
    verdict = _same(gold.body, answer.body, policy)
    if verdict is None and gold.key == answer.key:
        return True
    return verdict


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    unknown = False
    for verdict in verdicts:
        if verdict is False:
            return False
        unknown = unknown or verdict is None
    return None if unknown else True


def _same(gold: Any, answer: Any, policy: Policy) -> bool | None:
    if isinstance(gold, Text) or isinstance(answer, Text):
        return _same_text(gold, answer, policy)
    if isinstance(gold, Named) or isinstance(answer, Named):
        return _same_named(gold, answer, policy)
    if isinstance(gold, Unread) or isinstance(answer, Unread):
        return None
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _same_relation(gold, answer, policy)
    if isinstance(gold, Collection) and isinstance(answer, Collection):
        return _same_collection(gold, answer, policy)
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return same_quantity(gold, answer, policy)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        return _same_matrix(gold, answer, policy)
    if isinstance(gold, Union) and isinstance(answer, Union):
        return _unordered(gold.parts, answer.parts, policy)
    return _same_kinds_differ(gold, answer, policy)


def _same_kinds_differ(gold: Any, answer: Any, policy: Policy) -> bool | None:
    """Compare objects of different kinds: a set of one with its element, a column with a tuple, a union of points."""
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Collection) and len(one.items) == 1 and isinstance(other, (Quantity, Matrix)):
            return _same(one.items[0], other, policy)
        if isinstance(one, Matrix) and isinstance(other, Collection):
            flat = [cell for row in one.rows for cell in row]
            if (
                policy.vectors_as_tuples
                and (len(one.rows) == 1 or len(one.rows[0]) == 1)
                and other.opening in ("(", "[")
            ):
                return len(flat) == len(other.items) and _all(
                    _same(left, right, policy) for left, right in zip(flat, other.items, strict=True)
                )
        if isinstance(one, Union) and isinstance(other, Collection):
            parts = one.parts
            if all(isinstance(part, Collection) and part.opening == "{" for part in parts) and other.opening in (
                "{",
                "",
            ):
                return _unordered([item for part in parts for item in part.items], other.items, policy)
            if other.opening == "" and other.joined_by in ("or", ","):
                return _unordered(parts, other.items, policy)
    return False


# -- words ------------------------------------------------------------------------------------------------------------
def _same_text(gold: Any, answer: Any, policy: Policy) -> bool | None:
    if isinstance(gold, Text) and isinstance(answer, Text):
        return gold.words == answer.words
    text, other = (gold, answer) if isinstance(gold, Text) else (answer, gold)
    if isinstance(other, Named):
        return _same(text, other.value, policy) if text is gold else False
    if isinstance(other, Quantity):
        value = _word_value(text.words) if policy.number_words else None
        if value is not None:
            left, right = (
                (Quantity(("num", value, -1)), other) if text is gold else (other, Quantity(("num", value, -1)))
            )
            return same_quantity(left, right, policy)
        return _letters(other.node) == text.words if len(text.words) == 1 else False
    if isinstance(other, Collection) and text.words == "\\mathbb R":
        return _is_real_line(other)
    return False


def _word_value(words: str) -> Fraction | None:
    parts = words.split()
    if not 1 <= len(parts) <= 2 or any(part not in _NUMBER_WORDS for part in parts):
        return None
    values = [_NUMBER_WORDS[part] for part in parts]
    if len(values) == 2:
        return Fraction(sum(values)) if values[0] >= 20 and 1 <= values[1] <= 9 else None
    return Fraction(values[0])


def _letters(node: Node) -> str | None:
    return node[1].lower() if node[0] in ("sym", "const") and len(node[1]) == 1 else None


def _is_real_line(interval: Collection) -> bool:
    if len(interval.items) != 2 or not all(isinstance(item, Quantity) for item in interval.items):
        return False
    low, high = (item.node for item in interval.items)
    return low == ("neg", ("const", "inf")) and high == ("const", "inf")


# -- several values ---------------------------------------------------------------------------------------------------
def _same_matrix(gold: Matrix, answer: Matrix, policy: Policy) -> bool | None:
    if (len(gold.rows), len(gold.rows[0])) != (len(answer.rows), len(answer.rows[0])):
        return False
    pairs = zip((cell for row in gold.rows for cell in row), (cell for row in answer.rows for cell in row), strict=True)
    return _all(_same(left, right, policy) for left, right in pairs)


def _is_ordered(collection: Collection) -> bool:
    return collection.opening not in ("", "{")


def _same_collection(gold: Collection, answer: Collection, policy: Policy) -> bool | None:
    if _is_ordered(gold) and _is_ordered(answer):
        # Two items in square brackets may be an interval; three are a list, whatever its brackets.
        same_brackets = len(gold.items) > 2 or _brackets(gold) == _brackets(answer)
        return same_brackets and _in_order(gold.items, answer.items, policy)
    if "{" in (gold.opening, answer.opening) and (_is_ordered(gold) or _is_ordered(answer)):
        return False  # a set is no tuple
    if policy.set_braces == "required" and gold.opening != answer.opening:
        return False
    if _is_ordered(gold) or _is_ordered(answer):  # a tuple whose brackets were left out keeps its order
        ordered = gold if _is_ordered(gold) else answer
        may_be_bare = len(ordered.items) > 2 or _brackets(ordered) == "()"
        return may_be_bare and _in_order(gold.items, answer.items, policy)
    if any(isinstance(item, Named) for item in (*gold.items, *answer.items)):
        return _named_items(gold.items, answer.items, policy)
    joins = {gold.joined_by, answer.joined_by}
    if joins == {"and", "or"} and _all_inequalities((*gold.items, *answer.items)):
        return False
    if gold.opening == answer.opening == "{":
        return _unordered(_distinct(gold.items), _distinct(answer.items), policy)
    return _unordered(gold.items, answer.items, policy)


def _brackets(collection: Collection) -> str:
    opening = {"]": "("}.get(collection.opening, collection.opening)
    closing = {"[": ")"}.get(collection.closing, collection.closing)
    return opening + closing


def _in_order(gold: Sequence[Any], answer: Sequence[Any], policy: Policy) -> bool | None:
    if len(gold) != len(answer):
        return False
    return _all(_same(left, right, policy) for left, right in zip(gold, answer, strict=True))


def _distinct(items: Sequence[Any]) -> list[Any]:
    kept: list[Any] = []
    for item in items:
        if len(items) > _MAX_UNORDERED or not any(item == other for other in kept):
            kept.append(item)
    return kept


def _unordered(gold: Sequence[Any], answer: Sequence[Any], policy: Policy) -> bool | None:
    """Return whether each item of one has its own partner in the other."""
    if len(gold) != len(answer):
        return False
    if len(gold) > _MAX_UNORDERED:
        values = [[plain_number(item) for item in side] for side in (gold, answer)]
        if any(value is None for side in values for value in side):
            return None
        return sorted(values[0]) == sorted(values[1])  # type: ignore[type-var]
    remaining, unknown = list(answer), False
    for item in gold:
        verdicts = [_same(item, other, policy) for other in remaining]
        if True in verdicts:
            remaining.pop(verdicts.index(True))
        elif None in verdicts:
            unknown = True
        else:
            return False
    return None if unknown else True


def _named_items(gold: Sequence[Any], answer: Sequence[Any], policy: Policy) -> bool | None:
    """Compare ``x=1, y=2`` by name; where one side gives no names, in the same order; one name for all is a list."""
    if len(gold) != len(answer):
        return False
    names = [[item.name for item in side if isinstance(item, Named)] for side in (gold, answer)]
    values = [[item.value if isinstance(item, Named) else item for item in side] for side in (gold, answer)]
    if all(len(set(side)) <= 1 for side in names):
        known = {side[0] for side in names if side}
        return len(known) <= 1 and _unordered(values[0], values[1], policy)
    if len(names[0]) == len(names[1]) == len(gold):
        if sorted(names[0]) != sorted(names[1]):
            return False
        paired = dict(zip(names[1], values[1], strict=True))
        if len(paired) < len(answer):
            return _unordered(gold, answer, policy)
        return _all(_same(value, paired[name], policy) for name, value in zip(names[0], values[0], strict=True))
    return _in_order(values[0], values[1], policy)


# -- equations and inequalities ---------------------------------------------------------------------------------------
def _same_named(gold: Any, answer: Any, policy: Policy) -> bool | None:
    if isinstance(gold, Named) and isinstance(answer, Named):
        if gold.name == answer.name:
            return _same(gold.value, answer.value, policy)
        rearranged = same_equation(gold, answer, policy)
        if rearranged is not False:
            return rearranged
        both_symbols = len(gold.name) == 1 and len(answer.name) == 1
        return False if both_symbols else _same(gold.value, answer.value, policy)
    named, other = (gold, answer) if isinstance(gold, Named) else (answer, gold)
    if isinstance(other, Relation) and isinstance(named.value, Quantity):
        return same_equation(gold, answer, policy)
    if isinstance(other, Collection) and len(other.items) > 1 and not isinstance(named.value, (Collection, Union)):
        return False
    return _same(gold.value, answer, policy) if named is gold else _same(gold, answer.value, policy)


def _all_inequalities(items: Sequence[Any]) -> bool:
    return all(isinstance(item, Relation) for item in items)


def _same_relation(gold: Any, answer: Any, policy: Policy) -> bool | None:
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_relations(gold, answer, policy)
    relation, other = (gold, answer) if isinstance(gold, Relation) else (answer, gold)
    if "=" in relation.ops:
        value = value_of_equation(relation)
        if value is None:
            return False
        return _same(value, answer, policy) if relation is gold else _same(gold, value, policy)
    if not policy.intervals_as_inequalities:
        return False
    interval = as_set(relation)
    if interval is None or not isinstance(other, (Collection, Union)):
        return False
    return _same(interval, answer, policy) if relation is gold else _same(gold, interval, policy)


def _same_relations(gold: Relation, answer: Relation, policy: Policy) -> bool | None:
    mirrored = Relation(tuple(reversed(answer.sides)), tuple(MIRROR.get(op, op) for op in reversed(answer.ops)))
    unknown = False
    for candidate in (answer, mirrored):
        if candidate.ops == gold.ops:
            verdict = _in_order(gold.sides, candidate.sides, policy)
            if verdict:
                return True
            unknown = unknown or verdict is None
    if gold.ops == answer.ops == ("=",):
        return same_equation(gold, answer, policy)
    sets = [as_set(relation) for relation in (gold, answer)]
    if sets[0] is not None and sets[1] is not None:
        return variable(gold) == variable(answer) and _same(sets[0], sets[1], policy)
    inequality = same_inequality(gold, answer, policy.tolerances)
    if inequality is not None:
        return inequality
    return None if unknown or not {"=", "in", "~="}.intersection(gold.ops + answer.ops) else False
