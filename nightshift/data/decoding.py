"""From ids to text by a table of each token's bytes, for the decoders that are no more than that.

``tokenizers`` looks each id up in two maps, copies its token and asks for each whether it is special: 0.13 us a token,
an eighth of the orchestrator's CPU. A byte-level decoder (Radford et al. 2019, "Language Models are Unsupervised
Multitask Learners", section 2.2) and one that only joins tokens are functions of the ids one by one, up to the reading
of the joined bytes as UTF-8; others, which look at neighbours or at the beginning of a text, are left to the library.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders


class TokenTable:
    """Bytes of each token, with and without the special ones; of ids without a token none, as the library has it.

    Args:
        rows: ids that the model may answer with, which are often more than its tokenizer has tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, byte_level: bool, rows: int) -> None:
        size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
        of_token = _byte_level if byte_level else _as_it_is
        tokens = [backend.id_to_token(index) for index in range(size)]
        every = [b"" if token is None else of_token(token) for token in tokens] + [b""] * max(0, rows - size)
        # Arrays of objects: to take T of them at once is twice as fast as to look up one after the other.
        self._all = np.array(every, np.object_)
        self._plain = np.array([b"" if index in special else token for index, token in enumerate(every)], np.object_)

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, rows: int = 0) -> TokenTable | None:
        """The table of a tokenizer; None where its decoder is another one."""
        byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        known = byte_level or isinstance(backend.decoder, decoders.Fuse)
        return cls(backend, byte_level, rows) if known else None

    def decode(self, ids: NDArray[Any], skip_special_tokens: bool) -> str | None:
        """Text of ids [T]; None where one of them has no place in the table."""
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self._all)):
            return None
        table = self._plain if skip_special_tokens else self._all
        return b"".join(table.take(ids).tolist()).decode(errors="replace")


def _as_it_is(token: str) -> bytes:
    return token.encode()


def _byte_level(token: str) -> bytes:
    """The bytes that a token's characters stand for; of a token that holds any other character, its own UTF-8."""
    values = _bytes_of_characters()
    found = [values.get(character) for character in token]
    return token.encode() if None in found else bytes(value for value in found if value is not None)


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """Which byte each character stands for: printable ones for themselves, from U+0100 on the others in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = np.setdiff1d(np.arange(256), printable).tolist()
    return {chr(value): value for value in printable} | {chr(256 + at): value for at, value in enumerate(others)}
