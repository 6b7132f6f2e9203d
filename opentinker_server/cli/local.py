"""Commands that need no running server: serve, config, models."""

from __future__ import annotations

import asyncio
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer

from opentinker_server.cli.output import JsonOption, console, fail, print_fields, print_json, print_records

config_app = typer.Typer(help="The server's settings.", no_args_is_help=True)
models_app = typer.Typer(help="Base models on this machine.", no_args_is_help=True)

ConfigFileOption = typer.Option("--config", "-c", metavar="FILE", help="TOML file with settings.")
SetOption = typer.Option(
    "--set",
    metavar="SECTION.FIELD=VALUE",
    help="Override one setting; may be repeated. `opentinker config show` lists them all.",
)


def _load_config(file: Path | None, settings: list[str], flags: dict[str, str] | None = None):
    from opentinker_server.config import ConfigError, load_config

    overrides: dict[str, str] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            fail(f"--set takes SECTION.FIELD=VALUE, not {setting!r}", code=2)
        overrides[key] = value
    overrides.update(flags or {})
    try:
        return load_config(file, overrides=overrides)
    except ConfigError as error:
        fail(str(error), code=2)


def serve(
    file: Annotated[Path | None, ConfigFileOption] = None,
    settings: Annotated[list[str], SetOption] = [],  # noqa: B006
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one [default: 8711].")] = None,
    model: Annotated[str | None, typer.Option(help="Base model: a known name, a directory or a hub id.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where adapters and the database are kept.")] = None,
) -> None:
    """Run a server until it is interrupted.

    Without options: SmolLM2-135M-Instruct, SQLite, one local worker, loopback only.
    """
    from opentinker_server.app import run_server

    flags = {"server.host": host, "server.port": port, "model.name": model, "server.state_dir": state_dir}
    config = _load_config(file, settings, {k: str(v) for k, v in flags.items() if v is not None})
    try:
        asyncio.run(run_server(config))
    except (ValueError, OSError, RuntimeError) as error:
        fail(str(error))


@config_app.command("show")
def config_show(
    file: Annotated[Path | None, ConfigFileOption] = None,
    settings: Annotated[list[str], SetOption] = [],  # noqa: B006
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Print the effective settings, what each means, and where it comes from."""
    entries = _load_config(file, settings).describe()
    print_records(
        entries,
        {
            "setting": lambda e: e.key,
            "value": lambda e: e.value,
            "from": lambda e: e.source,
            "meaning": lambda e: e.doc,
        },
        as_json=as_json,
    )


def _cache_dir(file: Path | None = None) -> Path:
    return _load_config(file, []).model.cache_dir


@models_app.command("list")
def models_list(as_json: Annotated[bool, JsonOption] = False) -> None:
    """Models this installation knows by name. Local directories and hub ids work too."""
    from opentinker_server.models.registry import KNOWN_MODELS, is_fetched

    cache_dir = _cache_dir()
    rows = [
        {"name": m.name, "fetched": is_fetched(m.name, cache_dir=cache_dir), "description": m.description}
        for m in KNOWN_MODELS.values()
    ]
    print_records(rows, {key: itemgetter(key) for key in rows[0]}, as_json=as_json)


@models_app.command("fetch")
def models_fetch(
    name: Annotated[str, typer.Argument(help="A name from `opentinker models list`.")],
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Put a model into the local cache; nothing happens when it is there."""
    from opentinker_server.models.registry import fetch_model

    try:
        directory = fetch_model(
            name, cache_dir=_cache_dir(), progress=None if as_json else lambda line: console.print(line)
        )
    except (ValueError, RuntimeError) as error:
        fail(str(error))
    if as_json:
        print_json({"name": name, "directory": str(directory)})
    else:
        print_fields({name: directory}, as_json=False)
