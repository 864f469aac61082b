"""The wire: exact bytes, whole round trips, hostile replies, and how replies are folded."""

import dataclasses
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, Slots, alloy
from fedalloy.core.net import Inputs
from fedalloy.core.reduce import Fold
from fedalloy.core.registry import make
from fedalloy.core.state import State
from fedalloy.core.training import Local
from fedalloy.core.views import Info, ServerView
from fedalloy.core.wire import (
    MOST_SAMPLES,
    Items,
    Reply,
    Slot,
    Spec,
    bytes_of,
    diverged,
    dump,
    refusal,
    restore,
)
from fedalloy.errors import FedAlloyError
from fedalloy.round.replica import Replica
from fedalloy.round.replies import in_order
from fedalloy.round.server import Server
from fuzzing import examples

DIGITS = Inputs("image", (1, 8, 8), classes=10)
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
keys = st.text(min_size=1, max_size=12).filter(lambda key: key != "__metadata__")


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits, NaN and infinity included, in any dtype and shape, contiguous or not."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        raw = bytes(byte % 2 for byte in raw)
    value = (
        torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
    )
    return value.mT if len(shape) >= 2 and draw(st.booleans()) else value


def bits(value: Tensor) -> bytes:
    """What `torch.equal` cannot see: NaN equals itself, 0 does not equal -0."""
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert bits(found[key]) == bits(value)


# Serialised form


facts_of = st.dictionaries(
    st.text(max_size=5), st.integers() | st.text(max_size=5) | st.floats(allow_nan=False)
)


@examples(100)
@given(st.dictionaries(keys, tensors(), max_size=5), facts_of)
def test_round_trip(items: Items, facts: dict[str, object]) -> None:
    blob = dump(items, facts)
    found, said = restore(blob)
    assert_same(found, items)
    assert said == facts
    assert dump(dict(reversed(items.items())), dict(reversed(facts.items()))) == blob


@examples(100)
@given(st.dictionaries(keys, tensors(), max_size=5))
def test_bytes_are_those_of_the_tensors(items: Items) -> None:
    assert bytes_of(items) == {key: len(bits(value)) for key, value in items.items()}


def test_views_and_aliases_can_be_dumped() -> None:
    flat = torch.arange(6.0)
    items = {"whole": flat, "again": flat, "part": flat[2:4], "column": flat.view(2, 3)[:, 1]}
    assert_same(restore(dump(items))[0], items)


def test_a_parameter_can_be_dumped() -> None:
    assert_same(restore(dump({"w": torch.nn.Parameter(torch.ones(2))}))[0], {"w": torch.ones(2)})


@examples(300)
@given(st.binary(max_size=200))
def test_noise_is_refused_with_a_sentence(blob: bytes) -> None:
    with pytest.raises(FedAlloyError, match="not a FedAlloy message"):
        restore(blob)


@examples(300)
@given(st.data())
def test_damage_is_refused_or_leaves_a_message(data: st.DataObject) -> None:
    blob = bytearray(dump({"a": torch.arange(4.0), "b": torch.zeros(2, 2)}, {"round": 3}))
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    blob = blob[: data.draw(st.integers(0, len(blob)))] if data.draw(st.booleans()) else blob
    try:
        items, _ = restore(bytes(blob))
    except FedAlloyError:
        return
    assert all(isinstance(value, Tensor) for value in items.values())


@pytest.mark.parametrize("inside", ["{", "[" * 100_000, "\\ud800", "NaN["])
def test_nonsense_facts_are_refused(inside: str) -> None:
    header = b'{"__metadata__":{"facts":"' + inside.encode() + b'"}}'
    with pytest.raises(FedAlloyError, match="not a FedAlloy message"):
        restore(struct.pack("<Q", len(header)) + header)


def test_spec_counts_bytes() -> None:
    assert Spec(Slot(dtype=torch.float64), (3, 4)).bytes == 96
    assert Spec(Slot(dtype=torch.int8), ()).bytes == 1
    assert Spec(Slot(), (0,)).bytes == 0


# Hostile replies


@dataclass(frozen=True)
class _Means(Mechanism):
    """One slot of every kind."""

    @property
    def up(self) -> Slots:
        return {
            "mean": Slot("mean", (2, 3)),
            "uniform": Slot("uniform", (4,)),
            "sum": Slot("sum", (), torch.float64),
            "rows": Slot("class_mean", ("classes", 2), counts="counts"),
            "counts": Slot("sum", ("classes",), torch.int64),
            "all": Slot("all", (2,), torch.int64),
        }

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        my.persistent = {name: value for name, value in got.items() if name != "all"}
        my.persistent |= {f"all{client}": value for client, value in got["all"].items()}


