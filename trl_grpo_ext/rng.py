"""Keep random number generators as they were around code that draws from them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


class RandomState(NamedTuple):
    """The state of Python's, NumPy's and torch's generators (CPU and CUDA) at one moment."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: list[torch.Tensor] | None

    @classmethod
    def now(cls) -> RandomState:
        """Return the present state."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Set every generator back to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the state of all generators when the block ends."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.restore()
