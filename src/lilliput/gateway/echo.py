"""A prompt that is repeated before its answers."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator, Sequence

import torch

from lilliput.gateway.likelihood import Likelihood, likelihoods
from lilliput.gateway.piece import Piece, Token
from lilliput.gateway.vocabulary import Vocabulary

#: of a prompt with its likelihoods, in one piece: readers of streams take no line of any length
_TOKENS_A_PIECE = 64


class Echo:
    """The text of a prompt, with how likely the model finds its tokens, if that is wanted. Its answers share it.

    :param prompt: ids
    :param top: note the likelihood of every token, and so many of the likeliest; None: do not
    """

    def __init__(self, text: str, prompt: Sequence[int], vocabulary: Vocabulary, *, top: int | None) -> None:
        self.text, self.top = text, top
        self._prompt, self._vocabulary = prompt, vocabulary
        self._likelihoods: list[Likelihood | None] = [None]

    def read(self, place: int, logits: torch.Tensor) -> None:
        """Note the likelihoods of the tokens after `place`, by logits `[n, vocabulary]`; the parts come in order."""
        following = self._prompt[place + 1 : place + 1 + len(logits)]
        self._likelihoods += likelihoods(logits, following, self.top or 0)

    def pieces(self) -> Iterator[Piece]:
        """The prompt as the beginning of an answer."""
        if self.top is None:
            yield Piece(self.text)
            return
        tokens = [Token(*of) for of in zip(self._prompt, self._likelihoods, self._offsets(), strict=True)]
        for begin in range(0, len(tokens), _TOKENS_A_PIECE):
            some, after = tokens[begin : begin + _TOKENS_A_PIECE], tokens[begin + _TOKENS_A_PIECE :]
            start, end = 0 if not begin else some[0].offset, after[0].offset if after else len(self.text)
            yield Piece(self.text[start:end], some)

    def _offsets(self) -> list[int]:
        """How many characters of the text are complete before each token."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        lengths = [len(decoder.decode(self._vocabulary.bytes_of(token))) for token in self._prompt]
        # a tokenizer may begin with a token of its own, or with a space, which the text does not have
        more = sum(lengths) + len(decoder.decode(b"", final=True)) - len(self.text)
        starts = itertools.accumulate(lengths[:-1], initial=0)
        return [min(max(0, start - more), len(self.text)) for start in starts]
