"""Text from a table of tokens is what the library makes of the ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from nightshift.data import Tokenizer
from nightshift.data.decoding import TokenTable
from tests.fixtures.tokenizer_k import build_tokenizer, write_folder


def byte_level() -> tokenizers.Tokenizer:
    """Single bytes, some pairs that are no UTF-8 by themselves, a gap, special and other added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "Ġthe", "ÃĤ", "Ãł", "âĤ", "ðŁĺ"]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    vocabulary["last"] = len(pieces) + 3
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<ü>", special=True)])
    made.add_tokens([AddedToken("日本", special=False), AddedToken("Ġ日", special=False)])
    made.decoder = decoders.ByteLevel()
    return made


@pytest.mark.parametrize("backend", [byte_level(), build_tokenizer()])
def test_each_token_by_itself_and_all_in_a_row(backend: tokenizers.Tokenizer) -> None:
    table = TokenTable.of(backend, rows=280)
    assert table is not None
    size = max(index for index in backend.get_vocab(with_added_tokens=True).values()) + 5
    for skip in (True, False):
        for ids in [*([at] for at in range(size)), list(range(size))]:
            assert table.decode(np.array(ids, np.int32), skip) == backend.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 265), max_size=40), st.booleans())
def test_any_bytes(ids: list[int], skip: bool) -> None:
    assert _TABLE is not None
    text = _TABLE.decode(np.array(ids, np.int32), skip)
    assert text == _BACKEND.decode(ids, skip_special_tokens=skip)


_BACKEND = byte_level()
_TABLE = TokenTable.of(_BACKEND)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace(), decoders.ByteFallback()])
def test_another_decoder_is_left_to_the_library(decoder: object) -> None:
    backend = build_tokenizer()
    backend.decoder = decoder  # type: ignore[assignment]
    assert TokenTable.of(backend) is None


def test_ids_that_no_table_holds_are_left_to_the_library(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    ids = np.array([4, 5, 2, 9_999], np.int32)
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == "ab"
    assert tokenizer.decode(ids[:3], skip_special_tokens=False) == "ab<eos>"
    assert tokenizer.decode(ids[:0]) == ""
