"""What sites say of their tests: no impossible number becomes an accuracy, and none ends a run."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from mischief import MISCHIEF, Arrays, Bench, Facts, array, poisoned, taken_apart
from settings import ROWS
from test_lobby import prepared

from fedalloy.core import registry
from fedalloy.core.wire import Mail, Reply
from fedalloy.deploy.records import FACTS, ITEMS
from fedalloy.deploy.server import serve
from fedalloy.round.evaluate import evaluate
from fuzzing import FUZZING, dice

FEW = ("fedper", "local", "fedproto(lam=5)", "fedrep", "ssf(ratio=0.5)+finetune")
METHODS = [(name, "mlp(hidden=4)") for name in FEW]
if FUZZING:
    METHODS = [(row.method, row.models[-1]) for row in ROWS if registry.make(row.method).personal] + METHODS


class Said:
    """An engine whose clients say what they are told to say."""

    def __init__(self, bench: Bench, replies: Sequence[Reply] = ()) -> None:
        self.bench, self.replies = bench, replies
        self.mails: list[Mail] = []

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        if mails[0].errand == "score" or not self.replies:
            self.mails = [mail for mail in mails if mail.errand != "score"]
            yield from self.bench.post.carry(mails)
        else:
            yield from self.replies

    def close(self) -> None: ...


class Examined:
    """A bench whose sites have been tested once, honestly."""

    def __init__(self, method: str, model: str, room: Path) -> None:
        self.bench = Bench(method, room, test_share=0.2, model=model)
        asked = Said(self.bench)
        self.metrics, outcome = self.judged(asked)
        assert not outcome
        self.mails = asked.mails
        self.honest = list(self.bench.post.carry(self.mails))

    def judged(self, said: Said) -> tuple[dict[str, Any], dict[int, str]]:
        metrics, outcome = evaluate(self.bench.server, self.bench.setup.federation, said)
        return metrics, outcome.refused


@pytest.fixture(scope="module", params=METHODS)
def examined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Examined:
    method, model = request.param
    return Examined(method, model, tmp_path_factory.mktemp("examined"))


def changed(arrays: Arrays, key: str, value: int) -> None:
    found = arrays[key].numpy().copy()
    found.flat[0] = value
    arrays[key] = array(found)


def boasting(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    held = int(arrays["count"].numpy().flat[0])
    changed(arrays, "right", held + chance.choice([1, 7, 10**9, 10**12, 2**62]))


def negative(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    changed(arrays, chance.choice(["right", "count", "global"]), -chance.choice([1, 10**6, 2**63]))


def absurd(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    changed(
        arrays, chance.choice(["right", "count", "global"]), chance.choice([10**12 + 1, 2**62, 2**63 - 1])
    )


def overflowing(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    arrays["count"] = array(np.full_like(arrays["count"].numpy(), 10**12))


def omniscient(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    changed(arrays, "global", chance.choice([1798, 10**6, 10**12]))


def empty(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    arrays.clear()


OWN = (boasting, negative, absurd, overflowing, omniscient, empty)


@pytest.mark.fuzz
def test_no_hostile_test_is_believed(examined: Examined) -> None:
    kinds = [*(does for does in MISCHIEF if does is not poisoned), *OWN]  # whole numbers hold no NaN
    honest = examined.metrics["personal_local_acc"]
    for number, chance in enumerate(dice(68, 1100)):
        place = chance.randrange(3)
        arrays, facts = taken_apart(examined.honest[place])
        kinds[number % len(kinds)](chance, arrays, facts)
        content = RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(facts)})
        replies = list(examined.honest)
        replies[place] = examined.bench.read(content, examined.mails[place])
        metrics, refused = examined.judged(Said(examined.bench, replies))
        assert refused.keys() == {place}, f"{kinds[number % len(kinds)].__name__} {chance}"
        assert metrics["personal_clients"] == 2
        assert metrics["personal_asked"] == 3
        assert 0 <= metrics["personal_local_acc"] <= 1
    assert examined.judged(Said(examined.bench, examined.honest))[0]["personal_local_acc"] == honest


def test_nobody_can_be_believed(examined: Examined) -> None:
    """No accuracy, and no crash."""
    replies = [Reply(2, client) for client in range(3)]
    metrics, refused = examined.judged(Said(examined.bench, replies))
    assert refused == dict.fromkeys(range(3), "lacks count, global, right")
    assert (metrics["personal_local_acc"], metrics["personal_clients"]) == (None, 0)


def about_tests(question: Message) -> bool:
    facts = question.content.config_records.get(FACTS)
    return facts is not None and facts.get("errand") == "evaluate"


def test_the_history_names_whose_test_was_not_believed(tmp_path: Path) -> None:
    """And says how many sites an accuracy stands for."""
    grid, settings = prepared(tmp_path, method="fedper", rounds=2)
    honest = serve(*prepared(tmp_path / "honest", method="fedper", rounds=2))
    assert "refused_evaluation" not in honest.history[0]
    grid.tamper = lambda question, answer: lie(question, answer)
    result = serve(grid, settings)
    for line in result.history:
        assert line["refused"] == []
        (refused,) = line["refused_evaluation"]
        assert refused == {"client": 1, "why": "claims more right answers than test samples"}
        assert (line["metrics"]["personal_clients"], line["metrics"]["personal_asked"]) == (2, 3)
        assert line["metrics"]["personal_local_acc"] is None or line["metrics"]["personal_local_acc"] <= 1
    assert result.summary["weights_sha256"] == honest.summary["weights_sha256"]


def lie(question: Message, answer: Message) -> Message:
    if not about_tests(question) or question.metadata.dst_node_id != 101:
        return answer
    arrays, facts = dict(answer.content.array_records[ITEMS]), dict(answer.content.config_records[FACTS])
    arrays["right"] = array(arrays["count"].numpy() + 27855)
    return Message(RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(facts)}), reply_to=question)


def test_what_a_site_says_of_its_failure_is_short_and_plain(tmp_path: Path) -> None:
    """Else a site could write into the server's terminal, or fill its disk."""
    grid, settings = prepared(tmp_path, rounds=1)
    reason = "\x1b[2J\x07\nround 1: all is well\r" + "long" * 10**5
    grid.tamper = lambda question, answer: (
        Message(Error(0, reason), reply_to=question)
        if question.metadata.group_id == "1" and question.metadata.dst_node_id == 101
        else answer
    )
    (lost,) = serve(grid, settings).history[0]["refused"]
    assert lost["why"].isprintable()
    assert lost["why"].startswith("failed: ?[2J??round 1")
    assert len(lost["why"]) < 400
