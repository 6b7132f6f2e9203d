"""The recipes' own arithmetic, to exact arrays: shift, weights, masks, advantages, divisors, rewards."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

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


def answer(
    tokens: list[int],
    logprobs: list[float] | None = None,
    *,
    prompt: list[int] | None = None,
    advantage: float = 0.0,
    stop_reason: str = "stop",
) -> object:
    sequence = ot.SampledSequence(stop_reason=stop_reason, tokens=tokens, logprobs=logprobs or [0.0] * len(tokens))
    return rl.Answer(prompt=prompt or [1, 2], sequence=sequence, text="", reward=0.0, advantage=advantage)


def test_dm2_the_first_completion_token_is_trained() -> None:
    datum = sl.make_datum(sl.make_row([11, 12, 13], [21, 22], max_length=100))
    assert datum.model_input.to_ints() == [11, 12, 13, 21]
    assert inputs(datum) == {"target_tokens": [12, 13, 21, 22], "weights": [0, 0, 1, 1]}


def test_dm4_the_end_token_is_trained_whatever_the_padding_id() -> None:
    for completion in ([5, 6, 2], [5, 6, 7, 8, 9, 2]):
        found = inputs(sl.make_datum(sl.make_row([1], completion, max_length=100)))
        assert found["target_tokens"] == completion and found["weights"] == [1.0] * len(completion)


def test_long_rows_are_cut_at_the_end_and_a_lone_first_token_trains_nothing() -> None:
    row = sl.make_row([11, 12], [21, 22, 23], max_length=3)
    assert (row.tokens, row.weights, row.num_trained) == ([11, 12, 21], [0, 0, 1], 1)
    assert sl.make_row([], [21], max_length=9).num_trained == 0
    assert sl.make_row([], [21, 22], max_length=9).num_trained == 1


def test_weights_times_scale_give_the_mean() -> None:
    rows = [sl.make_row([1, 2], [3, 4, 5], max_length=9), sl.make_row([1], [6], max_length=9)]
    num_trained = sum(row.num_trained for row in rows)
    weights = [w for row in rows for w in inputs(sl.make_datum(row, scale=1 / num_trained))["weights"]]
    assert weights == pytest.approx([0, 0.25, 0.25, 0.25, 0.25]) and sum(weights) == pytest.approx(1)


def test_dm6_rows_without_a_trained_token_are_dropped_with_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [sl.make_row([1, 2, 3, 4], [5], max_length=3), sl.make_row([1], [2], max_length=3)]
    assert sl.trainable(rows, what="training") == rows[1:]
    assert "dropped 1 of 2 training rows" in capsys.readouterr().out
    assert sl.trainable(rows[1:], what="training") == rows[1:]
    assert capsys.readouterr().out == ""


def test_dm6_a_mean_over_nothing_is_not_available() -> None:
    assert sl.mean_nll(0.0, [sl.make_row([1, 2], [], max_length=9)]) is None
    assert sl.mean_nll(3.0, [sl.make_row([1], [2, 3], max_length=9)]) == 1.5
    assert sl.shown(None) == "not available" and json.dumps(sl.mean_nll(0.0, [])) == "null"


def test_every_row_comes_once_before_any_comes_again() -> None:
    batches = sl.shuffled_batches(list(range(10)), size=4, seed=3)
    drawn = list(itertools.chain.from_iterable(next(batches) for _ in range(5)))
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10)) and drawn[:10] != drawn[10:]
    singles = sl.shuffled_batches(list(range(10)), size=1, seed=3)
    assert drawn == [next(singles)[0] for _ in range(20)]


def test_held_out_passages_share_no_sentence_with_the_training_text() -> None:
    text = sl.read_text("")
    assert "Little though they seem to think of it" in text and "gutenberg.org" not in text
    passages = sl.split_passages(text, words=48)
    assert len(passages) > 60 and len(set(passages)) == len(passages)
    assert all(len(passage.split()) >= 48 for passage in passages)
    words = " ".join(text.split())
    assert all(passage in words for passage in passages)


def test_dm3_rl_alignment() -> None:
    datum = rl.make_datum(answer([4, 5], [-0.1, -0.2], prompt=[1, 2, 3], advantage=2.0))
    assert datum.model_input.to_ints() == [1, 2, 3, 4]
    found = inputs(datum)
    assert found["target_tokens"] == [2, 3, 4, 5] and found["advantages"] == [0, 0, 2, 2]
    assert found["logprobs"] == pytest.approx([0, 0, -0.1, -0.2]) and found["mask"] == [0, 0, 1, 1]


def test_lo12_a_constant_group_teaches_nothing() -> None:
    assert rl.group_advantages([1, 1, 1, 1]) is None and rl.group_advantages([0, 0, 0, 0]) is None
    assert rl.group_advantages([0.1] * 7) is None
    assert rl.group_advantages([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]


def test_lo13_dropped_completions_leave_the_divisor_too() -> None:
    answers = [
        answer(list(range(10)), advantage=1.0),
        answer(list(range(15)), advantage=-2.0),
        answer(list(range(5)), advantage=3.0, stop_reason="length"),
    ]
    data = rl.make_data(answers, token_mean=True, drop_truncated=True)
    assert [inputs(datum)["advantages"][-1] for datum in data] == pytest.approx([1 / 25, -2 / 25])
    data = rl.make_data(answers, token_mean=True, drop_truncated=False)
    assert [inputs(datum)["advantages"][-1] for datum in data] == pytest.approx([1 / 30, -2 / 30, 3 / 30])
    data = rl.make_data(answers, token_mean=False, drop_truncated=True)
    assert [inputs(datum)["advantages"][-1] for datum in data] == [1, -2]
    assert rl.make_data(answers[2:], token_mean=True, drop_truncated=True) == []


def test_truncated_is_counted_apart_from_wrong() -> None:
    group = [answer([1], stop_reason="length"), answer([1]), answer([1]), answer([1])]
    counted = rl.summary([group], prefix="held_out_")
    assert counted == {"held_out_reward": 0, "held_out_right": 0, "held_out_truncated": 0.25}


def test_reward_is_for_ending_with_the_right_number() -> None:
    assert rl.reward("7 + 12 = 19", "19", truncated=False) == 1.0
    assert rl.reward("19 is what 7 + 12 makes", "19", truncated=False) == 0.1
    assert rl.reward("no idea", "19", truncated=False) == 0.1
    assert rl.reward("7 + 12 = 19", "19", truncated=True) == 0.0


def test_no_held_out_question_is_trained_on() -> None:
    held_out = [rl.draw_problem(random.Random(seed), largest=3) for seed in range(5)]
    drawn = list(itertools.islice(rl.training_problems(random.Random(0), held_out, largest=3), 200))
    questions = {problem.question for problem in held_out}
    assert len({problem.question for problem in drawn}) == 9 - len(questions)
    assert not questions & {problem.question for problem in drawn}


def test_training_problems_end_when_every_question_is_held_out() -> None:
    held_out = [rl.Problem(question="What is 1 + 1? Keep it short.", answer="2")]
    with pytest.raises(rl.RecipeError, match="all sums up to 1 \\+ 1 are held out"):
        next(rl.training_problems(random.Random(0), held_out, largest=1))


def test_logprob_gap_looks_at_sampled_tokens_only() -> None:
    data = [rl.make_datum(answer([4, 5], [-0.1, -0.2], prompt=[1, 2, 3]))]
    trained = ot.TensorData.from_numpy(np.array([-9.0, -9.0, -0.1, -0.5], dtype=np.float32))
    output = ot.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=[{"logprobs": trained}], metrics={})
    assert rl.logprob_gap(data, output) == pytest.approx(0.3)


class PlainTokenizer:
    """As of a base model that knows no chats."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_a_model_without_chat_template_gets_plain_text() -> None:
    assert bytes(rl.encode_question(PlainTokenizer(), "What?")) == b"Question: What?\nAnswer:"
    assert bytes(sl.encode_prompt(PlainTokenizer(), "One two.")) == b"One two.\n"


