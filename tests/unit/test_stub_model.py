"""The stub's tokenizer: any text goes in and comes back, and each word the stub says is one token."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from server.engine.stub_model import FIRST_WORD_ID, NUM_WORDS, VOCAB_SIZE, WORDS, write_stub_model


def _tokenizer(tmp_path_factory: "Path") -> Tokenizer:
    return Tokenizer.from_file(str(write_stub_model(tmp_path_factory, 1024) / "tokenizer.json"))


def test_words_are_single_tokens(tmp_path: Path) -> None:
    """The last NUM_WORDS ids are the words, each with its space."""
    tokenizer = _tokenizer(tmp_path)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    said = [tokenizer.decode([FIRST_WORD_ID + index]) for index in range(NUM_WORDS)]
    assert said == [f" {word}" for word in WORDS]


def test_any_text_comes_back(tmp_path: Path) -> None:
    """Byte-level: nothing is unknown."""
    tokenizer = _tokenizer(tmp_path)

    @given(st.text())
    def round_trip(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

    round_trip()
