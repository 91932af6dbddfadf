"""``language``: how much of a completion is written in the wanted language.

No model and no download: the alphabet decides, and among languages of the Latin alphabet their commonest short words.
That is enough to punish a model that drifts into another script or language in the middle of its reasoning; it is no
language identification for short or mixed texts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from trl_grpo_ext.errors import ConfigurationError, nearest
from trl_grpo_ext.rewards.verifier import Verdict, verifier

# Prefixes of Unicode's character names.
_SCRIPTS: dict[str, tuple[str, ...]] = {
    "latin": ("LATIN",), "cyrillic": ("CYRILLIC",), "greek": ("GREEK",), "arabic": ("ARABIC",), "hebrew": ("HEBREW",),
    "devanagari": ("DEVANAGARI",), "bengali": ("BENGALI",), "tamil": ("TAMIL",), "telugu": ("TELUGU",),
    "thai": ("THAI",), "han": ("CJK",), "japanese": ("CJK", "HIRAGANA", "KATAKANA"), "hangul": ("HANGUL",),
}  # fmt: skip
_LANGUAGES = {
    "en": "latin", "de": "latin", "fr": "latin", "es": "latin", "it": "latin", "pt": "latin", "nl": "latin",
    "ru": "cyrillic", "uk": "cyrillic", "bg": "cyrillic", "el": "greek", "ar": "arabic", "fa": "arabic", "ur": "arabic",
    "he": "hebrew", "hi": "devanagari", "bn": "bengali", "ta": "tamil", "te": "telugu", "th": "thai", "zh": "han",
    "ja": "japanese", "ko": "hangul",
}  # fmt: skip
# Words that are frequent in one of these languages and rare in the others.
_COMMON_WORDS = {
    "en": "the and is of to that this with for are was which we have it be as from so then if when can not",
    "de": "der die das und ist nicht ein eine mit von dem den zu auf sich wir für auch daß dass wird sind aus bei wenn",
    "fr": "le les des est et une dans que qui pour pas sur avec nous ce cette sont donc mais il elle aux du où",
    "es": "el los las es y una del por para con que se como más pero su entonces son está hay muy porque también",
    "it": "il gli è e di che una per con non sono della nel si come più ma quindi questo questa anche dei alla ha",
    "pt": "o os as é e uma do da para com que não se como mais mas são então em dos ao também está isso por",
    "nl": "de het een en is van dat niet met voor zijn op aan we wordt ook maar dan er bij als naar om te deze",
}
_SKIPPED = re.compile(
    r"```.*?(?:```|$)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\[A-Za-z]+|https?://\S+|<[^<>\n]{1,40}>", re.DOTALL
)
_WORD = re.compile(r"[^\W\d_]+")
_MIN_WORDS = 12


def _validate(options: Mapping[str, Any]) -> None:
    wanted = options["language"]
    if wanted not in _LANGUAGES and wanted not in _SCRIPTS:
        known = [*_LANGUAGES, *_SCRIPTS]
        raise ConfigurationError(
            f"reward 'language': language={wanted!r} is unknown; use one of {', '.join(known)}.{nearest(wanted, known)}"
        )
    if not 0 <= options["threshold"] <= 1:
        raise ConfigurationError(f"reward 'language': threshold={options['threshold']} must be between 0 and 1")


@verifier(name="language", columns=(), reference=None, version="1", validate=_validate)
def language(
    text: str,
    reference: Any,
    *,
    language: str = "en",
    scoring: Literal["share", "threshold"] = "share",
    threshold: float = 0.9,
    min_letters: int = 20,
) -> Verdict:
    """Return the share of letters in the wanted script, halved if the words are those of another Latin language.

    Code, formulas, tags and links are left out. A text of fewer than ``min_letters`` letters gives no score.

    Args:
        text: the completion.
        reference: not used.
        language: a language (en, de, fr, es, it, pt, nl, ru, zh, ja, …) or a script (latin, cyrillic, han, …).
        scoring: "share" of letters, or 1 from ``threshold`` on and 0 below.
        threshold: share that counts as written in the language.
        min_letters: fewest letters that can be judged.
    """
    prose = _SKIPPED.sub(" ", text)
    letters = [char for char in prose if char.isalpha()]
    if len(letters) < min_letters:
        return Verdict(None, "too_short")
    script = _LANGUAGES.get(language, language)
    share = sum(_script_matches(char, script) for char in letters) / len(letters)
    reason = "share"
    if language in _COMMON_WORDS and (other := _other_latin_language(prose, language)):
        share, reason = share / 2, f"looks_like_{other}"
    if scoring == "threshold":
        return Verdict(float(share >= threshold), reason, f"{share:.2f}")
    return Verdict(share, reason, f"{share:.2f}")


@lru_cache(maxsize=8192)
def _script_matches(char: str, script: str) -> bool:
    if char.isascii():
        return script == "latin"
    return unicodedata.name(char, "").startswith(_SCRIPTS[script])


def _other_latin_language(prose: str, wanted: str) -> str | None:
    """Return another Latin language if its common words are at least twice as frequent as those of the wanted one."""
    words = [word.casefold() for word in _WORD.findall(prose)]
    if len(words) < _MIN_WORDS:
        return None
    counts = {name: sum(word in common for word in words) for name, common in _common_words().items()}
    best = max(counts, key=lambda name: counts[name])
    return best if best != wanted and counts[best] >= 3 and counts[best] >= 2 * counts[wanted] else None


@lru_cache(maxsize=1)
def _common_words() -> dict[str, frozenset[str]]:
    return {name: frozenset(words.split()) for name, words in _COMMON_WORDS.items()}
