"""Before round 1: how all sites prepare their samples, given in the terms or computed from what sites count."""

import json
import logging
import time
from collections import Counter
from functools import reduce
from operator import add
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedalloy.core.alloy import Alloy
from fedalloy.core.files import write_whole
from fedalloy.data.assemble import known_stats
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.data.totals import Stats, Totals
from fedalloy.deploy.hello import Guest
from fedalloy.deploy.masked import masked_mean
from fedalloy.deploy.post import LET_OUT, PAUSE, ROOM, SPARE, Lobby, pulled
from fedalloy.deploy.records import read_reply
from fedalloy.deploy.statistics import CLIP, STATISTICS, declared, far_off, from_items, in_order, shown
from fedalloy.deploy.terms import Terms
from fedalloy.errors import FedAlloyError, plain
from fedalloy.experiment.config import Config

FILE, SOURCE = "preprocessing.json", "preprocessing-source.json"
GIVE = "give --preprocessing FILE (written by 'fedalloy preprocessing' from public or pilot data)"
NUMBERED = f"sites with texts or tokens of their own must number words alike: {GIVE}"

log = logging.getLogger("fedalloy")

Source = dict[str, object]


def known(terms: Terms, run_folder: Path) -> Preprocessing | None:
    """What was agreed on before anybody says hello: as the run began, or in a file of the terms."""
    file = run_folder / FILE
    kept = Preprocessing.from_json(file.read_bytes(), str(file)) if file.exists() else None
    if kept is None and (run_folder / "history.jsonl").exists():
        raise FedAlloyError(
            f"{file} is gone, and this run began with it; put it back, or start a new run-folder"
        )
    given = given_file(terms)
    if not (kept or given) and terms.inputs.startswith("tokens"):
        raise FedAlloyError(NUMBERED)
    if kept and given and kept != given:
        raise FedAlloyError(
            f"{file} and {terms.preprocessing} differ; a run keeps what it began with, a new one needs a new run-folder"
        )
    return kept or given


def given_file(terms: Terms) -> Preprocessing | None:
    """The file that the terms name, read and held against them."""
    if not terms.preprocessing:
        return None
    try:
        text = Path(terms.preprocessing).expanduser().read_bytes()
    except OSError as error:
        raise FedAlloyError(f"--preprocessing {terms.preprocessing}: {error.strerror}") from None
    found = Preprocessing.from_json(text, terms.preprocessing)
    if found.class_names != terms.classes:
        raise FedAlloyError(
            f"{terms.preprocessing} names the classes {', '.join(found.class_names[:20]) or 'by numbers'}; "
            f"the terms say {', '.join(terms.classes[:20])}"
        )
    return found


def agree(config: Config, terms: Terms, method: Alloy, lobby: Lobby) -> tuple[Preprocessing, Source]:
    """What all sites are to use, and where it comes from."""
    guests = lobby.guests
    names = Counter(guest.columns for guest in guests.values()).most_common(1)[0][0]
    inputs = lobby.norm
    assert inputs is not None, "a full lobby has agreed on it"
    bare = Preprocessing(inputs.kind, inputs.shape, inputs.classes, terms.classes, feature_names=names)
    if terms.mean:
        return _checked(bare.scaled_by(*_given(terms, inputs.kind))), {"from": "the terms"}
    if inputs.kind == "tokens":
        raise FedAlloyError(NUMBERED)
    if stats := known_stats(config.data, inputs.kind, inputs.shape[0]):
        return bare.scaled_by(*stats), {"from": f"the name {config.data}"}
    refuse_sealed(method)
    asked = {k: guest for k, guest in sorted(guests.items()) if set(guest.columns) in (set(), set(names))}
    refused = dict.fromkeys(guests.keys() - asked.keys(), "has other columns")
    if terms.masked:
        if strangers := [k for k, guest in asked.items() if guest.columns != names]:
            refused |= dict.fromkeys(strangers, "has its columns in another order")
            asked = {k: guest for k, guest in asked.items() if k not in strangers}
        total, used, lost = _masked(lobby, asked, terms.round_limit)
        refused |= {k: lost.get(k, "did not stay until the end") for k in asked.keys() - set(used)}
    else:
        heard = _heard(config, lobby, asked, terms.round_limit, names, refused)
        for k in far_off(heard):
            refused[k] = "sends sums a million times beyond those of the others"
            del heard[k]
        used = sorted(heard)
        if len(used) < terms.least_replies:
            why = "; ".join(f"client {k} {word}" for k, word in sorted(refused.items()))
            raise FedAlloyError(
                f"{len(used)} sites sent usable statistics, {terms.least_replies} are needed: {why}"
            )
        total = reduce(add, heard.values())
    for k, why in sorted(refused.items()):
        log.warning("statistics without client %d, which %s", k, why)
    size = sum(spec.bytes for spec in declared(inputs.shape[0]).values())
    return _checked(bare.scaled_by(*total.stats())), {
        "from": "masked sums over sites" if terms.masked else "counts, sums and squares of sites",
        "clients": used,
        "refused": {str(k): why for k, why in sorted(refused.items())},
        "slots": {name: list(spec.shape) for name, spec in declared(inputs.shape[0]).items()},
        "bytes": size * len(used),
    }


