"""Commands: run, compare, tune, methods, explain, partition, report, diagnose, export, predict,
reproduce, bench, models, deploy."""

import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from annotated_types import Interval
from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnusedCliTokensError

from fedalloy import models as zoo
from fedalloy import trained
from fedalloy.analysis import explain as anatomy
from fedalloy.analysis.diagnose import study
from fedalloy.cli import show
from fedalloy.cli.console import AsJson, complain, console, counting, print_json, progress, resumable
from fedalloy.cli.deploy import deploy
from fedalloy.core.expression import slug, split
from fedalloy.core.files import write_whole
from fedalloy.core.imports import Imports, allowed, refuse_cluster
from fedalloy.core.parameters import LEAST, MOST, AtLeastOne, Few, expected
from fedalloy.core.version import VERSION
from fedalloy.data import load
from fedalloy.data.federation import federate
from fedalloy.deploy.terms import Terms
from fedalloy.errors import FedAlloyError, FedAlloyWarning, shown
from fedalloy.experiment.config import Config, complaint
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import reopen, resume, start
from fedalloy.report import write_comparison_report, write_figures, write_run_report, write_tables
from fedalloy.report.files import ImageForm, need_images
from fedalloy.research import presets
from fedalloy.research import reproduce as studies
from fedalloy.research.bench import play as benches
from fedalloy.research.compare import Comparison
from fedalloy.research.presets import PRESETS
from fedalloy.research.tune import Tuning

app = App(
    name="fedalloy",
    help="Heterogeneous federated learning: every method an alloy of small mechanisms.\n\n"
    "A first look, with data that are built in: fedalloy compare fedavg fedprox --rounds 10",
    version=VERSION,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
)
app.command(deploy)

MOST_SEEDS = 1000  # or learning rates, in one command
Settings = Annotated[Config | None, Parameter(name="*")]
ConfigFile = Annotated[
    Path | None,
    Parameter(name="--config", help="A TOML file with lines such as rounds = 20; flags win over it."),
]

Figures = Annotated[
    ImageForm | None,
    Parameter(
        help="Write every figure as a file in figures/ too: svg or pdf; needs fedalloy[images] and Chrome."
    ),
]

FLOWER = {"flwr", "cryptography", "httpx", "uvicorn"}  # what is installed with the extra

AllowCode = Annotated[
    bool,
    Parameter(
        name="--allow-code",
        negative="",
        help="Import methods and models outside of FedAlloy that a file or folder names; what you type needs no leave.",
    ),
]


@app.command
def preprocessing(
    data: Annotated[str, Parameter(help="A data set: digits, or the name of one in --data-root.")],
    /,
    *,
    out: Annotated[Path, Parameter(help="The file to write, which must be new.")],
    data_root: Annotated[Path | None, Parameter(help="The folder that holds the data.")] = None,
    class_names: Annotated[str, Parameter(help="The classes, such as 'cat,dog', if data lack some.")] = "",
    as_json: AsJson = False,
) -> None:
    """Write mean, deviation, vocabulary and names of a data set to a file, for 'deploy init --preprocessing'."""
    if out.exists():
        raise FedAlloyError(f"{out} exists already; give another --out")
    found = load(data, data_root, tuple(split(class_names))).preprocessing
    try:
        write_whole(out, found.to_json().encode())
    except OSError as error:
        raise FedAlloyError(f"cannot write {out}: {error.strerror}; give another --out") from None
    if as_json:
        print_json({"file": str(out), "sha256": found.sha256, "kind": found.kind, "shape": found.shape})
    else:
        console().print(f"preprocessing  {out}  ({found.kind}, {found.sha256[:12]})", soft_wrap=True)


