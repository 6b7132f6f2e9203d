"""Supervised fine-tuning, the whole loop on one page.

Teaches the model the prose of "In the Year 2889" (a public-domain story that the package reasoning-gym ships) and
watches the loss on the part of the story that it never sees.

    python cookbook/sl_loop.py --base-url 127.0.0.1:8711 --steps 24

Works with any server and any base model; the first model that the server offers is taken unless one is named.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
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
    """Where metrics.jsonl, config.json and curves.png go; empty makes runs/sl-<time>."""
    steps: int = 24
    """Optimizer steps."""
    batch_size: int = 8
    """Rows of a step."""
    max_length: int = 128
    """Tokens of a row; longer rows are cut."""
    prompt_tokens: int = 1
    """Tokens at the head of a row that are given and not trained on."""
    rank: int = 8
    """LoRA rank."""
    learning_rate: float = 5e-4
    """Adam step size; falls linearly to a tenth."""
    eval_every: int = 6
    """Steps between looks at the held-out rows."""
    held_out_rows: int = 12
    """Rows that are never trained on: the end of the story."""
    seed: int = 0
    """Of the adapter and of the order of rows."""


def story() -> str:
    """The text, paragraphs joined by blank lines, line breaks inside them removed."""
    text = (files("reasoning_gym") / "data" / "in_the_year_2889.txt").read_text(encoding="utf-8")
    text = text.split("*** START OF")[-1].split("*** END OF")[0]
    paragraphs = [re.sub(r"\s+", " ", part).strip() for part in text.split("\n\n")]
    return "\n\n".join(part for part in paragraphs if part)


def rows_of(tokens: list[int], max_length: int) -> list[list[int]]:
    """Consecutive rows of `max_length` inputs and as many targets."""
    return [tokens[i : i + max_length + 1] for i in range(0, len(tokens) - max_length, max_length)]


def supervised_datum(prompt: list[int], completion: list[int], max_length: int) -> ot.Datum | None:
    """Trains on every token of the completion, the first one included, and on nothing of the prompt.

    Row t of targets and weights belongs to input t, which predicts token t + 1. None when nothing would be trained.
    """
    tokens = (prompt + completion)[: max_length + 1]
    weights = ([0.0] * (len(prompt) - 1) + [1.0] * len(completion))[: len(tokens) - 1]
    if len(tokens) < 2 or not any(weights):
        return None
    return ot.Datum(
        model_input=ot.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def usable(data: list[ot.Datum | None], what: str) -> list[ot.Datum]:
    """Without the rows that train nothing; ends the run when none is left."""
    kept = [datum for datum in data if datum is not None]
    if len(kept) < len(data):
        console.print(f"{len(data) - len(kept)} of {len(data)} {what} rows have no token to train on and are left out")
    if not kept:
        sys.exit(f"error: no {what} row has a token to train on; raise max_length")
    return kept


def num_trained(data: list[ot.Datum]) -> float:
    """Sum of the weights: what a mean loss divides by."""
    return float(sum(datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in data))


def continue_text(sampler: ot.SamplingClient, tokenizer, prompt: list[int]) -> str:
    """Greedy continuation."""
    params = ot.SamplingParams(max_tokens=40, temperature=0)
    answer = sampler.sample(ot.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()
    return tokenizer.decode(answer.sequences[0].tokens, skip_special_tokens=True).strip()


def main(config: Config) -> None:
    run_dir = Path(config.run_dir or f"runs/sl-{time.strftime('%Y%m%d-%H%M%S')}")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    console.print(config)

    service = ot.ServiceClient(base_url=config.base_url or None)
    base_model = config.base_model or service.get_server_capabilities().result().supported_models[0].model_name
    trainer = service.create_lora_training_client(
        base_model, rank=config.rank, seed=config.seed, train_unembed=False
    ).result()
    tokenizer = trainer.get_tokenizer()

    rows = rows_of(tokenizer.encode(story(), add_special_tokens=False), config.max_length)
    train_rows, held_rows = rows[: -config.held_out_rows], rows[-config.held_out_rows :]
    given = config.prompt_tokens
    train = usable([supervised_datum(row[:given], row[given:], config.max_length) for row in train_rows], "training")
    held = usable([supervised_datum(row[:given], row[given:], config.max_length) for row in held_rows], "held-out")
    console.print(f"{len(train)} training rows, {len(held)} held-out rows of {config.max_length} tokens")

    prompt = held_rows[0][:32]
    base = service.create_sampling_client(base_model=base_model).result()
    before = continue_text(base, tokenizer, prompt)

    history: list[dict[str, float]] = []
    order: list[int] = []
    shuffle = random.Random(config.seed)
    held_loss = float("nan")
    progress = Progress("[bold]training", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    task = progress.add_task("steps", total=config.steps)
    with (run_dir / "metrics.jsonl").open("w") as log, Live(progress, console=console, refresh_per_second=4) as live:
        for step in range(config.steps + 1):
            if step % config.eval_every == 0 or step == config.steps:
                held_loss = trainer.forward(held, "cross_entropy").result().metrics["loss:sum"] / num_trained(held)
            record: dict[str, float] = {"step": step, "held_out_nll": held_loss}
            if step < config.steps:
                if len(order) < config.batch_size:
                    order += shuffle.sample(range(len(train)), len(train))
                batch = [train[order.pop(0)] for _ in range(config.batch_size)]
                rate = config.learning_rate * (1 - 0.9 * step / config.steps)
                # The loss is a sum: one weight per token would make the step grow with the batch, which Adam forgives.
                result = trainer.forward_backward(batch, "cross_entropy")
                stepped = trainer.optim_step(ot.AdamParams(learning_rate=rate))  # sent at once, runs after it
                record["train_nll"] = result.result().metrics["loss:sum"] / num_trained(batch)
                record["grad_norm"] = (stepped.result().metrics or {})["grad_norm"]
                progress.advance(task)
            history.append(record)
            log.write(json.dumps(record) + "\n")
            log.flush()
            live.update(show(history, progress))

    sampler = trainer.save_weights_and_get_sampling_client(name="final").result()
    after = continue_text(sampler, tokenizer, prompt)
    plot(history, run_dir / "curves.png")
    console.print(f"\n[bold]prompt[/]  {tokenizer.decode(prompt)}")
    console.print(f"[bold]before[/]  {before}\n[bold]after[/]   {after}")
    first, last = history[0]["held_out_nll"], history[-1]["held_out_nll"]
    console.print(f"held-out loss {first:.3f} -> {last:.3f} nats a token; snapshot {sampler.policy_version}; {run_dir}")
    service.close().result()


def show(history: list[dict[str, float]], progress: Progress) -> Table:
    """The live table: the last steps, above the progress bar."""
    table = Table("step", "train loss", "held-out loss", "gradient norm", title="nats a token", title_justify="left")
    for record in history[-8:]:
        cells = [record.get(key) for key in ("train_nll", "held_out_nll", "grad_norm")]
        table.add_row(str(record["step"]), *("-" if cell is None else f"{cell:.3f}" for cell in cells))
    grid = Table.grid()
    grid.add_row(table)
    grid.add_row(progress)
    return grid


def plot(history: list[dict[str, float]], path: Path) -> None:
    """Both losses over the steps."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for key, label in (("train_nll", "training rows"), ("held_out_nll", "held-out rows")):
        points = [(record["step"], record[key]) for record in history if key in record]
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="step", ylabel="loss, nats a token", title="Supervised fine-tuning")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: list[str]) -> Config:
    """Options from the command line; a misspelt one is refused with the nearest name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for item in fields(Config):
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=type(item.default), default=item.default)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        import difflib

        options = [f"--{item.name.replace('_', '-')}" for item in fields(Config)]
        close = difflib.get_close_matches(unknown[0].split("=")[0], options, n=1)
        parser.error(f"unknown option {unknown[0]}" + (f"; did you mean {close[0]}?" if close else ""))
    return Config(**vars(known))


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