@pytest.mark.parametrize("recipe", [sl, rl])
def test_ux2_a_misspelt_option_names_the_nearest(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--learing-rate", "1e-3"], ["--learing-rate=1e-3"]):
        with pytest.raises(SystemExit) as ended:
            recipe.parse(arguments)
        assert ended.value.code == 2
        assert "unknown option --learing-rate" in (message := capsys.readouterr().err)
        assert message.rstrip().endswith("did you mean --learning-rate?")


@pytest.mark.parametrize("recipe", [sl, rl])
def test_options_reach_the_config_and_are_checked(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe.parse(["--learning-rate", "0.25", "--steps", "7", "--seed", "0"])
    assert (config.learning_rate, config.steps, config.seed) == (0.25, 7, 0)
    assert recipe.parse([]) == recipe.Config()
    for arguments in (["--steps", "0"], ["--learning-rate", "-1"], ["--rank", "x"]):
        with pytest.raises(SystemExit):
            recipe.parse(arguments)
    assert "--steps must be greater than 0, got 0" in capsys.readouterr().err


def test_switches_of_the_rl_recipe() -> None:
    config = rl.parse(["--token-mean", "--drop-truncated"])
    assert config.token_mean and config.drop_truncated
    assert not rl.parse(["--no-token-mean"]).token_mean


@pytest.mark.parametrize("recipe", [sl, rl])
def test_help_explains_every_option(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        recipe.parse(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "--max" in text and "HOST:PORT of the server" in text and "Of the LoRA adapter, on attention and MLP." in text
    )
