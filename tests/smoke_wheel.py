"""Smoke test of the built wheel, run by scripts/smoke-wheel in an environment that has nothing but it.

Shows that `pip install pagein` alone gives daemon, gateway and command line without torch, onnxruntime or llama.cpp,
and that they serve a model which brings its own server.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

FAKE = Path(__file__).with_name("fake_engine.py")
PAGEIN = [sys.executable, "-m", "pagein"]


def run(*arguments: str, code: int = 0) -> str:
    """Run the command line; it must end with this code."""
    done = subprocess.run([*PAGEIN, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, f"pagein {arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> None:
    """Install, check, serve, ask, stop."""
    import pagein

    where = Path(pagein.__file__ or "").resolve()
    assert "site-packages" in str(where), f"this is not the installed wheel: {where}"
    assert (where.parent / "py.typed").is_file()
    for engine in ("torch", "onnxruntime", "llama_cpp", "xllamacpp", "numpy"):
        assert importlib.util.find_spec(engine) is None, f"{engine} came with the core install"
    assert pagein.__version__ in run("version")
    assert "pip install 'pagein[llamacpp]'" in run("doctor", code=1), "no engine is here, and doctor says so"

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "pagein.yaml")
        command = f"{sys.executable} {FAKE} --socket ${{socket}} --name echo"
        config.write_text(
            f"budget: 300MiB\nstate_dir: state\nserver: {{port: 0}}\n"
            f"models:\n  echo: {{command: {json.dumps(command)}, memory: 50MiB}}\n"
        )
        run("check", str(config))
        daemon = subprocess.Popen([*PAGEIN, "serve", str(config)])
        try:
            told = wait_for(Path(folder, "state", "daemon.json"), daemon)
            body = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "hello"}]}).encode()
            request = urllib.request.Request(
                told["address"] + "/v1/chat/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["choices"][0]["message"]["content"].startswith("word0")
            os.environ["PAGEIN_URL"] = told["address"]
            models = json.loads(run("ps", "--json"))
            assert "echo" in json.dumps(models)
        finally:
            daemon.send_signal(signal.SIGTERM)
            code = daemon.wait(30)
        assert code == 0, f"the daemon ended with {code}"
    print("smoke test of the wheel: passed")


def wait_for(file: Path, daemon: subprocess.Popen[bytes]) -> dict[str, str]:
    """The daemon's address, once it is told."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and daemon.poll() is None:
        if file.exists():
            told: dict[str, str] = json.loads(file.read_text())
            return told
        time.sleep(0.05)
    raise AssertionError("the daemon did not start")


if __name__ == "__main__":
    main()
