"""The program in a completion: which fenced block counts, and how it joins what the prompt gave.

Text only: nothing here parses Python, so that no completion can upset the training process.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Block = Literal["last", "first", "longest", "all"]

_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)(?:[ \t][^\n`]*)?$", re.MULTILINE)
_PYTHON_TAGS = ("", "python", "python3", "py", "py3", "{python}", ".python", "{.python}")
_CODE_LINE = re.compile(
    r"^[ \t]*(?:def |class |import |from \w[\w.]* import |async def |@\w|return\b|print\("
    r"|for .+:|while .+:|if .+:|\w[\w.]* ?= ?\S)",
    re.MULTILINE,
)


class Extraction(NamedTuple):
    """A program, or why there is none ("no_code", "truncated")."""

    program: str | None
    reason: str = ""


class _Fenced(NamedTuple):
    tag: str
    body: str
    closed: bool


def answer_part(text: str) -> str:
    """Return what follows the last ``</think>``, the whole text if there is none."""
    return text.rpartition("</think>")[2]


def fenced_blocks(text: str) -> list[_Fenced]:
    """Return the fenced blocks in order; a fence is closed by one of the same kind, at least as long."""
    blocks: list[_Fenced] = []
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif fence[1].startswith(opening[1]) and not fence[2]:
            blocks.append(_Fenced(opening[2].lower(), text[opening.end() + 1 : fence.start()], True))
            opening = None
    if opening is not None:
        blocks.append(_Fenced(opening[2].lower(), text[opening.end() + 1 :], False))
    return blocks


def extract(text: str, *, block: str = "last", source: str = "auto", accept_unclosed: bool = False) -> Extraction:
    """Return the program in a completion.

    Args:
        text: the completion.
        block: which fenced block counts if there are several; "all" joins them in order. Blocks tagged with another
            language never count.
        source: "block" wants a fenced block, "raw" takes the whole text, "auto" takes the whole text if there is no
            block and a line looks like Python.
        accept_unclosed: whether a last block without an end counts. By default it does not: the completion was cut off.
    """
    text = text.replace("\r\n", "\n")
    if source == "raw":
        return Extraction(text) if text.strip() else Extraction(None, "no_code")
    text = answer_part(text)
    found = fenced_blocks(text)
    usable = [one for one in found if one.tag in _PYTHON_TAGS and (one.closed or accept_unclosed) and one.body.strip()]
    if usable:
        bodies = [one.body for one in usable]
        chosen = {"last": bodies[-1], "first": bodies[0], "longest": max(bodies, key=len), "all": "\n".join(bodies)}
        return Extraction(chosen[block])
    if found:
        cut_off = not found[-1].closed and found[-1].tag in _PYTHON_TAGS
        return Extraction(None, "truncated" if cut_off else "no_code")
    if source == "auto" and _CODE_LINE.search(text):
        return Extraction(text)
    return Extraction(None, "no_code")


def join_prompt(program: str, prompt_code: str, entry_point: str | None) -> str:
    """Return the program with what the prompt gave: its imports and helpers, or the head of the function to complete.

    A program that defines the entry point itself follows the prompt's code, whose stub it overrides; one that does not
    is the stub's body.
    """
    prompt_code = prompt_code.replace("\r\n", "\n")
    if entry_point is None:
        return f"{prompt_code.rstrip()}\n\n{program}"
    name = re.escape(entry_point.partition(".")[0])
    if re.search(rf"^(?:async[ \t]+def|def|class)[ \t]+{name}\b|^{name}[ \t]*(?::[^=\n]+)?=", program, re.MULTILINE):
        return f"{prompt_code.rstrip()}\n\n{program}"
    return prompt_code.rstrip("\n") + "\n" + program.lstrip("\n")
