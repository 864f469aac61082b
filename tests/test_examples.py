"""Every example runs as it stands, in a folder of its own. The commands they name are run by `test_docs.py`."""

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
    assert {path.name for path in (ROOT / "examples").glob("[!_]*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, tmp_path: Path) -> None:
    assert EXAMPLES[name] in played(tmp_path, str(ROOT / "examples" / name))
    if name == "own_data.py":  # what it wrote is also read by the command that it names
        words = ["run", "--data", "clouds", "--data-root", "data"]
        assert f"fedalloy {' '.join(words)}" in (ROOT / "examples" / name).read_text()
        said = played(
            tmp_path, "-c", "from fedalloy.cli.app import main; main()", *words, "--rounds", "2", "--json"
        )
        assert '"status": "finished"' in said
