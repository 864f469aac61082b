"""What is released: wheel and sdist, installed away from the source beside nothing but what the core needs."""

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

import fedalloy
from terminal import strict_json

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
pytestmark = pytest.mark.xdist_group("package")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel that was built from the sdist beside it; FEDALLOY_DIST names one that is there."""
    if given := os.environ.get("FEDALLOY_DIST"):
        return ROOT / given
    place = tmp_path_factory.mktemp("dist")
    played(ROOT, sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place))
    return place


@pytest.fixture(scope="module")
def away(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a virtual environment that holds the wheel and the distributions that it requires, no other."""
    place = tmp_path_factory.mktemp("away")
    venv.create(place / "venv", symlinks=True)
    (replica,) = (place / "venv").glob("lib/python*/site-packages")
    for name in core():
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            if not (replica / top).exists() and top != "__pycache__":
                (replica / top).symlink_to(Path(str(found.locate_file(top))))
    (wheel,) = dist.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", str(place / "venv" / "bin" / "python"))
    played(place, *pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    return place


def core() -> set[str]:
    """The names of all distributions that the core requires, and what those require."""
    names: set[str] = set()
    asked = [Requirement(line) for line in PYPROJECT["dependencies"]]
    while asked:
        name = asked.pop().name.lower()
        if name not in names:
            names.add(name)
            asked += needs(name)
    return names


def needs(name: str) -> Iterator[Requirement]:
    for line in metadata.requires(name) or ():
        required = Requirement(line)
        if required.marker is None or required.marker.evaluate({"extra": ""}):
            yield required


def played(folder: Path, *words: str) -> str:
    """What a command that must succeed prints."""
    return spoken(folder, *words).stdout


def spoken(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        words,
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_every_file_of_the_package_is_in_the_wheel(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fedalloy/")}
    files = (path for path in (ROOT / "src" / "fedalloy").rglob("*") if path.is_file())
    ours = {str(path.relative_to(ROOT / "src")) for path in files if "__pycache__" not in path.parts}
    assert held == ours | {"fedalloy/analysis/papers.md"}
    assert {"fedalloy/py.typed", "fedalloy/data/digits.npz", "fedalloy/report/page.html"} <= held


def test_the_sdist_holds_what_is_needed_to_build_and_test(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "constraints.txt", "Makefile", "LICENSE", "README.md", "CITATION.cff"} <= held
    assert {"tests/test_package.py", "docs/papers.md", "examples/first.py"} <= held
    assert sdist.stat().st_size < 4 * 2**20


def test_one_version(dist: Path, away: Path) -> None:
    """Written down once, in the package."""
    assert "version" not in PYPROJECT
    version = fedalloy.__version__
    wheel, sdist = sorted(path.name for path in dist.iterdir())
    assert (wheel, sdist) == (f"fedalloy-{version}-py3-none-any.whl", f"fedalloy-{version}.tar.gz")
    assert played(away, "venv/bin/fedalloy", "--version").strip() == version


def test_nothing_but_the_core_is_at_hand(away: Path) -> None:
    """Else the tests below would prove nothing of the core."""
    extras = (
        Requirement(line).name for lines in PYPROJECT["optional-dependencies"].values() for line in lines
    )
    names = sorted({*extras, "sklearn", "scipy"} - {"fedalloy", "packaging"})
    told = "import importlib.util as u, sys; print(*[n for n in sys.argv if u.find_spec(n)], sep=','); "
    told += "print(u.find_spec('fedalloy').origin)"
    found, origin = played(away, "venv/bin/python", "-c", told, *names).split("\n")[:2]
    assert found == ""
    assert Path(origin).is_relative_to(away / "venv")


COMMANDS = """\
methods --json
models --json
explain feddw
partition --clients 4 --skew pathological:2
compare fedavg fedblade --seeds 0,1,2 --engine inline --clients 4 --rounds 2 --lr 0.1 --limit 300 --out both
report one
diagnose one
export one model.safetensors
predict model.safetensors samples.npz
tune fedprox --trials 2 --rounds 1 --clients 2
"""
TYPED = """
import sys
from fedalloy.cli.app import main
for line in sys.argv[1].splitlines():
    try:
        main(line.split())
    except SystemExit as end:
        assert end.code in (2 if line.startswith("tune") else 0, None), (line, end.code)
"""


def test_the_commands_of_the_core(away: Path) -> None:
    """The first as a newcomer types it, the others in one process: to start is what takes the time."""
    small = ("--clients", "4", "--rounds", "2", "--lr", "0.1", "--json", "--out", "one")
    run = strict_json(played(away, "venv/bin/fedalloy", "run", "--method", "scaffold", *small))
    assert run["status"] == "finished"
    np.savez(away / "samples.npz", x=np.zeros((2, 8, 8), np.uint8))
    said = spoken(away, "venv/bin/python", "-c", TYPED, COMMANDS)
    assert "Differs from the paper" in said.stdout  # explain: the paper index is there
    assert "pip install 'fedalloy[maps]'" in said.stderr  # diagnose: what it left out
    assert 'pip install "fedalloy[tune]"' in said.stderr  # tune: what it lacks
    for report in ("one/report.html", "both/report.html"):
        assert "<!doctype html>" in (away / report).read_text(encoding="utf-8")


def test_an_example(away: Path) -> None:
    example = (ROOT / "examples" / "first.py").read_text(encoding="utf-8")
    (away / "first.py").write_text(example, encoding="utf-8")
    assert "accuracy on the global test set" in played(away, "venv/bin/python", "first.py")


def test_extras_repeat_nothing() -> None:
    """All that a user may want is `all`; tests need all of it, and more."""
    extras = {
        name: [Requirement(line) for line in lines]
        for name, lines in PYPROJECT["optional-dependencies"].items()
    }
    (everything,) = extras["all"]
    assert everything.name == "fedalloy"
    assert everything.extras == set(extras) - {"all", "test", "docs"}
    named = [required.name for lines in extras.values() for required in lines if required.name != "fedalloy"]
    assert len(named) == len(set(named))
    assert "all" in next(required.extras for required in extras["test"] if required.name == "fedalloy")
