"""`fedalloy deploy`: a real federation, from its folder to its end. Flower is imported only by what needs it."""

import dataclasses
import datetime
import json
import logging
import os
import signal
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from fedalloy.cli.console import AsJson, console, print_json, progress
from fedalloy.core.files import damaged, read_whole, write_whole
from fedalloy.core.imports import Imports, allowed, outside
from fedalloy.core.parameters import NonNegative, Positive
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.deploy.terms import Terms, read_settings
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder

if TYPE_CHECKING:
    from fedalloy.deploy.check import Checked
    from fedalloy.deploy.deploy import Deployment

deploy = App(
    name="deploy", help="A real federation over Flower: make it, start its server and sites, run it."
)

Folder = Annotated[Path, Parameter(help="The deployment's folder.")]
LAST = "last-run.json"  # in server/: the run that was started last, its folder and rounds
ACCURACIES = {
    "global_acc": "global model, the server's test set",
    "personal_local_acc": "tested at the sites, on their own data",
}
LOOK = 10.0  # seconds between two questions to Flower about a run
SETTLED = 15.0  # seconds that a SuperNode lives if it was let in
SOON = 60  # days before a certificate ends
WATCH = 1.0  # seconds between two looks for keys that came or went
PAUSE = 2.0  # seconds before it is started again


@deploy.command
def init(
    folder: Annotated[Path, Parameter(help="The folder to write, which must be new.")],
    /,
    *,
    settings: Annotated[Config | None, Parameter(name="*")] = None,
    terms: Annotated[Terms | None, Parameter(name="*")] = None,
    host: Annotated[
        str, Parameter(help="The server's name or address as sites see it; several are parted by commas.")
    ] = "127.0.0.1",
    port: Annotated[int, Parameter(help="The server's port.")] = 9092,
) -> None:
    """Write a ready Flower app with certificates, keys for all sites and a page of instructions."""
    from fedalloy.core import registry
    from fedalloy.deploy.agreement import FILE, given_file, refuse_sealed
    from fedalloy.deploy.deploy import Deployment
    from fedalloy.deploy.plausible import check_plan, hosts_of

    chosen = settings or Config()
    agreed = terms or Terms()
    read_settings({**chosen.model_dump(exclude_unset=True), **agreed.model_dump(exclude_unset=True)})
    if "clients" not in chosen.model_fields_set:
        raise FedAlloyError("how many sites are there? give --clients, such as --clients 3")
    hosts = hosts_of(host)
    check_plan(chosen, agreed, Imports(), port)  # typed here
    chosen = chosen.spelled()
    given = given_file(agreed)
    if agreed.computed:
        refuse_sealed(registry.make(chosen.method, Imports()))
    agreed = agreed.model_copy(update={"preprocessing": FILE if given else ""})
    made = Deployment.create(folder, chosen, agreed, hosts, port)
    if given:
        made.keep(FILE, given.to_json())
    terminal = console()
    terminal.print(f"deployment  {folder}\nread next   {folder / 'README.md'}", soft_wrap=True)


@deploy.command
def server(
    folder: Folder,
    /,
    *,
    bind: Annotated[str, Parameter(help="The address to listen on; 0.0.0.0 for all.")] = "0.0.0.0",
    allow_code: Annotated[
        bool, Parameter(negative="", help="Let runs name methods and models outside of FedAlloy.")
    ] = False,
) -> None:
    """Start the server (Flower's SuperLink) and let in the sites whose keys it has; until Ctrl-C."""
    from fedalloy.deploy.credentials import for_owner_only
    from fedalloy.deploy.deploy import Deployment, stop

    made = Deployment(folder)
    os.environ["FEDALLOY_ALLOW_CODE"] = "1" if allow_code else "0"  # what starts from here inherits it
    with for_owner_only(), _until_stopped():
        process = made.start_server(bind)
        try:
            names = made.register_sites(process)
            terminal = console()
            _warn_of_old(made)
            terminal.print(f"ready: {made.address} for {', '.join(names)}", soft_wrap=True)
            told = ""
            while process.poll() is None:
                time.sleep(WATCH)
                try:
                    for line in made.follow_keys():
                        terminal.print(line, soft_wrap=True)
                    told = ""
                except FedAlloyError as error:
                    if str(error) != told:  # once, not every second
                        terminal.print(str(error), soft_wrap=True)
                    told = str(error)
            raise FedAlloyError(f"the SuperLink ended with code {process.returncode}; see above")
        finally:
            stop(process)


