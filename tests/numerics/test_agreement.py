"""Trainer, sampler, stock PEFT and the export agree on log-probabilities, in float32, through the public client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from support.calls import ce, logprobs
from support.server import RunningServer
from transformers import AutoModelForCausalLM

import opentinker_client as ot
from opentinker_server.models.registry import fetch_model

TOLERANCE = 1e-4
NAMES = ["tiny-llama", "tiny-llama-tied", "tiny-qwen3", "tiny-qwen3-tied", "tiny-gemma3", "tiny-gemma3-tied"]


def stock_logprobs(directory: Path, adapter: Path, tokens: list[int]) -> np.ndarray:
    """The same numbers from transformers and PEFT alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    result = PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        logits = result(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def check_agreement(name: str, directory: Path, cache: Path, tmp_path: Path, *, rank: int, steps: int) -> None:
    settings = {"model.cache_dir": cache}
    with RunningServer(name, tmp_path / "state", **settings) as server:
        service = ot.ServiceClient(base_url=server.address)
        trainer = service.create_lora_training_client(name, rank=rank, seed=3).result()
        vocab = service.get_server_capabilities().result().supported_models[0].vocab_size
        rng = np.random.default_rng(0)
        text = rng.integers(0, vocab, 40).tolist()
        for _ in range(steps):
            trainer.forward_backward([ce(text)], "cross_entropy")
            trainer.optim_step(ot.AdamParams(learning_rate=1e-2)).result()
        path = trainer.save_weights_for_sampler("final").result().path
        sampler = service.create_sampling_client(model_path=path).result()
        prompt = text[:10]
        params = ot.SamplingParams(max_tokens=24, seed=5, stop=[])
        sample = sampler.sample(ot.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()
        sequence = sample.sequences[0]
        tokens = [*prompt, *sequence.tokens]
        live = logprobs(trainer.forward([ce(tokens)], "cross_entropy").result())[0]
        service.create_registry_client().download(path, tmp_path / "export").result()
        base_only = service.create_sampling_client(base_model=name).result()
        untrained = np.array(base_only.compute_logprobs(ot.ModelInput.from_ints(tokens)).result()[1:])
        service.close().result()
    stock = stock_logprobs(directory, tmp_path / "export", tokens)
    np.testing.assert_allclose(sequence.logprobs, live[len(prompt) - 1 :], atol=TOLERANCE)
    np.testing.assert_allclose(live, stock, atol=TOLERANCE)
    assert np.abs(live - untrained).max() > 0.1, "the adapter changed nothing; the comparison would be empty"


@pytest.mark.parametrize("name", NAMES)
def test_tiny_models_agree(name: str, cache_dir: Path, tmp_path: Path) -> None:
    directory = fetch_model(name, cache_dir=cache_dir)
    check_agreement(name, directory, cache_dir, tmp_path, rank=4, steps=5)


@pytest.mark.slow
def test_smollm2_agrees(model_cache: Path, tmp_path: Path) -> None:
    name = "smollm2-135m-instruct"
    check_agreement(name, fetch_model(name, cache_dir=model_cache), model_cache, tmp_path, rank=8, steps=3)


@pytest.mark.parametrize("name", ["tiny-llama-tied", "tiny-qwen3"])
def test_merged_export_reproduces_the_live_numbers(name: str, cache_dir: Path, tmp_path: Path) -> None:
    """CASES AT-7: an adapted head on tied embeddings is untied in the merged model, inputs are unchanged."""
    directory = fetch_model(name, cache_dir=cache_dir)
    with RunningServer(name, tmp_path / "state", **{"model.cache_dir": cache_dir}) as server:
        service = ot.ServiceClient(base_url=server.address)
        trainer = service.create_lora_training_client(name, rank=4, seed=3, train_unembed=True).result()
        tokens = np.random.default_rng(1).integers(0, 256, 30).tolist()
        for _ in range(20):
            trainer.forward_backward([ce(tokens)], "cross_entropy")
            trainer.optim_step(ot.AdamParams(learning_rate=1e-2)).result()
        live = logprobs(trainer.forward([ce(tokens)], "cross_entropy").result())[0]
        path = trainer.save_state("final").result().path
        service.create_registry_client().download(path, tmp_path / "merged", merged=True).result()
        service.close().result()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        logits = merged(torch.tensor([tokens])).logits[0]
    found = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    np.testing.assert_allclose(found, live, atol=TOLERANCE)
    assert merged.config.tie_word_embeddings is False
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(merged.get_input_embeddings().weight, base.get_input_embeddings().weight)
