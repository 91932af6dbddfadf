"""Compare numbers and expressions with their units and percent signs; and the policy of every comparison."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from trl_grpo_ext.rewards.verifiers.math.answers import Quantity, plain_number
from trl_grpo_ext.rewards.verifiers.math.cursor import Node
from trl_grpo_ext.rewards.verifiers.math.evaluate import symbols
from trl_grpo_ext.rewards.verifiers.math.identity import Tolerances, same_expression
from trl_grpo_ext.rewards.verifiers.math.units import Unit, conversion, is_known


class Policy(NamedTuple):
    """Matters of taste. See the options of the ``math`` verifier for what each value means."""

    tolerances: Tolerances = Tolerances()
    percent: str = "either"
    units: str = "optional"
    intervals_as_inequalities: bool = True
    rearranged_equations: bool = True
    vectors_as_tuples: bool = False
    number_words: bool = True
    set_braces: str = "optional"


def same_quantity(gold: Quantity, answer: Quantity, policy: Policy) -> bool | None:
    """Return whether two quantities are the same, given what the policy says about units and percent signs."""
    factor = _unit_factor(gold.unit, answer.unit, policy)
    if factor is None:
        return _as_products(gold, answer, policy)
    if _base(gold.node) != _base(answer.node) and 10 not in (_base(gold.node), _base(answer.node)):
        return False
    answer_node = _rename_constant(gold.node, answer.node)
    verdicts = []
    for scale in _percent_factors(gold, answer, policy.percent):
        verdict = same_expression(gold.node, answer_node, policy.tolerances, factor * scale)
        if verdict:
            return True
        verdicts.append(verdict)
    product = _as_products(gold, answer, policy)
    return True if product else None if None in verdicts else False


def _rename_constant(gold: Node, answer: Node) -> Node:
    """Return the answer with its constant of integration called C, as in the gold: ``x^2 + c`` for ``x^2 + C``."""
    if gold[0] != "add" or answer[0] != "add" or ("sym", "C") not in gold[1] or "C" in symbols(answer):
        return answer
    own = [term for term in answer[1] if term in (("sym", "c"), ("sym", "K"), ("sym", "k"))]
    if len(own) != 1 or own[0][1] in symbols(gold):
        return answer
    return ("add", [("sym", "C") if term == own[0] else term for term in answer[1]])


def _base(node: Node) -> int:
    return node[3] if node[0] == "num" and len(node) > 3 else 10


def _as_products(gold: Quantity, answer: Quantity, policy: Policy) -> bool | None:
    """Compare the reading in which a spaced letter is a variable: ``10 m`` as ten times m."""
    if gold.product is None and answer.product is None:
        return False
    left, right = gold.product or gold.node, answer.product or answer.node
    if not (symbols(left) and symbols(right)) or (gold.unit and answer.unit and gold.unit != answer.unit):
        return False
    return same_expression(left, right, policy.tolerances)


def _unit_factor(gold: Unit | None, answer: Unit | None, policy: Policy) -> Fraction | None:
    """Return the factor from the answer's unit to the gold's, or None if the units forbid equality."""
    if policy.units == "ignore" or gold == answer:
        return Fraction(1)
    if gold is None or answer is None:
        return None if policy.units in ("required", "convert_required") and gold is not None else Fraction(1)
    if not is_known(gold) and not is_known(answer):
        same_head = gold[0][0].split()[-1] == answer[0][0].split()[-1]
        return Fraction(1) if same_head else None
    return conversion(answer, gold) if policy.units.startswith("convert") else None


def _percent_factors(gold: Quantity, answer: Quantity, policy: str) -> tuple[Fraction, ...]:
    hundred, one = Fraction(100), Fraction(1)
    if gold.percent == answer.percent or policy == "ignore":
        return (one,)
    if gold.percent:
        return (hundred,) if policy == "strict" else (one, hundred)
    if policy == "strict":
        return (1 / hundred,)
    value = plain_number(Quantity(gold.node))
    # 0.5 is a share, so 0.5 % is not what it means; 50 may be a percentage whose sign the data set left out.
    return (1 / hundred, one) if value is not None and abs(value) > 1 else (1 / hundred,)
