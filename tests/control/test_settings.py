"""Settings: sources in order, unknown names refused, every one documented."""

from pathlib import Path

import pytest

from opentinker_server.config import SECTIONS, ConfigError, load_config


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("[server]\nport = 1000\n[model]\nname = 'from-file'\ndtype = 'float32'\n")
    environment = {"OPENTINKER_SERVER__PORT": "2000", "OPENTINKER_MODEL__NAME": "from-environment"}
    config = load_config(file, overrides={"server.port": "3000"}, environment=environment)
    assert (config.server.port, config.model.name, config.model.dtype) == (3000, "from-environment", "float32")
    sources = {entry.key: entry.source for entry in config.describe()}
    assert sources["server.port"] == "flag"
    assert sources["model.name"] == "OPENTINKER_MODEL__NAME"
    assert sources["model.dtype"] == str(file)
    assert sources["training.max_rank"] == "default"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"server.prot": "1"}, "did you mean server.port"),
        ({"nothing.here": "1"}, "unknown setting nothing.here"),
        ({"server.port": "abc"}, "server.port"),
        ({"server.port": "70000"}, "65535"),
        ({"model.dtype": "int3"}, "float32, bfloat16"),
        ({"training.max_rank": "0"}, "training.max_rank"),
        ({"scheduler.gap_timeout_s": "-1"}, "scheduler.gap_timeout_s"),
        ({"logging.json": "maybe"}, "logging.json"),
        ({"server.host": "0.0.0.0"}, "allow_remote"),
    ],
)
def test_bad_settings_are_named(overrides: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(None, overrides=overrides, environment={})


def test_remote_listening_has_to_be_asked_for() -> None:
    overrides = {"server.host": "0.0.0.0", "server.allow_remote": "true"}
    assert load_config(None, overrides=overrides, environment={}).server.host == "0.0.0.0"


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_config(tmp_path / "missing.toml", environment={})
    broken = tmp_path / "broken.toml"
    broken.write_text("[server\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(broken, environment={})


def test_every_setting_is_documented() -> None:
    entries = load_config(None, environment={}).describe()
    assert {entry.key.partition(".")[0] for entry in entries} == set(SECTIONS)
    assert all(len(entry.doc) > 10 for entry in entries)
