"""Windows and macOS, played on Linux: what they lack is taken away, and the core has to do without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
LACKING = {
    "win32": (
        "fcntl resource pwd grp termios tty pty syslog readline",
        "O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_DIRECTORY fork memfd_create sched_getaffinity getuid geteuid getgid setsid "
        "killpg fchmod fchown chown uname getpgid posix_fallocate sendfile statvfs mkfifo",
        "SIGKILL SIGHUP SIGALRM SIGCHLD SIGUSR1 SIGUSR2 SIGSTOP pthread_sigmask setitimer alarm",
    ),
    "darwin": ("", "memfd_create sched_getaffinity posix_fallocate", ""),
}

# Other libraries find the system as it is: they have builds of their own for the others.
PLAY = """
import multiprocessing, os, pkgutil, signal, sys, types, warnings
import cyclopts, numpy, PIL.Image, plotly.graph_objects, plotly.io, plotly.offline, pydantic, rich.progress, rich.table
import safetensors.torch, torch, torch._dynamo, tomli_w
platform, modules, calls, signals = sys.argv[1:5]
extras = "flwr uvicorn httpx cryptography ray opacus datasets optuna pyarrow onnx kaleido sklearn scipy".split()
for name in [*modules.split(), *extras]:
    sys.modules[name] = None  # to import it is an ImportError
for place, names in ((os, calls), (signal, signals)):
    for name in names.split():
        if hasattr(place, name):
            delattr(place, name)
if platform == "win32":
    locked = []
    def locking(file, mode, count):
        locked.append((mode, count))
    sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_LOCK=1, LK_NBLCK=2)
sys.platform = platform
warnings.simplefilter("error")
warnings.simplefilter("ignore", EncodingWarning)
warnings.filterwarnings("error", category=EncodingWarning, module="fedalloy")

import fedalloy
for found in pkgutil.walk_packages(fedalloy.__path__, "fedalloy."):
    if found.name == "fedalloy.__main__":
        continue
    if found.name.startswith(("fedalloy.deploy.", "fedalloy.deploy.")) and not found.name.endswith(".cli"):
        continue  # a server and its sites run on Linux
    try:
        __import__(found.name)
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] in extras, error
    except fedalloy.FedAlloyError as error:
        assert "pip install" in str(error), error

from fedalloy.cli.app import main
def typed(*words):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, end.code
small = ("--clients", "3", "--rounds", "1", "--lr", "0.1", "--limit", "200")
typed("run", *small, "--method", "scaffold", "--out", "one")  # on the engine that is the default there
assert 'engine = "inline"' in open("one/config.toml", encoding="utf-8").read()
typed("compare", "fedavg", "fedprox", *small, "--out", "both")
typed("export", "one", "model.safetensors")
try:
    main(("run", *small, "--engine", "workers", "--out", "two"))
except SystemExit as end:
    assert end.code == 2
if platform == "win32":
    assert locked and set(locked) == {(2, 1)}, locked
print("played")
"""


@pytest.mark.parametrize("platform", LACKING)
def test_the_core_imports_and_trains_in_one_process(platform: str, tmp_path: Path) -> None:
    """Every module but those of extras; files are read and written in an encoding that is named."""
    asked = [sys.executable, "-X", "warn_default_encoding", "-c", PLAY]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "cp1252", "COLUMNS": "80"}
    done = subprocess.run(
        [*asked, platform, *LACKING[platform]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=240,
    )
    said = done.stdout.decode("cp1252"), done.stderr.decode("cp1252")
    assert done.returncode == 0, said
    assert said[0].rstrip().endswith("played"), said
    assert "the workers engine runs on Linux only; use --engine inline" in said[1]
    assert not (tmp_path / "two").exists()
