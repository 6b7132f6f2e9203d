"""Whole runs of the recipes, as processes, against a real server with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server import RunningServer

pytestmark = pytest.mark.slow
COOKBOOK = Path(__file__).resolve().parents[2] / "cookbook"


def run(recipe: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COOKBOOK / f"{recipe}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def server(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("recipes") / "state"
    with RunningServer("tiny-llama", state, **{"model.cache_dir": cache_dir}) as running:
        yield running.address


def test_sl_run_lowers_the_loss_and_leaves_its_files(server: str, tmp_path: Path) -> None:
    options = ["--base-url", server, "--run-dir", tmp_path, "--steps", 3, "--batch-size", 2, "--eval-every", 2]
    result = run("sl_loop", *options, "--learning-rate", 0.01)
    assert result.returncode == 0, result.stderr
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    # Written where it was measured, and only there.
    assert ["held_out_nll" in line for line in lines] == [True, False, True, True]
    assert lines[-1]["held_out_nll"] < lines[0]["held_out_nll"]
    assert [line["learning_rate"] for line in lines[1:]] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["steps"], config["base_url"], config["base_model"]) == (3, server, "tiny-llama")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert '"base_model": "tiny-llama"' in result.stdout and "before" in result.stdout and "after" in result.stdout


def test_a_run_folder_is_not_overwritten(server: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("kept\n")
    result = run("sl_loop", "--base-url", server, "--run-dir", tmp_path, "--steps", 1)
    assert result.returncode == 1 and "holds a run already; choose another --run-dir" in result.stderr
    assert (tmp_path / "metrics.jsonl").read_text() == "kept\n"


def test_dm6_a_run_with_nothing_to_train_on_ends_with_an_error(server: str, tmp_path: Path) -> None:
    result = run("sl_loop", "--base-url", server, "--run-dir", tmp_path, "--max-length", 4)
    assert result.returncode == 1, result.stdout
    assert "dropped 81 of 81 training rows" in result.stdout
    assert result.stderr.startswith("error: no training row is left; is --max-length 4 shorter than the prompts?")


def test_dm6_a_held_out_set_with_nothing_to_measure_is_not_available(server: str, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text(" ".join(f"This is sentence number {n} of a very plain text." for n in range(30)))
    # One passage is held out: it has no passage before it to be its prompt, so that no row is left to measure.
    result = run(
        "sl_loop", "--base-url", server, "--run-dir", tmp_path / "run", "--steps", 1, "--text-file", text,
        "--held-out", 0.2, "--passage-words", 40, "--batch-size", 1,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert [line["held_out_nll"] for line in records(tmp_path / "run")] == [None, None]
    assert "held-out loss not available -> not available" in result.stdout


def test_rl_run_trains_on_groups_that_differ(server: str, tmp_path: Path) -> None:
    # A random model ends one answer in five or so within 64 tokens, which earns 0.1: groups of 16 do differ.
    options = ["--base-url", server, "--run-dir", tmp_path, "--steps", 2, "--problems", 2, "--group-size", 16]
    result = run("rl_loop", *options, "--max-tokens", 64, "--held-out", 4, "--loss-fn", "ppo")
    assert result.returncode == 0, result.stderr
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert ["held_out_reward" in line for line in lines] == [True, False, True]
    trained = [line for line in lines[:2] if line["datums"]]
    assert trained
    for line in trained:
        assert line["datums"] == 16 * (2 - line["groups_removed"]) and line["grad_norm"] > 0
        assert line["logprob_gap"] < 1e-3  # trainer and sampler agree, in float32
    assert len({line["policy"] for line in lines}) == 1 + len(trained)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_lo12_steps_with_constant_groups_only_are_skipped(server: str, tmp_path: Path) -> None:
    # A group of one is always constant.
    options = ["--base-url", server, "--run-dir", tmp_path, "--steps", 2, "--problems", 3, "--group-size", 1]
    result = run("rl_loop", *options, "--held-out", 2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("warning: nothing to learn from at step") == 2
    lines = records(tmp_path)
    assert [(line["groups_removed"], line["datums"]) for line in lines[:2]] == [(3, 0)] * 2
    assert all("reward" in line and "grad_norm" not in line for line in lines[:2])
    assert len({line["policy"] for line in lines}) == 1  # the weights are the same, to the last bit


def test_an_unreachable_server_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        for recipe in ("sl_loop", "rl_loop"):
            result = run(recipe, "--base-url", address, "--run-dir", tmp_path)
            assert result.returncode == 1 and address in result.stderr
            assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1


def quickstart(cache_dir: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(COOKBOOK / "quickstart.py"), "--run-dir", str(folder), *arguments]
    environment = {**os.environ, "OPENTINKER_MODEL__CACHE_DIR": str(cache_dir), "OPENTINKER_MODEL__DTYPE": "float32"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_quickstart_runs_both_loops_and_stops_its_server(cache_dir: Path, tmp_path: Path) -> None:
    process = quickstart(cache_dir, tmp_path, "--steps", "1", "--base-model", "tiny-llama")
    stdout, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, stderr + stdout
    for name in ("sl", "rl"):
        assert [line["step"] for line in records(tmp_path / name)] == [0, 1]
        assert (tmp_path / name / "curves.png").is_file()
    assert str(tmp_path) in stdout
    assert "stopped" in (tmp_path / "server.log").read_text().splitlines()[-1]


def test_quickstart_stops_its_server_when_it_is_stopped(cache_dir: Path, tmp_path: Path) -> None:
    process = quickstart(cache_dir, tmp_path, "--base-model", "tiny-llama")
    assert process.stdout is not None and process.stderr is not None
    assert any("it serves on" in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    assert process.wait(timeout=90) == 1 and "error: terminated" in process.stderr.read()
    assert "stopped" in (tmp_path / "server.log").read_text().splitlines()[-1]


def test_quickstart_fails_when_the_server_does_not_start(cache_dir: Path, tmp_path: Path) -> None:
    process = quickstart(cache_dir, tmp_path, "--base-model", "no-such-model")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1 and "the server did not start; see" in stderr
