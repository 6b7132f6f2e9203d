"""Reinforcement learning with every step on this page.

Task: "What is 7 + 12? Keep it short." The small model knows many sums but rambles; it is paid for coming to an end with
the right number. Answers to one question form a group: an answer's advantage is its reward minus the mean of its group.
Held-out questions are asked before, during and after, and never trained on.

    python cookbook/rl_loop.py --base-url 127.0.0.1:8711 --steps 20

Any server address and any base model. The run folder gets config.json, metrics.jsonl and curves.png.
Suffixes: _P one entry a problem, _G one entry an answer of a group.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import opentinker_client as ot

console = Console()


@dataclass(frozen=True, kw_only=True)
class Config:
    """All options: `--learning-rate` sets learning_rate."""

    base_url: str = ""
    """HOST:PORT of the server; empty takes OPENTINKER_BASE_URL, else 127.0.0.1:8711."""
    base_model: str = ""
    """Base model; empty takes the first that the server offers."""
    largest: int = 20
    """Summands are 1 to this."""
    steps: int = 20
    """Optimizer steps, each on fresh answers."""
    problems: int = 8
    """Questions of a step."""
    group_size: int = 8
    """Answers to each question."""
    max_tokens: int = 16
    """Longest answer; one that reaches it counts as truncated and is paid nothing."""
    learning_rate: float = 3e-4
    """Of Adam."""
    rank: int = 8
    """Of the LoRA adapter, on attention and MLP."""
    loss_fn: str = "importance_sampling"
    """importance_sampling, ppo, cispo, dro or gspo."""
    token_mean: bool = False
    """Divide the advantages by the number of trained tokens, so that the loss is a mean over tokens."""
    drop_truncated: bool = False
    """Leave truncated answers out of the update and out of that number."""
    eval_every: int = 5
    """Steps between two rounds of held-out questions."""
    held_out: int = 32
    """Questions that are never trained on."""
    seed: int = 0
    """Of the initial weights, the questions and the answers."""
    run_dir: str = ""
    """Folder for the results; empty makes runs/rl-<time>."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question with one right answer."""

    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was sampled for one question, and what it earned."""

    prompt: list[int]
    sequence: ot.SampledSequence
    text: str
    reward: float
    advantage: float = 0.0

    @property
    def truncated(self) -> bool:
        """Whether it ran into max_tokens: it was cut off, not badly formed."""
        return self.sequence.stop_reason == "length"


class RecipeError(Exception):
    """The run cannot go on; the text says why."""


def draw_problem(source: random.Random, *, largest: int) -> Problem:
    """A sum of two numbers."""
    a, b = source.randint(1, largest), source.randint(1, largest)
    return Problem(question=f"What is {a} + {b}? Keep it short.", answer=str(a + b))


def training_problems(source: random.Random, held_out: Sequence[Problem], *, largest: int) -> Iterator[Problem]:
    """Endless questions, none of them a held-out one."""
    questions = {problem.question for problem in held_out}
    if len(questions) == largest**2:
        raise RecipeError(f"all sums up to {largest} + {largest} are held out; lower --held-out or raise --largest")
    while True:
        problem = draw_problem(source, largest=largest)
        if problem.question not in questions:
            yield problem


def reward(text: str, answer: str, *, truncated: bool) -> float:
    """1 for coming to an end with the right number last, 0.1 for only coming to an end, else 0."""
    if truncated:
        return 0.0
    numbers = re.findall(r"\d+", text)
    return 1.0 if numbers and numbers[-1] == answer else 0.1


def group_advantages(rewards_G: Sequence[float]) -> list[float] | None:
    """Each reward minus the mean of the group; None when all are equal and there is nothing to learn."""
    if max(rewards_G) == min(rewards_G):
        return None
    mean = sum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def make_datum(answer: Answer, *, divisor: float = 1.0) -> ot.Datum:
    """The shift by one: position t of the input predicts token t + 1; the mask is 1 on what was sampled.

    The sampler's own token ids and log-probabilities are used as they came: text is never encoded again.
    """
    tokens = [*answer.prompt, *answer.sequence.tokens]
    num_sampled = len(answer.sequence.tokens)
    given = [0.0] * (len(answer.prompt) - 1)
    return ot.Datum(
        model_input=ot.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [*given, *answer.sequence.logprobs],
            "advantages": [*given, *[answer.advantage / divisor] * num_sampled],
            "mask": [*given, *[1.0] * num_sampled],
        },
    )


def make_data(answers: Sequence[Answer], *, token_mean: bool, drop_truncated: bool) -> list[ot.Datum]:
    """The datums of one update. An answer that is dropped leaves the divisor too."""
    kept = [answer for answer in answers if not (drop_truncated and answer.truncated)]
    divisor = sum(len(answer.sequence.tokens) for answer in kept) if token_mean else 1
    return [make_datum(answer, divisor=divisor) for answer in kept]


def logprob_gap(data: Sequence[ot.Datum], output: ot.ForwardBackwardOutput) -> float:
    """Largest difference between the trainer's and the sampler's log-probability of a sampled token."""
    gaps = []
    for datum, result in zip(data, output.loss_fn_outputs, strict=True):
        sampled = datum.loss_fn_inputs["mask"].to_numpy() > 0
        gaps.append(abs(result["logprobs"].to_numpy() - datum.loss_fn_inputs["logprobs"].to_numpy())[sampled].max())
    return float(max(gaps))


def encode_question(tokenizer: Any, question: str) -> list[int]:
    """A chat turn where the model knows chats, else plain text."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode(f"Question: {question}\nAnswer:"))
    messages = [{"role": "system", "content": "You are a calculator."}, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def ask(
    sampler: ot.SamplingClient,
    tokenizer: Any,
    problems: Sequence[Problem],
    params: ot.SamplingParams,
    *,
    group_size: int,
) -> list[list[Answer]]:
    """A group of scored answers to each question; all questions are under way at once."""
    prompts_P = [encode_question(tokenizer, problem.question) for problem in problems]
    futures_P = []
    for index, prompt in enumerate(prompts_P):
        own = dataclasses.replace(params, seed=(params.seed or 0) + index)
        futures_P.append(sampler.sample(ot.ModelInput.from_ints(prompt), num_samples=group_size, sampling_params=own))
    groups_P = []
    for problem, prompt, future in zip(problems, prompts_P, futures_P, strict=True):
        answers_G = []
        for sequence in future.result().sequences:
            text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
            score = reward(text, problem.answer, truncated=sequence.stop_reason == "length")
            answers_G.append(Answer(prompt=prompt, sequence=sequence, text=text, reward=score))
        groups_P.append(answers_G)
    return groups_P


def summary(groups: Sequence[Sequence[Answer]], *, prefix: str) -> dict[str, float]:
    """Mean reward, share of right answers and share of truncated ones."""
    answers = [answer for group in groups for answer in group]
    return {
        f"{prefix}reward": sum(answer.reward for answer in answers) / len(answers),
        f"{prefix}right": sum(answer.reward == 1.0 for answer in answers) / len(answers),
        f"{prefix}truncated": sum(answer.truncated for answer in answers) / len(answers),
    }


class RunLog:
    """The run folder with config.json, metrics.jsonl and curves.png; a table and a progress bar on the screen."""

    COLUMNS = ("step", "reward", "truncated", "groups_removed", "held_out_reward", "held_out_right", "seconds")
    CURVES = ("reward", "held_out_reward", "held_out_right")

    def __init__(self, config: Config):
        self.folder = Path(config.run_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._file = (self.folder / "metrics.jsonl").open("x", encoding="utf-8")
        except FileExistsError:
            raise RecipeError(f"{self.folder} holds a run already; choose another --run-dir") from None
        settings = json.dumps(dataclasses.asdict(config), indent=2)
        (self.folder / "config.json").write_text(settings + "\n", encoding="utf-8")
        console.print_json(settings)
        self.records: list[dict[str, Any]] = []
        bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*bar, console=console)
        self._task = self._progress.add_task("training", total=config.steps)
        self._live = Live(self._render(), console=console, refresh_per_second=4)

    def __enter__(self) -> RunLog:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._file.close()

    def add(self, record: dict[str, Any]) -> None:
        """One line of metrics; a column without a value is shown as nothing."""
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self._progress.update(self._task, completed=record["step"])
        self._live.update(self._render())
        if not console.is_terminal:  # a log file gets a line a step, a terminal the table
            print("  ".join(f"{key} {shown(value)}" for key, value in record.items()), flush=True)

    def _render(self) -> Group:
        table = Table(*(key.replace("_", " ") for key in self.COLUMNS))
        for record in self.records[-10:]:
            table.add_row(*(shown(record[key]) if key in record else "" for key in self.COLUMNS))
        return Group(table, self._progress)

    def draw_curves(self) -> Path:
        """curves.png: CURVES over the steps."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for key in self.CURVES:
            points = [(record["step"], record[key]) for record in self.records if key in record]
            axes.plot([step for step, _ in points], [value for _, value in points], marker=".", label=key)
        axes.set(xlabel="optimizer steps", ylabel="mean over answers", title="Reinforcement learning", ylim=(0, 1))
        axes.legend()
        path = self.folder / "curves.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return path


def shown(value: Any) -> str:
    """A metric as text."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def show_samples(held_out: Sequence[Problem], before: Sequence[Sequence[Answer]], after: Sequence[Sequence[Answer]]):
    """Greedy answers to the first held-out questions."""
    table = Table("held-out question", "right answer", "before", "after", title="greedy answers", show_lines=True)
    for problem, (old, *_), (new, *_) in list(zip(held_out, before, after, strict=True))[:4]:
        table.add_row(problem.question, problem.answer, old.text, new.text)
    console.print(table)


def run(config: Config) -> None:
    """Trains one adapter."""
    service = ot.ServiceClient(base_url=config.base_url or None)
    models = service.get_server_capabilities().result().supported_models
    config = dataclasses.replace(
        config,
        base_url=service.address,
        base_model=config.base_model or models[0].model_name,
        run_dir=config.run_dir or f"runs/rl-{time.strftime('%Y%m%d-%H%M%S')}",
    )
    trainer = service.create_lora_training_client(
        config.base_model, rank=config.rank, seed=config.seed, train_unembed=False
    ).result()
    tokenizer = trainer.get_tokenizer()

    held_out_source = random.Random(f"held out {config.seed}")
    held_out = [draw_problem(held_out_source, largest=config.largest) for _ in range(config.held_out)]
    problems = training_problems(random.Random(config.seed), held_out, largest=config.largest)
    greedy = ot.SamplingParams(max_tokens=config.max_tokens, temperature=0)
    before, after = [], []

    with RunLog(config) as log:
        for step in range(config.steps + 1):
            started = time.monotonic()
            # An immutable snapshot: each answer of this step carries its version and the hash of its weights.
            sampler = trainer.save_weights_and_get_sampling_client().result()
            assert sampler.snapshot is not None
            record: dict[str, Any] = {"step": step, "policy": sampler.snapshot.sha256[:12]}

            if step % config.eval_every == 0 or step == config.steps:
                after = ask(sampler, tokenizer, held_out, greedy, group_size=1)
                before = before or after
                record |= summary(after, prefix="held_out_")
            if step == config.steps:
                log.add(record)
                break

            problems_P = [next(problems) for _ in range(config.problems)]
            sampling = ot.SamplingParams(max_tokens=config.max_tokens, seed=(config.seed * 10**4 + step) * 10**4)
            groups_P = ask(sampler, tokenizer, problems_P, sampling, group_size=config.group_size)
            record |= summary(groups_P, prefix="")

            answers: list[Answer] = []
            record["groups_removed"] = 0
            for answers_G in groups_P:
                advantages_G = group_advantages([answer.reward for answer in answers_G])
                if advantages_G is None:  # all answers earned the same
                    record["groups_removed"] += 1
                    continue
                for answer, advantage in zip(answers_G, advantages_G, strict=True):
                    answers.append(dataclasses.replace(answer, advantage=advantage))

            data = make_data(answers, token_mean=config.token_mean, drop_truncated=config.drop_truncated)
            record["datums"] = len(data)
            if data:
                # Both calls are on their way before either is waited for; the server runs them in this order.
                forward_backward = trainer.forward_backward(data, config.loss_fn)
                optim_step = trainer.optim_step(ot.AdamParams(learning_rate=config.learning_rate))
                record["loss"] = forward_backward.result().metrics["loss:sum"]
                record["grad_norm"] = (optim_step.result().metrics or {})["grad_norm"]
                record["logprob_gap"] = logprob_gap(data, forward_backward.result())
            else:
                console.print(f"[yellow]warning: nothing to learn from at step {step}, no update[/]")
            log.add(record | {"seconds": time.monotonic() - started})

    show_samples(held_out, before, after)
    weights = trainer.save_weights_for_sampler("final").result()
    first, last = log.records[0], log.records[-1]
    console.print(
        f"held-out reward {shown(first['held_out_reward'])} -> {shown(last['held_out_reward'])}, right "
        f"{shown(first['held_out_right'])} -> {shown(last['held_out_right'])}; {log.draw_curves()}",
        soft_wrap=True,
    )
    console.print(f"the trained weights: {weights.path}", soft_wrap=True)
    service.close().result()


def option(name: str) -> str:
    """Of the command line, for a field of Config."""
    return "--" + name.replace("_", "-")


def parse(arguments: Sequence[str]) -> Config:
    """Options of the command line; one that does not exist ends the run with the nearest name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    fields = dataclasses.fields(Config)
    statements = ast.parse(inspect.getsource(Config)).body[0].body[1:]  # type: ignore[attr-defined]
    docs = [statement.value.value for statement in statements[1::2]]  # the texts under the fields
    for field, doc in zip(fields, docs, strict=True):
        settings: dict[str, Any] = {"default": field.default, "help": f"{doc} [{field.default}]"}
        if isinstance(field.default, bool):
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["type"] = type(field.default)
        parser.add_argument(option(field.name), **settings)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], [option(field.name) for field in fields], n=1)
        parser.error(f"unknown option {unknown[0]}" + (f"; did you mean {near[0]}?" if near else ""))
    for field in fields:
        value = getattr(known, field.name)
        if type(value) in (int, float) and field.name != "seed" and value <= 0:
            parser.error(f"{option(field.name)} must be greater than 0, got {value}")
    return Config(**vars(known))


def main() -> None:
    """Runs the recipe; what it cannot do ends it with one line and a non-zero code."""
    try:
        run(parse(sys.argv[1:]))
    except (RecipeError, ot.OpenTinkerError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
