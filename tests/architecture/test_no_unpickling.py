"""Nothing on a product path can turn bytes from elsewhere into code."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile"}


def violations(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            found += [f"{where} import {n.name}" for n in node.names if n.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(f"{where} from {node.module}")
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in FORBIDDEN_CALLS:
                found.append(f"{where} {function.id}()")
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                name = f"{function.value.id}.{function.attr}"
                if name == "torch.load":
                    found.append(f"{where} {name}()")
                if name in {"np.load", "numpy.load"} and any(k.arg == "allow_pickle" for k in node.keywords):
                    found.append(f"{where} {name}(allow_pickle=...)")
    return found


def test_no_unpickling_or_evaluation_on_product_paths() -> None:
    files = [
        path
        for package in ("opentinker_client", "opentinker_server", "kernels/opentinker_kernels")
        for path in (ROOT / package).rglob("*.py")
        if "_pb2" not in path.name
    ]
    assert files
    assert not [line for path in files for line in violations(path)]


def test_the_scan_sees_what_it_should(tmp_path: Path) -> None:
    bad = ROOT / "build" / "scan_probe.py"
    bad.parent.mkdir(exist_ok=True)
    bad.write_text("import pickle\nimport torch\ntorch.load('x')\neval('1')\n")
    try:
        assert len(violations(bad)) == 3
    finally:
        bad.unlink()
