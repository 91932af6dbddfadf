"""Equations and inequalities: what they say about a variable, and when two of them say the same."""

from __future__ import annotations

from typing import Any

from trl_grpo_ext.rewards.verifiers.math.answers import Collection, Named, Quantity, Relation, Union
from trl_grpo_ext.rewards.verifiers.math.cursor import Node
from trl_grpo_ext.rewards.verifiers.math.evaluate import symbols
from trl_grpo_ext.rewards.verifiers.math.identity import Tolerances, same_expression
from trl_grpo_ext.rewards.verifiers.math.quantities import Policy

MIRROR = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!=", "~=": "~=", "in": "in"}
_INFINITY = Quantity(("const", "inf"))
_MINUS_INFINITY = Quantity(("neg", ("const", "inf")))


def _difference(equation: Any) -> Node | None:
    """Return lhs - rhs of a single equation in expressions, or None."""
    if isinstance(equation, Named):
        if len(equation.name) != 1 or not isinstance(equation.value, Quantity):
            return None
        return ("add", [("sym", equation.name), ("neg", equation.value.node)])
    if isinstance(equation, Relation) and equation.ops == ("=",):
        left, right = equation.sides
        if isinstance(left, Quantity) and isinstance(right, Quantity):
            return ("add", [left.node, ("neg", right.node)])
    return None


def same_equation(gold: Any, answer: Any, policy: Policy) -> bool | None:
    """Return whether two equations are multiples of each other: their differences have a constant ratio."""
    left, right = _difference(gold), _difference(answer)
    if left is None or right is None:
        return False if left is not None or right is not None else None
    if not policy.rearranged_equations:
        return False
    if symbols(left) != symbols(right) or not symbols(left):
        return False
    return _proportional(left, right, policy.tolerances)


def _proportional(left: Node, right: Node, tolerances: Tolerances) -> bool | None:
    """Return whether one expression is a constant times the other."""
    names = symbols(left) | symbols(right)
    # f / g is constant exactly if f(x) g(y) = f(y) g(x) for all x, y.
    shifted = [rename(node, {name: f"{name}#" for name in names}) for node in (left, right)]
    return same_expression(
        ("mul", [(left, False), (shifted[1], False)]), ("mul", [(shifted[0], False), (right, False)]), tolerances
    )


def rename(node: Node, names: dict[str, str]) -> Node:
    """Return the expression with its symbols renamed as ``names`` says; others keep their name."""
    kind = node[0]
    if kind == "sym":
        return ("sym", names.get(node[1], node[1]))
    if kind == "add":
        return (kind, [rename(term, names) for term in node[1]])
    if kind == "mul":
        return (kind, [(rename(factor, names), inverted) for factor, inverted in node[1]])
    if kind == "fn":
        return (kind, node[1], tuple(rename(argument, names) for argument in node[2]))
    if kind in ("num", "const"):
        return node
    return (kind, *(rename(part, names) if isinstance(part, tuple) else part for part in node[1:]))


def value_of_equation(relation: Relation) -> Any:
    """Return what a true chain of constants (3 + 4 = 7) or a sum of unknowns (a + b = 7) is worth, else None."""
    sides = [side for side in relation.sides if isinstance(side, Quantity)]
    if len(sides) != len(relation.sides) or any(op not in ("=", "~=") for op in relation.ops):
        return None
    first, last = sides[0], sides[-1]
    if symbols(last.node):
        return None
    if symbols(first.node):
        return last if _sum_of_unknowns(first.node) else None
    if all(same_expression(side.node, last.node, Tolerances()) for side in sides):
        return last
    return None


def _sum_of_unknowns(node: Node) -> bool:
    terms = node[1] if node[0] == "add" else [node]
    return len(terms) > 1 and all((term[1] if term[0] == "neg" else term)[0] == "sym" for term in terms)


def variable(relation: Relation) -> str | None:
    """Return the symbol that stands alone on exactly one side of the relation, or None."""
    names = [side.node[1] for side in relation.sides if isinstance(side, Quantity) and side.node[0] == "sym"]
    return names[0] if len(names) == 1 else None


def as_set(relation: Relation) -> Collection | Union | None:
    """Return the interval that an inequality in one bare variable describes, two of them for ``x != a``, or None."""
    sides, ops = relation.sides, relation.ops
    if not all(isinstance(side, Quantity) for side in sides):
        return None
    if ops == ("!=",) and sides[0].node[0] == "sym" and not symbols(sides[1].node):
        return Union((Collection((_MINUS_INFINITY, sides[1]), "(", ")"), Collection((sides[1], _INFINITY), "(", ")")))
    if any(op not in ("<", ">", "<=", ">=") for op in ops):
        return None
    if ops[0].startswith(">"):
        sides, ops = tuple(reversed(sides)), tuple(MIRROR[op] for op in reversed(ops))
    if any(op.startswith(">") for op in ops):
        return None
    is_variable = [side.node[0] == "sym" for side in sides]
    if len(sides) == 3 and is_variable[1] and not is_variable[0] and not is_variable[2]:
        return Collection((sides[0], sides[2]), "[" if ops[0] == "<=" else "(", "]" if ops[1] == "<=" else ")")
    if len(sides) == 2 and is_variable[0] and not symbols(sides[1].node):
        return Collection((_MINUS_INFINITY, sides[1]), "(", "]" if ops[0] == "<=" else ")")
    if len(sides) == 2 and is_variable[1] and not symbols(sides[0].node):
        return Collection((sides[0], _INFINITY), "[" if ops[0] == "<=" else "(", ")")
    return None


def same_inequality(gold: Relation, answer: Relation, tolerances: Tolerances) -> bool | None:
    """Return whether two inequalities are multiples of each other, with a factor whose sign fits their directions."""
    directions = {"<": ("<", -1), "<=": ("<=", -1), ">": ("<", 1), ">=": ("<=", 1)}
    if len(gold.ops) != 1 or len(answer.ops) != 1 or not {gold.ops[0], answer.ops[0]} <= set(directions):
        return None
    left, right = (_difference(Relation(relation.sides, ("=",))) for relation in (gold, answer))
    if left is None or right is None or not symbols(left) or symbols(left) != symbols(right):
        return None
    (strictness, sign), (other_strictness, other_sign) = directions[gold.ops[0]], directions[answer.ops[0]]
    if strictness != other_strictness:
        return False
    # left = k * right for one k at every point, and k is positive exactly if both point the same way.
    magnitudes = [("fn", "abs", (node,)) for node in (left, right)]
    factor = ("mul", [(left, False), (magnitudes[1], False)])
    other: Node = ("mul", [(right, False), (magnitudes[0], False)])
    if sign != other_sign:
        other = ("neg", other)
    if same_expression(factor, other, tolerances) is not True:
        return None if _proportional(left, right, tolerances) is not False else False
    return _proportional(left, right, tolerances)
