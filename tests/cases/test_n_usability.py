"""CASES area N: the command line and what users read when something is wrong."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.calls import ce

import opentinker_client as ot

CLI = str(Path(sys.executable).with_name("opentinker"))


def cli(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([CLI, *arguments], capture_output=True, text=True, input=stdin, timeout=60)


@pytest.fixture
def saved(t0_service: ot.ServiceClient) -> tuple[ot.TrainingClient, list[str]]:
    trainer = t0_service.create_lora_training_client("t0", rank=2, seed=1).result()
    return trainer, [trainer.save_state(f"c{i}").result().path for i in range(5)]


def test_ux1_delete_with_yes_deletes_each(t0_address: str, saved) -> None:
    trainer, paths = saved
    result = cli("checkpoints", "delete", "-y", *paths[:3], "--server", t0_address)
    assert result.returncode == 0, result.stderr
    listed = json.loads(cli("checkpoints", "list", "--run", trainer.model_id, "--json", "--server", t0_address).stdout)
    assert sorted(c["tinker_path"] for c in listed["checkpoints"]) == sorted(paths[3:])


def test_ux1_delete_asks_and_no_deletes_nothing(t0_address: str, saved) -> None:
    trainer, paths = saved
    result = cli("checkpoints", "delete", *paths[:2], "--server", t0_address, stdin="n\n")
    assert result.returncode != 0
    listed = json.loads(cli("checkpoints", "list", "--run", trainer.model_id, "--json", "--server", t0_address).stdout)
    assert len(listed["checkpoints"]) == 5


def test_ux1_a_missing_path_is_reported_while_the_others_go_on(t0_address: str, saved) -> None:
    trainer, paths = saved
    missing = paths[0] + "-missing"
    result = cli("checkpoints", "delete", "-y", paths[0], missing, paths[1], "--server", t0_address)
    assert result.returncode != 0
    assert "c0-missing" in "".join((result.stdout + result.stderr).split())
    listed = json.loads(cli("checkpoints", "list", "--run", trainer.model_id, "--json", "--server", t0_address).stdout)
    assert len(listed["checkpoints"]) == 3


def test_ux1_list_pages_and_says_there_is_more(t0_address: str, saved) -> None:
    trainer, _ = saved
    arguments = ("checkpoints", "list", "--run", trainer.model_id, "--limit", "2", "--server", t0_address)
    shown = cli(*arguments)
    assert "3 more" in shown.stdout + shown.stderr
    document = json.loads(cli(*arguments, "--json").stdout)
    assert len(document["checkpoints"]) == 2 and document["total_count"] == 5


COMMANDS = [
    ["serve"],
    ["status"],
    ["models", "list"],
    ["models", "fetch"],
    ["runs", "list"],
    ["runs", "info"],
    ["adapters", "list"],
    ["checkpoints", "list"],
    ["checkpoints", "info"],
    ["checkpoints", "delete"],
    ["checkpoints", "export"],
    ["sample"],
    ["config", "show"],
    ["version"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_ux1_every_command_has_help(command: list[str]) -> None:
    result = cli(*command, "--help")
    assert result.returncode == 0 and "Usage" in result.stdout


def test_ux1_json_parses_everywhere(t0_address: str, saved, tmp_path: Path) -> None:
    trainer, paths = saved
    server = ("--server", t0_address, "--json")
    for command in (
        ("version", "--json"),
        ("config", "show", "--json"),
        ("models", "list", "--json"),
        ("status", *server),
        ("runs", "list", *server),
        ("runs", "info", trainer.model_id, *server),
        ("adapters", "list", *server),
        ("checkpoints", "info", paths[0], *server),
        ("checkpoints", "export", paths[0], "--output", str(tmp_path / "out"), *server),
        ("sample", "abc", "--raw", "--max-tokens", "4", *server),
    ):
        result = cli(*command)
        assert result.returncode == 0, (command, result.stderr)
        assert json.loads(result.stdout) is not None
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("command", [["status"], ["runs", "list"], ["checkpoints", "list"], ["sample", "hi"]])
def test_ux1_unreachable_server_is_one_line(command: list[str]) -> None:
    start = time.monotonic()
    result = cli(*command, "--server", "127.0.0.1:9")
    assert time.monotonic() - start < 15
    assert result.returncode != 0
    assert "127.0.0.1:9" in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_ux2_accepted_arguments_have_an_effect(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=2, seed=1).result()
    trainer.save_weights_and_get_sampling_client(name="kept").result()
    registry = t0_service.create_registry_client()
    listed = registry.list_checkpoints(trainer.model_id).result().checkpoints
    assert any(c.checkpoint_type == "sampler" for c in listed)
    with pytest.raises(TypeError, match="num_samples"):
        sampler = t0_service.create_sampling_client(base_model="t0").result()
        sampler.sample(ot.ModelInput.from_ints([1]), num_sample=1, sampling_params=ot.SamplingParams())
    with pytest.raises(TypeError, match="temperature"):
        ot.SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="rank"):
        t0_service.create_lora_training_client("t0", rnk=2)


def test_ux3_wrong_kind_of_checkpoint_names_both_kinds(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=2, seed=1).result()
    trainer.forward_backward([ce([1, 2, 3])], "cross_entropy")
    trainer.optim_step(ot.AdamParams()).result()
    checkpoint = trainer.save_state("c").result().path
    snapshot = trainer.save_weights_for_sampler("s").result().path
    with pytest.raises(ot.BadRequestError) as caught:
        t0_service.create_sampling_client(model_path=checkpoint).result()
    assert "checkpoint" in str(caught.value) and "snapshot" in str(caught.value)
    assert caught.value.request_id
    with pytest.raises(ot.BadRequestError) as caught:
        trainer.load_state_with_optimizer(snapshot).result()
    assert "checkpoint" in str(caught.value) and "snapshot" in str(caught.value)
    other = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    with pytest.raises(ot.BadRequestError, match="rank"):
        other.load_state(checkpoint).result()


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--server", "localhost"),
        ("runs", "list", "--limit", "99999999999"),
        ("checkpoints", "info", "opentinker://x/snapshots/abc"),
    ],
)
def test_a_wrong_argument_is_one_line_and_no_traceback(t0_address: str, arguments: tuple[str, ...]) -> None:
    server = () if "--server" in arguments else ("--server", t0_address)
    result = cli(*arguments, *server)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_an_error_keeps_its_brackets(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("model = 3")
    assert "[model]" in cli("serve", "--config", str(file)).stderr
