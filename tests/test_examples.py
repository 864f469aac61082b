"""Every example runs as it stands, in a folder of its own; the ones that name a command keep that promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {
    "first.py": "accuracy on the global test set",
    "compare_methods.py": "scaffold+prox(mu=0.1)",
    "own_method.py": "FedCM + Prox",
    "own_model.py": "3,818 parameters",
    "own_data.py": "from memory: 700 training samples",
}
COMMANDS = {
    "own_method.py": ["--method", "examples.own_method:fedcm(alpha=0.3)", "--rounds", "2"],
    "own_model.py": ["--model", "examples.own_model:small_net", "--rounds", "2"],
    "own_data.py": ["--data", "clouds", "--data-root", "data", "--rounds", "2"],
}


def played(folder: Path, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_here() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert EXAMPLES[name] in played(tmp_path, str(ROOT / "examples" / name))
    if name in COMMANDS:
        said = played(
            tmp_path, "-c", "from fedalloy.cli import main; main()", "run", "--json", *COMMANDS[name]
        )
        assert '"status": "finished"' in said
        written = (ROOT / "examples" / name).read_text()
        assert all(word in written for word in COMMANDS[name][:2])
