r"""Find the final answer in a completion: its own step, with a named and configurable order of sources.

A source either yields the text of one answer or nothing; the first source in the order that yields wins. Two things
end the search for good: reasoning that was never finished, and a last box that was never closed. Both mean that the
model did not get to its answer, so nothing earlier may stand in for it. Every scan is linear in the completion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trl_grpo_ext.errors import ConfigurationError, nearest

DEFAULT_ORDER = ("boxed", "tag", "hashes", "sentence", "bold", "conclusion", "whole")
MAX_ANSWER_CHARS = 4000  # no answer is longer; keeps every later step cheap
_EXPLICIT = ("boxed", "tag", "hashes")  # marks that exist only to carry the answer

_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:\[[^\]\n]{0,20}\]\s*)?\{|\\[\\{}]|[{}]")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))")
_CONNECTOR = re.compile(
    r"(?:[\s$.,;:&*]|\\[()\[\], ;]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}"
    r"|\b(?:and|or|und|oder|et|ou|y|o)\b|[A-Za-z](?:_\{?\w\}?)?\s*=)*"
)
_TAG = re.compile(r"<(/?)answer\s*>", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]*####(?!#)[ \t]*([^\n]*)", re.MULTILINE)
_INLINE_HASHES = re.compile(r"####(?!#)[ \t]*([^\n#]+)")
_SENTENCE = re.compile(
    r"(?:\b(?:final|correct|right)?\s*\banswers?\b(?:\s+to\s+(?:the|this|your)\s+(?:question|problem))?\W{0,4}?\s*"
    r"(?:is|are|=|:|equals|would\s+be|should\s+be|must\s+be|will\s+be|comes\s+to)"
    r"|\b(?:correct|right|best)\s+(?:option|choice)\s*(?:is|:)"
    r"|\b(?:la\s+respuesta\s+es|la\s+réponse\s+est|die\s+antwort\s+(?:ist|lautet)|la\s+risposta\s+è)"
    r"|答案(?:是|为|：|:))(?![A-Za-z])",
    re.IGNORECASE,
)
_SENTENCE_FILLER = re.compile(
    r"(?:[\s:*_`=]|(?:therefore|thus|then|hence|simply|exactly|just|indeed|now|option|choice|equal\s+to|given\s+by)\b,?)*",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|[.?](?=\s|\*|$)|!(?=\s|\*|$)|(?<!\d)\.(?=[A-Z])|。")
_AFTERTHOUGHT = re.compile(
    r"\s*(?:,|;|\(|-{1,2}|\.)?\s*\b(?:because|since|as|which|where|when|whereas|while|but|not|so|for|after|i\s+hope|due\s+to|given\s+that|and\s+not|meaning|i\.e\.|that\s+is)\b.*$",
    re.IGNORECASE | re.DOTALL,
)
_NOT_A_VALUE = re.compile(
    r"^(?:correct|right|wrong|incorrect|obvious|clear|above|below|as\s+follows|found|given|the\b|that\b|this\b|these\b|in\s+the|only|also|unclear|unknown|likely|probably|going|to\s|we\b|I\b|by\b|obtained|then\b|reasonable|consistent|in\s+(?:simplest|lowest)|valid|complete)",
    re.IGNORECASE,
)
_BOLD = re.compile(r"\*\*(?!\s)([^*\n]{1,300}?)\*\*")
_LABEL = re.compile(
    r"^[\s*_#>`]*(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|result|solution|ans|choice|option)\b\s*(?:is|are)?\s*[:=\-–]?\s*",
    re.IGNORECASE,
)
_HEADING = re.compile(
    r"^[\s*_#>]*(?:the\s+)?(?:final\s+)?(?:answer|result|solution|conclusion)[\s*_:]*$", re.IGNORECASE
)
_HEADING_LINE = re.compile(r"^[ \t*_#]*(?:the\s+)?(?:final\s+)?answer[ \t*_:]*$", re.IGNORECASE | re.MULTILINE)
_CONCLUSION = re.compile(
    r"^(?:so|therefore|thus|hence|in\s+total|altogether|in\s+conclusion|finally|consequently|∴|\\therefore)\b[,:]?\s*(.+)$",
    re.IGNORECASE | re.DOTALL,
)
_DOUBT = re.compile(
    r"\b(?:not|no|maybe|perhaps|either|or|unless|know|might|could|guess|if|probably|between|than|about|least|most|nor|cannot)\b|n't\b|\?",
    re.IGNORECASE,
)
_MATH_SPAN = re.compile(r"\$\$(.{1,300}?)\$\$|\$([^$\n]{1,300})\$|\\\((.{1,300}?)\\\)|\\\[(.{1,300}?)\\\]", re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?")


class Extraction(NamedTuple):
    """The answer found, or why there is none."""

    text: str | None
    source: str  # the source that found it; else "unfinished_reasoning", "unclosed_box", "several_answers", "no_answer"


class _Span(NamedTuple):
    start: int
    end: int
    text: str


def visible_answer(
    text: str, *, think_tags: Sequence[str] = ("<think>", "</think>"), opened_by_template: bool = False
) -> str | None:
    """Return what follows the reasoning, or None if the reasoning was never closed.

    Args:
        text: the completion.
        think_tags: opening and closing tag of the reasoning block.
        opened_by_template: the chat template wrote the opening tag into the prompt, so a completion without the
            closing tag is unfinished reasoning.
    """
    opening, closing = think_tags
    cut = text.rfind(closing)
    if cut < 0 and opened_by_template:
        return None
    rest = text[cut + len(closing) :] if cut >= 0 else text
    reopened = rest.find(opening)
    if reopened >= 0:
        rest = rest[:reopened]
        return rest if rest.strip() else None
    return rest


def _find_boxes(text: str) -> tuple[list[_Span], int]:
    """Return the complete, outermost, non-empty boxes in order and where the last unclosed one starts (-1: none)."""
    boxes: list[_Span] = []
    stack: list[tuple[int, int]] = []  # (start of the box or -1 for a plain brace, start of its content)
    for token in _BOX_TOKEN.finditer(text):
        word = token.group()
        if word == "}":
            if not stack:
                continue
            start, inner = stack.pop()
            if start < 0 or not text[inner : token.start()].strip():
                continue
            while boxes and boxes[-1].start > start:
                boxes.pop()  # nested boxes: the outermost complete one holds them
            boxes.append(_Span(start, token.end(), text[inner : token.start()]))
        elif word == "{":
            stack.append((-1, token.end()))
        elif len(word) > 2:
            stack.append((token.start(), token.end()))
    unclosed = max((start for start, _ in stack), default=-1)
    for bare in _BARE_BOX.finditer(text):
        boxes.append(_Span(bare.start(), bare.end(), bare.group(1)))
    boxes.sort()
    return boxes, unclosed


def _is_connector(gap: str) -> bool:
    return len(gap) <= 60 and _CONNECTOR.fullmatch(gap) is not None


def _joint(text: str, spans: Sequence[_Span]) -> _Span | None:
    """Return the last span, merged with those before it that only ``and``, ``or`` or punctuation separates from it."""
    if not spans:
        return None
    first = len(spans) - 1
    while first > 0 and _is_connector(text[spans[first - 1].end : spans[first].start]):
        first -= 1
    answers = list(dict.fromkeys(span.text.strip() for span in spans[first:]))
    return _Span(spans[first].start, spans[-1].end, " , ".join(answers))


def _boxed(text: str) -> _Span | None:
    boxes, unclosed = _find_boxes(text)
    if unclosed >= 0 and (not boxes or unclosed > boxes[-1].start):
        return _Span(unclosed, len(text), "")  # marks the unfinished box
    return _joint(text, boxes)


def _tag(text: str) -> _Span | None:
    spans, opened = [], None
    for match in _TAG.finditer(text):
        if not match.group(1):
            opened = match
        elif opened is not None:
            spans.append(_Span(opened.start(), match.end(), text[opened.end() : match.start()]))
            opened = None
    if opened is not None:
        return _Span(opened.start(), len(text), "")  # cut off inside the tag
    return _joint(text, [span for span in spans if span.text.strip()])


def _next_line(text: str, position: int) -> _Span | None:
    """Return the first line with content after ``position``."""
    match = re.compile(r"\s*([^\n]+)").match(text, position)
    return _Span(match.start(1), match.end(1), match.group(1)) if match else None


def _hashes(text: str) -> _Span | None:
    found = list(_HASHES.finditer(text)) or list(_INLINE_HASHES.finditer(text))
    for match in reversed(found):
        line = _Span(match.start(), match.end(), match.group(1).strip())
        if not line.text or _HEADING.match(line.text):
            return _next_line(text, match.end())
        if re.match(r"[^\d$\\]*:?$|(?:step|part|case)\b", line.text, re.IGNORECASE) and text[match.end() :].strip():
            continue  # a markdown heading of level four, not an answer
        return line._replace(text=_first_value(_LABEL.sub("", line.text)).strip("*_ "))
    return None


def _first_value(line: str) -> str:
    """Return the statement that opens ``line``, without the chatter after it."""
    end = _SENTENCE_END.search(line)
    return _AFTERTHOUGHT.sub("", line[: end.start()] if end else line)


def _sentence(text: str) -> _Span | None:
    spans: list[_Span] = []
    for match in list(_SENTENCE.finditer(text))[-50:]:
        filler = _SENTENCE_FILLER.match(text, match.end())
        start = filler.end() if filler else match.end()
        end = _SENTENCE_END.search(text, start)
        stop = end.start() if end else len(text)
        candidate = _AFTERTHOUGHT.sub("", text[start : min(stop, start + MAX_ANSWER_CHARS)]).strip(" \t*_`\"'")
        if candidate and not _NOT_A_VALUE.match(candidate):
            spans.append(_Span(match.start(), end.end() if end else stop, candidate))
    if len(spans) > 1:
        gap = text[spans[-2].end : spans[-1].start]
        if re.fullmatch(r"[\s*_.]*(?:and|or|also|the|a)?\s*(?:the\s+)?", gap, re.IGNORECASE):
            return _joint_sentences(spans)
    if spans:
        return spans[-1]
    headings = list(_HEADING_LINE.finditer(text))
    return _next_line(text, headings[-1].end()) if headings else None


def _joint_sentences(spans: list[_Span]) -> _Span:
    last, before = spans[-1], spans[-2]
    if last.text == before.text:
        return last
    return _Span(before.start, last.end, f"{before.text} , {last.text}")


def _bold(text: str) -> _Span | None:
    last_paragraph = text.rstrip().rfind("\n\n")
    for match in reversed(list(_BOLD.finditer(text))[-100:]):
        content = match.group(1).strip()
        if _HEADING.match(content):
            return _next_line(text, match.end())
        if content.endswith(":") or text[match.end() : match.end() + 1] == ":":
            continue  # a label such as **Step 1:**
        content = _LABEL.sub("", content)
        if any(char.isdigit() or char == "\\" for char in content) or match.start() > last_paragraph:
            return _Span(match.start(), match.end(), _first_value(content))
    return None


def _conclusion(text: str) -> _Span | None:
    """Return the only value of a last sentence that opens with ``so`` or ``therefore`` and expresses no doubt."""
    body = text.rstrip().rstrip(".!*_ ")
    start = max(
        (match.end() for match in re.finditer(r"\n|(?<=[^\d\s])[.!?]\s+|(?<=\d)[.!?]\s+(?=[A-Z\\$])", body)), default=0
    )
    match = _CONCLUSION.match(body[start:].lstrip("*_ "))
    if match is None or len(match.group(1)) > 600 or _DOUBT.search(match.group(1)):
        return None
    spans = [next(part for part in found.groups() if part) for found in _MATH_SPAN.finditer(match.group(1))]
    if spans:
        return _Span(start, len(text), spans[0]) if len(spans) == 1 else None
    statement = match.group(1)
    if statement.count("=") >= 1 and "$" not in statement:
        statement = statement.rsplit("=", 1)[1]
    numbers = NUMBER.findall(statement)
    return _Span(start, len(text), numbers[0]) if len(numbers) == 1 else None


def _whole(text: str) -> _Span | None:
    stripped = text.strip()
    return _Span(0, len(text), stripped) if stripped and len(stripped) <= 400 else None


def _last_line(text: str) -> _Span | None:
    lines = [line for line in text.splitlines() if line.strip()]
    return _Span(len(text) - len(lines[-1]), len(text), _LABEL.sub("", lines[-1])) if lines else None


def _last_number(text: str) -> _Span | None:
    numbers = list(NUMBER.finditer(text))
    return _Span(numbers[-1].start(), numbers[-1].end(), numbers[-1].group()) if numbers else None


SOURCES: dict[str, Callable[[str], _Span | None]] = {
    "boxed": _boxed,
    "tag": _tag,
    "hashes": _hashes,
    "sentence": _sentence,
    "bold": _bold,
    "conclusion": _conclusion,
    "whole": _whole,
    "last_line": _last_line,
    "last_number": _last_number,
}


def check_order(order: str | Sequence[str]) -> tuple[str, ...]:
    """Return ``order`` as a tuple of source names.

    Raises:
        ConfigurationError: if a name is unknown or the order is empty.
    """
    names = (order,) if isinstance(order, str) else tuple(order)
    for name in names:
        if name not in SOURCES:
            raise ConfigurationError(
                f"extract names the unknown source {name!r}.{nearest(str(name), SOURCES)} Known: {', '.join(SOURCES)}."
            )
    if not names:
        raise ConfigurationError(f"extract is empty; give at least one of {', '.join(SOURCES)}.")
    return names


def extract(
    text: str,
    *,
    order: Sequence[str] = DEFAULT_ORDER,
    think_tags: Sequence[str] = ("<think>", "</think>"),
    opened_by_template: bool = False,
    on_unclosed: str = "reject",
    same: Callable[[str, str], bool] | None = None,
) -> Extraction:
    r"""Return the final answer of a completion.

    Args:
        text: the completion, folded (see ``fold_unicode``).
        order: names of sources, tried in turn; see ``SOURCES``.
        think_tags: opening and closing tag of the reasoning, which is never searched.
        opened_by_template: the prompt already holds the opening tag.
        on_unclosed: "reject" (an unclosed last box or tag is no answer) or "previous" (fall back to an earlier one).
        same: tells whether two answer texts agree. If given, a later box, tag or ``####`` that disagrees with the
            answer found makes the completion contradict itself: "several_answers".

    Returns:
        The answer and the source that found it; or no text and the reason.
    """
    visible = visible_answer(text, think_tags=think_tags, opened_by_template=opened_by_template)
    if visible is None:
        return Extraction(None, "unfinished_reasoning")
    for position, name in enumerate(order):
        span = SOURCES[name](visible)
        if span is None:
            continue
        if not span.text and name in ("boxed", "tag"):
            if on_unclosed == "reject":
                return Extraction(None, "unclosed_box" if name == "boxed" else "unclosed_tag")
            earlier = SOURCES[name](visible[: span.start])
            if earlier is None or not earlier.text:
                continue
            span = earlier
        if len(span.text) > MAX_ANSWER_CHARS:
            return Extraction(None, "answer_too_long")
        if same is not None and _contradicted(visible, span, order[position + 1 :], same):
            return Extraction(None, "several_answers")
        return Extraction(_statement(span.text, name), name)
    return Extraction(None, "no_answer")


def _statement(text: str, source: str) -> str:
    """Return the answer of a tag whose content is a whole sentence: ``<answer>The answer is 7.</answer>``."""
    if source == "tag" and (inner := _sentence(text)) is not None:
        return inner.text
    return text.strip()


def _contradicted(text: str, span: _Span, others: Sequence[str], same: Callable[[str, str], bool]) -> bool:
    for name in others:
        if name not in _EXPLICIT:
            continue
        later = SOURCES[name](text)
        if later is not None and later.text and later.start >= span.end and not same(span.text, later.text):
            return True
    return False
