"""Supervised fine-tuning with every step on this page.

A chat model learns to go on with a story as its authors did: "In the Year 2889" by Jules and Michel Verne, whose text
the package reasoning-gym ships. The end of the story is held out: its loss is measured before, during and after.

    python cookbook/sl_loop.py --base-url 127.0.0.1:8711 --steps 24

Any server address and any base model; `--text-file` takes another text. The run folder gets config.json,
metrics.jsonl and curves.png.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
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
    text_file: str = ""
    """Plain text to learn from; empty takes the story that reasoning-gym ships."""
    held_out: float = 0.15
    """Share of the text, from its end, that is only measured."""
    passage_words: int = 48
    """Words of a passage, roughly: a passage is a completion, the end of the one before it the prompt."""
    max_length: int = 192
    """Tokens of a row, prompt and completion together; longer rows are cut."""
    steps: int = 24
    """Optimizer steps."""
    batch_size: int = 8
    """Rows of a step."""
    learning_rate: float = 5e-4
    """Of Adam at the first step; it falls linearly towards zero."""
    rank: int = 8
    """Of the LoRA adapter, on attention and MLP."""
    eval_every: int = 6
    """Steps between two measurements of the held-out loss."""
    seed: int = 0
    """Of the initial weights and of the order of rows."""
    run_dir: str = ""
    """Folder for the results; empty makes runs/sl-<time>."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training example, before the shift by one."""

    tokens: list[int]
    """Prompt and completion."""
    weights: list[float]
    """As long as tokens: 0 on the prompt, 1 on the completion."""

    @property
    def num_trained(self) -> int:
        """Tokens that count; the very first has nothing before it and never does."""
        return sum(weight != 0 for weight in self.weights[1:])


class RecipeError(Exception):
    """The run cannot go on; the text says why."""


def read_text(text_file: str) -> str:
    """The text to learn from, without the licence around a text of Project Gutenberg."""
    path = Path(text_file) if text_file else files("reasoning_gym") / "data" / "in_the_year_2889.txt"
    text = path.read_text(encoding="utf-8")
    story = re.search(r"\*\*\* START OF [^\n]*\*\*\*\n(.*)\*\*\* END OF", text, flags=re.DOTALL)
    return story.group(1) if story else text


def split_passages(text: str, *, words: int) -> list[str]:
    """Whole sentences, packed into passages of at least `words` words."""
    passages: list[str] = []
    current: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"'])\s+", " ".join(text.split())):
        current.append(sentence)
        if sum(len(part.split()) for part in current) >= words:
            passages.append(" ".join(current))
            current = []
    return passages


def ending(passage: str) -> str:
    """The last words of a passage: what a prompt shows."""
    return " ".join(passage.split()[-16:])


