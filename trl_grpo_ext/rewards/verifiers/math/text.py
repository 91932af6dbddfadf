r"""Fold the many ways to write one character into ASCII and LaTeX, in one linear pass.

Models and data sets write ``−5``, ``½``, ``x²``, ``√2``, ``７`` or ``٧``. Everything after this module sees ``-5``,
``\frac{1}{2}``, ``x^{2}``, ``\usqrt 2``, ``7`` only. ``\usqrt`` is our own command: a root sign without braces, whose
argument is a whole number or a bracket (``√12`` is the root of twelve, while LaTeX reads ``\sqrt12`` as ``\sqrt{1}2``).
"""

from __future__ import annotations

import re
import unicodedata

_MINUS = "−–—‒―﹣－‐‑⁻➖"
_SPACES = "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_GREEK = {
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "δ": "delta",
    "ε": "epsilon",
    "ζ": "zeta",
    "η": "eta",
    "θ": "theta",
    "ι": "iota",
    "κ": "kappa",
    "λ": "lambda",
    "μ": "mu",
    "ν": "nu",
    "ξ": "xi",
    "π": "pi",
    "ρ": "rho",
    "σ": "sigma",
    "τ": "tau",
    "υ": "upsilon",
    "φ": "phi",
    "ϕ": "phi",
    "χ": "chi",
    "ψ": "psi",
    "ω": "omega",
    "Γ": "Gamma",
    "Δ": "Delta",
    "Θ": "Theta",
    "Λ": "Lambda",
    "Ξ": "Xi",
    "Π": "Pi",
    "Σ": "Sigma",
    "Φ": "Phi",
    "Ψ": "Psi",
    "Ω": "Omega",
}
_SINGLE: dict[str, str] = {
    **dict.fromkeys(_MINUS, "-"),
    **dict.fromkeys(_SPACES, " "),
    **{char: f"\\{name} " for char, name in _GREEK.items()},
    "×": "\\times ",
    "✕": "\\times ",
    "✖": "\\times ",
    "⨯": "\\times ",
    "·": "\\cdot ",
    "⋅": "\\cdot ",
    "∙": "\\cdot ",
    "•": "\\cdot ",
    "∗": "*",
    "÷": "/",
    "⁄": "/",
    "∕": "/",
    "≤": "\\le ",
    "⩽": "\\le ",
    "≦": "\\le ",
    "≥": "\\ge ",
    "⩾": "\\ge ",
    "≧": "\\ge ",
    "≠": "\\ne ",
    "≈": "\\approx ",
    "≅": "\\cong ",
    "≡": "\\equiv ",
    "∞": "\\infty ",
    "∅": "\\emptyset ",
    "⌀": "\\emptyset ",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "∈": "\\in ",
    "∉": "\\notin ",
    "±": "\\pm ",
    "∓": "\\mp ",
    "√": "\\usqrt ",
    "∛": "\\ucbrt ",
    "°": "^{\\circ}",
    "º": "^{\\circ}",
    "˚": "^{\\circ}",
    "∘": "\\circ ",
    "′": "'",
    "″": "''",
    "’": "'",
    "‘": "'",
    "“": '"',
    "”": '"',
    "∠": "\\angle ",
    "→": "\\to ",
    "⇒": "\\Rightarrow ",
    "∑": "\\sum ",
    "∏": "\\prod ",
    "∫": "\\int ",
    "∂": "\\partial ",
    "⌊": "\\lfloor ",
    "⌋": "\\rfloor ",
    "⌈": "\\lceil ",
    "⌉": "\\rceil ",
    "⟨": "\\langle ",
    "⟩": "\\rangle ",
    "〈": "\\langle ",
    "〉": "\\rangle ",
    "∖": "\\setminus ",
    "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}",
    "ℕ": "\\mathbb{N}",
    "ℚ": "\\mathbb{Q}",
    "ℂ": "\\mathbb{C}",
    "٫": ".",
    "٬": ",",
    "،": ",",
    "、": ",",
    "。": ".",
    "٪": "%",
    "⟌": "",
    "∣": "|",
    "∥": "||",
    "µ": "\\mu ",
}
_SUPERSCRIPT = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣʸᵃᵇᵏᵐᵗ", "0123456789+-=()nixyabkmt", strict=True))
_SUBSCRIPT = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₒₓₙₖₘᵢⱼ", "0123456789+-=()aeoxnkmij", strict=True))
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(map(re.escape, _SUPERSCRIPT))}]+")
_SUBSCRIPT_RUN = re.compile(f"[{''.join(map(re.escape, _SUBSCRIPT))}]+")


def _fold_char(char: str) -> str:
    if char in _SINGLE:
        return _SINGLE[char]
    category = unicodedata.category(char)
    if category == "Nd":
        return str(unicodedata.decimal(char))
    if category == "Cf" or char in "\ufe0f\u20e3":  # zero-width, invisible operators, the parts of an emoji digit
        return ""
    folded = unicodedata.normalize("NFKC", char)
    if category == "No" and "⁄" in folded:  # a vulgar fraction; NFKC gives its digits around U+2044
        numerator, denominator = folded.split("⁄", 1)
        return f"\\frac{{{numerator}}}{{{denominator or 1}}}"
    if len(folded) == 1 and folded != char:
        return _SINGLE.get(folded, folded)
    return folded


# "\boxed" in a Python or JSON string that forgot to double the backslash: \b is a backspace, \f a form feed, \t a tab.
_SWALLOWED_RUN = re.compile(r"[\x08\x0c\t](?=oxed\{|inom\{|rac\{|ext\{|frac\{|imes\b)")
_LETTERS_OF_ESCAPES = {"\x08": "\\b", "\x0c": "\\f", "\t": "\\t"}


def fold_unicode(text: str) -> str:
    r"""Return ``text`` with digits, signs, fractions, roots and scripts of Unicode rewritten in ASCII and LaTeX.

    Letters of other alphabets stay as they are (NFKC-folded), so words in any language can be compared.

    Args:
        text: any string; lone surrogates are kept.

    Returns:
        The folded text. ASCII input is returned unchanged, but for ``\boxed`` and the like whose backslash was
        swallowed by an unescaped string.
    """
    text = _SWALLOWED_RUN.sub(lambda match: _LETTERS_OF_ESCAPES[match.group()], text)
    if text.isascii():
        return text
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + "".join(_SUPERSCRIPT[char] for char in run.group()) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: "_{" + "".join(_SUBSCRIPT[char] for char in run.group()) + "}", text)
    return "".join(char if char.isascii() else _fold_char(char) for char in text)