MEANS = alloy("means", _Means())
DECLARED = Replica(MEANS, "mlp(hidden=2)", DIGITS, 0).specs("up")


def reply_of(client: int, seed: int = 0, samples: int | None = None, absent: Sequence[int] = ()) -> Reply:
    """A good reply; `absent` are classes that the client does not hold."""
    dice = torch.Generator().manual_seed(1000 * seed + client)
    counts = torch.randint(1, 9, (10,), generator=dice)
    counts[list(absent)] = 0
    rows = torch.randn(10, 2, generator=dice)
    rows[list(absent)] = 0
    items = {
        "_means.mean": torch.randn(2, 3, generator=dice),
        "_means.uniform": torch.randn(4, generator=dice),
        "_means.sum": torch.randn((), generator=dice, dtype=torch.float64),
        "_means.rows": rows,
        "_means.counts": counts,
        "_means.all": torch.randint(100, (2,), generator=dice),
    }
    return Reply(1, client, items, samples=int(counts.sum()) if samples is None else samples, loss=1.5)


def server_of(method: Alloy = MEANS) -> Server:
    server = Server(method, Replica(method, "mlp(hidden=2)", DIGITS, 0), Info(5, 100), Local(), seed=0)
    server.round = 1
    return server


NUMBERS = [math.nan, math.inf, -math.inf]
FLOATS = [key for key, spec in DECLARED.items() if spec.slot.dtype.is_floating_point]


@st.composite
def hostile(draw: st.DrawFn) -> Reply:
    """A good reply with one thing wrong."""
    reply = reply_of(draw(st.integers(0, 4)), draw(st.integers(0, 9)))
    items = {key: value.clone() for key, value in reply.items.items()}
    key = draw(st.sampled_from(sorted(items)))
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {
            "items": _poisoned(items, draw(st.sampled_from(FLOATS)), draw(st.sampled_from(NUMBERS)), draw)
        },
        lambda: {"items": items | {key: _reshaped(items[key], draw)}},
        lambda: {"items": items | {key: items[key].to(_other_dtype(items[key].dtype, draw))}},
        lambda: {"items": {name: value for name, value in items.items() if name != key}},
        lambda: {"items": items | {draw(keys.filter(lambda name: name not in items)): draw(tensors())}},
        lambda: {
            "items": {draw(st.sampled_from([" ", "x", "share.", "_MEANS."])) + key: items.pop(key), **items}
        },
        lambda: {"items": items | {"_means.counts": _impossible(items["_means.counts"], draw)}},
        lambda: {"samples": draw(st.integers(max_value=0) | st.integers(min_value=MOST_SAMPLES + 1))},
        lambda: {"samples": draw(st.floats() | st.booleans() | st.none() | st.text(max_size=3))},
        lambda: {"loss": draw(st.sampled_from(NUMBERS))},
        lambda: {"items": {}},
    ]
    return dataclasses.replace(reply, **draw(st.sampled_from(kinds))())


def _poisoned(items: Items, key: str, number: float, draw: st.DrawFn) -> Items:
    value = items[key].flatten()
    value[draw(st.integers(0, len(value) - 1))] = number
    return items | {key: value.view(items[key].shape)}


def _reshaped(value: Tensor, draw: st.DrawFn) -> Tensor:
    """A wrong shape: also those that would broadcast or hold as many numbers."""
    first = value.flatten()[0]
    choices = [
        first.clone(),
        first.view(1),
        value.unsqueeze(0),
        value.flatten().repeat(2),
        torch.cat([value.flatten(), first.view(1)]),
        value.flatten()[:0],
        value.mT.contiguous() if value.dim() == 2 else value.unsqueeze(-1),
        value[:1] if value.dim() else value.view(1, 1),
    ]
    return draw(st.sampled_from([choice for choice in choices if choice.shape != value.shape]))


def _other_dtype(dtype: torch.dtype, draw: st.DrawFn) -> torch.dtype:
    return draw(st.sampled_from([other for other in [*DTYPES, torch.complex64] if other != dtype]))


def _impossible(counts: Tensor, draw: st.DrawFn) -> Tensor:
    counts[draw(st.integers(0, 9))] = draw(st.integers(-(2**62), -1) | st.integers(MOST_SAMPLES + 1, 2**62))
    return counts


