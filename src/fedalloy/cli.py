"""The command line: `fedalloy run | compare | methods | explain | partition | report | models`."""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

import fedalloy
from fedalloy import console as show
from fedalloy import nets, registry
from fedalloy.compare import Comparison
from fedalloy.config import Config, complaint
from fedalloy.data import load
from fedalloy.errors import FedAlloyError
from fedalloy.explain import explain as explained
from fedalloy.explain import parameters_of
from fedalloy.federation import federate
from fedalloy.nets.base import Inputs
from fedalloy.report import read_comparison, write_comparison_report, write_run_report, write_tables
from fedalloy.run import resume, start

app = App(
    name="fedalloy",
    help="Heterogeneous federated learning: every method an alloy of small mechanisms.",
    version=fedalloy.__version__,
    version_flags=["--version"],
)

Settings = Annotated[Config | None, Parameter(name="*")]
AsJson = Annotated[
    bool, Parameter(name="--json", negative="", help="Print one JSON object and nothing else.")
]
ConfigFile = Annotated[Path | None, Parameter(name="--config", help="A TOML file; flags win over it.")]
Out = Annotated[Path | None, Parameter(help="The folder to write; must be new.")]


@app.command
def run(
    *,
    settings: Settings = None,
    config: ConfigFile = None,
    out: Out = None,
    resume_from: Annotated[
        Path | None, Parameter(name="--resume", help="Carry on with a run that was stopped or killed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train one method on one federation."""
    given = _given(settings)
    console = show.console(quiet=as_json)
    if resume_from is not None:
        _no_other(resume_from, out, config)
        stored = Config.of(Config.read(resume_from / "config.toml"))
        chosen = Config.of({**stored.model_dump(), **given})
        with show.progress(console, chosen.rounds, show.played(resume_from)) as tick:
            result = resume(resume_from, chosen, tick)
    else:
        chosen = _merged(config, given)
        place = out or _new_place(chosen)
        with show.progress(console, chosen.rounds) as tick, show.resumable(place):
            result = start(chosen, place, tick)
    report = write_run_report(result.folder)
    if as_json:
        _print_json({**result.summary, "folder": str(result.folder), "report": str(report)})
    else:
        show.run(console, result, report)


@app.command
def compare(
    *methods: str,
    settings: Settings = None,
    seeds: Annotated[str, Parameter(help="Seeds, separated by commas.")] = "0",
    target: Annotated[float | None, Parameter(help="Count the rounds until this accuracy.")] = None,
    config: ConfigFile = None,
    out: Annotated[Path | None, Parameter(help="The folder; finished runs in it are not run again.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods fairly: same partition, same initial weights, same batches.

    Type the same command again after a crash and it carries on; add a method and only that one is run.
    """
    base = _merged(config, _given(settings))
    plan = Comparison.plan(base, methods, _numbers(seeds), out, target, _command_line())
    console = show.console(quiet=as_json)
    total = len(plan.methods) * len(plan.seeds) * base.rounds
    with (
        show.progress(console, total, total - plan.rounds_left()) as tick,
        show.resumable(plan.folder, again=True),
    ):
        results = plan.run(lambda method, seed, record: tick({**record, "doing": f"{method}, seed {seed}"}))
    if as_json:
        _print_json(
            {
                "folder": str(plan.folder),
                "report": str(plan.folder / "report.html"),
                "runs": [{**result.summary, "folder": str(result.folder)} for result in results],
            }
        )
    else:
        show.comparison(console, read_comparison(plan.folder), plan.folder)


@app.command
def methods(*, as_json: AsJson = False) -> None:
    """List the methods, with their families, papers and parameters, and the parts that can be added to them."""
    recipes = [
        {
            "name": r.name,
            "title": r.title,
            "family": r.family,
            "paper": r.paper,
            "parameters": parameters_of(r),
        }
        for r in registry.RECIPES.values()
    ]
    parts = [
        {"name": name, "says": (kind.__doc__ or "").splitlines()[0]}
        for name, kind in registry.parts().items()
    ]
    if as_json:
        _print_json({"methods": recipes, "parts": parts})
    else:
        show.methods(show.console(), recipes, parts)


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
        A method or a combination, such as "fedprox(mu=0.1)" or "moon+prox".
    model
        The model whose bytes are counted.
    data
        The data set that sizes the model.
    data_root
        Where that data set lies.
    """
    facts = explained(method, model, load(data, data_root).inputs).facts()
    _print_json(facts) if as_json else show.explanation(show.console(), facts)


@app.command
def partition(
    *,
    settings: Settings = None,
    config: ConfigFile = None,
    out: Annotated[Path | None, Parameter(help="Write the picture to this HTML file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show who holds what, as a table and a picture."""
    chosen = _merged(config, _given(settings))
    federation = federate(
        chosen.data,
        chosen.clients,
        chosen.skew,
        chosen.seed,
        chosen.test_share,
        chosen.data_root,
        chosen.augment,
    )
    picture = (
        show.partition_picture(federation, out or Path("partition.html")) if out or not as_json else None
    )
    if as_json:
        counts = federation.split.counts(federation.dataset)
        _print_json(
            {
                "clients": federation.clients,
                "eligible": len(federation.eligible),
                "class_names": list(federation.dataset.class_names),
                "counts": counts.tolist(),
                "test_samples": federation.split.test_offsets.diff().tolist(),
                "picture": str(picture) if picture else None,
            }
        )
    else:
        show.partition(show.console(), federation, picture)


@app.command
def report(folder: Path, *, as_json: AsJson = False) -> None:
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
    if as_json:
        _print_json({"written": [str(path) for path in written]})
    else:
        for path in written:
            show.console().print(f"wrote {path}")


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
        Where that data set lies.
    model
        Only this one; with parameters, or your own as "package.module:factory".
    """
    inputs = load(data, data_root).inputs
    rows = [_model_row(name, says, inputs) for name, says, kinds in nets.names() if inputs.kind in kinds]
    if model is not None:
        rows = [_model_row(model, "", inputs)]
    _print_json({"models": rows}) if as_json else show.models(show.console(), rows, data)


def _model_row(name: str, says: str, inputs: Inputs) -> dict[str, Any]:
    size = nets.size_of(name, inputs)
    return {"name": name, "says": says, "parameters": size.parameters, "flops_per_sample": size.flops}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: errors that the user can mend end in one sentence and exit code 2."""
    try:
        app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        cause = error.__cause__
        _fail(complaint(cause) if isinstance(cause, pydantic.ValidationError) else str(error))
    except FedAlloyError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(sentence: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(
        f"[bold red]error:[/] {show.plain(sentence)}"
    )
    sys.exit(2)


def _given(settings: Config | None) -> dict[str, Any]:
    """Only what was typed."""
    return settings.model_dump(include=settings.model_fields_set) if settings else {}


def _merged(file: Path | None, given: dict[str, Any]) -> Config:
    return Config.of({**(Config.read(file) if file else {}), **given}, str(file or ""))


def _no_other(folder: Path, out: Path | None, config: Path | None) -> None:
    if out or config:
        raise FedAlloyError(
            f"--resume {folder} takes its config and its folder from the run; leave --out and --config away"
        )
    if not (folder / "config.toml").is_file():
        raise FedAlloyError(
            f"{folder} is not a run folder (it has no config.toml); start one with 'fedalloy run'"
        )


def _new_place(config: Config) -> Path:
    """A folder of its own for every run."""
    name = registry.make(config.method).title.lower().replace(" ", "")
    data = config.data.replace("/", "-").replace(":", "-")
    return (
        Path("runs")
        / f"{name}-{data}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 1000:03d}"
    )


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise FedAlloyError(f"--seeds {text}: whole numbers are expected, such as 0,1,2") from None
    if any(number < 0 for number in numbers):
        raise FedAlloyError(f"--seeds {text}: seeds cannot be negative")
    return numbers


def _command_line() -> str:
    return shlex.join(["fedalloy", *sys.argv[1:]])


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
