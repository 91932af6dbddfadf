"""Checkpoints that the memory tests share."""

from __future__ import annotations

import pytest
from runs import checkpoint, save_adapter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_adapter(base, tmp_path_factory.mktemp("adapter"))