@examples(600)
@given(hostile())
def test_hostile_replies_are_refused_and_named(bad: Reply) -> None:
    assert refusal(bad, DECLARED, weighed=True)
    good = [reply_of(client) for client in range(5) if client != bad.client]
    alone, both = server_of(), server_of()
    alone.receive([reply.client for reply in good], good)
    outcome = both.receive(range(5), [good[0], bad, *good[1:]])
    assert list(outcome.refused) == [bad.client]
    assert [reply.client for reply in outcome.accepted] == [reply.client for reply in good]
    assert_same(both.state(), alone.state())


@examples(100)
@given(st.integers(0, 4), st.integers(0, 99), st.sampled_from([1, 77, MOST_SAMPLES]))
def test_good_replies_are_accepted(client: int, seed: int, samples: int) -> None:
    assert refusal(reply_of(client, seed, samples), DECLARED, weighed=True) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"samples": -3}, "claims -3 samples"),
        ({"samples": 10**13}, "claims 10000000000000 samples"),
        ({"loss": math.nan}, "its training loss is not finite"),
        ({"items": {}}, "lacks _means.all, _means.counts, _means.mean"),
    ],
)
def test_refusals_say_why(change: dict[str, Any], sentence: str) -> None:
    why = refusal(dataclasses.replace(reply_of(0), **change), DECLARED, weighed=True)
    assert why is not None
    assert why.startswith(sentence)


def test_broadcastable_shapes_are_wrong_shapes() -> None:
    reply = reply_of(0)
    for shape in [(1, 3), (2, 1), (), (1, 2, 3)]:
        bad = dataclasses.replace(reply, items=reply.items | {"_means.mean": torch.zeros(shape)})
        assert refusal(bad, DECLARED, weighed=True) == f"_means.mean has shape {shape}, declared (2, 3)"


def test_finite_numbers_whose_sum_overflows_are_finite() -> None:
    """And infinities that cancel in a sum are not."""
    reply = reply_of(0)
    large = dataclasses.replace(reply, items=reply.items | {"_means.mean": torch.full((2, 3), 3e38)})
    assert refusal(large, DECLARED, weighed=True) is None
    both = torch.tensor([[math.inf, -math.inf, 0.0], [0.0, 0.0, 0.0]])
    bad = dataclasses.replace(reply, items=reply.items | {"_means.mean": both})
    assert refusal(bad, DECLARED, weighed=True) == "_means.mean is not finite"


def test_only_numbers_that_blew_up_count_as_divergence() -> None:
    reply = reply_of(0)
    nan = dataclasses.replace(reply, items=reply.items | {"_means.mean": torch.full((2, 3), math.nan)})
    assert diverged(refusal(nan, DECLARED, weighed=True) or "")
    assert diverged(refusal(dataclasses.replace(reply, loss=math.inf), DECLARED, weighed=True) or "")
    assert not diverged(refusal(dataclasses.replace(reply, samples=0), DECLARED, weighed=True) or "")


def test_samples_are_not_asked_for_where_they_do_not_weigh() -> None:
    assert refusal(dataclasses.replace(reply_of(0), samples=0), DECLARED, weighed=False) is None


def test_a_round_with_nothing_usable_changes_nothing() -> None:
    server = server_of(make("scaffold"))
    before = {key: value.clone() for key, value in server.state().items()}
    outcome = server.receive([0, 1], [Reply(1, 0), Reply(1, 1)])
    assert sorted(outcome.refused) == [0, 1]
    assert not outcome.accepted
    assert_same(server.state(), before)


@pytest.mark.parametrize(
    ("stray", "why"),
    [
        (reply_of(4), "was not asked"),
        (dataclasses.replace(reply_of(0), round=7), "answered round 7"),
        (reply_of(1, seed=5), "answered twice"),
    ],
)
def test_strays_are_refused(stray: Reply, why: str) -> None:
    """Nobody slips in another's reply, an old one, or a second one."""
    asked = [0, 1, 2]
    replies = [reply_of(client) for client in asked if why != "answered round 7" or client != stray.client]
    clean, server = server_of(), server_of()
    clean.receive(asked, replies)
    outcome = server.receive(asked, [*replies, stray])
    assert outcome.refused == {stray.client: why}
    assert_same(server.state(), clean.state())


# Folding


def folded(replies: Sequence[Reply]) -> Mapping[str, Any]:
    fold = Fold(MEANS.pieces[0].up)
    for reply in replies:
        fold.add(bare(reply), float(reply.samples))
    return fold.got()


def bare(reply: Reply) -> Reply:
    """Its items by the names of the slots."""
    items = {key.partition(".")[2]: value for key, value in reply.items.items()}
    return dataclasses.replace(reply, items=items)


