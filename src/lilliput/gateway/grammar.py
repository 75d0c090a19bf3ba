"""Answers that follow a grammar: JSON of a schema, or calls of tools."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from lilliput.gateway.problems import Problem, unsupported
from lilliput.gateway.served_model import ServedModel

#: small models like to write blanks without end
_JSON_OPTIONS = {"whitespace_flexible": False}
_helpers = ThreadPoolExecutor(2, thread_name_prefix="grammar")


class Grammars:
    """Makes grammars for one model. What it must know of the tokenizer is found out at the first use (a second)."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._tokenizer: Any = None
        self._making = threading.Lock()

    def json(self, schema: dict[str, Any] | None, param: str) -> Grammar:
        """JSON of a schema; of None: any object. Takes time: call it in a thread. Raises `Problem`."""
        return self._grammar({"type": "object"} if schema is None else schema, param)

    def lark(self, text: str, param: str) -> Grammar:
        """What a grammar in llguidance's dialect of Lark allows. Takes time: call it in a thread."""
        return self._grammar(text, param)

    def _grammar(self, source: dict[str, Any] | str, param: str) -> Grammar:
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise unsupported("This server was installed without llguidance, which this needs.", param) from None
        tokenizer = self._prepared()
        try:
            if isinstance(source, str):
                grammar = LLMatcher.grammar_from_lark(source)
            else:
                grammar = LLMatcher.grammar_from_json_schema(json.dumps(source), defaults=_JSON_OPTIONS)  # type: ignore[arg-type]
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            error = matcher.get_error() if matcher.is_error() else ""
        except (ValueError, RecursionError) as e:
            error = str(e)
        if error:
            raise Problem(f"This schema cannot be used: {' '.join(error.split())[:300]}", param=param)
        return Grammar(matcher)

    def _prepared(self) -> Any:
        with self._making:
            if self._tokenizer is None:
                from llguidance.hf import from_tokenizer

                model = self._model
                size = max(model.size, len(model.tokenizer))
                self._tokenizer = from_tokenizer(model.tokenizer, n_vocab=size, eos_token=sorted(model.end_ids))
            return self._tokenizer


class Grammar:
    """One answer's way through a grammar.

    Some grammars take tens of milliseconds a token. What may come next is therefore computed as soon as the last token
    is known, while its hidden states travel.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._next: Future[bytes] | None = None

    def copy(self) -> Grammar:
        """For another answer, from the beginning."""
        return Grammar(self._matcher.deep_copy())

    def allowed(self, vocabulary: int) -> torch.Tensor:
        mask = self._matcher.compute_bitmask() if self._next is None else self._next.result()
        bits = np.frombuffer(mask, dtype=np.uint8)
        if self._matcher.is_error():
            raise Problem("The grammar of this request became too complex.", code="grammar_too_complex")
        flags = np.unpackbits(bits, bitorder="little")
        allowed = torch.zeros(vocabulary, dtype=torch.bool)
        count = min(vocabulary, len(flags))
        allowed[:count] = torch.from_numpy(flags[:count]).bool()
        return allowed

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._next = _helpers.submit(self._matcher.compute_bitmask)
