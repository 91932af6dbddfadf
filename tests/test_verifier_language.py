"""``language``: scripts, and the common words of Latin languages."""

from __future__ import annotations

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifiers.language import language

TEXTS = {
    "en": "First we add the two numbers, and then we see that the sum of them is larger than the third one.",
    "de": "Zuerst addieren wir die beiden Zahlen, und dann sehen wir, dass die Summe nicht mit der dritten gleich ist.",
    "fr": "Nous ajoutons les deux nombres, et nous voyons que la somme est plus grande que le nombre du texte.",
    "es": "Primero sumamos los dos números, y entonces vemos que la suma es más grande que el número del texto.",
    "it": "Prima sommiamo i numeri, e poi vediamo che la somma non è più grande del numero con gli altri.",
    "pt": "Primeiro somamos os números, e então vemos que a soma não é maior do que o número com os outros.",
    "nl": "Eerst tellen we de getallen op, en dan zien we dat het totaal niet groter is dan het getal van de tekst.",
    "ru": "Сначала мы складываем оба числа, а потом видим, что сумма больше третьего.",
    "zh": "首先我们把两个数字相加然后我们看到它们的和比第三个数字大得多所以答案是七",
    "ja": "まず二つの数を足してから、その和が三番目の数より大きいことがわかります。",
    "ko": "먼저 두 숫자를 더한 다음 그 합이 세 번째 숫자보다 크다는 것을 알 수 있습니다.",
    "ar": "نجمع العددين أولا ثم نرى أن المجموع أكبر من العدد الثالث في السؤال",
    "hi": "पहले हम दोनों संख्याओं को जोड़ते हैं और फिर देखते हैं कि योग तीसरी संख्या से बड़ा है",
}


@pytest.mark.parametrize("wanted", list(TEXTS))
@pytest.mark.parametrize("written", list(TEXTS))
def test_each_language_is_told_from_each_other(wanted, written):
    score = language(language=wanted).judge(TEXTS[written]).score
    if wanted == written:
        assert score >= 0.95
    elif (wanted, written) == ("ja", "zh"):
        assert score == 1.0  # Japanese is written with Chinese characters too: the script alone cannot tell
    else:
        assert score <= 0.5


def test_a_mixture_is_scored_by_its_share():
    half = "This is the first half, which is English. " + "Это вторая половина, она русская"
    assert 0.4 < language().judge(half).score < 0.7
    assert language(scoring="threshold").judge(half).score == 0.0
    assert language(scoring="threshold", threshold=0.4).judge(half).score == 1.0


def test_code_formulas_and_tags_are_not_counted():
    text = (
        f"<think>{TEXTS['ru']}</think> ```python\nprint('hello world, this is code')\n``` $x = \\alpha + \\text{{abc}}$"
    )
    assert language(language="ru").judge(text).score == 1.0


def test_short_texts_are_not_judged():
    assert language().judge("Yes. 42").score is None
    assert language(min_letters=3).judge("Yes. 42").score == 1.0


@pytest.mark.parametrize("options", [{"language": "xx"}, {"threshold": 2.0}])
def test_bad_options(options):
    with pytest.raises(ConfigurationError):
        language(**options)
