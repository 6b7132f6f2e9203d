"""Design rules about imports, checked on the running interpreter and by import-linter."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "opentinker_client"


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_import_contracts_hold() -> None:
    result = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


def test_client_loads_no_heavy_library() -> None:
    loaded = loaded_after("import opentinker_client")
    heavy = {"torch", "transformers", "peft", "triton", "opentinker_server", "opentinker_kernels", "sqlalchemy"}
    assert not heavy & loaded


def test_control_plane_loads_no_torch() -> None:
    loaded = loaded_after("import opentinker_server.app, opentinker_server.cli.main")
    assert not {"torch", "transformers", "peft"} & loaded


def test_only_wire_and_transport_know_protobuf() -> None:
    offenders = []
    for path in CLIENT.rglob("*.py"):
        part = path.relative_to(CLIENT).parts[0]
        if part in {"wire", "transport"}:
            continue
        if re.search(r"^\s*(from|import) (google\.protobuf|grpc)\b|_pb2", path.read_text(), re.M):
            offenders.append(str(path.relative_to(ROOT)))
    assert not offenders


def test_cookbook_uses_public_client_names_only() -> None:
    offenders = []
    for path in (ROOT / "cookbook").glob("*.py"):
        for match in re.finditer(r"^\s*(?:from|import) (opentinker_\w+(?:\.\w+)*)", path.read_text(), re.M):
            if match[1] != "opentinker_client":
                offenders.append(f"{path.name}: {match[1]}")
    assert not offenders


def test_no_top_level_kernels_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
