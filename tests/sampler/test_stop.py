"""Incremental detokenisation, against decoding everything at every token."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from opentinker_server.models.testing import write_byte_tokenizer
from opentinker_server.sampler.stop import StopTextMatcher


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    directory: Path = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def first_match(tokenizer, prompt: list[int], tokens: list[int], texts: tuple[str, ...]) -> int | None:
    matcher = StopTextMatcher(texts, tokenizer=tokenizer, prompt_tail=prompt)
    return next((index for index, token in enumerate(tokens) if matcher.push(token)), None)


def test_match_falls_on_the_token_that_completes_it(tokenizer) -> None:
    tokens = ids(tokenizer, "say stop now")
    assert first_match(tokenizer, ids(tokenizer, "prompt"), tokens, ("stop",)) == 7
    assert first_match(tokenizer, [], tokens, ("now", "y s")) == 4
    assert first_match(tokenizer, [], tokens, ("nope",)) is None


def test_match_never_begins_in_the_prompt(tokenizer) -> None:
    assert first_match(tokenizer, ids(tokenizer, "st"), ids(tokenizer, "op"), ("stop", "st")) is None
    assert first_match(tokenizer, ids(tokenizer, "st"), ids(tokenizer, "op"), ("op",)) == 1


def test_characters_of_several_tokens_match_when_complete(tokenizer) -> None:
    tokens = ids(tokenizer, "ab€🙂!")
    assert len(tokens) == 2 + 3 + 4 + 1
    assert first_match(tokenizer, [], tokens, ("€",)) == 4
    assert first_match(tokenizer, [], tokens, ("b€🙂",)) == 8
    assert first_match(tokenizer, tokens[:3], tokens[3:], ("€🙂",)) == 5  # the prompt ends inside a character
    assert first_match(tokenizer, [], tokens, ("\ufffd",)) is None


def test_endless_incomplete_bytes_do_not_hide_a_later_match(tokenizer) -> None:
    broken = ids(tokenizer, "€")[:1] * 100
    tokens = [*broken, *ids(tokenizer, "€ stop")]
    assert first_match(tokenizer, [], tokens, ("€ stop",)) == len(tokens) - 1


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(alphabet="abé€🙂 ", min_size=1, max_size=40),
    prompt=st.text(alphabet="abé", max_size=6),
    texts=st.lists(st.text(alphabet="abé€🙂 ", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_incremental_search_equals_searching_everything(tokenizer, text, prompt, texts) -> None:
    tokens = ids(tokenizer, text)
    expected = next(
        (
            index
            for index in range(len(tokens))
            if any(stop in tokenizer.decode(tokens[: index + 1]).rstrip("\ufffd") for stop in texts)
        ),
        None,
    )
    assert first_match(tokenizer, ids(tokenizer, prompt), tokens, tuple(texts)) == expected
