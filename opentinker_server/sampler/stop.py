"""Stop texts: incremental detokenisation that looks at new text only."""

from collections.abc import Sequence
from typing import Protocol

_CONTEXT_TOKENS = 4
_MAX_WINDOW_TOKENS = 16
_INCOMPLETE = "\ufffd"


class Detokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class StopTextMatcher:
    """Watches one sample's tokens for stop texts.

    A few tokens before the new ones are decoded with them: many tokenizers write a token differently at the
    start of a text, and a character may be spread over up to four tokens. Its text counts once its bytes
    are complete. The prompt's text is never searched.
    """

    def __init__(self, texts: Sequence[str], *, detokenizer: Detokenizer, prompt_tail: Sequence[int]) -> None:
        """texts: none of them empty. prompt_tail: the last tokens of the prompt, as context."""
        self._texts = tuple(texts)
        self._detokenizer = detokenizer
        self._window = [int(token) for token in prompt_tail[-_CONTEXT_TOKENS:]]
        self._read_text = self._complete_text()
        self._tail = ""
        self._tail_length = max(len(text) for text in self._texts) - 1

    def push(self, token: int) -> bool:
        """Adds the next token; whether a stop text is complete with it."""
        self._window.append(token)
        text = self._complete_text()
        searched = self._tail + text[len(self._read_text) :]
        self._tail = searched[max(0, len(searched) - self._tail_length) :]
        self._read_text = text
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._read_text = self._complete_text()
        return any(stop in searched for stop in self._texts)

    def _complete_text(self) -> str:
        text = self._detokenizer.decode(self._window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.rstrip(_INCOMPLETE)
