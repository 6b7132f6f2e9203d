"""Training speed and memory: this server through the public client, beside plain PEFT and TRL, in one run.

    python benchmarks/training.py                       # everything, the better part of an hour on two cores
    python benchmarks/training.py --only 8x32 --dtype bfloat16
    python benchmarks/training.py --trl-python PATH     # an interpreter that has torch, peft and trl
    python benchmarks/training.py --profile --rounds 0  # only where the time of a step goes

Every variant lives in a process of its own, so that its peak memory is its own, and takes one timed step when it is
asked; the variants are asked in turn, so that a slow minute of the machine meets all of them. A step is
forward_backward and optim_step of every adapter, all submitted before any is waited for; plain PEFT trains several
adapters one after the other. LoRA rank 16 on all linear layers but the head, alpha 32.

The row "limit" is the rate of a plain matrix product in the same turns, told as the tokens/s that it would allow:
a step needs 4 operations per token and parameter (forward, and backward to the activations) of the frozen layers,
those of the head for trained tokens only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path

from common import (
    HERE,
    MODEL,
    Child,
    Spread,
    VariantFailed,
    answer,
    machine,
    ratio,
    take_turns,
    wait_for_turn,
    write_json,
)

RANK, ALPHA, VOCABULARY = 16, 32, 40_000
BODY_PARAMETERS, HEAD_PARAMETERS = 106_168_320, 28_311_552
"""Of the linear layers of MODEL."""


@dataclass(frozen=True)
class Shape:
    """What every adapter trains in a step."""

    adapters: int
    datums: int
    tokens: int
    trained: float = 1.0
    """Share of the positions, the last ones of each datum, that are trained."""

    @property
    def rows(self) -> int:
        """Tokens of a step."""
        return self.adapters * self.datums * self.tokens

    @property
    def flops(self) -> float:
        """Forward, and backward to the activations, of the frozen layers."""
        return 4.0 * self.rows * (BODY_PARAMETERS + self.trained * HEAD_PARAMETERS)


SHAPES = {
    "1x4x256": Shape(1, 4, 256),
    "1x4x256-quarter": Shape(1, 4, 256, trained=0.25),
    "8x128": Shape(8, 1, 128),
    "8x32": Shape(8, 1, 32),
    **{f"adapters-{count}": Shape(count, 1, 64) for count in (1, 2, 4, 8, 16, 32)},
    **{f"length-{length}": Shape(1, 1024 // length, length) for length in (64, 128, 512, 1024)},
}
"""Length 256 is 1x4x256."""
QUICK = ("1x4x256", "8x32")
TARGETS = ("1x4x256", "1x4x256-quarter", "8x128", "8x32")
TRL_SHAPES = ("1x4x256",)


def random_rows(shape: Shape, adapter: int) -> list[list[int]]:
    """Token ids of each datum, one more than its length."""
    rng = random.Random(adapter)
    return [[rng.randrange(10, VOCABULARY) for _ in range(shape.tokens + 1)] for _ in range(shape.datums)]


# Variants: each yields once it is ready, then does a step for every `next`.


def opentinker_steps(shape: Shape, dtype: str, model_dir: Path) -> Generator[None]:
    """This server, started here with its defaults, through the public client."""
    import numpy as np

    import opentinker_client as ot

    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("opentinker")), "serve", "--port", "0", "--model", MODEL]
        command += ["--state-dir", folder, "--set", f"model.dtype={dtype}"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = next((line for line in server.stdout if " serves " in line), "").split(" on ")[-1].strip()
            if not address:
                raise RuntimeError("the server did not start")
            service = ot.ServiceClient(base_url=address)
            weights = (np.arange(shape.tokens) >= shape.tokens * (1 - shape.trained)).astype(np.float32)
            work = []
            for adapter in range(shape.adapters):
                trainer = service.create_lora_training_client(
                    MODEL, rank=RANK, alpha=ALPHA, seed=adapter, train_unembed=False
                ).result()
                data = [
                    ot.Datum(
                        model_input=ot.ModelInput.from_ints(row[:-1]),
                        loss_fn_inputs={"target_tokens": row[1:], "weights": weights},
                    )
                    for row in random_rows(shape, adapter)
                ]
                work.append((trainer, data))
            try:
                while True:
                    yield
                    futures: list[ot.APIFuture] = []
                    for trainer, data in work:
                        futures.append(trainer.forward_backward(data, "cross_entropy", trained_only=True))
                        futures.append(trainer.optim_step(ot.AdamParams(learning_rate=1e-4)))
                    for future in futures:
                        future.result()
            finally:
                service.close().result()
        finally:
            server.terminate()
            try:
                server.wait(timeout=45)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def peft_steps(shape: Shape, dtype: str, model_dir: Path) -> Generator[None]:
    """A plain loop over stock transformers and PEFT; several adapters one after the other."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    model = get_peft_model(base, config, adapter_name="a0")
    for adapter in range(1, shape.adapters):
        model.add_adapter(f"a{adapter}", config)
    work = []
    for adapter in range(shape.adapters):
        own = [parameter for name, parameter in model.named_parameters() if f".a{adapter}." in name]
        ids = torch.tensor(random_rows(shape, adapter))[:, :-1]
        labels = ids.clone()
        labels[:, : int(shape.tokens * (1 - shape.trained))] = -100
        work.append((f"a{adapter}", torch.optim.AdamW(own, 1e-4), ids, labels))
    while True:
        yield
        for name, optimizer, ids, labels in work:
            model.set_adapter(name)
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def limit_steps(shape: Shape, dtype: str, model_dir: Path) -> Generator[None]:
    """Products of two 2048 x 2048 matrices."""
    import torch

    left, right = torch.randn(2, 2048, 2048).to(getattr(torch, dtype))
    while True:
        yield
        for _ in range(LIMIT_PRODUCTS):
            torch.mm(left, right)


