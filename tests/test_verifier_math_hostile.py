"""Answers made to hang, exhaust or attack a grader: refused at once, and nothing in them runs."""

from __future__ import annotations

import time

import pytest

from trl_grpo_ext.rewards.verifiers.math import guard, math
from trl_grpo_ext.rewards.verifiers.math.evaluate import Evaluator
from trl_grpo_ext.rewards.verifiers.math.expression import parse_expression
from trl_grpo_ext.rewards.verifiers.math.tokens import TooLarge, tokenise

# A verdict takes a few milliseconds here; the bound leaves room for a busy machine and is far below any hang.
MAX_CPU_S = 0.5

HANGS = {
    "power tower": "9^{9^{9^{9}}}",
    "tower of ten": "10^{10^{10}}",
    "tower without braces": "9^9^9^9^9",
    "a billion bits": "2^{1000000000}",
    "factorial": "1000000000!",
    "factorial tower": "((20!)!)!",
    "three thousand factorials": "5" + "!" * 3000,
    "binomial": "\\binom{1000000000}{500000000}",
    "long sum": "\\sum_{k=1}^{1000000000} k",
    "long product": "\\prod_{k=1}^{1000000} k",
    "expansion": "(x+y+z+1)^{500}",
    "expansion of many": "(1+x)^{100000}",
    "integral without a closed form": "\\int_0^1 x^{x^{x}}\\,dx",
    "fifty thousand decimals": "0." + "1" * 50_000,
    "fifty thousand digits": "9" * 50_000,
    "five hundred roots": "\\sqrt{" * 500 + "5" + "}" * 500,
    "three thousand brackets": "(" * 3000 + "5" + ")" * 3000,
    "1500 left": "\\left(" * 1500 + "5" + "\\right)" * 1500,
    "two thousand fractions": "\\frac{1}{" * 2000 + "5" + "}" * 2000,
    "five thousand elements": ",".join(map(str, range(5000))),
    "a set of five thousand": "\\{" + ",".join(map(str, range(5000))) + "\\}",
    "two thousand sets": "\\{" * 2000 + "\\}" * 2000,
    "five thousand signs": "-" * 5000 + "5",
    "three thousand sines": "\\sin " * 3000 + "5",
    "three thousand powers": "x^" * 3000 + "5",
    "two hundred sines": "+".join(f"\\sin({number})" for number in range(200)),
    "many large powers": "+".join(f"{number}^{{9000}}" for number in range(2, 120)),
    "determinant of symbols": "\\det\\begin{pmatrix}"
    + "\\\\".join("&".join(f"a_{{{row}{column}}}" for column in range(9)) for row in range(9))
    + "\\end{pmatrix}",
    "fifty kilobytes": "x+" * 25_000 + "1",
    "unclosed": "{" * 5000,
    "dollars": "$" * 20_000,
}

ATTACKS = [
    "__import__('os').system('touch MATHCASERANCODE')",
    "exec(\"open('MATHCASERANCODE','w')\")",
    "eval(compile(\"open('MATHCASERANCODE','w')\",'','exec'))",
    "().__class__.__bases__[0].__subclasses__()",
    "[open('MATHCASERANCODE','w')]",
    "open('MATHCASERANCODE','w')#1\\pi",
    "open('MATHCASERANCODE','w') if 1 else \\frac{1}{2}",
    "\\frac{__import__('os').system('touch MATHCASERANCODE')}{1}",
    "(lambda: open('MATHCASERANCODE','w'))()",
    "\\input{MATHCASERANCODE}",
    "\\write18{touch MATHCASERANCODE}",
    'S(\'open("MATHCASERANCODE","w")\')',
    "\\int_0^1 open('MATHCASERANCODE','w') dx",
    "\\sum_{k=1}^{3} __import__('os').system('touch MATHCASERANCODE')",
    "\\begin{pmatrix}open('MATHCASERANCODE','w')\\\\2\\end{pmatrix}",
    "\\text{__import__('os').system('touch MATHCASERANCODE')}",
    "x.subs(x, open('MATHCASERANCODE','w'))",
    "{{open('MATHCASERANCODE','w')}}",
    "`touch MATHCASERANCODE`",
    "$(touch MATHCASERANCODE)",
]

GOLDS = ["5", "\\frac{1}{2}", "x^2+1", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\int_0^1 x\\,dx", "\\{1,2\\}"]


@pytest.mark.parametrize("answer", list(HANGS.values()), ids=list(HANGS))
def test_an_answer_made_to_hang_is_refused_without_asking_a_worker(answer, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "trl_grpo_ext.rewards.verifiers.math.grading.same_symbolically", lambda *arguments: asked.append(arguments)
    )
    started = time.process_time()
    verdict = math().judge(f"\\boxed{{{answer}}}", "5")
    assert time.process_time() - started < MAX_CPU_S
    assert verdict.score == 0.0
    assert asked == []


@pytest.mark.parametrize("answer", list(HANGS.values()), ids=list(HANGS))
def test_a_gold_made_to_hang_does_no_harm_either(answer):
    started = time.process_time()
    verdict = math(symbolic=False).judge("\\boxed{5}", answer)
    assert time.process_time() - started < 2 * MAX_CPU_S
    assert verdict.score in (None, 0.0)


@pytest.mark.parametrize("text", ["\\boxed{" * 3000, "<think>" * 5000, "<answer>" * 5000, "**" * 20_000, "#### " * 5000,
                                  "the answer is " * 4000, "\\boxed{a}, " * 5000, "So 7. " * 10_000, "a" * 400_000,
                                  "$1$" * 10_000, "\\text{" * 5000])  # fmt: skip
def test_extraction_is_linear(text):
    started = time.process_time()
    assert math(symbolic=False).judge(text, "5").score == 0.0
    assert time.process_time() - started < MAX_CPU_S


@pytest.mark.parametrize("gold", GOLDS)
@pytest.mark.parametrize("answer", ATTACKS)
def test_nothing_in_an_answer_runs(answer, gold, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for form in (f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>", f"#### {answer}", answer):
        assert math().judge(form, gold).score == 0.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("attack", ATTACKS[:6])
def test_nothing_in_a_gold_runs(attack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    math().judge("\\boxed{5}", attack)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["2^{200000}", "3000!", "\\binom{40000}{20000}", "(x+1)^{101}", "\\sin(10^{300})", "e^{10^{30}}",
     "+".join(["\\ln 3"] * 300)],
)  # fmt: skip
def test_arithmetic_is_bounded_before_it_is_done(text):
    node = parse_expression(tokenise(text)).branches[0]
    started = time.process_time()
    with pytest.raises(TooLarge):
        Evaluator({"x": 3}, 50).value(node)
    assert time.process_time() - started < MAX_CPU_S


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("x" * 401, "characters"),
        ("\\alpha" * 61, "commands"),
        ("__import__", "code"),
        ("(" * 13 + ")" * 13, "nested"),
        ("1" * 31, "digits"),
        ("\\sum_{k=1}^{2001} k", "bound"),
        ("x^{x^{x}}", "tower"),
        ("9^9^9", "tower"),
        ("((3!)!)!", "factorials"),
        ("\\int \\int \\int x", "two sums"),
    ],
)
def test_the_guard_names_what_it_refuses(text, part):
    assert part in guard.refusal(text)


@pytest.mark.parametrize(
    "text", ["\\int_0^1 x^2\\,dx", "\\sum_{k=1}^{100} \\frac{1}{k^2}", "a_{n}^{2}+b_{n}^{2}", "5! + 3!"]
)
def test_the_guard_lets_honest_answers_through(text):
    assert guard.refusal(text) is None