def encode_prompt(tokenizer: Any, passage: str) -> list[int]:
    """The request to go on after a passage: a chat turn where the model knows chats, else the bare text."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode(ending(passage) + "\n"))
    messages = [
        {"role": "system", "content": "You continue the story."},
        {"role": "user", "content": ending(passage)},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def make_row(prompt: Sequence[int], completion: Sequence[int], *, max_length: int) -> Row:
    """Prompt and completion, cut to `max_length`; every token of the completion counts, and none of the prompt."""
    weights = [0.0] * len(prompt) + [1.0] * len(completion)
    return Row(tokens=[*prompt, *completion][:max_length], weights=weights[:max_length])


def make_datum(row: Row, *, scale: float = 1.0) -> ot.Datum:
    """The shift by one: position t of the input predicts token t + 1. The weights are multiplied by `scale`."""
    return ot.Datum(
        model_input=ot.ModelInput.from_ints(row.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": row.tokens[1:],
            "weights": [scale * weight for weight in row.weights[1:]],
        },
    )


def build_rows(tokenizer: Any, passages: Sequence[str], *, max_length: int) -> list[Row]:
    """One row for each passage after the first; its completion ends with the end-of-sequence token."""
    rows = []
    for before, passage in itertools.pairwise(passages):
        completion = [*tokenizer.encode(passage, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append(make_row(encode_prompt(tokenizer, before), completion, max_length=max_length))
    return rows


def trainable(rows: Sequence[Row], *, what: str) -> list[Row]:
    """The rows in which a token counts; says how many were dropped."""
    kept = [row for row in rows if row.num_trained]
    if len(kept) < len(rows):
        dropped = len(rows) - len(kept)
        console.print(f"[yellow]dropped {dropped} of {len(rows)} {what} rows: none of their tokens is trained[/]")
    return kept


def shuffled_batches(rows: Sequence[Row], *, size: int, seed: int) -> Iterator[list[Row]]:
    """Endless batches; every row comes once before any comes again."""
    order = random.Random(seed)
    queue: list[Row] = []
    while True:
        while len(queue) < size:
            queue += order.sample(rows, len(rows))
        yield queue[:size]
        queue = queue[size:]


def mean_nll(loss_sum: float, rows: Sequence[Row]) -> float | None:
    """Nats per trained token; None, shown as "not available", when there is no such token."""
    num_trained = sum(row.num_trained for row in rows)
    return loss_sum / num_trained if num_trained else None


def held_out_nll(trainer: ot.TrainingClient, rows: Sequence[Row]) -> float | None:
    """Mean loss of rows that are never trained on."""
    if not rows:
        return None
    output = trainer.forward([make_datum(row) for row in rows], "cross_entropy").result()
    return mean_nll(output.metrics["loss:sum"], rows)


def show_samples(title: str, trainer: ot.TrainingClient, tokenizer: Any, passages: Sequence[str]) -> None:
    """Greedy continuations of held-out passages, from a snapshot of the adapter as it is now."""
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = ot.SamplingParams(max_tokens=40, temperature=0)
    prompts = [ot.ModelInput.from_ints(encode_prompt(tokenizer, passage)) for passage in passages]
    futures = [sampler.sample(prompt, num_samples=1, sampling_params=params) for prompt in prompts]
    table = Table(title=f"{title}: greedy, snapshot version {sampler.policy_version}", show_lines=True)
    table.add_column("held-out text", ratio=2)
    table.add_column("the model goes on", ratio=3)
    for passage, future in zip(passages, futures, strict=True):
        reply = tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True)
        table.add_row(f"... {ending(passage)}", reply.strip())
    console.print(table)


class RunLog:
    """The run folder with config.json, metrics.jsonl and curves.png; a table and a progress bar on the screen."""

    COLUMNS = ("step", "train_nll", "held_out_nll", "grad_norm", "seconds")
    CURVES = ("train_nll", "held_out_nll")

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
        """One line of metrics. None is shown as "not available", a column without a value as nothing."""
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
            points = [(record["step"], record[key]) for record in self.records if record.get(key) is not None]
            axes.plot([step for step, _ in points], [value for _, value in points], marker=".", label=key)
        axes.set(xlabel="optimizer steps", ylabel="nats per token", title="Supervised fine-tuning")
        axes.legend()
        path = self.folder / "curves.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return path


def shown(value: Any) -> str:
    """A metric as text."""
    if value is None:
        return "not available"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run(config: Config) -> None:
    """Trains one adapter."""
    service = ot.ServiceClient(base_url=config.base_url or None)
    models = service.get_server_capabilities().result().supported_models
    config = dataclasses.replace(
        config,
        base_url=service.address,
        base_model=config.base_model or models[0].model_name,
        run_dir=config.run_dir or f"runs/sl-{time.strftime('%Y%m%d-%H%M%S')}",
    )
    trainer = service.create_lora_training_client(
        config.base_model, rank=config.rank, seed=config.seed, train_unembed=False
    ).result()
    tokenizer = trainer.get_tokenizer()

    passages = split_passages(read_text(config.text_file), words=config.passage_words)
    first_held_out = round((1 - config.held_out) * len(passages))
    train_passages, held_out_passages = passages[:first_held_out], passages[first_held_out:]
    train_rows = build_rows(tokenizer, train_passages, max_length=config.max_length)
    held_out_rows = build_rows(tokenizer, held_out_passages, max_length=config.max_length)
    train_rows = trainable(train_rows, what="training")
    held_out_rows = trainable(held_out_rows, what="held-out")
    if not train_rows:
        raise RecipeError(f"no training row is left; is --max-length {config.max_length} shorter than the prompts?")
    console.print(f"{len(train_rows)} rows to train on, {len(held_out_rows)} held out")

    batches = shuffled_batches(train_rows, size=config.batch_size, seed=config.seed)
    with RunLog(config) as log:
        show_samples("before", trainer, tokenizer, held_out_passages[:2])
        log.add({"step": 0, "held_out_nll": held_out_nll(trainer, held_out_rows)})
        for step in range(1, config.steps + 1):
            started = time.monotonic()
            batch = next(batches)
            num_trained = sum(row.num_trained for row in batch)
            learning_rate = config.learning_rate * (1 - (step - 1) / config.steps)

            # Losses are sums over tokens and rows; weights divided by their number make the step that of a mean.
            data = [make_datum(row, scale=1 / num_trained) for row in batch]
            # Both calls are on their way before either is waited for; the server runs them in this order.
            forward_backward = trainer.forward_backward(data, "cross_entropy")
            optim_step = trainer.optim_step(ot.AdamParams(learning_rate=learning_rate))

            record: dict[str, Any] = {"step": step, "train_nll": forward_backward.result().metrics["loss:sum"]}
            record |= {"grad_norm": (optim_step.result().metrics or {})["grad_norm"], "learning_rate": learning_rate}
            record |= {"tokens": num_trained, "seconds": time.monotonic() - started}
            if step % config.eval_every == 0 or step == config.steps:
                record["held_out_nll"] = held_out_nll(trainer, held_out_rows)
            log.add(record)

    show_samples("after", trainer, tokenizer, held_out_passages[:2])
    weights = trainer.save_weights_for_sampler("final").result()
    before, after = log.records[0]["held_out_nll"], log.records[-1]["held_out_nll"]
    console.print(
        f"held-out loss {shown(before)} -> {shown(after)} nats per token; {log.draw_curves()}", soft_wrap=True
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
        kind: Any = type(field.default)
        parser.add_argument(option(field.name), type=kind, default=field.default, help=f"{doc} [{field.default}]")
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
