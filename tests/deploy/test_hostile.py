"""Replies that no honest site would send: every one is refused by name, none is folded, none crashes the server."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from mischief import MISCHIEF, WITHOUT_ARRAYS, Bench, array, taken_apart
from settings import ROWS

from fedalloy.core.wire import Mail
from fedalloy.deploy.records import FACTS, ITEMS, reply_record
from fuzzing import FUZZING, dice

FEW = ("fedavg", "scaffold", "feddw(mu=1)", "fedsce(p=1, mu=0.1)", "fedpac", "ssf(ratio=0.5)")
METHODS = (
    [(row.method, row.models[-1]) for row in ROWS] if FUZZING else [(name, "mlp(hidden=4)") for name in FEW]
)
CASES_EACH = 400


@pytest.fixture(scope="module", params=METHODS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    method, model = request.param
    return Bench(method, tmp_path_factory.mktemp("hostile"), model=model)


def generated(bench: Bench) -> Iterator[tuple[str, RecordDict, Mail]]:
    for number, chance in enumerate(dice(CASES_EACH, CASES_EACH)):
        place = chance.randrange(3)
        arrays, facts = taken_apart(bench.honest[place])
        kinds = MISCHIEF if arrays else WITHOUT_ARRAYS
        does = kinds[number % len(kinds)]
        does(chance, arrays, facts)
        content = RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(facts)})
        yield f"{does.__name__} {chance}", content, bench.mails[place]


def test_honest_replies_are_read_as_they_were_sent(bench: Bench) -> None:
    """Else refusing would prove nothing."""
    for reply, mail in zip(bench.honest, bench.mails, strict=True):
        read = bench.read(reply_record(reply), mail)
        assert not read.error
        assert read.items.keys() == reply.items.keys()
        assert all(torch.equal(read.items[key], value) for key, value in reply.items.items())


@pytest.mark.fuzz
def test_no_hostile_reply_is_taken(bench: Bench) -> None:
    reasons = set()
    for name, content, mail in generated(bench):
        why = bench.judge(content, mail)
        assert why, f"{name} was taken"
        reasons.add(why.split()[0])
    assert len(reasons) > 4


def test_two_thousand_cases() -> None:
    assert CASES_EACH * len(METHODS) >= 2000


def test_a_number_of_samples_that_nobody_has(bench: Bench) -> None:
    for samples in (-1, 10**13, 2**62):
        arrays, facts = taken_apart(bench.honest[0])
        facts["samples"] = samples
        content = RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(facts)})
        assert bench.judge(content, bench.mails[0]) == f"claims {samples} samples"


def test_too_much_is_refused_before_it_is_unpacked(bench: Bench) -> None:
    arrays, facts = taken_apart(bench.honest[0])
    bench.post.most_bytes, most = 1000, bench.post.most_bytes
    arrays["big"] = array(np.zeros(1000))
    content = RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(facts)})
    why = bench.judge(content, bench.mails[0])
    bench.post.most_bytes = most
    assert why is not None
    assert "bytes; at most 1,000 are expected" in why


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({FACTS: ConfigRecord({"client": 0})}),
        RecordDict({ITEMS: MetricRecord({"a": 1}), FACTS: ConfigRecord({})}),
        RecordDict({ITEMS: ArrayRecord(), FACTS: MetricRecord({"client": 0})}),
        RecordDict({"more": ArrayRecord(), ITEMS: ArrayRecord(), FACTS: ConfigRecord({"client": 0})}),
    ],
)
def test_records_of_another_kind(bench: Bench, content: RecordDict) -> None:
    assert bench.judge(content, bench.mails[0])


def test_counts_that_cannot_be(tmp_path: Path) -> None:
    """Class counts weigh rows: negative, absurd or contradictory ones are refused."""
    bench = Bench("feddw(mu=1)", tmp_path)
    key = next(key for key in bench.honest[0].items if key.endswith("counts"))
    for change in (-1, 10**14):
        arrays, facts = taken_apart(bench.honest[0])
        counts = arrays[key].numpy().copy()
        counts[0] = change
        arrays[key] = array(counts)
        content = RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(facts)})
        assert "impossible counts" in str(bench.judge(content, bench.mails[0]))
