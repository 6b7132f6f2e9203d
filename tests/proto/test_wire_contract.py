"""The wire contract: style, committed stubs, no breaking change against the released baseline."""

import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).with_name("buf")


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)


def test_proto_style_and_comments() -> None:
    result = run(BUF, "lint")
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_breaking_change_against_the_baseline() -> None:
    result = run(BUF, "breaking", "--against", "proto/baseline.binpb")
    assert result.returncode == 0, result.stdout + result.stderr


def test_breaking_check_sees_a_renumbered_field(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    tensor = tmp_path / "proto/opentinker/v1/tensor.proto"
    tensor.write_text(tensor.read_text().replace("bytes data = 1;", "bytes data = 9;"))
    against = ROOT / "proto/baseline.binpb"
    result = subprocess.run(
        [str(BUF), "breaking", "--against", str(against)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "tensor.proto" in result.stdout


@pytest.mark.parametrize("package", ["opentinker_client/wire/v1", "opentinker_server/workers/v1"])
def test_committed_stubs_are_what_the_protos_give(tmp_path: Path, package: str) -> None:
    result = run(sys.executable, "proto/generate.py", tmp_path)
    assert result.returncode == 0, result.stderr
    made = sorted(p.name for p in (tmp_path / package).glob("*.py*"))
    kept = sorted(p.name for p in (ROOT / package).glob("*.py*"))
    assert made == kept
    _, different, missing = filecmp.cmpfiles(tmp_path / package, ROOT / package, made, shallow=False)
    assert not different and not missing, f"run `make proto`: {different + missing}"
