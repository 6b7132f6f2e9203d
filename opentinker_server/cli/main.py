"""Entry point of the `opentinker` command.

The client-only install has neither typer nor rich; the command then says which extra brings them.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    try:
        from opentinker_server.cli.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"typer", "rich"}:
            raise
        sys.exit("error: the command line needs the server extra: pip install 'opentinker[server]'")
    app()
