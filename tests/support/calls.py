"""Building blocks of the case tests, through the public client only.

Reading gradients: `PROBE` is an Adam step without momentum that moves each weight by d = 10 g / (|g| + 1000), which is
inverted exactly, so the difference of exported weights before and after shows the gradient. Ordinary Adam hides
scale errors: its first step is the sign times the learning rate. On a fresh adapter the B factors start at zero and
hold the whole gradient.

Ratio dial: send `logprobs = lp - ln(r)`, where `lp` comes from `forward`; the importance ratio is then exactly r.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import load_file

import opentinker_client as ot

PROBE = ot.AdamParams(learning_rate=10.0, beta1=0.0, beta2=0.0, eps=1e3, weight_decay=0.0, grad_clip_norm=0.0)


def datum(tokens: Sequence[int], targets: Sequence[int], **inputs: object) -> ot.Datum:
    """A datum whose further inputs are given as lists on the target-token axis."""
    return ot.Datum(
        model_input=ot.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={"target_tokens": list(targets), **inputs},
    )


def ce(tokens: Sequence[int], weights: Sequence[float] | None = None) -> ot.Datum:
    """Next-token datum of a token list; weights default to ones."""
    weights = [1.0] * (len(tokens) - 1) if weights is None else list(weights)
    return datum(tokens[:-1], tokens[1:], weights=weights)


def random_tokens(length: int, seed: int, vocab: int = 256) -> list[int]:
    """`length` token ids below `vocab`."""
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def logprobs(output: ot.ForwardBackwardOutput) -> list[np.ndarray]:
    """The log-probabilities of each datum."""
    return [np.asarray(item["logprobs"].to_numpy()) for item in output.loss_fn_outputs]


def target_logprobs(trainer: ot.TrainingClient, tokens: Sequence[int], targets: Sequence[int]) -> np.ndarray:
    """`lp` of the ratio dial."""
    data = [datum(tokens, targets, weights=[0.0] * len(targets))]
    return logprobs(trainer.forward(data, "cross_entropy").result())[0]


def dialled(
    trainer: ot.TrainingClient,
    tokens: Sequence[int],
    targets: Sequence[int],
    *,
    ratios: Sequence[float],
    advantages: Sequence[float],
) -> ot.Datum:
    """A reinforcement datum whose importance ratios are exactly `ratios`."""
    lp = target_logprobs(trainer, tokens, targets)
    sampled = [float(p) - math.log(r) for p, r in zip(lp, ratios, strict=True)]
    return datum(tokens, targets, logprobs=sampled, advantages=list(advantages))


def weights_at(service: ot.ServiceClient, uri: str) -> dict[str, np.ndarray]:
    """Tensors of an exported snapshot or checkpoint, by PEFT name."""
    with TemporaryDirectory() as folder:
        service.create_registry_client().download(uri, folder).result()
        return load_file(str(Path(folder) / "adapter_model.safetensors"))


_counter = iter(range(10**9))


def weights(service: ot.ServiceClient, trainer: ot.TrainingClient) -> dict[str, np.ndarray]:
    """Tensors of the adapter as it is now."""
    return weights_at(service, trainer.save_weights_for_sampler(f"w{next(_counter)}").result().path)


def probe(
    service: ot.ServiceClient, trainer: ot.TrainingClient, params: ot.AdamParams = PROBE
) -> dict[str, np.ndarray]:
    """Applies the probe step (PROBE, or it with clipping); returns the gradient that it shows, by PEFT name."""
    before = weights(service, trainer)
    trainer.optim_step(params).result()
    after = weights(service, trainer)
    moved = {name: before[name].astype(np.float64) - after[name] for name in before}
    return {name: PROBE.eps * d / (PROBE.learning_rate - np.abs(d)) for name, d in moved.items()}


def b_factors(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """All B factors as one vector: the whole gradient of a fresh adapter."""
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors) if "lora_B" in name])


def gradient_of(
    service: ot.ServiceClient,
    base_model: str,
    data: Sequence[ot.Datum],
    loss_fn: str,
    config: dict[str, float] | None = None,
    *,
    seed: int = 7,
) -> np.ndarray:
    """Gradient of the B factors of a fresh adapter."""
    trainer = service.create_lora_training_client(base_model, rank=4, seed=seed).result()
    trainer.forward_backward(list(data), loss_fn, config).result()
    gradient = b_factors(probe(service, trainer))
    trainer.unload().result()
    return gradient