def stack(replies: Sequence[Reply], name: str) -> "np.ndarray[Any, np.dtype[Any]]":
    return np.stack([reply.items[f"_means.{name}"].numpy() for reply in replies])


@examples(100)
@given(st.integers(1, 6), st.integers(0, 50), st.sets(st.integers(0, 9), max_size=10))
def test_fold_is_what_numpy_says(clients: int, seed: int, absent: set[int]) -> None:
    replies = [
        reply_of(client, seed, absent=sorted(absent) if client % 2 else ()) for client in range(clients)
    ]
    got = folded(replies)
    samples = np.array([reply.samples for reply in replies], dtype=np.float64)
    if samples.sum() == 0:  # every class absent, one client: nothing to weigh by
        return
    counts = stack(replies, "counts").astype(np.float64)
    assert np.allclose(got["mean"], np.average(stack(replies, "mean"), axis=0, weights=samples), rtol=1e-6)
    assert np.allclose(got["uniform"], stack(replies, "uniform").mean(0), rtol=1e-5, atol=1e-7)
    assert np.allclose(got["sum"], stack(replies, "sum").sum(0), rtol=1e-12)
    assert np.array_equal(got["counts"], counts.sum(0))
    rows = (stack(replies, "rows") * counts[:, :, None]).sum(0) / np.maximum(counts.sum(0), 1)[:, None]
    assert np.allclose(got["rows"], rows, rtol=1e-5, atol=1e-7)
    assert {client: value.tolist() for client, value in got["all"].items()} == {
        reply.client: reply.items["_means.all"].tolist() for reply in replies
    }
    assert {name: (value.dtype, value.shape) for name, value in got.items() if name != "all"} == {
        key.removeprefix("_means."): (spec.slot.dtype, torch.Size(spec.shape))
        for key, spec in DECLARED.items()
        if key != "_means.all"
    }


def test_a_class_nobody_holds_is_told_by_its_count() -> None:
    got = folded([reply_of(client, absent=[3]) for client in range(3)])
    assert int(got["counts"][3]) == 0
    assert not got["rows"][3].any()
    assert torch.isfinite(got["rows"]).all()


def test_a_class_held_by_one_has_that_ones_row() -> None:
    replies = [reply_of(0, absent=[3]), reply_of(1), reply_of(2, absent=[3])]
    assert torch.allclose(folded(replies)["rows"][3], replies[1].items["_means.rows"][3])


def test_replies_are_not_changed_by_folding() -> None:
    replies = [reply_of(client) for client in range(3)]
    folded(replies)
    server_of().receive(range(3), replies)
    for client, reply in enumerate(replies):
        assert_same(reply.items, reply_of(client).items)


@examples(100)
@given(st.permutations(range(5)))
def test_the_order_of_arrival_does_not_matter(order: list[int]) -> None:
    ahead, shuffled = server_of(), server_of()
    ahead.receive(range(5), [reply_of(client) for client in range(5)])
    outcome = shuffled.receive(range(5), [reply_of(client) for client in order])
    assert_same(shuffled.state(), ahead.state())
    assert [reply.client for reply in outcome.accepted] == list(range(5))


def test_order_would_matter_without_sorting() -> None:
    """Else the test above proves nothing."""
    results = set()
    for shift in range(5):
        fold = Fold(MEANS.pieces[0].up)
        for client in range(5):
            value = torch.tensor([1e16, 1.0, -1e16, 3.0, 1e-3][(client + shift) % 5], dtype=torch.float64)
            reply = dataclasses.replace(reply_of(client), items=reply_of(0).items | {"_means.sum": value})
            fold.add(bare(reply), 1.0)
        results.add(float(fold.got()["sum"]))
    assert len(results) > 1


def test_replies_are_passed_on_as_soon_as_possible() -> None:
    asked: list[int] = []

    def arriving() -> Any:
        for client in [2, 0, 1]:
            asked.append(client)
            yield reply_of(client)

    stream = in_order([0, 1, 2], arriving())
    assert next(stream).client == 0
    assert asked == [2, 0]
    assert [reply.client for reply in stream] == [1, 2]


def test_bytes_up_are_those_of_all_replies() -> None:
    replies = [reply_of(client) for client in range(3)]
    bad = dataclasses.replace(reply_of(3), loss=math.nan)
    outcome = server_of().receive(range(4), [*replies, bad])
    expected = {key: 4 * spec.bytes for key, spec in DECLARED.items()} | {"samples": 4 * 8}
    assert outcome.bytes_up == expected
