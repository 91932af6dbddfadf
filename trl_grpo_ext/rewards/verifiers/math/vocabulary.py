"""The words of LaTeX that the tokeniser knows, and what each one is taken for."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DROPPED = _words(
    "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle "
    "scriptstyle "
    "limits nolimits rm bf it tt sf cal large Large LARGE huge small normalsize boldmath mathstrut strut centering "
    "therefore because noindent ensuremath hfill nonumber relax"
)
SPACES = _words("quad qquad enspace thinspace medspace space")
TEXT = _words("text textbf textit textrm textsf texttt textnormal textup mbox hbox emph mathrm operatorname textmd")
STYLE = _words("mathbf mathit mathsf mathtt mathcal mathnormal boldsymbol bm underline boxed fbox bold pmb")
DROPPED_WITH_ARGUMENT = _words("hspace vspace phantom vphantom hphantom label tag color mathchoice kern ref cite")
OPERATORS = {
    "times": "*", "cdot": "*", "ast": "*", "cdotp": "*", "bullet": "*", "div": "/", "colon": ":",
    "le": "<=", "leq": "<=", "leqslant": "<=", "leqq": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=", "geqq": ">=",
    "lt": "<", "gt": ">", "ne": "!=", "neq": "!=", "approx": "~=", "simeq": "~=", "thickapprox": "~=", "doteq": "~=",
    "cong": "~=", "equiv": "=", "coloneqq": "=", "in": "in", "notin": "notin", "to": "to", "rightarrow": "to",
    "Rightarrow": "to", "implies": "to", "cup": "cup", "bigcup": "cup", "cap": "cap", "setminus": "setminus",
    "backslash": "setminus", "pm": "pm", "mp": "mp", "land": "and", "wedge": "and", "lor": "or", "vee": "or",
    "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "Vert": "||", "lVert": "||", "rVert": "||",
    "prime": "'", "ldots": "...", "dots": "...", "cdots": "...", "dotsc": "...", "colonequals": "=",
}  # fmt: skip
COMMANDS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "frac": "frac", "sqrt": "sqrt", "usqrt": "usqrt",
    "ucbrt": "ucbrt", "binom": "binom", "dbinom": "binom", "tbinom": "binom", "infty": "infty", "emptyset": "emptyset",
    "varnothing": "emptyset", "circ": "circ", "degree": "degree", "overline": "overline", "bar": "overline",
    "choose": "choose", "over": "over", "angle": "angle", "mathbb": "mathbb", "Re": "Re", "Im": "Im",
}  # fmt: skip
FUNCTIONS = _words(
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg exp sqrt cbrt abs gcd lcm "
    "max min floor ceil asin acos atan asinh acosh atanh arcsinh arccosh arctanh sgn"
)
GREEK = _words(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi omicron rho varrho "
    "sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell hbar"
)
VARIANTS = {"varepsilon": "epsilon", "vartheta": "theta", "varphi": "phi", "varrho": "rho"}
OPENERS = {"lbrace": "\\{", "langle": "<(", "lfloor": "lfloor", "lceil": "lceil", "lbrack": "[", "lparen": "("}
CLOSERS = {"rbrace": "\\}", "rangle": ")>", "rfloor": "rfloor", "rceil": "rceil", "rbrack": "]", "rparen": ")"}
CURRENCIES = {"€": "€", "£": "£", "¥": "¥", "₹": "₹"}
