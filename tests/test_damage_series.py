"""Comparisons and searches whose folders were damaged: refused with a sentence, or the same results."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuzzing import dice
from terminal import fedalloy, strict_json
from test_damage import HOW, any_file, edit, flip

SMALL = (
    "--engine",
    "inline",
    "--clients",
    "3",
    "--rounds",
    "2",
    "--limit",
    "120",
    "--model",
    "mlp(hidden=4)",
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "compare": ("compare", "fedavg+private(clip=1, noise=1)", "scaffold", *SMALL),
    "tune": ("tune", "fedlc", "--lr", "0.1", *SMALL),
}
Made = Callable[[str], tuple[Path, Any]]


def found(out: Path) -> Any:
    """What a series came to, but for times."""
    kept = ("weights_sha256", "private_sha256", "epsilon", "accuracy", "status")
    summaries = {path: strict_json(path.read_text()) for path in sorted(out.rglob("summary.json"))}
    return [
        (str(path.relative_to(out)), [summary.get(name) for name in kept])
        for path, summary in summaries.items()
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folders: dict[str, tuple[Path, Any]] = {}

    def of(command: str) -> tuple[Path, Any]:
        if command not in folders:
            out = tmp_path_factory.mktemp(command) / "out"
            assert fedalloy(*COMMANDS[command], "--out", str(out), "--json").code == 0
            folders[command] = out, found(out)
        return folders[command]

    return of


def again(command: str, out: Path) -> str:
    """Type the command once more: what was refused, or nothing."""
    said = fedalloy(*COMMANDS[command], "--out", str(out), "--json")
    if said.code == 0:
        return ""
    assert (said.code, len(said.trouble)) == (2, 1), said.err
    return said.trouble[0]


def first(out: Path, name: str) -> Path:
    return min(out.glob(f"*/seed0/{name}"))


REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "an epsilon in a summary": (
        "compare",
        lambda out: edit(
            first(out, "summary.json"),
            lambda lines: ['  "epsilon": 0.5,\n' if '"epsilon"' in x else x for x in lines],
        ),
        "summary.json",
    ),
    "a line of a history": (
        "compare",
        lambda out: edit(first(out, "history.jsonl"), lambda lines: lines[1:]),
        "history.jsonl",
    ),
    "an accuracy in a trial": (
        "tune",
        lambda out: edit(
            first(out, "summary.json"),
            lambda lines: [x.replace('"final": 0.', '"final": 1.') for x in lines],
        ),
        "summary.json",
    ),
    "a setting of a trial": (
        "tune",
        lambda out: edit(
            first(out, "config.toml"), lambda lines: [x.replace("lr = 0.1", "lr = 0.2") for x in lines]
        ),
        "config.toml",
    ),
    "a point of a search": (
        "tune",
        lambda out: edit(
            out / "tune.json", lambda lines: [x.replace('"tau": 0.1', '"tau": 0.3') for x in lines]
        ),
        "tune.json",
    ),
    "points of a search swapped": (
        "tune",
        lambda out: edit(
            out / "tune.json",
            lambda lines: [
                x.replace('"tau": 10', '"tau": 9').replace('"tau": 1\n', '"tau": 10\n') for x in lines
            ],
        ),
        "tune.json",
    ),
    "an accuracy of a search": (
        "tune",
        lambda out: edit(
            out / "tune.json", lambda lines: [x.replace('"accuracy": 0', '"accuracy": 1') for x in lines]
        ),
        "tune.json",
    ),
    "a byte of a search": ("tune", lambda out: flip(out / "tune.json", 40), "tune.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_damage_in_a_series_is_refused(name: str, made: Made, tmp_path: Path) -> None:
    command, damage, named = REFUSED[name]
    before, _ = made(command)
    out = tmp_path / "out"
    shutil.copytree(before, out)
    damage(out)
    assert named in again(command, out)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("compare", "compare.json"),
        ("compare", "report.html"),
        ("compare", "table.md"),
        ("tune", "tune.json"),
    ],
)
def test_what_is_lost_of_a_series_is_written_again(
    command: str, name: str, made: Made, tmp_path: Path
) -> None:
    before, expected = made(command)
    out = tmp_path / "out"
    shutil.copytree(before, out)
    text = (out / name).read_bytes()
    (out / name).unlink()
    assert again(command, out) == ""
    assert (out / name).read_bytes() == text
    if command == "compare":  # nothing in these is believed
        (out / name).write_bytes(b"\xff\xfe\x00")
        assert again(command, out) == ""
        assert (out / name).read_bytes() == text
    assert found(out) == expected


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_any_damage_in_a_series_is_refused_or_changes_nothing(made: Made, tmp_path: Path) -> None:
    counts = {"refused": 0, "same": 0}
    for chance in dice(12, 300):
        command = chance.choice(list(COMMANDS))
        before, expected = made(command)
        out = tmp_path / "out" / "run"
        shutil.copytree(before, out)
        path = any_file(out, chance)
        if chance.random() < 0.5:  # a run that is not over
            for summary in chance.sample(sorted(out.rglob("summary.json")), 1):
                summary.unlink()
        done = f"{chance} {command}: {path.relative_to(out)} {_harmed(path, chance)}"
        try:
            said = again(command, out)
        except Exception as error:
            raise AssertionError(done) from error
        assert said or found(out) == expected, done
        assert not said or str(out) in said, f"{done}: {said}"
        counts["refused" if said else "same"] += 1
        shutil.rmtree(out)
    print(counts)
    assert min(counts.values()) > 1


def _harmed(path: Path, chance: random.Random) -> str:
    how = chance.choice(list(HOW))
    if path.exists():
        HOW[how](path, chance)
    return how
