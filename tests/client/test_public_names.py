"""The public names are pinned: removing or renaming one is a decision, not an accident."""

import inspect

import opentinker_client as ot

METHODS = {
    "ServiceClient": [
        "address",
        "attach",
        "close",
        "create_lora_training_client",
        "create_registry_client",
        "create_rest_client",
        "create_sampling_client",
        "create_training_client_from_state",
        "create_training_client_from_state_with_optimizer",
        "get_server_capabilities",
    ],
    "TrainingClient": [
        "create_sampling_client",
        "forward",
        "forward_backward",
        "forward_backward_custom",
        "get_info",
        "get_tokenizer",
        "load_state",
        "load_state_with_optimizer",
        "optim_step",
        "save_state",
        "save_weights_and_get_sampling_client",
        "save_weights_for_sampler",
        "unload",
    ],
    "SamplingClient": [
        "compute_logprobs",
        "get_base_model",
        "get_tokenizer",
        "policy_version",
        "refresh",
        "sample",
        "sample_stream",
        "sampler_id",
        "snapshot",
    ],
    "RegistryClient": [
        "address",
        "close",
        "delete_checkpoint",
        "delete_checkpoint_from_tinker_path",
        "download",
        "get_server_capabilities",
        "get_training_run",
        "get_training_run_by_tinker_path",
        "get_weights_info_by_tinker_path",
        "list_checkpoints",
        "list_snapshots",
        "list_training_runs",
        "list_user_checkpoints",
        "set_checkpoint_ttl_from_tinker_path",
        "watch_snapshots",
    ],
    "APIFuture": ["cancel", "coroutine", "done", "future", "result", "result_async"],
}
WITHOUT_TWIN = {
    "address",
    "close",
    "create_registry_client",
    "create_rest_client",
    "get_base_model",
    "get_tokenizer",
    "policy_version",
    "sample_stream",
    "sampler_id",
    "snapshot",
    "watch_snapshots",
}


def test_methods_of_the_clients() -> None:
    for name, expected in METHODS.items():
        public = [m for m in dir(getattr(ot, name)) if not m.startswith("_") and not m.endswith("_async")]
        assert sorted({*public, *(["result_async"] if name == "APIFuture" else [])}) == sorted(expected), name


def test_every_call_has_an_async_twin() -> None:
    for name, methods in METHODS.items():
        if name == "APIFuture":
            continue
        cls = getattr(ot, name)
        for method in set(methods) - WITHOUT_TWIN:
            assert inspect.iscoroutinefunction(getattr(cls, f"{method}_async")), f"{name}.{method}_async"


def test_everything_public_has_a_docstring() -> None:
    for name in ot.__all__:
        assert inspect.getdoc(getattr(ot, name)), name
    for name, methods in METHODS.items():
        for method in methods:
            assert inspect.getdoc(getattr(getattr(ot, name), method)), f"{name}.{method}"


def test_all_is_complete() -> None:
    assert sorted(ot.__all__) == ot.__all__ or set(ot.__all__) == set(sorted(ot.__all__))
    assert all(hasattr(ot, name) for name in ot.__all__)
    assert ot.RestClient is ot.RegistryClient
