"""The recipes: exact datums, and whole runs against a real server on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.server import RunningServer

import opentinker_client as ot

COOKBOOK = Path(__file__).resolve().parents[2] / "cookbook"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cookbook_{name}", COOKBOOK / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sl, rl = load("sl_loop"), load("rl_loop")


def inputs(datum: ot.Datum) -> dict[str, list]:
    return {key: value.tolist() for key, value in datum.loss_fn_inputs.items()}


def sampled(tokens: list[int], logprobs: list[float], reason: str = "stop") -> ot.SampledSequence:
    return ot.SampledSequence(stop_reason=reason, tokens=tokens, logprobs=logprobs)


def test_dm2_the_first_completion_token_is_trained() -> None:
    datum = sl.supervised_datum([11, 12, 13], [21, 22], 100)
    assert datum.model_input.to_ints() == [11, 12, 13, 21]
    assert inputs(datum) == {"target_tokens": [12, 13, 21, 22], "weights": [0, 0, 1, 1]}


def test_dm4_the_end_token_is_trained_whatever_the_padding_id() -> None:
    for completion in ([5, 6, 2], [5, 6, 7, 8, 9, 2]):
        datum = sl.supervised_datum([1], completion, 100)
        assert inputs(datum)["target_tokens"][-1] == 2 and inputs(datum)["weights"] == [1.0] * len(completion)


def test_dm6_rows_without_a_trained_token_are_left_out() -> None:
    assert sl.supervised_datum([1, 2, 3, 4], [5], 3) is None
    kept = sl.usable([None, sl.supervised_datum([1], [2], 9)], "training")
    assert len(kept) == 1
    with pytest.raises(SystemExit, match="no training row"):
        sl.usable([None, None], "training")


def test_dm3_rl_alignment() -> None:
    datum = rl.policy_datum([1, 2, 3], sampled([4, 5], [-0.1, -0.2]), 2.0)
    assert datum.model_input.to_ints() == [1, 2, 3, 4]
    found = inputs(datum)
    assert found["target_tokens"] == [2, 3, 4, 5] and found["advantages"] == [0, 0, 2, 2]
    assert found["logprobs"] == pytest.approx([0, 0, -0.1, -0.2]) and found["mask"] == [0, 0, 1, 1]


def test_lo12_constant_groups_teach_nothing() -> None:
    assert rl.group_advantages([1, 1, 1, 1]) == [0, 0, 0, 0] == rl.group_advantages([0, 0, 0, 0])
    advantages = rl.group_advantages([1, 0, 0, 0])
    deviation = (3 / 16) ** 0.5
    assert advantages == pytest.approx([0.75 / deviation] + [-0.25 / deviation] * 3)


def test_lo13_dropped_completions_leave_the_divisor_too() -> None:
    answers = [
        ([1, 2], sampled(list(range(10)), [0.0] * 10), 1.0),
        ([1, 2], sampled(list(range(15)), [0.0] * 15), -2.0),
        ([1, 2], sampled(list(range(5)), [0.0] * 5, "length"), 3.0),
    ]
    data = rl.policy_data(answers, token_mean=True, drop_truncated=True)
    assert [inputs(d)["advantages"][-1] for d in data] == pytest.approx([1 / 25, -2 / 25])
    data = rl.policy_data(answers, token_mean=True, drop_truncated=False)
    assert [inputs(d)["advantages"][-1] for d in data] == pytest.approx([1 / 30, -2 / 30, 3 / 30])
    assert rl.policy_data(answers[2:], token_mean=True, drop_truncated=True) == []


def test_reward_counts_the_last_number_of_a_finished_answer() -> None:
    assert rl.reward("7 + 12 = 19", "19", finished=True) == 1.0
    assert rl.reward("19 is what 7 + 12", "19", finished=True) == 0.1
    assert rl.reward("no idea", "19", finished=True) == 0.1
    assert rl.reward("7 + 12 = 19", "19", finished=False) == 0.0


def run(recipe: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(COOKBOOK / f"{recipe}.py"), *arguments], capture_output=True, text=True, timeout=250
    )


@pytest.mark.parametrize("recipe", ["sl_loop", "rl_loop"])
def test_ux2_a_misspelt_option_names_the_nearest(recipe: str) -> None:
    result = run(recipe, "--learing-rate", "1e-3")
    assert result.returncode == 2 and "did you mean --learning-rate?" in result.stderr


@pytest.fixture(scope="module")
def tiny_server(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    state = tmp_path_factory.mktemp("recipes") / "state"
    with RunningServer("tiny-llama", state, **{"model.cache_dir": cache_dir}) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sl_loop", "rl_loop"])
def test_recipes_run_on_any_server_and_model(recipe: str, tiny_server: RunningServer, tmp_path: Path) -> None:
    small = ["--steps", "3", "--run-dir", str(tmp_path), "--base-url", tiny_server.address]
    small += ["--batch-size", "2"] if recipe == "sl_loop" else ["--groups", "2", "--held-out", "4"]
    result = run(recipe, *small)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 3
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_dm6_a_run_with_nothing_to_train_on_ends_with_an_error(tiny_server: RunningServer, tmp_path: Path) -> None:
    result = run("sl_loop", "--base-url", tiny_server.address, "--run-dir", str(tmp_path), "--prompt-tokens", "129")
    assert result.returncode == 1 and "no training row has a token to train on" in result.stderr


@pytest.mark.slow
def test_quickstart_runs_both_loops_and_stops_its_server(cache_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(COOKBOOK / "quickstart.py"), "--steps", "1", "--base-model", "tiny-llama"]
    environment = {**os.environ, "OPENTINKER_MODEL__CACHE_DIR": str(cache_dir), "OPENTINKER_MODEL__DTYPE": "float32"}
    result = subprocess.run(
        [*command, "--run-dir", str(tmp_path)], capture_output=True, text=True, timeout=280, env=environment
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert (tmp_path / "sl/metrics.jsonl").is_file() and (tmp_path / "rl/metrics.jsonl").is_file()
    assert "stopped" in (tmp_path / "server.log").read_text()
