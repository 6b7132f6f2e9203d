"""Reinforcement learning, the whole loop on one page.

Task: "What is 7 + 12? Keep it short." The small model knows many sums but rambles; it is paid for coming to an end
with the right number. Rewards are compared inside a group of answers to the same question (group-relative advantages),
and held-out questions are never trained on.

    python cookbook/rl_loop.py --base-url 127.0.0.1:8711 --steps 20

Works with any server and any chat model; the first model that the server offers is taken unless one is named.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

import opentinker_client as ot

matplotlib.use("Agg")
import matplotlib.pyplot as plt

console = Console()


@dataclass(frozen=True)
class Config:
    """Every option of the recipe; `--help` lists them."""

    base_url: str = ""
    """HOST:PORT of the server; empty takes OPENTINKER_BASE_URL, else 127.0.0.1:8711."""
    base_model: str = ""
    """Base model; empty takes the first that the server offers."""
    run_dir: str = ""
    """Where metrics.jsonl, config.json and curves.png go; empty makes runs/rl-<time>."""
    steps: int = 20
    """Optimizer steps, each on fresh answers."""
    groups: int = 8
    """Questions of a step."""
    group_size: int = 8
    """Answers to each question."""
    max_tokens: int = 16
    """Longest answer; one that reaches it is truncated: counted as such, and paid nothing."""
    largest: int = 20
    """Summands are 1 to this."""
    rank: int = 8
    """LoRA rank."""
    learning_rate: float = 3e-4
    """Adam step size."""
    loss_fn: str = "importance_sampling"
    """importance_sampling, ppo, cispo, ..."""
    token_mean: bool = False
    """Divide advantages by the number of trained tokens, so that the loss is a mean over tokens."""
    drop_truncated: bool = False
    """Leave truncated answers out of the update, and out of the divisor."""
    eval_every: int = 5
    """Steps between looks at the held-out questions."""
    held_out: int = 32
    """Questions that are never trained on."""
    seed: int = 0
    """Of the adapter, the questions and the answers."""


SYSTEM = "You are a calculator."


def problem(rng: random.Random, largest: int) -> tuple[str, str]:
    """A question and its answer."""
    a, b = rng.randint(1, largest), rng.randint(1, largest)
    return f"What is {a} + {b}? Keep it short.", str(a + b)


def reward(reply: str, answer: str, *, finished: bool) -> float:
    """1 for an answer that came to its end with the right number last, 0.1 for one that only came to an end."""
    if not finished:
        return 0.0
    numbers = re.findall(r"\d+", reply)
    return 1.0 if numbers and numbers[-1] == answer else 0.1


def group_advantages(rewards: list[float]) -> list[float]:
    """Reward minus the mean of the group, over its standard deviation; zeros when all are equal."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [0.0] * len(rewards) if deviation < 1e-6 else [(r - mean) / deviation for r in rewards]


def policy_datum(prompt: list[int], sequence: ot.SampledSequence, advantage: float) -> ot.Datum:
    """The sampled ids with their own log-probabilities; the prompt is masked out.

    Row t belongs to input t, which predicts token t + 1, so the first action sits at row len(prompt) - 1.
    """
    tokens, action = prompt + sequence.tokens, len(sequence.tokens)
    pad = [0.0] * (len(prompt) - 1)
    return ot.Datum(
        model_input=ot.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [*pad, *sequence.logprobs],
            "advantages": [*pad, *([advantage] * action)],
            "mask": [*pad, *([1.0] * action)],
        },
    )


Answer = tuple[list[int], ot.SampledSequence, float]
"""Prompt, what was sampled, and its advantage."""


def policy_data(answers: list[Answer], *, token_mean: bool, drop_truncated: bool) -> list[ot.Datum]:
    """Datums of one update. What is dropped leaves the divisor too."""
    kept = [a for a in answers if not (drop_truncated and a[1].stop_reason == "length")]
    divisor = sum(len(sequence.tokens) for _, sequence, _ in kept) if token_mean else 1
    return [policy_datum(prompt, sequence, advantage / divisor) for prompt, sequence, advantage in kept]