def _given(terms: Terms, kind: str) -> Stats:
    mean, std = terms.given_mean, terms.given_std
    if kind == "image" and not all(0 <= value <= 1 for value in (*mean, *std)):
        raise FedAlloyError(
            "--mean and --std are of pixels scaled to [0, 1]; divide what is of 0 to 255 by 255"
        )
    return mean, std


def refuse_sealed(method: Alloy) -> None:
    """Statistics are no part of what a seal covers."""
    if sealer := method.claimant("seal"):
        raise FedAlloyError(
            f"{sealer} does not cover counts, sums and squares of the sites' data: {GIVE}, or --mean and --std"
        )


def record(run_folder: Path, agreed: Preprocessing, source: Source) -> None:
    """Keep it with the run: a restart uses this, and never computes it anew."""
    if not (run_folder / FILE).exists():
        write_whole(run_folder / SOURCE, (json.dumps(source, indent=2) + "\n").encode())
        write_whole(run_folder / FILE, agreed.to_json().encode())
    log.info("%s (%s)", shown(agreed), source.get("from", "as the run began"))


def _checked(agreed: Preprocessing) -> Preprocessing:
    if why := agreed.nonsense():
        raise FedAlloyError(f"no preprocessing can be agreed on: {why}")
    return agreed


def _question() -> RecordDict:
    return RecordDict({STATISTICS: ConfigRecord({"limb": 16})})


def _heard(
    config: Config,
    lobby: Lobby,
    asked: dict[int, Guest],
    limit: float,
    names: tuple[str, ...],
    refused: dict[int, str],
) -> dict[int, Totals]:
    """Every site's totals by client; whoever sends none that can be used is refused by name."""
    waiting: dict[str, int] = {}
    for k, guest in asked.items():
        message = Message(_question(), guest.node, "query", ttl=limit + SPARE)
        waiting |= dict.fromkeys(lobby.grid.push_messages([message]), k)
    heard: dict[int, Totals] = {}
    deadline = time.monotonic() + limit
    while waiting:
        for message_id, answer in pulled(lobby.grid, list(waiting)):
            k = waiting.pop(message_id)
            try:
                heard[k] = in_order(_totals(answer, asked[k], config.test_share), asked[k].columns, names)
            except FedAlloyError as error:
                refused[k] = str(error)
        if time.monotonic() > deadline:
            break
        if waiting:
            time.sleep(PAUSE)
    refused |= dict.fromkeys(waiting.values(), f"did not answer within {limit:g} s")
    for k in [k for k in heard if not lobby.admits(asked[k])]:
        refused[k] = LET_OUT
        del heard[k]
    return dict(sorted(heard.items()))


def _totals(answer: Message | str, guest: Guest, test_share: float) -> Totals:
    if isinstance(answer, str):
        raise FedAlloyError(answer)
    if answer.has_error():
        raise FedAlloyError(f"failed: {plain(answer.error.reason)}")
    reply = read_reply(answer.content, guest.client, ROOM)
    if not test_share and reply.samples != guest.samples:
        raise FedAlloyError(f"counts {reply.samples} samples, and said that it has {guest.samples}")
    return from_items(reply.items, guest.inputs, reply.samples)


def _masked(lobby: Lobby, asked: dict[int, Guest], limit: float) -> tuple[Totals, list[int], dict[int, str]]:
    """The sum over all sites, of which nobody's part can be read."""
    nodes = {guest.node: _question() for guest in asked.values()}
    inputs = next(iter(asked.values())).inputs
    specs = sorted(declared(inputs.shape[0]).items())
    shapes = {node: [spec.shape for _, spec in specs] for node in nodes}
    sums = masked_mean(lobby, nodes, shapes, limit, clip=CLIP)
    lost = {k: sums.lost[guest.node] for k, guest in asked.items() if guest.node in sums.lost}
    if not sums.answered:
        why = "; ".join(f"client {k} {word}" for k, word in sorted(lost.items()))
        raise FedAlloyError(f"no masked statistics came about: {why or 'too few sites stayed until the end'}")
    items = {
        key: torch.from_numpy(value * len(sums.answered)).round().long().reshape(spec.shape)
        for (key, spec), value in zip(specs, sums.mean, strict=True)
    }
    used = sorted(k for k, guest in asked.items() if guest.node in sums.answered)
    return from_items(items, inputs), used, lost
