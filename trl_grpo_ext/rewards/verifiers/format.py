"""``format``: the completion is a sequence of tagged blocks, ``<think>…</think><answer>…</answer>`` for example."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifier import Verdict, verifier

_MAX_TAGS = 200  # a text with more has repeated some, whatever follows
_NAME = re.compile(r"[A-Za-z][\w-]{0,40}\Z")


def _validate(options: Mapping[str, Any]) -> None:
    tags = _tags(options["tags"])
    if not tags or len(set(tags)) != len(tags) or not all(_NAME.match(tag) for tag in tags):
        raise ConfigurationError(
            f"reward 'format': tags={options['tags']!r} must be one or more different names, such as [think, answer]"
        )
    for key in ("min_chars", "max_chars"):
        for tag, limit in (options[key] or {}).items():
            if tag not in tags or isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise ConfigurationError(
                    f"reward 'format': {key}={options[key]!r} must map names among {list(tags)} to whole numbers >= 0"
                )


def _tags(tags: Any) -> tuple[str, ...]:
    return (tags,) if isinstance(tags, str) else tuple(tags)


@verifier(name="format", columns=(), reference=None, version="1", validate=_validate)
def format(
    text: str,
    reference: Any,
    *,
    prompt: Any = None,
    completion_ids: Sequence[int] | None = None,
    tags: Any = ("think", "answer"),
    opened_by_template: Literal["auto", "yes", "no"] = "auto",
    empty: Literal["reject", "allow"] = "reject",
    min_chars: Any = None,
    max_chars: Any = None,
    last_tag: Literal["required", "untagged"] = "required",
    text_after: Literal["reject", "allow"] = "reject",
    partial: bool = False,
    tokenizer: str | None = None,
    score_value: float = 1.0,
) -> Verdict:
    """Return ``score_value`` if the completion has exactly the blocks asked for, in order, and nothing between them.

    Every tag occurs once; white space before, between and after the blocks does not matter. A tag name counts wherever
    it stands, so ``</answer>`` inside the reasoning is a mistake. One linear pass.

    Args:
        text: the completion.
        reference: not used.
        prompt: the row's prompt; tells with "auto" whether the template opened the first block.
        completion_ids: the token ids, read only if ``tokenizer`` is given.
        tags: names of the blocks in order.
        opened_by_template: the prompt already ends in the first opening tag, so the completion starts inside that
            block. "auto" looks at the end of the prompt; a chat template's own text cannot be seen there, so set
            "yes" for templates that open the block.
        empty: whether blocks of white space only are accepted.
        min_chars: {name: fewest characters of its content, trimmed}.
        max_chars: {name: most characters}.
        last_tag: "untagged" if the last block is plain text to the end, as in ``<think>…</think> text``; name it in
            ``tags`` all the same.
        text_after: whether text may follow the last block.
        partial: instead of 0, pay the share of tags that occur exactly once.
        tokenizer: name or folder of the tokenizer, for tags that are special tokens: these are missing from the text
            TRL decodes, so it is decoded again from the ids with them.
        score_value: full score.
    """
    names = _tags(tags)
    if tokenizer is not None and completion_ids is not None:
        text = _decode(tokenizer, tuple(int(token) for token in completion_ids), names)
    opened = opened_by_template == "yes" or (opened_by_template == "auto" and _prompt_opens(prompt, names[0]))
    matches = itertools.islice(_tag_pattern(names).finditer(text), _MAX_TAGS)
    found = [(match.group(1), match.group(2), match.span()) for match in matches]
    wanted = [(slash, name) for name in names for slash in ("", "/")]
    if last_tag == "untagged":
        wanted = wanted[:-2]
    if opened:
        wanted = wanted[1:]
    reason = _structure(found, wanted)
    if reason is None:
        reason = _contents(
            _blocks(text, found, names, opened=opened, untagged=last_tag == "untagged"),
            empty=empty,
            min_chars=min_chars or {},
            max_chars=max_chars or {},
            text_after=text_after,
        )
    if reason is None:
        return Verdict(score_value, "well_formed")
    seen = [(slash, name) for slash, name, _ in found]
    share = sum(seen.count(tag) == 1 for tag in wanted) / len(wanted) if partial and wanted else 0.0
    # A completion with all tags that breaks another rule must stay below one without fault.
    return Verdict(min(share, 1 - 1 / (len(wanted) + 1)) * score_value if share else 0.0, reason)


@lru_cache(maxsize=64)
def _tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<(/?)({'|'.join(map(re.escape, names))})>")


def _prompt_opens(prompt: Any, name: str) -> bool:
    """Return whether the prompt, or the unfinished assistant turn that it ends in, ends in the opening tag."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt:
        last = prompt[-1]
        prompt = last.get("content") if isinstance(last, Mapping) and last.get("role") == "assistant" else None
    return isinstance(prompt, str) and prompt.rstrip().endswith(f"<{name}>")


def _structure(found: Sequence[tuple[str, str, Any]], wanted: Sequence[tuple[str, str]]) -> str | None:
    seen = [(slash, name) for slash, name, _ in found]
    if seen == list(wanted):
        return None
    for tag in wanted:
        if tag not in seen:
            return "missing_tag"
    if any(seen.count(tag) > 1 for tag in seen):
        return "repeated_tag"
    return "unexpected_tag" if set(seen) - set(wanted) else "wrong_order"


def _blocks(
    text: str, found: Sequence[tuple[str, str, tuple[int, int]]], names: Sequence[str], *, opened: bool, untagged: bool
) -> list[tuple[str | None, str]]:
    """Return the pieces of a well-structured text: (name of the block or None for what lies outside, content)."""
    pieces: list[tuple[str | None, str]] = []
    position, inside = 0, names[0] if opened else None
    for slash, name, (start, end) in found:
        pieces.append((inside, text[position:start]))
        inside, position = (None if slash else name), end
    pieces.append((names[-1] if untagged else inside, text[position:]))
    return pieces


def _contents(
    pieces: Sequence[tuple[str | None, str]],
    *,
    empty: str,
    min_chars: Mapping[str, int],
    max_chars: Mapping[str, int],
    text_after: str,
) -> str | None:
    for index, (name, content) in enumerate(pieces):
        size = len(content.strip())
        if name is None:
            if size and not (text_after == "allow" and index == len(pieces) - 1):
                return "text_outside"
        elif not size and empty == "reject":
            return "empty_block"
        elif size < min_chars.get(name, 0):
            return "block_too_short"
        elif size > max_chars.get(name, size):
            return "block_too_long"
    return None


@lru_cache(maxsize=4)
def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def _decode(name: str, ids: tuple[int, ...], names: Sequence[str]) -> str:
    """Return the text of the ids with the tags that are special tokens, without all other special tokens."""
    tokenizer = _tokenizer(name)
    tags = {f"<{slash}{tag}>" for tag in names for slash in ("", "/")}
    dropped = {
        token_id
        for token_id, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=False)
        if token not in tags
    }
    return str(tokenizer.decode([token for token in ids if token not in dropped], skip_special_tokens=False))