def main(config: Config) -> None:
    run_dir = Path(config.run_dir or f"runs/rl-{time.strftime('%Y%m%d-%H%M%S')}")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    console.print(config)

    service = ot.ServiceClient(base_url=config.base_url or None)
    base_model = config.base_model or service.get_server_capabilities().result().supported_models[0].model_name
    trainer = service.create_lora_training_client(
        base_model, rank=config.rank, seed=config.seed, train_unembed=False
    ).result()
    tokenizer = trainer.get_tokenizer()

    held_rng, rng = random.Random(10_000 + config.seed), random.Random(config.seed)
    held = [problem(held_rng, config.largest) for _ in range(config.held_out)]
    held_questions = {question for question, _ in held}

    def encode(question: str) -> list[int]:
        text = f"{question}\n"
        if tokenizer.chat_template:  # a base model has none
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)

    def text_of(sequence: ot.SampledSequence) -> str:
        return tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()

    def evaluate(sampler: ot.SamplingClient) -> tuple[float, float, list[str]]:
        """Mean reward, share of right answers, and texts of greedy answers to the held-out questions."""
        params = ot.SamplingParams(max_tokens=config.max_tokens, temperature=0)
        futures = [
            sampler.sample(ot.ModelInput.from_ints(encode(question)), num_samples=1, sampling_params=params)
            for question, _ in held
        ]
        sequences = [future.result().sequences[0] for future in futures]
        scores = [
            reward(text_of(sequence), answer, finished=sequence.stop_reason == "stop")
            for sequence, (_, answer) in zip(sequences, held, strict=True)
        ]
        right = sum(score == 1.0 for score in scores) / len(scores)
        return sum(scores) / len(scores), right, [text_of(sequence) for sequence in sequences]

    history: list[dict[str, float]] = []
    replies_before: list[str] = []
    validation = (float("nan"), float("nan"))
    progress = Progress("[bold]training", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    task = progress.add_task("steps", total=config.steps)
    with (run_dir / "metrics.jsonl").open("w") as log, Live(progress, console=console, refresh_per_second=4) as live:
        for step in range(config.steps + 1):
            # An immutable snapshot of the weights: every answer of this step is bound to it.
            sampler = trainer.save_weights_and_get_sampling_client().result()
            if step % config.eval_every == 0 or step == config.steps:
                score, right, replies = evaluate(sampler)
                validation = (score, right)
                replies_before = replies_before or replies
            record: dict[str, float] = {"step": step, "held_out_reward": validation[0], "held_out_right": validation[1]}
            if step < config.steps:
                record |= train_step(config, step, trainer, sampler, rng, held_questions, encode, text_of)
                progress.advance(task)
            history.append(record)
            log.write(json.dumps(record) + "\n")
            log.flush()
            live.update(show(history, progress))

    trainer.save_state("final", overwrite=True).result()
    plot(history, run_dir / "curves.png")
    for (question, answer), before, after in list(zip(held, replies_before, replies, strict=True))[:4]:
        console.print(f"[bold]{question}[/] ({answer})\n  before {before!r}\n  after  {after!r}", highlight=False)
    first, last = history[0], history[-1]
    console.print(
        f"held-out reward {first['held_out_reward']:.2f} -> {last['held_out_reward']:.2f}, right "
        f"{first['held_out_right']:.2f} -> {last['held_out_right']:.2f}; {run_dir}"
    )
    service.close().result()


def train_step(config, step, trainer, sampler, rng, held_questions, encode, text_of) -> dict[str, float]:
    """Sample groups, score them, and take one optimizer step on those that can teach something."""
    problems: list[tuple[str, str]] = []
    while len(problems) < config.groups:
        candidate = problem(rng, config.largest)
        if candidate[0] not in held_questions:
            problems.append(candidate)
    futures = []
    for index, (question, _) in enumerate(problems):
        params = ot.SamplingParams(max_tokens=config.max_tokens, seed=config.seed * 10**6 + step * 1000 + index)
        prompt = ot.ModelInput.from_ints(encode(question))
        futures.append(sampler.sample(prompt, num_samples=config.group_size, sampling_params=params))

    answers: list[Answer] = []
    rewards: list[float] = []
    truncated = removed = 0
    for (question, answer), future in zip(problems, futures, strict=True):
        sequences = future.result().sequences
        scores = [reward(text_of(s), answer, finished=s.stop_reason == "stop") for s in sequences]
        rewards += scores
        truncated += sum(sequence.stop_reason == "length" for sequence in sequences)
        advantages = group_advantages(scores)
        if not any(advantages):  # all answers scored alike: nothing to learn from
            removed += 1
            continue
        answers += [(encode(question), s, a) for s, a in zip(sequences, advantages, strict=True)]
    data = policy_data(answers, token_mean=config.token_mean, drop_truncated=config.drop_truncated)
    record = {
        "reward": sum(rewards) / len(rewards),
        "truncated": truncated / len(rewards),
        "groups_removed": removed,
    }
    if not data:
        console.print(f"warning: step {step} has nothing to learn from ({removed} groups scored alike); no update")
        return record
    result = trainer.forward_backward(data, config.loss_fn, trained_only=True)
    stepped = trainer.optim_step(ot.AdamParams(learning_rate=config.learning_rate))  # sent at once, runs after it
    record["loss"] = result.result().metrics["loss:sum"]
    record["grad_norm"] = (stepped.result().metrics or {})["grad_norm"]
    return record


def show(history: list[dict[str, float]], progress: Progress) -> Table:
    """The live table: the last steps, above the progress bar."""
    keys = ("reward", "held_out_reward", "held_out_right", "truncated", "groups_removed")
    table = Table("step", "reward", "held-out reward", "held-out right", "truncated", "groups removed")
    for record in history[-8:]:
        cells = [record.get(key) for key in keys]
        table.add_row(str(record["step"]), *("-" if cell is None else f"{cell:.2f}" for cell in cells))
    grid = Table.grid()
    grid.add_row(table)
    grid.add_row(progress)
    return grid


def plot(history: list[dict[str, float]], path: Path) -> None:
    """Rewards over the steps."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    curves = (
        ("reward", "training reward"),
        ("held_out_reward", "held-out reward"),
        ("held_out_right", "held-out right"),
    )
    for key, label in curves:
        points = [(record["step"], record[key]) for record in history if key in record]
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="step", ylabel="mean of answers", title="Reinforcement learning", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: list[str]) -> Config:
    """Options from the command line; a misspelt one is refused with the nearest name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for item in fields(Config):
        option = f"--{item.name.replace('_', '-')}"
        if isinstance(item.default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=item.default)
        else:
            parser.add_argument(option, type=type(item.default), default=item.default)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        import difflib

        options = [f"--{item.name.replace('_', '-')}" for item in fields(Config)]
        close = difflib.get_close_matches(unknown[0].split("=")[0], options, n=1)
        parser.error(f"unknown option {unknown[0]}" + (f"; did you mean {close[0]}?" if close else ""))
    return Config(**vars(known))


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
