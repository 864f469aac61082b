"""The server of a real federation: wait for the sites, then the same rounds as everywhere, or the rest of them."""

import hashlib
import json
import logging
import time
import uuid
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.files import PRIVATE, damaged, kept_secret, read_whole, write_whole
from fedalloy.core.imports import Imports, foreign_in, outside
from fedalloy.core.net import Inputs
from fedalloy.data import Augment, Dataset, Prepare, Preprocessing, Split, load
from fedalloy.data.assemble import fitted
from fedalloy.data.federation import Federation, federate
from fedalloy.deploy.agreement import Source, agree, known, record
from fedalloy.deploy.credentials import for_owner_only
from fedalloy.deploy.door import RUN
from fedalloy.deploy.hello import Guest, agreed_inputs
from fedalloy.deploy.masked import MaskedPost, check_maskable
from fedalloy.deploy.post import Lobby, Post
from fedalloy.deploy.roster import clients_by_node
from fedalloy.deploy.terms import Settings, Terms, read_settings
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import Busy, RunFolder
from fedalloy.experiment.run import Record, Result, Setup, play

SIZES = "sites.json"

log = logging.getLogger("fedalloy")


@dataclass(frozen=True)
class Roll(Federation):
    """What a server knows of sites with data of their own: how many samples each trains on."""

    told: tuple[int, ...] = ()

    @property
    def clients(self) -> int:
        return len(self.told)

    @cached_property
    def sizes(self) -> Tensor:
        return torch.tensor(self.told)

    @property
    def counts(self) -> Tensor | None:
        return None

    @property
    def common_test(self) -> bool:
        return False


def serve(grid: Grid, settings: Settings, imports: Imports | None = None) -> Result:
    """A whole training over the sites that `grid` reaches; carries on if the run folder holds a part of one."""
    config, terms = read_settings(settings)
    if imports is None and (names := foreign_in(config.model_dump())):
        raise outside(names, "the app")
    with for_owner_only():
        return _serve(grid, config, terms, imports)


def _serve(grid: Grid, config: Config, terms: Terms, imports: Imports | None) -> Result:
    dealt = federate(**config.dealing) if terms.sites == "dealt" else None
    agreed = None if dealt else known(terms, Path(terms.run_folder))
    source: Source = {"from": "the terms"}
    lobby = Lobby(
        grid,
        config.clients,
        clients_by_node,
        norm=dealt.dataset.inputs if dealt else _norm(agreed, terms),
        classes=None if dealt else len(terms.classes),
    )
    lobby.agreed = agreed
    wanted = terms.least_sites or config.clients
    lobby.fill(wanted, terms.join_limit)
    told = _told(Path(terms.run_folder), lobby.guests)
    federation = dealt
    if federation is None:
        if agreed is None:
            agreed, source = agree(config, terms, registry.make(config.method, imports), lobby)
        lobby.agreed, federation = agreed, roll(config, terms, agreed, told)
    setup = Setup(config, federation, imports=imports)
    setup.most_norm = terms.most_norm
    if terms.masked:
        check_maskable(setup.method)
    _refuse_local_tests(setup)
    folder = _folder(Path(terms.run_folder), config)
    _write_told(folder.path, told)
    if lobby.agreed:
        record(folder.path, lobby.agreed, source)
    if summary := folder.summary():
        return Result(folder.path, config, folder.history(), summary, _imports=imports)
    _outlive(folder)
    if setup.method.claimant("seal"):
        folder.needs_from_its_start("secret")
        setup.secret = kept_secret(folder.path / "secret")
    post = partial(
        MaskedPost if terms.masked else Post,
        lobby=lobby,
        run=_name(folder),
        terms=terms,
        checkpoint_every=config.checkpoint_every,
    )
    return play(setup, folder, _after_round, engine=post)


def _norm(agreed: Preprocessing | None, terms: Terms) -> Inputs | None:
    """What samples have to look like, as far as that is agreed on before anybody says hello."""
    term = agreed_inputs(terms.inputs, len(terms.classes)) if terms.inputs else None
    if agreed and term not in (None, agreed.inputs):
        raise FedAlloyError(
            f"what was agreed on is for {agreed.inputs}, the terms say inputs = {terms.inputs}"
        )
    return agreed.inputs if agreed else term


