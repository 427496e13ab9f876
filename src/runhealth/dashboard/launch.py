"""Start the dashboard. Streamlit is looked for only here, and only when it is needed."""

import importlib.util
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from runhealth.storage.errors import ConfigError, MissingExtraError

ADDRESS = "127.0.0.1"
PORT = 8501
PORTS_TRIED = 20
STORE_ENV = "RUNHEALTH_STORE"
RUN_ENV = "RUNHEALTH_RUN"
APP = str(Path(__file__).with_name("app.py"))


def main(run: str | None = None, store: str | None = None, port: int | None = None, address: str = ADDRESS) -> int:
    """Replace this process by a Streamlit server that shows `run` of `store`; Ctrl-C or SIGTERM ends it. Never returns.

    `store` None means $RUNHEALTH_STORE, else ./runs; `run` None lets the reader choose. `port` None takes the first
    free one from 8501 on.

    Raises:
        MissingExtraError: Streamlit is not installed.
        ConfigError: the port is taken, or cannot be bound.
    """
    if importlib.util.find_spec("streamlit") is None:
        raise MissingExtraError(
            "the dashboard needs Streamlit, which is not installed: pip install 'runhealth[dashboard]'"
        )
    port = free_port(address, port)
    where = f"http://{address}:{port}/" + (f"?run={quote(run, safe='')}" if run else "")
    print(f"Dashboard: {where}\nCtrl-C stops it.", flush=True)
    os.execve(sys.executable, command(address, port), environment(run, store, os.environ))


def command(address: str, port: int) -> list[str]:
    """The server's command line. Options given here win over the user's and the folder's Streamlit settings."""
    options = {
        "server.address": address,
        "server.port": str(port),
        "server.headless": "true",  # no browser is opened, no e-mail address is asked for
        "server.fileWatcherType": "none",
        "server.runOnSave": "false",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "type",
        "logger.hideWelcomeMessage": "true",
    }
    return [sys.executable, "-m", "streamlit", "run", APP, *(f"--{key}={value}" for key, value in options.items())]


def environment(run: str | None, store: str | None, base: Mapping[str, str]) -> dict[str, str]:
    """How the app is told what to show."""
    env = dict(base)
    if store is not None:
        env[STORE_ENV] = store
    env.pop(RUN_ENV, None)
    if run:
        env[RUN_ENV] = run
    return env


def free_port(address: str, port: int | None) -> int:
    """`port` if it can be bound, or the first that can from `PORT` on when `port` is None."""
    tried = range(PORT, PORT + PORTS_TRIED) if port is None else (port,)
    problem = ""
    for candidate in tried:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, candidate))
            except (OSError, OverflowError) as error:
                problem = str(error)
            else:
                return int(probe.getsockname()[1])
    first, last = tried[0], tried[-1]
    ports = f"port {first}" if first == last else f"a port from {first} to {last}"
    raise ConfigError(f"expected {ports} on {address} to be free, met: {problem}; choose another with --port")
