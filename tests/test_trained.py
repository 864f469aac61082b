"""A trained model leaves its run: result.model, export, predict; the file is all that is needed."""

import csv
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch
from PIL import Image

import fedalloy as fa
from fedalloy.api import Result
from fedalloy.cli.app import main
from fedalloy.core.wire import dump, restore
from fedalloy.trained.readers import read
from fuzzing import dice


def trained(
    tmp: Path, data: Any = "digits", model: str = "mlp", method: str = "fedavg", **more: Any
) -> Result:
    clients = more.pop("clients", 3)
    fed = fa.federate(data, clients=clients, skew="iid", **more)
    return fa.train(fed, model=model, method=method, rounds=2, engine="inline", lr=0.1, out=tmp / "run")


def final(result: Result, name: str = "global_acc") -> float:
    value: float = result.history[-1]["metrics"][name]
    return value


def write_csv(path: Path, header: list[str], rows: list[list[object]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return trained(tmp_path_factory.mktemp("digits"), model="mlp(norm=batch)")


@pytest.fixture(scope="module")
def file(digits: Result) -> Path:
    return fa.export(digits.folder, digits.folder.parent / "model.safetensors")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose columns have very unlike scales."""
    root = tmp_path_factory.mktemp("tables")
    draw = np.random.default_rng(0)
    rows: list[list[object]] = []
    for number in range(120):
        ill = number % 2
        rows.append(
            [
                draw.normal(1000 + 900 * ill, 400),
                draw.normal(-ill, 0.9),
                "ill" if ill else "well",
                "test" if number >= 80 else "train",
            ]
        )
    return write_csv(root / "cells.csv", ["area", "shade", "diagnosis", "split"], rows)


def test_of_images_with_batchnorm_predict_equals_the_evaluation(
    digits: Result, file: Path, tmp_path: Path
) -> None:
    dataset = fa.federate("digits", clients=3, skew="iid").dataset
    test = slice(dataset.train, None)
    np.savez(tmp_path / "new.npz", x=dataset.x[test].numpy(), y=dataset.y[test].numpy())
    assert fa.predict(file, tmp_path / "new.npz").accuracy == final(digits)
    assert fa.predict(digits.model, tmp_path / "new.npz").accuracy == final(digits)


def test_of_tables_too_whatever_the_order_of_columns(table: Path, tmp_path: Path) -> None:
    result = trained(tmp_path, "cells", data_root=table.parent)
    model = fa.export(result.folder, tmp_path / "m.safetensors")
    with table.open() as opened:
        rows = [row for row in csv.DictReader(opened) if row["split"] == "test"]
    turned = write_csv(
        tmp_path / "new.csv",
        ["diagnosis", "shade", "note", "area", "label"],
        [["?", row["shade"], "x", row["area"], row["diagnosis"]] for row in rows],
    )
    found = fa.predict(model, turned, tmp_path / "out.csv")
    assert found.accuracy == final(result) > 0.6
    assert found.ignored == ("diagnosis", "note")
    written = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert list(written[0]) == ["sample", "label", "predicted", "probability", "p(ill)", "p(well)"]
    assert {row["predicted"] for row in written} == {"ill", "well"}
    alone = write_csv(tmp_path / "alone.csv", ["diagnosis", "shade", "area"], [["ill", 0, 1], ["well", 1, 2]])
    assert fa.predict(model, alone).labels == (0, 1)  # the only other column holds nothing but classes
    plain = write_csv(tmp_path / "plain.csv", ["shade", "area"], [[0, 1]])
    assert fa.predict(model, plain).accuracy is None
    lacking = write_csv(tmp_path / "lacking.csv", ["shade", "volume"], [[0, 1]])
    with pytest.raises(fa.FedAlloyError, match="lacks the column 'area'"):
        fa.predict(model, lacking)


def test_of_texts_too_by_the_words_of_the_training(tmp_path: Path) -> None:
    good, bad = "a fine warm film", "a dull cold film indeed"
    rows: list[list[object]] = [
        [f"{good} {n}" if n % 2 else f"{bad} {n}", "good" if n % 2 else "bad", "test" if n >= 30 else "train"]
        for n in range(50)
    ]
    write_csv(tmp_path / "films.csv", ["text", "label", "split"], rows)
    result = trained(tmp_path, "films", "bilstm(embed=8, hidden=8)", data_root=tmp_path)
    model = fa.export(result.folder, tmp_path / "m.safetensors")
    new = write_csv(tmp_path / "new.csv", ["label", "text"], [[row[1], row[0]] for row in rows[30:]])
    assert fa.predict(model, new).accuracy == final(result)
    assert result.model(["a fine film", "unheard-of words"]).shape == (2, 2)
    assert result.model.predict("dull")[0].name in ("good", "bad")
    for ending in ("pt2", "onnx"):
        fa.export(result.folder, tmp_path / f"m.{ending}")
    ids = read(new, result.model.preprocessing).x
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    assert np.allclose(session.run(None, {"samples": ids.numpy()})[0], result.model(ids), atol=1e-5)
    program = torch.export.load(tmp_path / "m.pt2").module()
    assert torch.allclose(program(ids), result.model(ids), atol=1e-5)


def test_numbers_are_places_among_the_classes(tmp_path: Path) -> None:
    """As in training, whatever the classes are called."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "grades.npz", x=x, y=y, class_names=["2", "0", "1"])
    model = trained(tmp_path, "grades", data_root=tmp_path).model
    assert model.class_names == ("2", "0", "1")

    def labels(y: Any, **more: Any) -> tuple[int, ...] | None:
        np.savez(tmp_path / "new.npz", x=x[: len(y)], y=y, **more)
        return fa.predict(model, tmp_path / "new.npz").labels

    assert labels([0, 1, 2]) == (0, 1, 2)
    assert labels([0.0, 2.0]) == (0, 2)
    assert labels(["0", "1", "2"]) == (1, 2, 0)
    assert labels([0, 1, 2], class_names=["0", "1", "2"]) == (1, 2, 0)
    for wrong in ([3], [-1], [0.5], [np.nan], ["x"]):
        with pytest.raises(fa.FedAlloyError, match=r"label .*(out of range|no class)"):
            labels(wrong)


def test_images_as_users_have_them(digits: Result) -> None:
    dataset = fa.federate("digits", clients=3, skew="iid").dataset
    x, model = dataset.x[:4], digits.model
    assert not model.training
    assert isinstance(model, torch.nn.Module)
    said = model(x)
    assert torch.equal(said, model(x.numpy()))
    assert torch.equal(said, model(x.permute(0, 2, 3, 1)))
    assert torch.equal(said, model(x[:, 0]))
    assert torch.equal(said, model(x.double() / 255))
    assert torch.allclose(said[:1], model(x[0]))
    assert torch.allclose(said[:1], model(x[0, 0].numpy()))
    assert model.predict(x[0])[0].name in model.class_names
    for wrong in (x[:, :, :4], x.float(), ["text"], x[0, 0, 0], torch.full((8, 8), torch.nan), [None]):
        with pytest.raises(fa.FedAlloyError):
            model(wrong)


def test_image_files_and_folders(digits: Result, tmp_path: Path) -> None:
    dataset = fa.federate("digits", clients=3, skew="iid").dataset
    for number in range(20):
        folder = tmp_path / "new" / str(int(dataset.y[number]))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(dataset.x[number, 0].numpy()).save(folder / f"{number}.png")
        Image.fromarray(dataset.x[number, 0].numpy()).save(tmp_path / f"{number:02d}.png")
    found = fa.predict(digits.model, tmp_path / "new")
    right = digits.model(dataset.x[:20]).argmax(1) == dataset.y[:20]
    assert found.accuracy == float(right.double().mean())
    flat = fa.predict(digits.model, tmp_path)  # images directly in a folder have no labels
    assert flat.labels is None
    assert flat.titles[0] == "00.png"
    assert [row.label for row in flat.rows] == digits.model(dataset.x[:20]).argmax(1).tolist()
    assert len(fa.predict(digits.model, tmp_path / "03.png").rows) == 1
    Image.new("L", (9, 8)).save(tmp_path / "wide.png")
    with pytest.raises(fa.FedAlloyError, match="9x8 pixels; the model reads 8x8"):
        fa.predict(digits.model, tmp_path / "wide.png")


ALONE = """
import sys, json, numpy as np
{imports}
x = np.load("x.npy")
{body}
np.save("p.npy", p)
assert "fedalloy" not in sys.modules
print(names)
"""
TORCH = ALONE.format(
    imports="import torch",
    body="""extra = {"class_names.json": ""}
program = torch.export.load("model.pt2", extra_files=extra).module()
p, names = program(torch.from_numpy(x)).numpy(), extra["class_names.json"]""",
)
ONNX = ALONE.format(
    imports="import onnxruntime",
    body="""session = onnxruntime.InferenceSession("model.onnx")
p, names = session.run(None, {"samples": x})[0], session.get_modelmeta().custom_metadata_map["class_names"]
assert "torch" not in sys.modules""",
)


@pytest.mark.parametrize(("ending", "program"), [("pt2", TORCH), ("onnx", ONNX)])
def test_programs_run_without_fedalloy(digits: Result, tmp_path: Path, ending: str, program: str) -> None:
    fa.export(digits.folder, tmp_path / f"model.{ending}")
    x = fa.federate("digits", clients=3, skew="iid").dataset.x[:7]
    np.save(tmp_path / "x.npy", x.numpy())
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [str(number) for number in range(10)]
    assert np.allclose(np.load(tmp_path / "p.npy"), digits.model(x), atol=1e-5)


def test_a_pt2_archive_holds_no_pickle(digits: Result, tmp_path: Path) -> None:
    fa.export(digits.folder, tmp_path / "m.pt2")
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:
        for entry in archive.infolist():
            content = archive.read(entry)
            assert not content.startswith((b"\x80", b"PK")), (
                entry.filename
            )  # a pickle; an archive with one in it
            assert not entry.filename.endswith((".pkl", ".pt")) or not content


def test_the_file_is_all_that_is_needed(file: Path, digits: Result, tmp_path: Path) -> None:
    """A process in an empty folder, with the model and the samples."""
    shutil.copy(file, tmp_path / "m.safetensors")
    x = fa.federate("digits", clients=3, skew="iid").dataset.x[:5]
    np.savez(tmp_path / "new.npz", x=x.numpy())
    done = subprocess.run(
        [sys.executable, "-m", "fedalloy", "predict", "m.safetensors", "new.npz", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [row["probabilities"] for row in json.loads(done.stdout)["predictions"]]
    assert said == digits.model(x).tolist()


def unsealed(folder: Path) -> None:
    """As a folder of old, without digests and preprocessing."""
    config = folder / "config.toml"
    config.write_text("".join(line for line in config.read_text().splitlines(True) if line[0] != "#"))
    checkpoint = folder / "checkpoint" / "server.safetensors"
    items, facts = restore(checkpoint.read_bytes())
    checkpoint.write_bytes(dump(items, {name: facts[name] for name in ("round", "data")}))


@pytest.mark.filterwarnings("ignore:.*earlier version")
def test_a_run_that_moved_and_lost_its_data(table: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    shutil.copy(table, root / "cells.csv")
    result = trained(tmp_path, "cells", data_root=root)
    before = result.model(np.ones((3, 2)))
    shutil.rmtree(root)
    moved = Path(shutil.move(result.folder, tmp_path / "elsewhere"))
    model = fa.load_model(fa.export(moved, tmp_path / "m.safetensors"))
    assert torch.equal(model(np.ones((3, 2))), before)
    (moved / "preprocessing.json").unlink()
    with pytest.raises(fa.FedAlloyError, match=r"preprocessing.json is damaged"):
        fa.export(moved, tmp_path / "n.safetensors")
    unsealed(moved)
    with pytest.raises(fa.FedAlloyError, match=r"holds no preprocessing.json, so its data are needed once"):
        fa.export(moved, tmp_path / "n.safetensors")
    root.mkdir()
    shutil.copy(table, root / "cells.csv")
    assert torch.equal(fa.load_model(fa.export(moved, tmp_path / "n.safetensors"))(np.ones((3, 2))), before)


SHOWN = ("ccvr", "feddyn", "fedbabu", "fedetf", "fedpac", "moon", "fedfaaug", "fml", "ssf")


@pytest.mark.parametrize("method", SHOWN)
def test_the_model_is_the_one_that_is_evaluated(tmp_path: Path, method: str) -> None:
    metric = "aux_acc" if method == "fml" else "global_acc"
    result = trained(tmp_path, model="cnn" if method == "fedfaaug" else "mlp", method=method)
    dataset = fa.federate("digits", clients=3, skew="iid").dataset
    x, y = dataset.x[dataset.train :], dataset.y[dataset.train :]
    model = fa.load_model(fa.export(result.folder, tmp_path / "m.safetensors"))
    assert float((model(x).argmax(1) == y).double().mean()) == final(result, metric)
    program = torch.export.load(fa.export(result.folder, tmp_path / "m.pt2")).module()
    assert torch.allclose(program(x), model(x), atol=1e-5)


@pytest.mark.parametrize(
    "method", ["local", "fedper", "fedproto", "fedbabu", "ditto", "fedgh", "fedala", "perfedavg"]
)
def test_personal_models_are_those_that_are_evaluated(tmp_path: Path, method: str) -> None:
    result = trained(tmp_path, method=method, test_share=0.2)
    fed = fa.federate("digits", clients=3, skew="iid", test_share=0.2)
    data = fed.client(1)
    model = fa.load_model(fa.export(result.folder, tmp_path / "m.safetensors", client=1))
    said = [row.label for row in model.predict(data.x_test)]
    assert (
        float((torch.tensor(said) == data.y_test).double().mean())
        == result.history[-1]["metrics"]["per_client"][1]
    )
    assert model.card.client == 1
    assert torch.equal(model(data.x_test), result.personal(1)(data.x_test))


def test_what_there_is_not_is_said(digits: Result, tmp_path: Path) -> None:
    local = trained(tmp_path, method="local")
    with pytest.raises(fa.FedAlloyError, match="Local has no global model"):
        _ = local.model
    with pytest.raises(fa.FedAlloyError, match="there are clients 0 to 2"):
        local.personal(3)
    with pytest.raises(fa.FedAlloyError, match="FedAvg has no personal models"):
        digits.personal(0)
    with pytest.raises(fa.FedAlloyError, match="a model file ends in"):
        fa.export(digits.folder, tmp_path / "m.pkl")
    with pytest.raises(fa.FedAlloyError, match="is not a run folder"):
        fa.export(tmp_path, tmp_path / "m.pt2")


OWN = """
from torch import nn
print("imported")
def net(inputs) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 10))
"""


def test_a_net_of_ones_own_is_built_only_with_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ownnet.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = trained(tmp_path, model="ownnet:net")
    path = fa.export(result.folder, tmp_path / "m.safetensors", allow_code=True)
    x = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    assert torch.equal(fa.load_model(path, allow_code=True)(x), result.model(x))
    program = torch.export.load(result.model.save(tmp_path / "m.pt2")).module()
    assert torch.allclose(program(x), result.model(x), atol=1e-6)
    del sys.modules["ownnet"]
    capsys.readouterr()
    with pytest.raises(fa.FedAlloyError, match=r"names code outside of FedAlloy \(ownnet:net\)"):
        fa.load_model(path)
    with pytest.raises(fa.FedAlloyError, match=r"config.toml names code outside of FedAlloy \(ownnet:net\)"):
        fa.export(result.folder, tmp_path / "n.safetensors")
    assert "ownnet" not in sys.modules
    assert not (tmp_path / "n.safetensors").exists()


def test_other_forms_are_not_read(digits: Result, tmp_path: Path) -> None:
    path = fa.export(digits.folder, tmp_path / "m.pt2")
    with pytest.raises(fa.FedAlloyError, match=r"torch.export.load"):
        fa.load_model(path)


def changed(file: Path, path: Path, **facts: Any) -> Path:
    items, card = restore(file.read_bytes())
    path.write_bytes(dump(items, {**card, **facts}))
    return path


@pytest.mark.parametrize(
    "facts",
    [
        {"format": "fedalloy model 2"},
        {"model": "mlp(hidden=65, norm=batch)"},
        {"model": "os:system"},
        {"method": "fedavg()+subprocess:getoutput(cmd='touch evil')"},
        {"models": []},
        {"models": ["mlp"] * 5000},
        {"models": "mlp"},
        {"seed": -1},
        {"seed": 1e300},
        {"client": True},
        {"which": "other"},
        {"which": "aux"},
        {"head": "prototypes"},
        {"head": ["own"]},
        {"which": {}},
        {"preprocessing": {}},
        {"preprocessing": None},
        {"weights_sha256": "0" * 64},
        {"extra": 1},
        {"model": "x" * 10**6},
        {"model": "(" * 4000},
    ],
)
def test_a_card_that_lies_is_refused(file: Path, tmp_path: Path, facts: dict[str, Any]) -> None:
    path = changed(file, tmp_path / "m.safetensors", **facts)
    with pytest.raises(fa.FedAlloyError):
        fa.load_model(path)
    assert not Path("evil").exists()


def test_a_card_cannot_ask_for_all_memory(file: Path, tmp_path: Path) -> None:
    _, card = restore(file.read_bytes())
    how = {**card["preprocessing"], "shape": [1, 2**20, 2**10]}  # type: ignore[dict-item]
    path = changed(file, tmp_path / "m.safetensors", preprocessing=how, model="mlp(hidden=16384)")
    with pytest.raises(fa.FedAlloyError, match="parameters"):
        fa.load_model(path)
    for method in (
        "fml(meme='{}')",
        "fedavg+auxiliary(model='{}')",
        "fedsce(aux='{}')",
        "fedkd(student='{}')",
    ):
        path = changed(file, path, method=method.format("MLP(hidden=16384, depth=64)"))
        with pytest.raises(fa.FedAlloyError, match="parameters"):
            fa.load_model(path)


def test_weights_that_are_not_the_nets_are_refused(file: Path, tmp_path: Path) -> None:
    from fedalloy.core.wire import fingerprint

    items, card = restore(file.read_bytes())
    name = "head.weight"
    for bad in (
        {**items, name: items[name].double()},
        {**items, name: items[name][:1]},
        {**items, name: torch.full_like(items[name], torch.nan)},
        {key: value for key, value in items.items() if key != name},
        {**items, "more": torch.zeros(1)},
    ):
        path = tmp_path / "m.safetensors"
        path.write_bytes(dump(bad, {**card, "weights_sha256": fingerprint(bad)}))
        with pytest.raises(fa.FedAlloyError, match=r"m\.safetensors"):
            fa.load_model(path)


def headed(header: bytes, body: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + body


HOSTILE = {
    "nothing": b"",
    "pickle": b"\x80\x04cos\nsystem\n(S'touch evil'\ntR.",
    "endless header": b"\xff" * 16,
    "no card": headed(b"{}"),
    "brackets": headed(b"[" * 10**6),
    "braces": headed(b'{"a":' * 10**5),
    "card of brackets": headed(b'{"__metadata__":{"facts":"' + b"[" * 10**5 + b'"}}'),
    "card of digits": headed(b'{"__metadata__":{"facts":"' + b"9" * 10**5 + b'"}}'),
    "a giant": headed(b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}', b"1234"),
    "less than none": headed(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"1234"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.safetensors").write_bytes(HOSTILE[name])
    for words in (
        ["predict", "m.safetensors", "new.csv", "--out", "out.csv"],
        ["export", "m.safetensors", "m.pt2"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("error: m.safetensors is no model")
        assert said.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_card_that_names_code_imports_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    for place, text in (
        ("model", "evil:net"),
        ("models", ["mlp", "evil:net"]),
        ("method", "fedavg()+evil:boom(cmd='x')"),
        ("method", "fml(meme='evil:net')"),
    ):
        changed(file, tmp_path / "m.safetensors", **{place: text})
        with pytest.raises(SystemExit) as stop:
            main(["predict", "m.safetensors", "new.csv"])
        assert stop.value.code == 2
        assert "names code outside of FedAlloy (evil:" in capsys.readouterr().err
    assert not Path("imported").exists()


def test_names_of_classes_cannot_speak_to_the_terminal(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, card = restore(file.read_bytes())
    names = ["\x1b[2J[red]", *"abcdefghi"]
    how = {**card["preprocessing"], "class_names": names}  # type: ignore[dict-item]
    model = changed(file, tmp_path / "m.safetensors", preprocessing=how)
    np.savez(tmp_path / "new.npz", x=np.zeros((3, 8, 8), np.uint8), y=[0, 0, 0])
    main(["predict", str(model), str(tmp_path / "new.npz")])
    said = capsys.readouterr().out
    assert "?[2J[red]" in said
    assert "\x1b[2J" not in said


def test_no_file_is_written_over(digits: Result, file: Path, tmp_path: Path) -> None:
    before, samples = file.read_bytes(), tmp_path / "new.npz"
    np.savez(samples, x=np.zeros((3, 8, 8), np.uint8))
    for write in (
        lambda: fa.export(digits.folder, file),
        lambda: digits.model.save(file),
        lambda: fa.predict(file, samples, samples),
        lambda: fa.predict(file, samples, file),
    ):
        with pytest.raises(fa.FedAlloyError, match="exists already"):
            write()
    for write in (
        lambda: fa.export(digits.folder, tmp_path / "no" / "m.pt2"),
        lambda: fa.predict(file, samples, tmp_path / "no" / "out.csv"),
    ):
        with pytest.raises(fa.FedAlloyError, match="cannot write"):
            write()
    assert file.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["new.npz"]


@pytest.mark.fuzz
def test_damaged_files_give_a_sentence_or_the_same_model(file: Path, tmp_path: Path) -> None:
    whole, path = file.read_bytes(), tmp_path / "m.safetensors"
    x = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    said = fa.load_model(file)(x)
    for draw in dice(60, 3000):
        blob = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(draw.choice([8, 200, 3000, len(blob)]))
            match draw.randrange(3):
                case 0:
                    blob[place] ^= 1 << draw.randrange(8)
                case 1:
                    del blob[place : place + draw.randint(1, 50)]
                case _:
                    blob[place:place] = draw.randbytes(draw.randint(1, 20))
        path.write_bytes(blob)
        try:
            found = fa.load_model(path)(x)
        except fa.FedAlloyError:
            continue
        assert torch.equal(found, said) or bytes(blob[:8]) == whole[:8]


def test_tensors_have_the_names_of_the_net(file: Path) -> None:
    names = safetensors.torch.load_file(file).keys()
    assert {"body.1.weight", "body.2.running_mean", "head.weight", "head.bias"} <= set(names)


def test_commands(digits: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "m.safetensors"
    main(["export", str(digits.folder), str(model), "--json"])
    assert json.loads(capsys.readouterr().out) == {"file": str(model), "bytes": model.stat().st_size}
    x = fa.federate("digits", clients=3, skew="iid").dataset.x[:30]
    np.savez(tmp_path / "new.npz", x=x.numpy())
    main(["predict", str(model), str(tmp_path / "new.npz"), "--out", str(tmp_path / "out.csv")])
    assert "predictions" in capsys.readouterr().out
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 31
    for words in (
        ["export", str(tmp_path), "m.pt2"],
        ["predict", "no.safetensors", "x.csv"],
        ["predict", str(model), "no.csv"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        assert capsys.readouterr().err.startswith("error: ")
