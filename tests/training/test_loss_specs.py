"""What the control plane is told about the losses."""

import math
import subprocess
import sys

import numpy as np
import pytest

from opentinker_server.training.loss_specs import LOSS_SPECS, resolve_config


def test_importing_the_specs_loads_no_torch() -> None:
    code = "import sys, opentinker_server.training.loss_specs; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_the_six_losses_are_offered() -> None:
    assert set(LOSS_SPECS) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"}
    assert [s.name for s in LOSS_SPECS.values() if s.two_dimensional_targets] == ["cross_entropy"]


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_policy_losses_require_an_explicit_mask(name: str) -> None:
    assert LOSS_SPECS[name].required == {"target_tokens", "logprobs", "advantages", "mask"}


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
MASK = {"mask_ratio_low": 0.0, "mask_ratio_high": 0.0}


def test_defaults_are_absolute_ratio_bounds_and_no_mask() -> None:
    for name in ("ppo", "cispo"):
        assert resolve_config(LOSS_SPECS[name], {}) == CLIP | MASK
    assert resolve_config(LOSS_SPECS["gspo"], {}) == CLIP
    assert resolve_config(LOSS_SPECS["importance_sampling"], {}) == {"truncate_ratio": 0.0} | MASK
    assert resolve_config(LOSS_SPECS["dro"], {}) == {"beta": 0.05}
    resolved = resolve_config(LOSS_SPECS["ppo"], {"clip_high_threshold": 4, "mask_ratio_low": 0.5})
    assert resolved == CLIP | MASK | {"clip_high_threshold": 4.0, "mask_ratio_low": 0.5}


def test_only_the_sequence_ratio_needs_its_whole_datum() -> None:
    assert [spec.name for spec in LOSS_SPECS.values() if not spec.per_token] == ["gspo"]


def test_tokens_may_have_clip_bounds_of_their_own() -> None:
    assert [s.name for s in LOSS_SPECS.values() if {"clip_low", "clip_high"} <= s.optional] == ["ppo", "cispo"]


@pytest.mark.parametrize(
    ("name", "config", "text"),
    [
        ("ppo", {"clip_lo": 0.5}, "clip_lo"),
        ("cross_entropy", {"beta": 0.5}, "it has: none"),
        ("importance_sampling", {"truncate_ratio": -2}, "truncate_ratio"),
        ("ppo", {"mask_ratio_low": 3, "mask_ratio_high": 2}, "mask_ratio_low 3.0 is above mask_ratio_high 2.0"),
        ("gspo", {"mask_ratio_low": 0.5}, "mask_ratio_low"),
        ("ppo", {"clip_low_threshold": -0.1}, "-0.1"),
        ("ppo", {"clip_low_threshold": 1.5}, "1.5"),
        ("dro", {"beta": math.nan}, "nan"),
        ("dro", {"beta": math.inf}, "inf"),
        ("dro", {"beta": True}, "True"),
    ],
)
def test_bad_configuration_is_refused_by_name(name: str, config: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve_config(LOSS_SPECS[name], config)


@pytest.mark.parametrize("name", sorted(LOSS_SPECS))
def test_no_configured_number_leaves_float32(name: str) -> None:
    for key, rule in LOSS_SPECS[name].config.items():
        with pytest.raises(ValueError, match=key):
            resolve_config(LOSS_SPECS[name], {key: 1e308})
        assert np.isfinite(np.float32(rule.maximum))
