"""The order in which prompts are dealt: shuffled epochs, mixed files, an exactly resumable cursor.

The order depends on the seed alone and the cursor is a few integers, so that a resumed run deals
the prompts that the uninterrupted one would have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from glm_lora.errors import DataError
from glm_lora.rl.data import Prompt, PromptData


class PromptStream:
    """Deals prompts in an endless, fixed order that a small cursor describes.

    Every file is gone through in epochs, shuffled anew in each (when asked to). Several files are
    interleaved so that after any number of draws each has had its share to within one prompt.

    Args:
        data: The prompts.
        shuffle: Shuffle every epoch of every file.
        seed: Seeds the shuffling.
    """

    def __init__(self, data: PromptData, *, shuffle: bool, seed: int) -> None:
        self._data = data
        self._shuffle = shuffle
        self._seed = seed
        self._taken = [0] * len(data.files)
        self._order: list[tuple[int, np.ndarray]] = [(-1, np.zeros(0))] * len(data.files)

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        return [self._next() for _ in range(count)]

    @property
    def drawn(self) -> int:
        """Prompts dealt so far."""
        return sum(self._taken)

    @property
    def epoch(self) -> float:
        """Prompts dealt so far divided by the number of prompts."""
        return self.drawn / len(self._data)

    def state_dict(self) -> dict[str, Any]:
        """The cursor: plain JSON values."""
        return {
            "taken": list(self._taken),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "data": self._data.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream over the same data stood.

        Raises:
            DataError: The cursor belongs to other data, another seed or another order.
        """
        mine = self.state_dict()
        for key, what in (("data", "prompt data"), ("seed", "seed"), ("shuffle", "shuffling")):
            if state.get(key) != mine[key]:
                raise DataError(
                    f"the saved data cursor has another {what} ({state.get(key)})",
                    str(mine[key]),
                    "Resume with the options and prompt files of the first start",
                )
        self._taken = [int(n) for n in state["taken"]]

    def _next(self) -> Prompt:
        index = self._due()
        prompts = self._data.files[index].prompts
        epoch, position = divmod(self._taken[index], len(prompts))
        self._taken[index] += 1
        return prompts[self._permutation(index, epoch)[position]]

    def _due(self) -> int:
        """The file that is furthest behind its share (the first of equals)."""
        total = sum(f.weight for f in self._data.files)
        drawn = self.drawn + 1
        lag = [
            f.weight / total * drawn - n for f, n in zip(self._data.files, self._taken, strict=True)
        ]
        return max(range(len(lag)), key=lag.__getitem__)

    def _permutation(self, index: int, epoch: int) -> np.ndarray:
        if self._order[index][0] != epoch:
            count = len(self._data.files[index].prompts)
            order = np.arange(count)
            if self._shuffle:
                order = np.random.default_rng([self._seed, index, epoch]).permutation(count)
            self._order[index] = (epoch, order)
        return self._order[index][1]


def request_seed(seed: int, rollout: int, index: int) -> int:
    """The seed of prompt ``index`` of one rollout: 63 bits, equal in every process."""
    digest = hashlib.sha256(f"{seed} {rollout} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
