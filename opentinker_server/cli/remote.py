"""Commands that talk to a running server, through the public client."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import opentinker_client as ot
from opentinker_server.cli.output import (
    JsonOption,
    ServerOption,
    console,
    error_console,
    fail,
    failures_as_one_line,
    human_bytes,
    print_fields,
    print_json,
    print_records,
)

runs_app = typer.Typer(help="Training runs: one for each adapter.", no_args_is_help=True)
adapters_app = typer.Typer(help="Adapters and their snapshot versions.", no_args_is_help=True)
checkpoints_app = typer.Typer(help="Saved checkpoints and snapshots.", no_args_is_help=True)

Server = Annotated[str | None, ServerOption]
AsJson = Annotated[bool, JsonOption]
Limit = Annotated[int, typer.Option(help="Most entries to show.", min=1)]
Offset = Annotated[int, typer.Option(help="Entries to skip.", min=0)]


@contextmanager
def _registry(server: str | None) -> Iterator[ot.RegistryClient]:
    with failures_as_one_line():
        registry = ot.RegistryClient(base_url=server)
        try:
            yield registry
        finally:
            registry.close()


def _more(shown: int, offset: int, total: int) -> None:
    if total > offset + shown:
        console.print(f"{total - offset - shown} more; use --offset {offset + shown}")


def status(server: Server = None, as_json: AsJson = False) -> None:
    """Say what a server is, what it offers, and what it holds."""
    with _registry(server) as registry:
        info = registry.get_server_capabilities().result()
        adapters = registry.list_training_runs(limit=1).result().cursor.total_count
        saved = registry.list_user_checkpoints(limit=1).result().cursor.total_count
        fields: dict[str, Any] = {
            "address": registry.address,
            "version": info.server_version,
            "models": [model.model_name for model in info.supported_models],
            "context": [model.max_context_length for model in info.supported_models],
            "loss functions": list(info.loss_fns),
            "adapters": adapters,
            "saved checkpoints and snapshots": saved,
            "session lease (s)": info.session_lease_s,
            "largest rank": info.limits.max_rank,
            "most live adapters": info.limits.max_adapters,
        }
        if not as_json:
            fields = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in fields.items()}
        print_fields(fields, as_json=as_json)


@runs_app.command("list")
def runs_list(limit: Limit = 20, offset: Offset = 0, server: Server = None, as_json: AsJson = False) -> None:
    """List training runs, newest first."""
    with _registry(server) as registry:
        page = registry.list_training_runs(limit=limit, offset=offset).result()
        if as_json:
            print_json({"training_runs": page.training_runs, "total_count": page.cursor.total_count})
            return
        print_records(
            page.training_runs,
            {
                "run": lambda r: r.training_run_id,
                "model": lambda r: r.base_model,
                "rank": lambda r: r.lora_rank,
                "state": lambda r: r.state,
                "step": lambda r: r.step,
                "snapshots": lambda r: r.latest_version,
                "last used": lambda r: r.last_request_time,
            },
            as_json=False,
        )
        _more(len(page.training_runs), offset, page.cursor.total_count)


@runs_app.command("info")
def runs_info(
    run: Annotated[str, typer.Argument(help="Id of the run (the adapter's id).")],
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Show one training run."""
    with _registry(server) as registry:
        record = registry.get_training_run(run).result()
        if as_json:
            print_json(record)
            return
        print_fields({name: getattr(record, name) for name in record.__dataclass_fields__}, as_json=False)


@adapters_app.command("list")
def adapters_list(limit: Limit = 20, offset: Offset = 0, server: Server = None, as_json: AsJson = False) -> None:
    """List adapters with the state that training needs and their newest snapshot."""
    runs_list(limit=limit, offset=offset, server=server, as_json=as_json)


