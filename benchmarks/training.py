"""Training speed and memory: this server through the public client, beside plain PEFT and TRL, in one run.

    python benchmarks/training.py                       # everything, about half an hour on two cores
    python benchmarks/training.py --only 8x32 --dtype bfloat16
    python benchmarks/training.py --trl-python PATH     # an interpreter that has torch, peft and trl

Every variant lives in a process of its own, so that its peak memory is its own, and takes one timed step when it is
asked; the variants are asked in turn, so that a slow minute of the machine meets all of them. A step is
forward_backward and optim_step of every adapter; medians, and ratios of medians. LoRA rank 16 on all linear layers but
the head, alpha 32. "limit" is the rate of a plain matrix product in the same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MODEL = "smollm2-135m-instruct"
MODEL_DIR = Path("~/.cache/opentinker/models").expanduser() / MODEL
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
    **{f"adapters-{count}": Shape(count, 1, 64) for count in (1, 2, 4, 16, 32)},
    **{f"length-{length}": Shape(1, 1024 // length, length) for length in (64, 512, 1024)},
}
QUICK = ("1x4x256", "8x32")


def random_rows(shape: Shape, adapter: int) -> list[list[int]]:
    """Token ids of each datum, one more than its length."""
    import random

    rng = random.Random(adapter)
    return [[rng.randrange(10, VOCABULARY) for _ in range(shape.tokens + 1)] for _ in range(shape.datums)]


# Children: each yields once it is ready, then does a step for every `next`.


def opentinker_steps(shape: Shape, dtype: str) -> Iterator[None]:
    """This server, started here with its defaults, through the public client."""
    import numpy as np

    import opentinker_client as ot

    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("opentinker")), "serve", "--port", "0", "--model", MODEL]
        command += ["--state-dir", folder, "--set", f"model.dtype={dtype}"]
        log = open(Path(folder) / "server.log", "w")  # noqa: SIM115
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert server.stdout is not None
        address = next(line for line in server.stdout if " serves " in line).split(" on ")[-1].strip()
        service = ot.ServiceClient(base_url=address)
        weights = (np.arange(shape.tokens) >= shape.tokens * (1 - shape.trained)).astype(np.float32)
        work = []
        for adapter in range(shape.adapters):
            trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=adapter, train_unembed=False).result()
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
            server.terminate()
            server.wait()


def peft_steps(shape: Shape, dtype: str) -> Iterator[None]:
    """A plain loop over stock transformers and PEFT; several adapters one after the other."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=getattr(torch, dtype))
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


def trl_steps(shape: Shape, dtype: str) -> None:
    """TRL's SFTTrainer drives its own loop: the turns are taken in a callback. Never returns."""
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
            model=AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=getattr(torch, dtype)),
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
            processing_class=AutoTokenizer.from_pretrained(MODEL_DIR),
            callbacks=[Turns()],
        )
        trainer.train()


def limit_steps(shape: Shape, dtype: str) -> Iterator[None]:
    """One product of two 2048 x 2048 matrices."""
    import torch

    left, right = torch.randn(2, 2048, 2048).to(getattr(torch, dtype))
    while True:
        yield
        for _ in range(LIMIT_PRODUCTS):
            torch.mm(left, right)


LIMIT_PRODUCTS = 10
LIMIT_FLOPS = LIMIT_PRODUCTS * 2.0 * 2048**3
STEPS: dict[str, Callable[[Shape, str], Iterator[None] | None]] = {
    "limit": limit_steps,
    "opentinker": opentinker_steps,
    "peft": peft_steps,
    "trl": trl_steps,
}


def wait_for_turn() -> None:
    """Blocks, without spinning; ends the process when the parent has gone or says so."""
    if sys.stdin.readline().strip() != "step":
        sys.exit(0)


def answer(seconds: float) -> None:
    """One line: seconds of the step, and peak memory of this process and its children so far, in bytes."""
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes(os.getpid())}), flush=True)


def peak_bytes(pid: int) -> int:
    """VmHWM of a process and all below it."""
    total = 0
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        total += int(status.split("VmHWM:")[1].split()[0]) * 1024
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            total += peak_bytes(int(child))
    except (OSError, IndexError):
        pass
    return total


