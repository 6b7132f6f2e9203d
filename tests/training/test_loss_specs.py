"""What the control plane is told about the losses."""

import math
import subprocess
import sys

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


def test_defaults_are_absolute_ratio_bounds() -> None:
    for name in ("ppo", "cispo", "gspo"):
        assert resolve_config(LOSS_SPECS[name], {}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert resolve_config(LOSS_SPECS["dro"], {}) == {"beta": 0.05}
    assert resolve_config(LOSS_SPECS["ppo"], {"clip_high_threshold": 4}) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 4.0,
    }


@pytest.mark.parametrize(
    ("name", "config", "text"),
    [
        ("ppo", {"clip_lo": 0.5}, "clip_lo"),
        ("importance_sampling", {"beta": 0.5}, "it has: none"),
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
