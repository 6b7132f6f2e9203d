"""Stop texts: incremental detokenisation that looks at new text only."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_CONTEXT_TOKENS = 4
_WINDOW_TOKENS = 16
_MAX_WINDOW_TOKENS = 64
_INCOMPLETE = "\ufffd"


class StopTextMatcher:
    """Watches one sample's tokens for stop texts.

    A few tokens before the new ones are decoded with them: many tokenizers write a token differently at the
    start of a text, and a character may be spread over up to four tokens. Its text counts once its bytes
    are complete. The prompt's text is never searched.
    """

    def __init__(self, texts: Sequence[str], *, tokenizer: PreTrainedTokenizerBase, prompt_tail: Sequence[int]) -> None:
        """texts: none of them empty. prompt_tail: the last tokens of the prompt, as context."""
        self._texts = tuple(texts)
        self._tokenizer = tokenizer
        self._window = [int(token) for token in prompt_tail[-_CONTEXT_TOKENS:]]
        self._read_text = self._decode().rstrip(_INCOMPLETE)
        self._tail = ""
        self._tail_length = max(len(text) for text in self._texts) - 1

    def push(self, token: int) -> bool:
        """Adds the next token; whether a stop text is complete with it."""
        self._window.append(token)
        text = self._decode()
        complete_text = text.rstrip(_INCOMPLETE)
        searched = self._tail + complete_text[len(self._read_text) :]
        self._tail = searched[max(0, len(searched) - self._tail_length) :]
        self._read_text = complete_text
        # Cut between characters: the rest of one that was cut would be taken for new text. Bytes that never
        # become a character must not let the window grow without bound.
        whole = len(text) == len(complete_text)
        if len(self._window) > (_WINDOW_TOKENS if whole else _MAX_WINDOW_TOKENS):
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._read_text = self._decode().rstrip(_INCOMPLETE)
        return any(stop in searched for stop in self._texts)

    def _decode(self) -> str:
        text = self._tokenizer.decode(self._window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
