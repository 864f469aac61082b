"""What sites tell when they are asked about the new model: declared, checked and refused by name like an update."""

from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from mischief import MISCHIEF, Bench, taken_apart
from settings import ROWS

from fedalloy.core import registry
from fedalloy.core.alloy import Mechanism
from fedalloy.core.wire import Mail, Reply
from fedalloy.deploy.records import FACTS, ITEMS
from fuzzing import FUZZING, dice

FEW = ("ccvr", "fedfm(lam=5)")
METHODS = [row.method for row in ROWS if registry.make(row.method).asking(last=True)] if FUZZING else FEW


class Asked:
    """A bench whose sites have told once, honestly."""

    def __init__(self, method: str, room: Path) -> None:
        self.bench = Bench(method, room)
        self.asker: Mechanism = self.bench.setup.method.asking(last=True)[0]
        self.mails: list[Mail] = self.bench.server.ask(self.asker, range(3))
        self.honest: list[Reply] = list(self.bench.post.carry(self.mails))


@pytest.fixture(scope="module", params=METHODS)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(request.param, tmp_path_factory.mktemp("asked"))


def test_honest_answers_are_heard(asked: Asked) -> None:
    outcome = asked.bench.server.hear(asked.asker, range(3), asked.honest)
    assert not outcome.refused
    assert len(outcome.accepted) == 3


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore:no client that was asked holds class")
def test_no_hostile_answer_is_heard(asked: Asked) -> None:
    reasons = set()
    for number, chance in enumerate(dice(120, 5000)):
        place = chance.randrange(3)
        arrays, facts = taken_apart(asked.honest[place])
        does = MISCHIEF[number % len(MISCHIEF)]
        does(chance, arrays, facts)
        content = RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(facts)})
        reply = asked.bench.read(content, asked.mails[place])
        outcome = asked.bench.server.hear(asked.asker, [place], [reply])
        assert list(outcome.refused) == [place], f"{does.__name__} {chance} was heard"
        reasons.add(outcome.refused[place].split()[0])
    assert len(reasons) > 5