LIMIT_PRODUCTS = 10
LIMIT_FLOPS = LIMIT_PRODUCTS * 2.0 * 2048**3
VARIANTS: dict[str, Callable[[Shape, str, Path], Generator[None]]] = {
    "limit": limit_steps,
    "opentinker": opentinker_steps,
    "peft": peft_steps,
}


def run_trl(shape: Shape, dtype: str, model_dir: Path) -> None:
    """TRL's SFTTrainer drives its own loop: the turns are taken in a callback."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Turns(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            wait_for_turn()
            self.started = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            answer(time.perf_counter() - self.started)

    assert shape.adapters == 1 and shape.trained == 1.0
    rows = [row[:-1] for _ in range(200) for row in random_rows(shape, 0)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)),
            args=SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=shape.datums,
                max_steps=1000,
                report_to=[],
                save_strategy="no",
                logging_steps=1000,
                max_length=shape.tokens,
                use_cpu=True,
                bf16=dtype == "bfloat16",
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
            processing_class=AutoTokenizer.from_pretrained(model_dir),
            callbacks=[Turns()],
        )
        trainer.train()


def run_child(variant: str, shape: Shape, dtype: str, model_dir: Path) -> None:
    """Until the parent has no more turns."""
    if variant == "trl":
        run_trl(shape, dtype, model_dir)
    else:
        take_turns(VARIANTS[variant](shape, dtype, model_dir))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant at one shape and dtype."""

    shape: str
    dtype: str
    variant: str
    note: str = ""
    """Why there are no numbers."""
    seconds: list[float] | None = None
    """Of each round."""
    tokens_per_second: float = 0.0
    """Of the median round."""
    gflops: float = 0.0
    """Rate of the operations that the step needs; of the matrix product itself in the row "limit"."""
    share_of_limit: float = 0.0
    """`gflops` as a share of the row "limit"."""
    opentinker_faster: Spread | None = None
    """Time of this variant over that of OpenTinker."""
    peak_gib: float = 0.0
    """Of all processes of the variant together."""
    peak_gib_by_process: list[float] | None = None
    """OpenTinker: client, control plane, device worker."""


def measure(shape_name: str, dtype: str, *, rounds: int, model_dir: Path, trl_python: str | None) -> list[Row]:
    """One row per variant. Raises VariantFailed."""
    pythons = dict.fromkeys(VARIANTS, sys.executable)
    if trl_python is not None and shape_name in TRL_SHAPES:
        pythons["trl"] = trl_python
    children: dict[str, Child] = {}
    try:
        for variant, python in pythons.items():  # one after the other: a start computes too
            command = [python, str(HERE / "training.py"), "--child", variant, "--model-dir", str(model_dir)]
            children[variant] = Child([*command, "--only", shape_name, "--dtype", dtype])
            children[variant].step(keep=False)
        for turn in range(rounds + 1):
            for child in children.values():
                child.step(keep=turn > 0)
    finally:
        for child in children.values():
            child.stop()
    rows = [row_of(shape_name, dtype, variant, children) for variant in children]
    if trl_python is None and shape_name in TRL_SHAPES:
        rows.append(Row(shape=shape_name, dtype=dtype, variant="trl", note="not installed"))
    return rows


