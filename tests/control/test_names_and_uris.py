"""Names and URIs: plain names only, one parser."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_server.state.names import ADAPTER, NotAPlainName, check_name, is_id, new_id
from opentinker_server.state.uris import BadUri, CheckpointUri, SnapshotUri, parse_uri

EVIL = ["", ".", "..", "a..b", "../x", "/x", "a/b", "a\\b", "a b", "a\0", "a\n", "%2e%2e", "-x", ".x", "x" * 129, "é"]


@pytest.mark.parametrize("name", EVIL)
def test_evil_names_are_refused(name: str) -> None:
    with pytest.raises(NotAPlainName):
        check_name(name, what="name")
    with pytest.raises(BadUri):
        parse_uri(f"opentinker://{new_id(ADAPTER)}/checkpoints/{name}")


@pytest.mark.parametrize("version", ["0", "01", "-1", "1.0", "one", "", "9" * 13, "²"])
def test_bad_versions_are_refused(version: str) -> None:
    with pytest.raises(BadUri):
        parse_uri(f"opentinker://{new_id(ADAPTER)}/snapshots/{version}")


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", fullmatch=True), st.integers(1, 10**11))
def test_uris_round_trip(name: str, version: int) -> None:
    adapter_id = new_id(ADAPTER)
    for uri in (CheckpointUri(adapter_id, name), SnapshotUri(adapter_id, version)):
        assert parse_uri(str(uri)) == uri


@given(st.text(max_size=200))
def test_the_parser_never_fails_otherwise(text: str) -> None:
    for candidate in (text, "opentinker://" + text):
        with contextlib.suppress(BadUri):
            parse_uri(candidate)


def test_ids_have_one_form() -> None:
    made = {new_id(ADAPTER) for _ in range(1000)}
    assert len(made) == 1000 and all(is_id(text, ADAPTER) for text in made)
    assert not is_id("a-../../../../../../x", ADAPTER) and not is_id(new_id("s"), ADAPTER)