@app.command
def run(
    *,
    settings: Settings = None,
    config: ConfigFile = None,
    out: Annotated[
        Path | None, Parameter(help="The folder to write, which must be new; by default one in runs/.")
    ] = None,
    resume_from: Annotated[
        Path | None, Parameter(name="--resume", help="Carry on with the run in this folder.")
    ] = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Train one method on one federation.

    Writes a folder with config.toml, history.jsonl, summary.json, checkpoint/ and report.html.
    """
    given, terminal = _given(settings), console(quiet=as_json)
    if resume_from is None:
        imports = _imports(config, given, allow_code)
        chosen, done = _merged(config, given), 0
        place = out or _new_place(chosen)
    elif out or config:
        raise FedAlloyError("--resume takes config and folder from the run; leave --config and --out away")
    else:
        place, folder = resume_from, RunFolder.existing(resume_from)
        imports = _imports(place / "config.toml", given, allow_code)
        chosen, done = Config.of({**folder.config.model_dump(), **given}), len(folder.history())
    way = f"fedalloy run --resume {shlex.quote(str(place))}"
    with resumable(place / "config.toml", way), progress(terminal, chosen.rounds, done) as bar:
        if resume_from is None:
            result = start(chosen, place, bar.round, bar.reply, imports)
        else:
            result = resume(place, chosen, bar.round, bar.reply, allow_code=True)  # checked above
    report = write_run_report(result.folder)
    if as_json:
        print_json({**result.summary, "folder": str(result.folder), "report": str(report)})
    else:
        show.run(terminal, result, report)


@app.command
def compare(
    *methods: Annotated[str, Parameter(help="Methods, such as fedavg 'fedprox(mu=0.1)' moon+prox.")],
    settings: Settings = None,
    seeds: Annotated[
        str | None, Parameter(help="Seeds, such as 0,1,2; three or more allow a significance test.")
    ] = None,
    target: Annotated[
        float | None, Parameter(help="Count the rounds until this accuracy, such as 0.8.")
    ] = None,
    figures: Figures = None,
    everything: Annotated[
        bool, Parameter(name="--all", negative="", help="Compare every method that fits the federation.")
    ] = False,
    preset: Annotated[
        str | None,
        Parameter(help=f"The methods and settings of a paper: {', '.join(PRESETS)}. Flags win over it."),
    ] = None,
    config: ConfigFile = None,
    out: Annotated[
        Path | None, Parameter(help="The folder to write; finished runs in it are not run again.")
    ] = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods fairly: same partition, same initial weights, same batches.

    Type the same command again after a crash and it carries on; add a method and only that one is run.
    """
    given, terminal = _given(settings), console(quiet=as_json)
    if "method" in given:
        raise FedAlloyError("name the methods without --method, such as: fedalloy compare fedavg fedprox")
    if seeds is not None and "seed" in given:
        raise FedAlloyError("give --seeds or --seed, not both")
    paper = presets.preset(preset) if preset else None
    imports = _imports(config, given, allow_code)
    base = _merged(config, {**paper.settings, **given} if paper else given)
    if everything and (methods or paper):
        raise FedAlloyError("--all names the methods; leave the others and --preset away")
    methods = methods or (
        paper.methods if paper else presets.every_method(base.architectures) if everything else ()
    )
    numbers = [base.seed] if seeds is None else _numbers(seeds)
    if figures:
        need_images()
    plan = Comparison.plan(base, methods, numbers, out, target, fitting=everything, imports=imports)
    total = len(plan.methods) * len(plan.seeds) * base.rounds
    with (
        resumable(plan.folder / "compare.json", "the same command"),
        progress(terminal, total, total - plan.rounds_left()) as bar,
    ):
        plan.run(bar.run, bar.round, bar.reply)
    drawn = write_figures(plan.folder, figures) if figures else []
    if as_json:
        print_json({**plan.facts(), **({"figures": [str(path) for path in drawn]} if drawn else {})})
    else:
        show.comparison(terminal, plan.folder)
        show.figures(terminal, drawn)


@app.command
def tune(
    method: str,
    /,
    *,
    settings: Settings = None,
    trials: Annotated[AtLeastOne, Parameter(help="How many points to try; all, if there are no more.")] = 20,
    seeds: Annotated[str | None, Parameter(help="Seeds of every trial, such as 0,1,2.")] = None,
    lr_values: Annotated[
        str | None,
        Parameter(help="Learning rates to try, such as 0.01,0.03,0.1 (the default for SGD); --lr fixes it."),
    ] = None,
    config: ConfigFile = None,
    out: Annotated[
        Path | None, Parameter(help="The folder to write; finished trials in it are not run again.")
    ] = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Search a method's hyper-parameters on held-out training samples; the test set is not looked at.

    Tries the values that its paper tried; a parameter that is typed stays as it is. Without --validation a fifth of the
    training samples is held out. Type the same command again after a crash and it carries on.

    Parameters
    ----------
    method
        A method or a sum, such as fedprox or "moon(projection=penultimate)".
    """
    given, terminal = _given(settings), console(quiet=as_json)
    if "method" in given:
        raise FedAlloyError("name the method without --method, such as: fedalloy tune fedprox")
    if seeds is not None and "seed" in given:
        raise FedAlloyError("give --seeds or --seed, not both")
    if lr_values is not None and "lr" in given:
        raise FedAlloyError("give --lr-values to try some, or --lr to fix one, not both")
    if given.get("validation") == 0:
        raise FedAlloyError("--validation 0 would choose by the test set; leave it away to hold out 0.2")
    imports = _imports(config, given, allow_code)
    base = _merged(config, given)
    numbers = [base.seed] if seeds is None else _numbers(seeds)
    plan = Tuning.plan(base, method, numbers, trials, _rates(lr_values) if lr_values else (), out, imports)
    total = plan.trials * len(plan.seeds) * base.rounds
    with (
        resumable(plan.folder / "tune.json", "the same command"),
        progress(terminal, total, total - plan.rounds_left()) as bar,
    ):
        plan.run(bar.run, bar.round, bar.reply)
    print_json(plan.facts()) if as_json else show.tuning(terminal, plan)


@app.command
def methods(*, as_json: AsJson = False) -> None:
    """List the methods, with their papers and parameters, and the parts that can be added to them."""
    recipes, parts = anatomy.recipes(), anatomy.parts()
    print_json({"methods": recipes, "parts": parts}) if as_json else show.methods(console(), recipes, parts)


@app.command
def explain(
    method: str,
    *,
    model: str = "mlp",
    data: str = "digits",
    data_root: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Take a method apart: its parts, its state, what crosses the wire and how many bytes that is.

    Parameters
    ----------
    method
        A method or a sum, such as fedavg, "fedprox(mu=0.1)" or moon+prox.
    model
        The model whose bytes are counted.
    data
        The data set that sizes the model.
    data_root
        The folder where that data set lies.
    """
    facts = anatomy.explain(method, model, load(data, data_root).inputs, Imports()).facts()
    print_json(facts) if as_json else show.explanation(console(), facts)


@app.command
def partition(
    *,
    settings: Settings = None,
    config: ConfigFile = None,
    out: Annotated[
        Path | None, Parameter(help="Where to draw the picture; partition.html by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show who holds what, as a table and a picture.

    Takes the flags of a run, of which those about data, clients, skew and seed matter.
    """
    federation = federate(**_merged(config, _given(settings)).dealing)
    path = out or (None if as_json else Path("partition.html"))
    picture = show.partition_picture(federation, path) if path else None
    if as_json:
        print_json({**show.partition_facts(federation), "picture": str(picture) if picture else None})
    else:
        show.partition(console(), federation, picture)


@app.command
def report(folder: Path, *, figures: Figures = None, as_json: AsJson = False) -> None:
    """Write the HTML report of a run or a comparison again.

    Parameters
    ----------
    folder
        The folder of a run or of a comparison.
    """
    if (folder / "compare.json").exists():
        written = [write_comparison_report(folder), *write_tables(folder)]
    else:
        written = [write_run_report(folder)]
    drawn = write_figures(folder, figures) if figures else []
    if as_json:
        print_json({"written": [str(path) for path in [*written, *drawn]]})
    else:
        show.files(console(), **{path.name: path for path in written})
        show.figures(console(), drawn)


@app.command
def diagnose(
    folder: Path, *, clients: AtLeastOne = 10, allow_code: AllowCode = False, as_json: AsJson = False
) -> None:
    """Look inside a finished run: ranks, spectra, collapse, a map of features, and what its method has to show.

    Reads the last checkpoint, rehearses one more local round without recording it, writes diagnostics.json and adds
    the figures to the report.

    Parameters
    ----------
    folder
        The folder of a run.
    clients
        How many clients to look at.
    """
    found = study(*reopen(folder, allow_code=allow_code), RunFolder.existing(folder), clients)
    written = write_run_report(folder)
    if as_json:
        print_json({**found["numbers"], "report": str(written)})
    else:
        show.findings(console(), found["numbers"])
        show.files(console(), report=written)


@app.command
def export(
    run: Path,
    path: Path,
    *,
    client: Annotated[
        int | None, Parameter(help="The model of this client, for methods with personal models.")
    ] = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Write the trained model of a run to a file, ready to use; the data are not needed.

    model.safetensors holds named tensors, architecture, normalisation and class names, and is what 'fedalloy predict'
    reads; model.pt2 (torch.export) and model.onnx are programs of their own: samples in, probabilities out.

    Parameters
    ----------
    run
        The folder of a run, here or at a federation's server; the folder of a site, for its own model; or a model.
    path
        The file to write, which must be new: its ending says in which form.
    """
    written = trained.export(run, path, client, allow_code=allow_code)
    facts = {"file": str(written), "bytes": written.stat().st_size}
    print_json(facts) if as_json else show.files(console(), model=written)


@app.command(name="predict")
def predict_samples(
    model: Path,
    samples: Path,
    *,
    out: Annotated[Path | None, Parameter(help="A new CSV file with a line for each sample.")] = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Ask a model about new samples: the class of each, and the probabilities of all classes.

    Samples with labels are also scored. Columns of a table are found by their names.

    Parameters
    ----------
    model
        A model that 'fedalloy export' wrote as .safetensors.
    samples
        A .csv or .npz file, an image, or a folder of images.
    """
    found = trained.predict(model, samples, out, allow_code=allow_code)
    if as_json:
        rows = [
            {
                "sample": title,
                "predicted": row.name,
                "probability": row.probability,
                "probabilities": row.probabilities,
            }
            for title, row in zip(found.titles, found.rows, strict=True)
        ]
        print_json(
            {
                "class_names": found.class_names,
                "accuracy": found.accuracy,
                "ignored": found.ignored,
                "predictions": rows,
            }
        )
    else:
        show.predictions(console(), found, out)


@app.command
def bench(
    *,
    only: Annotated[
        str, Parameter(help=f"Only these, separated by commas: {', '.join(benches.NAMES)}.")
    ] = "",
    rounds: Annotated[
        Annotated[int, Interval(ge=2, le=1000)],
        Parameter(help="Rounds of a run; the first is not counted."),
    ] = 3,
    repeats: Annotated[Few, Parameter(help="Times that everything is run; the best counts.")] = 2,
    data_root: Annotated[
        Path | None, Parameter(help="A folder with mnist.npz; random pixels by default.")
    ] = None,
    out: Annotated[Path | None, Parameter(help="Write everything as JSON to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time rounds beside a bare PyTorch loop in the same run.

    Only the ratios are worth quoting: the machine decides the rest.
    """
    names = benches.chosen(only)
    if out and not out.parent.is_dir():
        raise FedAlloyError(f"cannot write {out}: {out.parent} is no folder; give another --out")
    with console(quiet=as_json).status("bench") as status:
        found = benches.play(names, rounds, repeats, data_root, lambda row: status.update(f"bench {row}"))
    if out:
        write_whole(out, (json.dumps(found, indent=2) + "\n").encode())
    print_json(found) if as_json else show.benches(console(), found)


@app.command
def reproduce(
    item: str = "list",
    *,
    scale: Annotated[
        Literal["cpu", "paper"],
        Parameter(help="A stated reduction for a small machine, or the paper's own setting."),
    ] = "cpu",
    only: Annotated[str, Parameter(help="Only these rows and columns, separated by commas.")] = "",
    seeds: Annotated[str, Parameter(help="Seeds, separated by commas; by default those of the item.")] = "",
    settings: Settings = None,
    judge: Annotated[
        Literal["final", "last10", "best"] | None,
        Parameter(
            help="Accuracies of the last round, of the last ten or of the best; by default as the item has it."
        ),
    ] = None,
    jobs: Annotated[Few, Parameter(help="Runs side by side; the cores are shared out.")] = 1,
    missing: Annotated[
        bool,
        Parameter(name="--play", help="Play what is missing; with --no-play only finished runs are shown."),
    ] = True,
    images: Annotated[
        bool, Parameter(negative="", help="Write the figures as SVG files too; needs a Chrome or Chromium.")
    ] = False,
    out: Annotated[Path | None, Parameter(help="The folder to write; by default runs/reproduce.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a paper's tables and figures again, with our numbers beside the paper's; what was cut short carries on.

    Settings, such as --rounds 20 or --engine ray, win over those of the item.

    Parameters
    ----------
    item
        PAPER/ITEM, such as feddw/table1; "list" shows what there is, and how long it would take here.
    """
    given, terminal = _given(settings), console(quiet=as_json)
    for name, instead in {"method": "--only", "data": "--only", "seed": "--seeds"}.items():
        if name in given:
            raise FedAlloyError(f"an item has its own {name}: leave --{name} away, or choose with {instead}")
    if item == "list":
        with terminal.status("timing a few steps of every model"):
            listed = studies.listed(scale, given)
        print_json({"items": listed}) if as_json else show.studies(console(), listed)
        return
    folder = out or Path("runs") / "reproduce"
    chosen = _numbers(seeds) if seeds else ()
    with (
        resumable(folder / "runs", "the same command"),
        counting(terminal, item) as tick,
    ):
        done = studies.reproduce(
            item,
            folder,
            split(only),
            tick,
            scale=scale,
            given=given,
            seeds=chosen,
            judge=judge,
            jobs=jobs,
            missing=missing,
            images=images,
        )
    if as_json:
        print_json({**done.facts, "files": {name: str(path) for name, path in done.files.items()}})
    else:
        show.tables(terminal, done.tables)
        show.files(terminal, **done.files)


@app.command
def models(
    *, data: str = "digits", data_root: Path | None = None, model: str | None = None, as_json: AsJson = False
) -> None:
    """List the models, sized for a data set.

    Parameters
    ----------
    data
        The data set that sizes them.
    data_root
        The folder where that data set lies.
    model
        Only this one, such as "mlp(hidden=64)", or your own as package.module:factory.
    """
    inputs = load(data, data_root).inputs
    listed = {name: says for name, says, kinds in zoo.names() if inputs.kind in kinds}
    rows = []
    for name, says in listed.items() if model is None else [(model, listed.get(model, ""))]:
        size = zoo.size_of(name, inputs, Imports())
        rows.append(
            {"name": name, "says": says, "parameters": size.parameters, "flops_per_sample": size.flops}
        )
    print_json({"models": rows}) if as_json else show.models(console(), rows, data)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: errors that the user can mend end in one sentence and exit code 2."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("once", FedAlloyWarning)
            warnings.showwarning = lambda message, *_, **__: complain(str(message), "note")
            app(arguments, exit_on_error=False, print_error=False, result_action="return_none")
    except CycloptsError as error:
        complain(_sentence(error))
    except FedAlloyError as error:
        complain("; ".join([str(error), *_notes(error)]))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in FLOWER:
            raise
        complain("a real federation needs Flower; type: pip install 'fedalloy[flower]'")
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        complain(f"{error.filename or 'standard output'}: {(error.strerror or str(error)).lower()}")
    except KeyboardInterrupt as error:
        complain("; ".join(_notes(error)) or "nothing was written", "stopped")
        sys.exit(130)
    else:
        return
    sys.exit(2)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _sentence(error: CycloptsError) -> str:
    """What is wrong with the words that were typed."""
    command = " ".join(["fedalloy", *(error.command_chain or [])])
    if isinstance(error.__cause__, pydantic.ValidationError):
        first = error.__cause__.errors()[0]
        if first["loc"] or not error.argument:
            known = Terms if first["loc"] and first["loc"][0] in Terms.model_fields else Config
            return complaint(error.__cause__, kind=known)
        wanted = expected(error.argument.field_info.annotation)
        return f"{error.argument.name} must be {wanted}, not {shown(first['input'], quoted=False)}"
    if isinstance(error, UnusedCliTokensError):
        said = f"{' '.join(error.unused_tokens or [])!r} was not expected."
    elif isinstance(error, MissingArgumentError) and error.argument:
        said = (
            f"{error.keyword} needs a value."
            if error.keyword
            else f"the {error.argument.name.lstrip('-').upper()} is missing."
        )
    else:
        said = str(error)
    return f"{said[0].lower()}{said[1:]} See '{command} --help'."


def _given(settings: Config | None) -> dict[str, Any]:
    """Only what was typed."""
    return settings.model_dump(include=settings.model_fields_set) if settings else {}


def _merged(file: Path | None, given: dict[str, Any]) -> Config:
    return Config.of({**(Config.read(file) if file else {}), **given}, str(file or ""))


def _imports(file: Path | None, given: dict[str, Any], allow_code: bool) -> Imports:
    """The permission to import what was typed; an error if a file names other code and nobody allowed that."""
    if file:
        found = Config.read(file)
        allowed(str(file), found, given, allow_code=allow_code)
        if not allow_code:
            refuse_cluster(str(file), found, given)
    return Imports()


def _new_place(config: Config) -> Path:
    """A folder of its own for every run."""
    moment = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() // 10**6 % 1000:03d}"
    return Path("runs") / f"{slug(config.method)}-{slug(config.data)}-seed{config.seed}-{moment}"


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 19 for word in words):
        raise FedAlloyError(
            "--seeds must be whole numbers of at least 0, each of at most 18 digits, "
            f"not {shown(text)}; for example 0,1,2"
        )
    if len(words) > MOST_SEEDS:
        raise FedAlloyError(f"--seeds names {len(words)} seeds; name {MOST_SEEDS} at most, such as 0,1,2")
    return [int(word) for word in words]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = []
    if not 1 <= len(rates) <= MOST_SEEDS or not all(LEAST <= rate <= MOST for rate in rates):
        raise FedAlloyError(
            f"--lr-values must be numbers from {LEAST:g} to {MOST}, not {shown(text)}; for example 0.01,0.03,0.1"
        )
    return rates
