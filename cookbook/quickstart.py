"""Starts a server on the embedded defaults, runs both loops against it, stops it: `make quickstart`.

python cookbook/quickstart.py              # about 6 minutes on two cores
python cookbook/quickstart.py --steps 2    # a quick look
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPES = ("sl", "rl")


@contextmanager
def running_server(folder: Path, base_model: str) -> Iterator[str]:
    """`opentinker serve` with SQLite and one local worker on a free loopback port; yields its address.

    It is stopped by its own process id, whatever happens in between. Raises RuntimeError when it does not start.
    """
    command = [str(Path(sys.executable).with_name("opentinker")), "serve", "--port", "0", "--model", base_model]
    command += ["--state-dir", str(folder / "state")]
    with (folder / "server.log").open("w") as log:
        # A group of its own: Ctrl-C reaches the recipe first, and the server when the recipe has closed its session.
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    try:
        assert server.stdout is not None
        # The line comes once the model is loaded and calls are answered; the pipe ends when the server does.
        serving = next((line for line in server.stdout if " serves " in line), None)
        if serving is None:
            raise RuntimeError(f"the server did not start; see {folder / 'server.log'}")
        yield serving.split(" on ")[-1].strip()
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main() -> None:
    """Ends with a non-zero code when a part of it fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, help="steps of each loop, instead of their defaults")
    parser.add_argument("--base-model", default="smollm2-135m-instruct")
    parser.add_argument("--run-dir", type=Path, default=Path(f"runs/quickstart-{time.strftime('%Y%m%d-%H%M%S')}"))
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the server is stopped then, too
        signal.signal(number, lambda *_: sys.exit("error: terminated"))

    started = time.monotonic()
    options.run_dir.mkdir(parents=True, exist_ok=True)
    print(f"starting a server with {options.base_model} ...", flush=True)
    try:
        with running_server(options.run_dir, options.base_model) as address:
            print(f"it serves on {address}", flush=True)
            for name in RECIPES:
                print(f"\n== {name}_loop.py", flush=True)
                command = [sys.executable, str(HERE / f"{name}_loop.py"), "--base-url", address]
                command += ["--run-dir", str(options.run_dir / name)]
                command += [] if options.steps is None else ["--steps", str(options.steps)]
                subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {Path(error.cmd[1]).name} ended with code {error.returncode}")
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted")
    seconds = time.monotonic() - started
    print(f"\nDone in {seconds:.0f} s; the server is stopped. Results, in {options.run_dir}:", flush=True)
    for name in RECIPES:
        print(f"  {name}/metrics.jsonl  {name}/config.json  {name}/curves.png")
    print("  server.log  state/")


if __name__ == "__main__":
    main()
