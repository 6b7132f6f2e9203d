"""What every benchmark shares: variants in processes of their own that take turns, their memory, the machine.

A benchmark runs itself again as a child for each variant. The child waits on its standard input without spinning, does
one step for each line `step`, and answers with one line of JSON. Standard library only: a peer's interpreter runs
this file too.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = "smollm2-135m-instruct"
_STOP_TIMEOUT_S = 60
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")


# The child's side.


def take_turns(steps: Generator[None]) -> None:
    """Advances `steps` once to get ready, then once, timed, for each turn; closes it in the end."""
    try:
        next(steps)
        while True:
            wait_for_turn()
            started = time.perf_counter()
            next(steps)
            answer(time.perf_counter() - started)
    finally:
        steps.close()


def wait_for_turn() -> None:
    """Blocks; ends the process when the parent says so or has gone."""
    if sys.stdin.readline().strip() != "step":
        sys.exit(0)


def answer(seconds: float) -> None:
    """Tells the parent the duration of the step, and the peak memory so far."""
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes_by_depth(os.getpid())}), flush=True)


def peak_bytes_by_depth(pid: int) -> list[int]:
    """VmHWM of a process, of its children together, of theirs, and so on."""
    level, totals = [pid], []
    while level:
        sizes = [_peak_bytes(process) for process in level]
        totals.append(sum(sizes))
        level = [child for process in level for child in _children(process)]
    return totals


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:  # ended a moment ago
        return 0
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 if "VmHWM:" in status else 0


def _children(pid: int) -> list[int]:
    """Of all its threads: a child belongs to the thread that started it."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in thread.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


# The parent's side.


class VariantFailed(RuntimeError):
    """A child ended before it was told to; the message holds the end of what it wrote."""


class Child:
    """One variant in its own process."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.seconds: list[float] = []
        """Of the steps that are kept."""
        self.peak_bytes: list[int] = []
        """By depth of process, as of the last step."""
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def step(self, *, keep: bool = True) -> None:
        """Lets it do one step, and waits. Raises VariantFailed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed() from error
        while not (line := self._process.stdout.readline()).startswith('{"seconds"'):
            if not line:
                raise self._failed()
        result = json.loads(line)
        self.peak_bytes = result["peak_bytes"]
        if keep:
            self.seconds.append(result["seconds"])

    def stop(self) -> None:
        """Asks it to end and waits; kills it when it does not."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it may have ended with a turn unread
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _failed(self) -> VariantFailed:
        code = self._process.wait()
        self._errors.seek(0)
        tail = "".join(self._errors.readlines()[-15:])
        return VariantFailed(f"{' '.join(self.command)}\nended with code {code}:\n{tail}")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A number over the rounds of a run."""

    median: float
    """Ratio of the medians, where this is a ratio."""
    low: float
    """Smallest of a single round."""
    high: float
    """Largest of a single round."""

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Of two variants that took turns: round by round, and of the medians."""
    rounds = [a / b for a, b in zip(above, below, strict=True)]
    median = statistics.median(above) / statistics.median(below)
    return Spread(median=round(median, 3), low=round(min(rounds), 3), high=round(max(rounds), 3))


def machine() -> dict[str, object]:
    """What ran this: hardware, versions, commit."""
    from importlib.metadata import version

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return {
        "cpu": name or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "peft")},
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": _commit(),
    }


def _commit() -> str:
    """Ends in "+changes" where the engine differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=HERE.parent, capture_output=True, text=True).stdout.strip()

    engine = ("opentinker_client", "opentinker_server", "kernels")
    return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "--", *engine) else "")


def write_json(path: Path, document: dict[str, object]) -> None:
    """By one rename: a reader never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.partial")
    scratch.write_text(json.dumps(document, indent=1) + "\n")
    scratch.rename(path)
