"""How commands print: a rich table for people, JSON for programs, one line for failures."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import opentinker_client as ot

console = Console(highlight=False)
error_console = Console(stderr=True, highlight=False)

JsonOption = typer.Option("--json", help="Print JSON instead of a table.")
ServerOption = typer.Option(
    "--server",
    "-s",
    metavar="HOST:PORT",
    help="Address of the server [default: OPENTINKER_BASE_URL, else 127.0.0.1:8711].",
)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Enum):
        return value.value
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def print_json(value: Any) -> None:
    """Print dataclasses, lists and dictionaries as one JSON document on standard output."""
    sys.stdout.write(json.dumps(_plain(value), indent=2) + "\n")


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def print_records(
    records: Iterable[Any], columns: dict[str, Callable[[Any], Any]], *, as_json: bool, title: str = ""
) -> None:
    """Print one row a record; `columns` maps a heading to what fills it."""
    records = list(records)
    if as_json:
        print_json(records)
        return
    table = Table(title=title or None, title_justify="left", header_style="bold")
    for heading in columns:
        table.add_column(heading, overflow="fold")
    for record in records:
        table.add_row(*(_cell(fill(record)) for fill in columns.values()))
    console.print(table)


def print_fields(fields: dict[str, Any], *, as_json: bool) -> None:
    """Print one thing as a column of names and values."""
    if as_json:
        print_json(fields)
        return
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(name, _cell(value))
    console.print(table)


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with one line on standard error."""
    error_console.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def human_bytes(count: int | None) -> str:
    """1536 -> '1.5 KiB'."""
    if not count:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


@contextmanager
def failures_as_one_line() -> Iterator[None]:
    """Turn the SDK's errors, and what it says of wrong arguments, into one line and a non-zero exit code."""
    try:
        yield
    except ot.OpenTinkerError as error:
        request_id = getattr(error, "request_id", "")
        request = f" (request {request_id})" if request_id else ""
        fail(f"{error}{request}")
    except (ValueError, TypeError, OSError) as error:  # an argument that the client refuses, a file that is not there
        fail(str(error), code=2)
