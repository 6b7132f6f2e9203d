"""Starts a server on the embedded defaults, runs both loops against it, stops it: `make quickstart`.

python cookbook/quickstart.py              # about 6 minutes on two cores
python cookbook/quickstart.py --steps 2    # a quick look
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def start_server(run_dir: Path, model: str) -> tuple[subprocess.Popen[str], str]:
    """`opentinker serve` on a free loopback port; returns the process and its address once it serves."""
    command = [str(Path(sys.executable).with_name("opentinker")), "serve", "--port", "0", "--model", model]
    command += ["--state-dir", str(run_dir / "state")]
    with (run_dir / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if " serves " in line:
            return process, line.split(" on ")[-1].strip()
    sys.exit(f"error: the server did not start; see {run_dir / 'server.log'}")


def stop_server(process: subprocess.Popen[str]) -> None:
    """By its own process id, whatever happened."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="steps of each loop, instead of their defaults")
    parser.add_argument("--base-model", default="smollm2-135m-instruct")
    parser.add_argument("--run-dir", type=Path, default=Path(f"runs/quickstart-{time.strftime('%Y%m%d-%H%M%S')}"))
    options = parser.parse_args()
    options.run_dir.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    print(f"starting a server with {options.base_model} ...", flush=True)
    process, address = start_server(options.run_dir, options.base_model)
    print(f"it serves on {address}", flush=True)
    try:
        for name in ("sl", "rl"):
            command = [sys.executable, str(HERE / f"{name}_loop.py"), "--base-url", address]
            command += ["--run-dir", str(options.run_dir / name)]
            if options.steps is not None:
                command += ["--steps", str(options.steps)]
            print(f"\n== {name}_loop.py", flush=True)
            subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {Path(error.cmd[1]).name} ended with code {error.returncode}")
    finally:
        stop_server(process)
    seconds = time.monotonic() - started
    print(f"\nDone in {seconds:.0f} s; the server is stopped. Metrics, curves and the server's log: {options.run_dir}")


if __name__ == "__main__":
    main()
