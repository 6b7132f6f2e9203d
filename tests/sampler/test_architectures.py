"""Every supported architecture: the sampler against stock transformers with the adapter merged into its weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from opentinker_server.models.base import BaseModel
from opentinker_server.models.registry import resolve_model
from opentinker_server.sampler.engine import EngineConfig, SamplerEngine

NAMES = [f"tiny-{arch}{tied}" for arch in ("llama", "qwen3", "gemma3", "mixtral") for tied in ("", "-tied")]


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_equal_stock_transformers(name: str, cache_dir: Path, make_adapter, make_task, drive) -> None:
    """Prompts are longer than gemma's window of 16; base and adapter run in one batch, in chunks of 37."""
    source = resolve_model(name, cache_dir=cache_dir)
    base = BaseModel.load(source, dtype=torch.float32, device="cpu")
    engine = SamplerEngine(base, EngineConfig(max_batched_tokens=37))
    adapter = make_adapter(base, seed=3, spread=0.1)
    engine.add_snapshot("tuned", adapter)
    rng = np.random.default_rng(0)
    tasks = [
        make_task(
            rng.integers(0, 256, 30 + 11 * index).tolist(),
            task_id=index,
            snapshot_key=key,
            max_tokens=40,
            seed=index,
            prompt_logprobs=True,
        )
        for index, key in enumerate(("", "tuned", "", "tuned"))
    ]
    outputs = drive(engine, tasks)
    for key in ("", "tuned"):
        plain = AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32, attn_implementation="eager")
        for module_name, (a, b) in adapter.factors.items() if key else ():
            linear = plain.get_submodule(module_name)
            # A parameter of its own: a tied head must not change the input embeddings.
            linear.weight = nn.Parameter(linear.weight.detach() + adapter.scale * (b @ a))
        for task in (task for task in tasks if task.snapshot_key == key):
            output = outputs[task.task_id]
            tokens = torch.tensor([*task.prompt.tolist(), *output.sequences[0].tokens.tolist()])
            with torch.no_grad():
                logits = plain(tokens[None]).logits[0]
            expected = torch.log_softmax(logits[:-1], dim=-1).gather(1, tokens[1:, None]).squeeze(1).numpy()
            num_prompt = len(task.prompt)
            np.testing.assert_allclose(output.prompt_logprobs[1:], expected[: num_prompt - 1], atol=1e-4)
            np.testing.assert_allclose(output.sequences[0].logprobs, expected[num_prompt - 1 :], atol=1e-4)