def row_of(shape_name: str, dtype: str, variant: str, children: dict[str, Child]) -> Row:
    """What `measure` found out about one variant."""
    child, ours = children[variant], children["opentinker"]
    limit_flops = LIMIT_FLOPS / statistics.median(children["limit"].seconds)
    shape = SHAPES[shape_name]
    is_limit = variant == "limit"
    flops = limit_flops if is_limit else shape.flops / statistics.median(child.seconds)
    return Row(
        shape=shape_name,
        dtype=dtype,
        variant=variant,
        seconds=[round(value, 3) for value in child.seconds],
        tokens_per_second=round(shape.rows * flops / shape.flops, 1),
        gflops=round(flops / 1e9, 1),
        share_of_limit=round(flops / limit_flops, 3),
        opentinker_faster=None if variant in ("limit", "opentinker") else ratio(child.seconds, ours.seconds),
        peak_gib=round(sum(child.peak_bytes) / 2**30, 2),
        peak_gib_by_process=[round(value / 2**30, 2) for value in child.peak_bytes],
    )


def has_trl(python: str) -> bool:
    """Whether that interpreter can run `run_trl`."""
    try:
        found = subprocess.run([python, "-c", "import torch, peft, datasets, trl"], capture_output=True)
    except OSError:
        return False
    return found.returncode == 0


HEADER = ("shape", "dtype", "variant", "tokens/s", "GFLOP/s", "of limit", "OpenTinker is faster", "peak GiB")
LINE = "{:16} {:9} {:11} {:>9} {:>8} {:>8} {:>21} {:>8}"


def line_of(row: Row) -> str:
    """One line of the printed table."""
    names = (row.shape, row.dtype, row.variant)
    if row.note:
        return LINE.format(*names, "-", "-", "-", row.note, "-")
    faster = "" if row.opentinker_faster is None else f"{row.opentinker_faster} x"
    rates = (row.tokens_per_second, round(row.gflops), f"{row.share_of_limit:.2f}")
    return LINE.format(*names, *rates, faster, f"{row.peak_gib:.2f}")


def parse() -> argparse.Namespace:
    """Options from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SHAPES, metavar="SHAPE", help=f"some of: {', '.join(SHAPES)}")
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each variant; 0 leaves them out")
    parser.add_argument("--profile", action="store_true", help="also where the time of one step goes, part by part")
    parser.add_argument("--trl-python", help="interpreter with torch, peft and trl")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--child", choices=[*VARIANTS, "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--model-dir", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.child is not None:
        run_child(options.child, SHAPES[options.only[0]], options.dtype[0], options.model_dir)
        return
    from opentinker_server.models.registry import resolve_model

    model_dir = resolve_model(MODEL, cache_dir=Path("~/.cache/opentinker").expanduser()).directory
    trl_python = options.trl_python if options.trl_python and has_trl(options.trl_python) else None
    if options.trl_python and trl_python is None:
        print(f"warning: {options.trl_python} cannot import torch, peft, datasets and trl", file=sys.stderr)
    document: dict[str, object] = {"machine": machine()}
    document["shapes"] = {name: asdict(shape) for name, shape in SHAPES.items()}
    results: list[dict[str, object]] = []
    profiles: list[dict[str, object]] = []
    document |= {"results": results, "profiles": profiles}

    def keep() -> None:  # a run that is cut off keeps what it has
        if options.json is not None:
            write_json(options.json, document)

    failures = 0
    chosen = options.only or (QUICK if options.quick else SHAPES)
    cases = [(name, dtype) for name in chosen for dtype in options.dtype]
    if options.rounds:
        print(LINE.format(*HEADER), flush=True)
    for name, dtype in cases if options.rounds else ():
        try:
            rows = measure(name, dtype, rounds=options.rounds, model_dir=model_dir, trl_python=trl_python)
        except VariantFailed as error:
            failures += 1
            rows = [Row(shape=name, dtype=dtype, variant="-", note="failed")]
            print(error, file=sys.stderr)
        print("\n".join(line_of(row) for row in rows), flush=True)
        results += [asdict(row) for row in rows]
        keep()
    if options.profile:
        from training_profile import profile_step

        for name, dtype in cases:
            if options.only or name in TARGETS:
                found = profile_step(SHAPES[name], dtype, rows_of=random_rows, rank=RANK, alpha=ALPHA)
                print(f"\n{name} {dtype}: {found}", flush=True)
                profiles.append({"shape": name, "dtype": dtype, **asdict(found)})
                keep()
    if failures:
        sys.exit(f"error: {failures} of {len(cases)} cases failed")


if __name__ == "__main__":
    main()
