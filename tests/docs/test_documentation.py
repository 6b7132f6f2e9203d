"""Every Python block of the documentation runs, in order, page by page, against a real server; every shell block too.

A failing block is named by file and line. Blocks that would start this test suite again are checked by a dry run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.server import RunningServer

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "cookbook").glob("*.md"))]
DEFAULT_ADDRESS = "127.0.0.1:8711"


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    for match in re.finditer(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S):
        yield Block(page, page.read_text()[: match.start()].count("\n") + 2, match[1], match[2])


PYTHON_PAGES = [page for page in PAGES if any(b.language == "python" for b in blocks(page))]
SHELL_BLOCKS = [b for page in PAGES for b in blocks(page) if b.language == "bash"]


@pytest.fixture(scope="module")
def small_server(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    state = tmp_path_factory.mktemp("docs-state") / "state"
    settings = {"model.cache_dir": model_cache, "model.dtype": "bfloat16"}
    with RunningServer("smollm2-135m-instruct", state, **settings) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python_blocks_run_as_written(page: Path, small_server: RunningServer, tmp_path: Path) -> None:
    program = []
    for block in blocks(page):
        if block.language == "python":
            program += [
                f"print('block at {block}', flush=True)",
                block.text.replace(DEFAULT_ADDRESS, small_server.address),
            ]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(program)], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    last = re.findall(r"^block at (.*)$", result.stdout, re.M)[-1:]
    assert result.returncode == 0, f"{last}: {result.stderr}"


@pytest.mark.slow
def test_readme_example_learns(small_server: RunningServer, tmp_path: Path) -> None:
    example = next(b for b in blocks(ROOT / "README.md") if b.language == "python")
    result = subprocess.run(
        [sys.executable, "-c", example.text.replace(DEFAULT_ADDRESS, small_server.address)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[1]) for line in result.stdout.splitlines() if re.match(r"^\d+ ", line)]
    assert len(losses) == 10 and losses[-1] < losses[0] / 2
    assert "| snapshot 1" in result.stdout


def commands(block: Block) -> list[str]:
    lines = [line.split("#")[0].strip() for line in block.text.splitlines()]
    return [command.strip() for line in lines if line for command in line.split("&&")]


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=str)
def test_shell_blocks_run(block: Block, small_environment: dict[str, str]) -> None:
    for command in commands(block):
        if command.startswith("git clone") or command.startswith("cd "):
            continue  # the checkout that this test runs in
        if command.startswith("make"):
            # Installs, serves for ever, or starts this suite: the recipe must exist and expand.
            result = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
        else:
            result = subprocess.run(
                command, shell=True, cwd=ROOT, capture_output=True, text=True, env=small_environment, timeout=250
            )
        assert result.returncode == 0, f"{block}: {command}: {result.stderr}"


@pytest.fixture(scope="module")
def small_environment() -> dict[str, str]:
    """The environment of a user who has activated the virtual environment."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_every_page_has_a_place_in_the_readme_or_docs() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in text