@deploy.command
def site(
    bundle: Annotated[Path, Parameter(help="The site's folder: its key, ca.pem and site.toml.")],
    /,
    *,
    data_root: Annotated[
        Path | None, Parameter(help="The folder with this site's data: NAME.npz, NAME/ (images) or NAME.csv.")
    ] = None,
    data: Annotated[str | None, Parameter(help="The name of the data here, if it is not the run's.")] = None,
    state: Annotated[
        Path | None, Parameter(help="Where private state is kept; by default BUNDLE/state.")
    ] = None,
    superlink: Annotated[
        str | None, Parameter(help="HOST:PORT of the server, if it is not that of site.toml.")
    ] = None,
    patience: Annotated[
        NonNegative, Parameter(help="Seconds to go on trying while the server does not let it in.")
    ] = 300.0,
    look_every: Annotated[
        Positive, Parameter(help="Seconds between two looks for messages of the server.")
    ] = 0.5,
    allow_code: Annotated[
        bool, Parameter(negative="", help="Let the server name models and methods outside of FedAlloy.")
    ] = False,
    only_masked: Annotated[
        bool, Parameter(negative="", help="Send updates by secure aggregation or not at all.")
    ] = False,
    most_epsilon: Annotated[
        NonNegative | None,
        Parameter(help="Take part only where all runs spend no more than this, with noise added here."),
    ] = None,
    check: Annotated[
        bool, Parameter(negative="", help="Only read the data as a run would, say what is there, and end.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a site: a SuperNode and the worker that answers its messages; until Ctrl-C.

    The data are read and held against the plan of the run first; what does not fit is told here, to nobody else.
    """
    from fedalloy.deploy.audit import Audit
    from fedalloy.deploy.check import check_site
    from fedalloy.deploy.credentials import for_owner_only
    from fedalloy.deploy.deploy import site_process
    from fedalloy.deploy.errors import site_log
    from fedalloy.deploy.knock import check_bundle, refusal
    from fedalloy.deploy.plausible import address_of
    from fedalloy.deploy.site import answer
    from fedalloy.deploy.worker import work

    client, named = _site(bundle)
    server = address_of(superlink or named)
    check_bundle(bundle)
    kept = (state or bundle / "state").resolve()
    node: dict[str, Any] = {"client": client, "state": str(kept)}
    node |= {"data-root": str(data_root.resolve())} if data_root else {}
    node |= {"data": data} if data else {}
    node |= {"superlink": server}
    node |= {"allow-code": True} if allow_code else {}
    node |= {"only-masked": True} if only_masked else {}
    node |= {"most-epsilon": most_epsilon} if most_epsilon is not None else {}
    found = check_site(bundle, node)
    if check:
        _say_checked(client, found, as_json)
        return
    logging.getLogger("fedalloy").addHandler(logging.StreamHandler())
    terminal = console()
    terminal.print(f"site {client} of {server}: private state in {kept}", soft_wrap=True)
    refused_since, said = time.monotonic(), None
    with for_owner_only(), site_log(kept), _until_stopped():
        Audit(kept).verify()
        while True:
            why = refusal(bundle, server, client)
            if why and why != said:
                terminal.print(f"{why} (tried again for {patience:g} s)", soft_wrap=True, markup=False)
            said, ended = why, None
            if why is None:
                began = time.monotonic()
                running = site_process(bundle.resolve(), server, node, kept, look_every=look_every)
                with running as (process, address, secret):
                    work(address, secret, answer, lambda: process.poll() is None)
                ended = process.returncode
                if time.monotonic() - began > SETTLED:
                    refused_since = time.monotonic()
            if time.monotonic() - refused_since > patience:
                raise FedAlloyError(
                    why or f"the SuperNode ended again and again for {patience:g} s (code {ended}); see above"
                )
            time.sleep(PAUSE)


@deploy.command
def run(
    folder: Folder,
    /,
    *,
    run_config: Annotated[
        tuple[str, ...], Parameter(help="Change settings of the app, such as 'rounds=5 lr=0.1'.")
    ] = (),
    allow_code: Annotated[
        bool, Parameter(negative="", help="Run an app that names methods or models outside of FedAlloy.")
    ] = False,
    detach: Annotated[bool, Parameter(negative="", help="Do not wait for the end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start the run, or carry on with one that was cut short, and wait for its end."""
    from fedalloy.cli import show
    from fedalloy.deploy.credentials import for_owner_only
    from fedalloy.deploy.deploy import Deployment
    from fedalloy.deploy.plausible import check_plan
    from fedalloy.experiment.run import Result
    from fedalloy.report import write_run_report

    made, terminal = Deployment(folder), console(quiet=as_json)
    config, terms = read_settings(settings := made.settings_with(run_config))
    imports = allowed(str(made.folder / "app" / "pyproject.toml"), settings, allow_code=allow_code)
    if made.foreign and not allow_code:
        raise outside(made.foreign, str(made.folder / "app"))
    check_plan(config, terms, imports)
    number = made.start_run([*run_config, *_spelling(config, made.folder / "server" / terms.run_folder)])
    last = {"run": str(number), "folder": terms.run_folder, "rounds": config.rounds}
    write_whole(made.folder / "server" / LAST, json.dumps(last).encode(), 0o600)
    if detach:
        print_json({"run": str(number)}) if as_json else terminal.print(f"run {number} started")
        return
    place = RunFolder(made.folder / "server" / terms.run_folder)
    with progress(terminal, config.rounds) as bar:
        _watch(made, number, place, bar.round)
    summary = place.summary()
    if summary is None:
        raise FedAlloyError(f"run {number} ended, but {place.path} holds no summary")
    with for_owner_only():
        report = write_run_report(place.path)
    if as_json:
        print_json({**summary, "run": str(number), "folder": str(place.path), "report": str(report)})
    else:
        show.run(terminal, Result(place.path, config, place.history(), summary), report)


@deploy.command
def status(folder: Folder, /, *, as_json: AsJson = False) -> None:
    """How the last run is doing: its rounds, its accuracy, who was missing."""
    from fedalloy.deploy.deploy import Deployment

    made = Deployment(folder)
    last = _last(made)
    number, place = int(last["run"]), made.folder / "server" / last["folder"]
    word, why = made.status(number)
    history = RunFolder(place).history()
    facts: dict[str, Any] = {
        "run": str(number),
        "status": word,
        "details": why,
        "folder": str(place),
        "rounds": len(history),
        "of": last["rounds"],
        "preprocessing": _preprocessing(place),
        "metrics": next((line["metrics"] for line in reversed(history) if line["metrics"]), None),
        "missing": history[-1]["refused"] if history else [],
    }
    if as_json:
        print_json(facts)
        return
    terminal = console()
    terminal.print(
        f"run {number}: {word} {why}\n{place}\nround {facts['rounds']} of {facts['of']}", soft_wrap=True
    )
    for name, title in ACCURACIES.items():
        if facts["metrics"] and name in facts["metrics"]:
            terminal.print(f"accuracy {facts['metrics'][name]:.2%} ({title})")
    if facts["preprocessing"]:
        terminal.print(f"preprocessing {facts['preprocessing'][:12]} for all sites", soft_wrap=True)
    for one in facts["missing"]:
        terminal.print(f"client {one['client']} {one['why']}", soft_wrap=True)


@deploy.command
def stop(folder: Folder, /) -> None:
    """Stop the last run; 'fedalloy deploy run' carries on with it."""
    from fedalloy.deploy.deploy import Deployment

    made = Deployment(folder)
    number = int(_last(made)["run"])
    made.stop_run(number)
    console().print(f"run {number} stopped")


@deploy.command
def audit(
    bundle: Annotated[Path, Parameter(help="The site's folder.")],
    /,
    *,
    state: Annotated[Path | None, Parameter(help="Where its state is, if not in BUNDLE/state.")] = None,
    verify: Annotated[
        bool, Parameter(negative="", help="Only say whether every line is as it was written.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What left this site: when, to whom, which round, how many bytes in which slots, epsilon so far."""
    from fedalloy.deploy.audit import LOG, Audit

    kept = state or bundle / "state"
    if not (kept / LOG).exists():
        raise FedAlloyError(f"{kept / LOG} does not exist: nothing has left this site yet, or give --state")
    found = Audit(kept)
    lines = found.verify()
    if as_json:
        print_json({"lines": lines, "verified": True, **({} if verify else {"entries": found.entries()})})
        return
    terminal = console()
    for line in [] if verify else found.entries():
        slots = ", ".join(f"{name} {size:,}" for name, size in line["slots"].items())
        spent = f"  epsilon {line['epsilon']:.2f}" if line["epsilon"] is not None else ""
        where = f"round {line['round']}" if line["round"] is not None else "-"
        terminal.print(
            f"{line['time'][:19]}  {line['kind']}  {where}  {line['bytes']:,} bytes ({slots}){spent}  to {line['to']}",
            soft_wrap=True,
            markup=False,
        )
    terminal.print(f"{lines} lines, every one as it was written")


@deploy.command
def key(
    folder: Folder,
    site: Annotated[str, Parameter(help="The site, such as site-0.")],
    /,
    *,
    new: Annotated[
        bool, Parameter(negative="", help="Make a new key pair for it; send it the file 'key'.")
    ] = False,
    pub: Annotated[
        Path | None, Parameter(help="Put this public key, which the site made, in its place.")
    ] = None,
    remove: Annotated[bool, Parameter(negative="", help="Let it out, for good.")] = False,
    as_json: AsJson = False,
) -> None:
    """Replace or remove the key of a site; a server that runs follows within seconds, in the middle of a run too."""
    from fedalloy.deploy.credentials import make_site_key
    from fedalloy.deploy.deploy import Deployment
    from fedalloy.deploy.roster import SITE, read_key

    made = Deployment(folder)
    place = made.folder / "sites" / site
    if sum((new, pub is not None, remove)) != 1:
        raise FedAlloyError("give one of --new, --pub FILE and --remove")
    if not SITE.fullmatch(site) or not place.is_dir():
        raise FedAlloyError(
            f"{site!r} is no folder in {made.folder / 'sites'}; they are called site-0, site-1 ..."
        )
    if pub is not None:
        made.refuse_key(site, read_key(pub))
        write_whole(place / "key.pub", pub.read_bytes(), 0o600)
    elif new:
        make_site_key(place)
    elif (place / "key.pub").exists():
        (place / "key.pub").unlink()
    else:
        raise FedAlloyError(f"{site} has no key.pub: it is out already")
    did = "removed" if remove else "replaced"
    if as_json:
        print_json({"site": site, "key": did})
    else:
        console().print(f"{site}: key {did}; a server that runs follows within seconds", soft_wrap=True)


@deploy.command
def renew(
    folder: Folder,
    /,
    *,
    authority: Annotated[
        bool,
        Parameter(negative="", help="Make another authority, which signs from the next renewal on."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Give the server a new key and certificate; one that runs uses them for new connections, without a restart."""
    from fedalloy.deploy.credentials import renew_authority, renew_certificate
    from fedalloy.deploy.deploy import Deployment

    made = Deployment(folder).folder
    if authority:
        until = renew_authority(made / "credentials", made / "sites").date().isoformat()
        words = (
            f"the new authority is valid to {until}; send every site its new ca.pem from {made / 'sites'}, "
            f"and when all have it, type: fedalloy deploy renew {folder}"
        )
    else:
        until = renew_certificate(made / "credentials").date().isoformat()
        words = f"the server's certificate is valid to {until}"
    if as_json:
        print_json({"valid_until": until, "renewed": "authority" if authority else "certificate"})
    else:
        console().print(words, soft_wrap=True)


def _warn_of_old(made: "Deployment") -> None:
    """Say which certificates end soon."""
    from fedalloy.deploy.credentials import ends_of

    for name, end in ends_of(made.folder / "credentials").items():
        left = end - datetime.datetime.now(datetime.UTC)
        if left.days < SOON:
            more = " --authority" if name == "ca.pem" else ""
            way = f"fedalloy deploy renew {made.folder}{more}"
            console().print(
                f"warning: {name} is valid for {left.days} more days; type: {way}", soft_wrap=True
            )


def _watch(made: "Deployment", number: int, place: RunFolder, on_round: Any) -> None:
    """Wait for the end of a run, telling of every round that is new."""
    seen, looked = len(place.history()), 0.0
    while True:
        history = place.history()
        for record in history[seen:]:
            on_round(record)
        seen = max(seen, len(history))
        if time.monotonic() - looked > LOOK or place.summary() is not None:
            word, why = made.status(number)
            looked = time.monotonic()
            if word == "finished:completed":
                return
            if word.startswith("finished"):
                reason = why.removeprefix("ServerApp failed with exception: ")
                raise FedAlloyError(f"run {number} {word.partition(':')[2]}: {reason}")
        time.sleep(0.2)


def _say_checked(client: int, found: "Checked | None", as_json: bool) -> None:
    if found is None:
        raise FedAlloyError("nobody said what data a run will ask for; name it with --data NAME")
    if as_json:
        print_json({"client": client, **dataclasses.asdict(found)})
        return
    held = ", ".join(f"{name} {count}" for name, count in found.classes.items())
    console().print(
        f"data      {found.data} ({found.kind}, {' x '.join(map(str, found.shape))})\n"
        f"samples   {found.train} to train on, {found.test} to test on\n"
        f"by class  {held}\nready     site {client} can join",
        soft_wrap=True,
        markup=False,
    )


def _site(bundle: Path) -> tuple[int, str]:
    """Which client this is, and where its server is: all that whoever made the folder has a say in."""
    try:
        told = tomllib.loads((bundle / "site.toml").read_text())
    except (OSError, ValueError, RecursionError):
        raise FedAlloyError(f"{bundle} is no site's folder: it needs site.toml, key and ca.pem") from None
    client, server = told.get("client"), told.get("superlink")
    if (
        type(client) is not int
        or client < 0
        or not isinstance(server, str)
        or told.keys() - {"client", "superlink"}
    ):
        raise FedAlloyError(
            f'{bundle / "site.toml"} holds other lines than client = 0 and superlink = "HOST:PORT"; ask for it again'
        )
    return client, server


def _preprocessing(run_folder: Path) -> str | None:
    """The sha256 of what all sites prepare their samples by; None where it is not yet agreed, or data are dealt."""
    file = run_folder / "preprocessing.json"
    return Preprocessing.from_json(file.read_bytes(), str(file)).sha256 if file.exists() else None


def _spelling(config: Config, run_folder: Path) -> list[str]:
    """Overrides that give models their one name, or in a run that has begun the names it began with."""
    begun = (run_folder / "config.toml").is_file()
    wanted = config.like(RunFolder(run_folder).config) if begun else config.spelled()
    changed = [
        name for name in ("method", "model", "models") if getattr(wanted, name) != getattr(config, name)
    ]
    return [f"{name}={json.dumps(getattr(wanted, name))}" for name in changed]


def _last(made: "Deployment") -> dict[str, Any]:
    file = made.folder / "server" / LAST
    if not file.exists():
        raise FedAlloyError(f"nothing was run yet; type: fedalloy deploy run {made.folder}")
    try:
        found = json.loads(read_whole(file))
        return {"run": int(found["run"]), "folder": str(found["folder"]), "rounds": int(found["rounds"])}
    except (ValueError, KeyError, TypeError):
        raise damaged(file, "it names no run") from None


@contextmanager
def _until_stopped() -> Iterator[None]:
    """Ctrl-C and a polite kill are the usual end of what runs for ever."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except KeyboardInterrupt:
        console().print("stopped")
    finally:
        signal.signal(signal.SIGTERM, before)
