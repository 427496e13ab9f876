"""Starting the server."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from runhealth.dashboard import launch
from runhealth.storage.errors import ConfigError, MissingExtraError


def test_launching_imports_no_streamlit() -> None:
    code = "import sys; import runhealth.dashboard.launch; sys.exit('streamlit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_streamlit_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'runhealth\[dashboard\]'"):
        launch.main("r")


def test_a_taken_port_is_an_error_and_the_default_moves_on() -> None:
    with socket.socket() as taken:
        taken.bind((launch.ADDRESS, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"expected port {port} on 127.0.0.1 to be free"):
            launch.free_port(launch.ADDRESS, port)
    with pytest.raises(ConfigError, match="port 99999"):
        launch.free_port(launch.ADDRESS, 99999)
    assert launch.free_port(launch.ADDRESS, None) >= launch.PORT


def test_the_environment_carries_run_and_store() -> None:
    base = {"PATH": "/bin", launch.RUN_ENV: "old", launch.STORE_ENV: "kept"}
    assert launch.environment("r", "s", base) == {"PATH": "/bin", launch.RUN_ENV: "r", launch.STORE_ENV: "s"}
    assert launch.environment(None, None, base) == {"PATH": "/bin", launch.STORE_ENV: "kept"}


def test_it_serves_on_this_machine_only_and_ends_on_sigterm(tmp_path: Path) -> None:
    port = launch.free_port(launch.ADDRESS, 0)
    code = f"from runhealth.dashboard import launch; launch.main('a b', {str(tmp_path)!r}, {port})"
    env = {**os.environ, "HOME": str(tmp_path)}
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=env
    )
    try:
        assert _answer(f"http://127.0.0.1:{port}/_stcore/health", server) == "ok"
        listening = Path("/proc/net/tcp").read_text() if Path("/proc/net/tcp").exists() else ""
        assert f"00000000:{port:04X}" not in listening
    finally:
        server.send_signal(signal.SIGTERM)
        said = server.communicate(timeout=30)[0]
    assert said.startswith(f"Dashboard: http://127.0.0.1:{port}/?run=a%20b\n")
    assert "usage statistics" not in said
    assert not (tmp_path / ".streamlit" / "machine_id_v4").exists()


def _answer(url: str, server: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return str(reply.read().decode())
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no answer from {url}; exit status {server.poll()}")
