"""`deploy site --check`: a site learns here, and nowhere else, whether its data can be used."""

import json
from pathlib import Path

import pytest

from terminal import Said, fedalloy

GOOD = "age,scanner,label\n1,2,cat\n2,3,dog\n3,4,cat\n4,5,dog\n5,6,cat\n"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    words = (
        "--clients",
        "2",
        "--data",
        "scans",
        "--class-names",
        "cat,dog",
        "--rounds",
        "1",
        "--model",
        "mlp",
    )
    assert fedalloy("deploy", "init", str(tmp_path / "fed"), *words).code == 0
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "scans.csv").write_text(GOOD)
    return tmp_path / "fed" / "sites" / "site-1"


def checked(bundle: Path, *words: str) -> Said:
    root = bundle.parents[2] / "data"
    return fedalloy("deploy", "site", str(bundle), "--data-root", str(root), *words)


def test_what_is_there_is_said(bundle: Path) -> None:
    said = checked(bundle, "--check")
    assert said.code == 0, said.err
    assert "scans (vector, 2)" in said.out
    assert "site 1 can join" in said.out
    found = json.loads(checked(bundle, "--check", "--json").out)
    assert (found["client"], found["kind"], found["shape"]) == (1, "vector", [2])
    assert found["train"] + found["test"] == 5
    assert set(found["classes"]) == {"cat", "dog"}
    assert not (bundle / "state").exists()


@pytest.mark.parametrize("words", [("--check",), ("--patience", "0")])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (GOOD.replace("3,4", "3,Philips"), "Philips"),
        (GOOD.replace("cat", "horse"), "horse"),
        ("age,label\n", "scans"),
        (None, "scans"),
    ],
)
def test_bad_data_are_told_before_anybody_is_asked(
    bundle: Path, text: str | None, why: str, words: tuple[str, ...]
) -> None:
    file = bundle.parents[2] / "data" / "scans.csv"
    file.unlink() if text is None else file.write_text(text)
    said = checked(bundle, *words)
    assert said.code == 2
    assert why in said.err
    assert "plan.toml" in " ".join(said.err.split())
    assert not (bundle / "state").exists()


def test_the_data_may_have_another_name_here(bundle: Path) -> None:
    root = bundle.parents[2] / "data"
    (root / "scans.csv").rename(root / "mine.csv")
    assert checked(bundle, "--check").code == 2
    assert checked(bundle, "--check", "--data", "mine").code == 0


def test_without_a_plan_the_data_alone_are_read(bundle: Path) -> None:
    (bundle / "plan.toml").unlink()
    assert "name it with --data" in checked(bundle, "--check").err
    assert checked(bundle, "--check", "--data", "scans").code == 0
    assert checked(bundle, "--check", "--data", "nothing").code == 2


@pytest.mark.parametrize(
    "line", ['method = "os:getcwd"', 'model = "evil:net"', 'data-root = "/etc"', "x = " + "[" * 10**5, "\x00"]
)
def test_a_plan_is_believed_no_more_than_a_message(bundle: Path, line: str) -> None:
    plan = bundle / "plan.toml"
    name = line.split()[0]
    kept = [old for old in plan.read_text().splitlines() if not old.startswith(f"{name} ")]
    plan.write_text("\n".join([*kept, line]))
    said = checked(bundle, "--check")
    assert said.code == (0 if name == "data-root" else 2)
    assert "Traceback" not in said.err