@adapters_app.command("snapshots")
def adapters_snapshots(
    adapter: Annotated[str, typer.Argument(help="Id of the adapter.")],
    limit: Limit = 20,
    offset: Offset = 0,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """List the snapshot versions of an adapter, newest first."""
    with _registry(server) as registry:
        page = registry.list_snapshots(adapter, limit=limit, offset=offset).result()
        if as_json:
            print_json({"snapshots": page.snapshots, "total_count": page.cursor.total_count})
            return
        print_records(
            page.snapshots,
            {
                "version": lambda s: s.version,
                "name": lambda s: s.name,
                "step": lambda s: s.step,
                "sha256": lambda s: s.sha256[:12],
                "size": lambda s: human_bytes(s.size_bytes),
                "taken": lambda s: s.created_at,
                "uri": lambda s: s.uri,
            },
            as_json=False,
        )
        _more(len(page.snapshots), offset, page.cursor.total_count)


@checkpoints_app.command("list")
def checkpoints_list(
    run: Annotated[str | None, typer.Option("--run", help="Only those of this run.")] = None,
    limit: Limit = 20,
    offset: Offset = 0,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """List checkpoints (training) and named snapshots (sampler), newest first."""
    with _registry(server) as registry:
        if run is None:
            page = registry.list_user_checkpoints(limit=limit, offset=offset).result()
            shown, total = page.checkpoints, page.cursor.total_count
        else:
            everything = registry.list_checkpoints(run).result().checkpoints
            shown, total = everything[offset : offset + limit], len(everything)
        if as_json:
            print_json({"checkpoints": shown, "total_count": total})
            return
        print_records(
            shown,
            {
                "path": lambda c: c.tinker_path,
                "kind": lambda c: c.checkpoint_type,
                "size": lambda c: human_bytes(c.size_bytes),
                "saved": lambda c: c.time,
                "expires": lambda c: c.expires_at,
            },
            as_json=False,
        )
        _more(len(shown), offset, total)


@checkpoints_app.command("info")
def checkpoints_info(
    path: Annotated[str, typer.Argument(help="opentinker:// path of a checkpoint or snapshot.")],
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint or snapshot is and how its adapter is built."""
    with _registry(server) as registry:
        record = registry.get_weights_info_by_tinker_path(path).result()
        if as_json:
            print_json(record)
            return
        print_fields({name: getattr(record, name) for name in record.__dataclass_fields__}, as_json=False)


@checkpoints_app.command("delete")
def checkpoints_delete(
    paths: Annotated[list[str], typer.Argument(help="opentinker:// paths.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints or snapshots for good. One that fails is reported, and the others go on."""
    if not yes:
        typer.confirm(f"Delete {len(paths)} for good?", abort=True, err=True)
    deleted, failed = [], {}
    with _registry(server) as registry:
        for path in paths:
            try:
                registry.delete_checkpoint_from_tinker_path(path).result()
                deleted.append(path)
            except ot.APIConnectionError:
                raise
            except ot.OpenTinkerError as error:
                failed[path] = str(error)
    if as_json:
        print_json({"deleted": deleted, "failed": failed})
    else:
        for path in deleted:
            console.print(f"deleted {path}", soft_wrap=True)
        for path, reason in failed.items():
            error_console.print(f"not deleted {path}: {reason}", soft_wrap=True, markup=False)
    if failed:
        raise typer.Exit(1)


@checkpoints_app.command("export")
def checkpoints_export(
    path: Annotated[str, typer.Argument(help="opentinker:// path of a checkpoint or snapshot.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must be absent or empty.")],
    merged: Annotated[bool, typer.Option(help="A whole model with the adapter merged in.")] = False,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint or snapshot as a PEFT adapter, or as a merged Hugging Face model."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        fail(f"{output} exists and is not an empty folder")
    with _registry(server) as registry:
        files = registry.download(path, output, merged=merged).result()
    if as_json:
        print_json({"path": path, "output": str(output), "files": [str(file) for file in files]})
    else:
        print_fields({file.name: human_bytes(file.stat().st_size) for file in files}, as_json=False)


def sample(
    text: Annotated[str | None, typer.Argument(help="Prompt; without one, an interactive chat.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Base model, or opentinker:// path of a snapshot [default: the base]."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Sample from a model: one prompt, or a chat when no prompt is given. Tokens are shown as they come."""
    if as_json and text is None:
        fail("--json needs a prompt: a chat has no one answer", code=2)
    with failures_as_one_line():
        service = ot.ServiceClient(base_url=server)
        try:
            sampler, tokenizer = _open(service, model)
            settings = ot.SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=secrets.randbits(63) if seed is None else seed,
            )
            if text is None:
                _chat(sampler, tokenizer, settings)
                return
            prompt = _encode(tokenizer, [{"role": "user", "content": text}], raw=raw)
            if as_json:
                response = sampler.sample(prompt, num_samples=1, sampling_params=settings).result()
                sequence = response.sequences[0]
                print_json(
                    {
                        "text": tokenizer.decode(list(sequence.tokens), skip_special_tokens=True),
                        "tokens": [int(token) for token in sequence.tokens],
                        "logprobs": [float(value) for value in sequence.logprobs],
                        "stop_reason": sequence.stop_reason,
                        "policy_version": sequence.policy_version,
                    }
                )
            else:
                _stream(sampler, tokenizer, prompt, settings)
        finally:
            service.close()


def _open(service: ot.ServiceClient, model: str | None) -> tuple[ot.SamplingClient, Any]:
    if model is None:
        model = service.get_server_capabilities().result().supported_models[0].model_name
    path = model if model.startswith("opentinker://") else None
    sampler = service.create_sampling_client(model_path=path, base_model=None if path else model).result()
    return sampler, sampler.get_tokenizer()


def _encode(tokenizer: Any, messages: list[dict[str, str]], *, raw: bool) -> ot.ModelInput:
    if raw or not getattr(tokenizer, "chat_template", None):
        return ot.ModelInput.from_ints(tokenizer.encode("\n".join(m["content"] for m in messages)))
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return ot.ModelInput.from_ints(tokenizer.encode(text, add_special_tokens=False))


def _stream(sampler: ot.SamplingClient, tokenizer: Any, prompt: ot.ModelInput, settings: ot.SamplingParams) -> str:
    tokens: list[int] = []
    shown = ""
    for delta in sampler.sample_stream(prompt, sampling_params=settings):
        tokens += [int(token) for token in delta.tokens]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # the rest of a character may still come
            console.print(text[len(shown) :], end="", markup=False, soft_wrap=True)
            shown = text
    console.print(tokenizer.decode(tokens, skip_special_tokens=True)[len(shown) :], markup=False)
    return tokenizer.decode(tokens, skip_special_tokens=True)


def _chat(sampler: ot.SamplingClient, tokenizer: Any, settings: ot.SamplingParams) -> None:
    console.print("Type a message; an empty line or Ctrl-D ends the chat.")
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = console.input("[bold]you>[/] ").strip()
        except EOFError:
            return
        if not line:
            return
        messages.append({"role": "user", "content": line})
        prompt = _encode(tokenizer, messages, raw=False)
        messages.append({"role": "assistant", "content": _stream(sampler, tokenizer, prompt, settings)})