def run_child(variant: str, shape: Shape, dtype: str) -> None:
    steps = STEPS[variant](shape, dtype)
    assert steps is not None
    next(steps)
    try:
        while True:
            wait_for_turn()
            started = time.perf_counter()
            next(steps)
            answer(time.perf_counter() - started)
    finally:
        steps.close()  # type: ignore[attr-defined]


class Child:
    """A variant in its own process."""

    def __init__(self, variant: str, shape_name: str, dtype: str, python: str) -> None:
        self.command = [python, __file__, "--child", variant, "--only", shape_name, "--dtype", dtype]
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def step(self, *, keep: bool = True) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith('{"seconds"'):
            if not line:
                raise RuntimeError(f"a variant ended with code {self.process.wait()}: {self.command}")
        result = json.loads(line)
        self.peak_bytes = result["peak_bytes"]
        if keep:
            self.seconds.append(result["seconds"])

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def measure(shape_name: str, dtype: str, *, rounds: int, trl_python: str | None) -> list[dict[str, object]]:
    """One row per variant."""
    shape = SHAPES[shape_name]
    pythons = {"limit": sys.executable, "opentinker": sys.executable, "peft": sys.executable}
    if trl_python is not None and shape.adapters == 1 and shape.trained == 1.0 and dtype == "float32":
        pythons["trl"] = trl_python
    children: dict[str, Child] = {}
    try:
        for variant, python in pythons.items():  # one after the other: a start computes too
            children[variant] = Child(variant, shape_name, dtype, python)
            children[variant].step(keep=False)
        for turn in range(rounds + 1):
            for child in children.values():
                child.step(keep=turn > 0)
    finally:
        for child in children.values():
            child.stop()
    limit = LIMIT_FLOPS / statistics.median(children.pop("limit").seconds)
    peft = statistics.median(children["peft"].seconds)
    rows = []
    for variant, child in children.items():
        seconds = statistics.median(child.seconds)
        rows.append(
            {
                "shape": shape_name,
                "dtype": dtype,
                "variant": variant,
                "tokens_per_second": round(shape.rows / seconds, 1),
                "seconds": [round(value, 3) for value in child.seconds],
                "times_peft": round(peft / seconds, 2),
                "share_of_limit": round(shape.flops / seconds / limit, 2),
                "limit_gflops": round(limit / 1e9),
                "peak_gib": round(child.peak_bytes / 2**30, 2),
            }
        )
    return rows


def machine() -> dict[str, object]:
    """What ran this."""
    from importlib.metadata import version

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "")
    flags = next((line.split() for line in info.splitlines() if line.startswith("flags")), [])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "cpu": name or platform.processor(),
        "cores": os.cpu_count(),
        "flags": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "peft")},
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(SHAPES), help="shapes, instead of all")
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each variant")
    parser.add_argument("--trl-python", help="interpreter with torch, peft and trl")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--child", choices=sorted(STEPS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        run_child(options.child, SHAPES[options.only[0]], options.dtype[0])
        return
    results: list[dict[str, object]] = []
    print(f"{'shape':16} {'dtype':9} {'variant':11} {'tokens/s':>9} {'x peft':>7} {'of limit':>8} {'peak GiB':>8}")
    for shape_name in options.only or (QUICK if options.quick else SHAPES):
        for dtype in options.dtype:
            rows = measure(shape_name, dtype, rounds=options.rounds, trl_python=options.trl_python)
            results += rows
            for row in rows:
                print(
                    f"{row['shape']:16} {row['dtype']:9} {row['variant']:11} {row['tokens_per_second']:9} "
                    f"{row['times_peft']:7} {row['share_of_limit']:8} {row['peak_gib']:8}",
                    flush=True,
                )
            if options.json is not None:  # a run that is cut off keeps what it has
                document = {
                    "machine": machine(),
                    "shapes": {name: asdict(shape) for name, shape in SHAPES.items()},
                    "results": results,
                }
                options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
