"""Entry point of a device worker process: `python -m opentinker_server.workers.main --fd N`.

N is a connected stream socket inherited from the control plane; its first frame is the configuration.
"""

import argparse
import logging
import os
import signal
import socket
import sys

from opentinker_server.workers.config import WorkerConfig
from opentinker_server.workers.frames import receive_frame


def main() -> int:
    """Returns the exit code; see `process.serve`."""
    # An interrupt at the terminal reaches every process there; the control plane decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description="Device worker; started by the control plane.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket")
    connection = socket.socket(fileno=parser.parse_args().fd)
    connection.set_inheritable(False)
    first_frame = receive_frame(connection)
    if first_frame is None:
        return 0
    config = WorkerConfig.from_json(first_frame.decode())
    logging.basicConfig(stream=sys.stderr, level=config.log_level, format="%(levelname)s %(name)s: %(message)s")
    # Imports torch and the model libraries, which takes seconds.
    from opentinker_server.workers.process import serve

    return serve(connection, config)


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    # Every command has been answered; taking the model libraries down in order would cost seconds.
    os._exit(exit_code)
