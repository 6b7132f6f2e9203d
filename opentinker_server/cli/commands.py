"""The command tree: one typer application, its groups in files of their own."""

from __future__ import annotations

from importlib.metadata import version as distribution_version
from typing import Annotated

import typer

from opentinker_server.cli import local, remote
from opentinker_server.cli.output import JsonOption, print_fields

app = typer.Typer(
    name="opentinker",
    help="Fine-tune language models from your own loop, on a server you run.\n\n"
    "Start one with `opentinker serve`, then look at it with `opentinker status`, `runs`, `checkpoints`, "
    "or talk to a model with `opentinker sample`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("serve")(local.serve)
app.add_typer(local.config_app, name="config")
app.add_typer(local.models_app, name="models")
app.command("status")(remote.status)
app.add_typer(remote.runs_app, name="runs")
app.add_typer(remote.adapters_app, name="adapters")
app.add_typer(remote.checkpoints_app, name="checkpoints")
app.command("sample")(remote.sample)


@app.command("version")
def version(as_json: Annotated[bool, JsonOption] = False) -> None:
    """Print the version of this installation."""
    installed = distribution_version("opentinker")
    if as_json:
        print_fields({"version": installed}, as_json=True)
    else:
        typer.echo(f"opentinker {installed}")
