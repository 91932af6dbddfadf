"""The parser's view of the tokens: where it stands, and what may come next."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from trl_grpo_ext.rewards.verifiers.math.tokens import Token

Node = tuple[Any, ...]


class NotParsed(Exception):  # noqa: N818  says that another stage must look at the text
    """The tokens are no expression that this grammar knows."""


def number(value: int | Fraction) -> Node:
    """Return the node of an exact number."""
    return ("num", Fraction(value), -1)


class Cursor:
    """A position in a list of tokens."""

    def __init__(self, tokens: Sequence[Token], sign: int) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self.sign = sign  # which branch of a plus-minus sign is read: +1 upper, -1 lower
        self.saw_plus_minus = False

    def peek(self, offset: int = 0) -> Token | None:
        index = self.position + offset
        return self.tokens[index] if index < len(self.tokens) else None

    def take(self) -> Token:
        token = self.peek()
        if token is None:
            raise NotParsed("ends too early")
        self.position += 1
        return token

    def accept(self, kind: str, *texts: str) -> bool:
        token = self.peek()
        if token is not None and token.kind == kind and token.text in texts:
            self.position += 1
            return True
        return False

    def expect_close(self, text: str) -> None:
        if not self.accept("close", text):
            raise NotParsed(f"lacks {text}")