def roll(config: Config, terms: Terms, agreed: Preprocessing, told: dict[str, int]) -> Roll:
    """The federation as it was agreed on, with the server's own test set if there is one."""
    if terms.test_data:
        root = Path(config.data_root) if config.data_root else None
        dataset = load(terms.test_data, root, terms.classes, agreed)
    else:
        nothing = torch.empty(0, *agreed.shape, dtype=torch.uint8)
        empty = Dataset("sites", nothing, torch.empty(0).long(), 0, agreed.kind, agreed.classes)
        dataset = fitted(empty, agreed)
    none = torch.empty(0, dtype=torch.int64)
    offsets = torch.zeros(config.clients + 1, dtype=torch.int64)
    split = Split(none, offsets, none, offsets, torch.arange(dataset.train, len(dataset.y)))
    sizes = tuple(told.get(str(client), 0) for client in range(config.clients))
    return Roll(dataset, split, Prepare.of(dataset, Augment()), told=sizes)


def _told(path: Path, guests: dict[int, Guest]) -> dict[str, int]:
    """Samples by client: as first told, so that a restart without somebody draws the same clients."""
    RunFolder(path).needs_from_its_start(SIZES)
    file = path / SIZES
    before = _read_told(file) if file.exists() else {}
    return {str(client): guest.samples for client, guest in sorted(guests.items())} | before


def _read_told(file: Path) -> dict[str, int]:
    try:
        found = json.loads(read_whole(file))
        told, seal = found["samples"], found["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged(file, "it is not what this server wrote") from None
    if seal != _seal(told):
        raise damaged(file, "it is not what this server wrote")
    return dict(told)


def _write_told(path: Path, told: dict[str, int]) -> None:
    write_whole(path / SIZES, json.dumps({"samples": told, "sha256": _seal(told)}).encode(), PRIVATE)


def _seal(told: object) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _folder(path: Path, config: Config) -> RunFolder:
    """The run's folder, new or as an earlier server left it."""
    if not (path / "config.toml").is_file():
        return RunFolder.create(path, config)
    folder = RunFolder.existing(path)
    if changed := folder.config.differences(config):
        raise FedAlloyError(
            f"{path} was started with other settings ({', '.join(changed)}); give another run-folder for a new run"
        )
    return folder


def _outlive(folder: RunFolder, limit: float = 60.0) -> None:
    """Wait for the process of a run whose server was killed: it ends when it notices that, some seconds later."""
    deadline = time.monotonic() + limit
    while True:
        try:
            with folder.locked():
                return
        except Busy:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _refuse_local_tests(setup: Setup) -> None:
    """Sites that hide what they send do not tell how many of which class their models get right."""
    sealer = setup.method.claimant("seal")
    if sealer and setup.federation.judged_locally(setup.method):
        raise FedAlloyError(
            f"{sealer} does not cover tests at the sites: give the server test-data, and a method with a global model"
        )


def _name(folder: RunFolder) -> str:
    """What sites keep this run's private state under: the same after a restart, another for every new run."""
    folder.needs_from_its_start("run-id")
    file = folder.path / "run-id"
    if not file.exists():
        write_whole(file, uuid.uuid4().hex.encode(), PRIVATE)
    name = read_whole(file).decode(errors="replace")
    if not RUN.fullmatch(name):
        raise damaged(file, "it names no run")
    return name


def _after_round(record: Record) -> None:
    """Say how it went, and who was missing."""
    lost = "".join(f"; client {one['client']} {one['why']}" for one in record["refused"])
    lost += "".join(
        f"; the test of client {one['client']} {one['why']}" for one in record.get("refused_evaluation", [])
    )
    usable = len(record["participants"]) - len(record["refused"])
    log.info("round %d: %d of %d replies%s", record["round"], usable, len(record["participants"]), lost)
