"""Partitions: laws that hold for every data set, skew and seed."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedalloy.data import (
    IID,
    BalancedDirichlet,
    Dataset,
    Dirichlet,
    Domain,
    Pathological,
    Quantity,
    Skew,
    Split,
    parse_skew,
    partition,
)
from fedalloy.errors import FedAlloyError
from fuzzing import examples


def dataset(train: int, test: int, classes: int, domains: int = 0, seed: int = 0) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (train + test,), generator=draw)
    y[:classes] = torch.arange(classes)
    domain = torch.randint(domains, (train + test,), generator=draw) if domains else None
    names = tuple(f"domain {number}" for number in range(domains))
    x = torch.arange(train + test, dtype=torch.float32)[:, None]
    return Dataset("toy", x, y, train, "vector", classes, domain=domain, domain_names=names)


skews = st.one_of(
    st.just(IID()),
    st.just(Domain()),
    st.builds(Dirichlet, st.floats(1e-300, 1e300)),
    st.builds(Dirichlet, st.floats(1e-3, 10)),
    st.builds(BalancedDirichlet, st.floats(1, 100)),
    st.builds(Quantity, st.floats(1e-3, 10)),
    st.builds(Pathological, st.integers(1, 3)),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Dataset, int, Skew, int]:
    classes = draw(st.integers(3, 7))
    train, test = draw(st.integers(60, 300)), draw(st.integers(0, 80))
    data = dataset(train, test, classes, domains=3, seed=draw(st.integers(0, 50)))
    skew = draw(skews)
    clients = draw(st.integers(3, 4 if isinstance(skew, BalancedDirichlet) else 12))
    return data, clients, skew, draw(st.integers(0, 2**40))


def same(a: Split, b: Split) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in vars(a))


def check_form(data: Dataset, split: Split, clients: int) -> None:
    assert split.clients == clients
    for index, offsets in (
        (split.train_index, split.train_offsets),
        (split.test_index, split.test_offsets),
    ):
        assert index.dtype == offsets.dtype == torch.int64
        assert len(offsets) == clients + 1
        assert offsets[0] == 0
        assert offsets[-1] == len(index)
        assert (offsets.diff() >= 0).all()
    dealt = torch.cat([split.train_index, split.test_index])
    assert len(dealt.tolist()) == len(set(dealt.tolist()))
    assert torch.equal(torch.cat([split.train(client) for client in range(clients)]), split.train_index)
    assert torch.equal(torch.cat([split.test(client) for client in range(clients)]), split.test_index)
    counts = split.counts(data)
    assert torch.equal(counts.sum(1), split.train_offsets.diff())
    assert torch.equal(counts.sum(0), data.y[split.train_index].bincount(minlength=data.classes))
    owner = split.owner_of_test
    for client in range(clients):
        mine = set(split.test(client).tolist()) & set(split.global_test.tolist())
        assert set(split.global_test[owner == client].tolist()) == mine


@examples(120)
@given(cases())
def test_laws_with_the_global_test_set_dealt(case: tuple[Dataset, int, Skew, int]) -> None:
    data, clients, skew, seed = case
    split = partition(data, clients, skew, seed)
    check_form(data, split, clients)
    assert same(split, partition(data, clients, skew, seed))
    assert split.global_test.tolist() == list(range(data.train, len(data.y)))
    if not isinstance(skew, Pathological) or clients * skew.classes_per_client >= data.classes:
        assert split.train_index.sort().values.tolist() == list(range(data.train))
    key, groups = data.y, data.classes
    if isinstance(skew, Domain) and data.domain is not None:
        key, groups = key + groups * data.domain, groups * 3
    for group in range(groups):
        held = torch.tensor([(key[split.train(client)] == group).sum() for client in range(clients)])
        got = torch.tensor([(key[split.test(client)] == group).sum() for client in range(clients)])
        size = int((key[data.train :] == group).sum())
        if held.sum() == 0:
            assert got.sum() == 0
        else:
            assert got.sum() == size
            assert ((got - size * held / held.sum()).abs() < 1).all()
            assert (got[held == 0] == 0).all()


@examples(80)
@given(cases(), st.floats(0.01, 0.99))
def test_laws_with_a_share_held_out(case: tuple[Dataset, int, Skew, int], share: float) -> None:
    data, clients, skew, seed = case
    split = partition(data, clients, skew, seed, share)
    check_form(data, split, clients)
    assert same(split, partition(data, clients, skew, seed, share))
    train, test = split.train_offsets.diff(), split.test_offsets.diff()
    assert (train[train + test > 0] > 0).all()
    assert ((test - share * (train + test)).abs() <= 1).all()
    dealt = torch.cat([split.train_index, split.test_index]).sort().values.tolist()
    if isinstance(skew, Domain):
        assert dealt == list(range(len(data.y)))
        assert torch.equal(split.global_test, split.test_index.sort().values)
        assert (split.owner_of_test >= 0).all()
    else:
        assert dealt == [place for place in dealt if place < data.train]
        assert split.global_test.tolist() == list(range(data.train, len(data.y)))
        assert (split.owner_of_test == -1).all()


@examples(60)
@given(st.integers(2, 12), st.integers(1, 12), st.integers(1, 30), st.integers(0, 1000))
def test_pathological(classes: int, wanted: int, clients: int, seed: int) -> None:
    assume(wanted <= classes)
    data = dataset(1500, 300, classes, seed=seed)
    split = partition(data, clients, Pathological(wanted), seed)
    counts = split.counts(data)
    assert ((counts > 0).sum(1) == wanted).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    if clients * wanted >= classes:
        assert holders.min() >= 1
        assert len(split.train_index) == 1500
    for column in counts.T:
        held = column[column > 0]
        assert len(held) == 0 or held.max() - held.min() <= 1


def test_pathological_with_a_rare_class() -> None:
    data = dataset(300, 60, 3)
    data.y[:] = torch.arange(360) % 2
    data.y[:4] = 2
    split = partition(data, 12, Pathological(2), 0)
    assert ((split.counts(data) > 0).sum(1) == 2).all()


@pytest.mark.parametrize("skew", [IID(), Domain()])
def test_equal_sizes(skew: Skew) -> None:
    data = dataset(1000, 100, 5, domains=2)
    split = partition(data, 8, skew, 3)
    assert data.domain is not None
    for domain in range(2 if isinstance(skew, Domain) else 1):
        sizes = split.train_offsets.diff()[domain :: 2 if isinstance(skew, Domain) else 1]
        assert sizes.max() - sizes.min() <= 1
    if isinstance(skew, Domain):
        for client in range(8):
            assert (data.domain[split.train(client)] == client % 2).all()
            assert (data.domain[split.test(client)] == client % 2).all()


def test_dirichlet_is_harsher_for_smaller_alpha_and_follows_its_law() -> None:
    data = dataset(20_000, 0, 10)
    spread = []
    for alpha in (0.001, 0.1, 1.0, 100.0):
        counts = partition(data, 20, Dirichlet(alpha), 0).counts(data)
        share = counts / counts.sum(0)
        spread.append(float(share.square().sum(0).mean()))  # E[sum p^2] = (alpha + 1) / (20 alpha + 1)
    assert spread == sorted(spread, reverse=True)
    for alpha, found in zip((0.1, 1.0, 100.0), spread[1:], strict=True):
        assert found == pytest.approx((alpha + 1) / (20 * alpha + 1), rel=0.35)


@pytest.mark.parametrize(("alpha", "clients"), [(1e-6, 4), (0.05, 10), (0.5, 10)])
def test_a_balanced_deal_fills_nobody_who_has_enough(alpha: float, clients: int) -> None:
    data = dataset(20_000, 0, 10)
    counts = partition(data, clients, BalancedDirichlet(alpha), 0).counts(data)
    full = counts.cumsum(1) - counts >= 20_000 / clients
    assert (counts[full] <= 1).all()  # a cut may be off by one sample
    assert (counts[full] == 0).any()
    assert counts.sum(1).min() >= 10
    assert counts.sum() == 20_000
    plain = partition(data, clients, Dirichlet(alpha), 0).counts(data)
    assert counts.sum(1).double().std() < plain.sum(1).double().std()


def test_a_balanced_deal_leaves_every_first_class_as_dirichlet_does() -> None:
    """Nobody is full before the first class, so its shares follow the same law."""
    data = dataset(20_000, 0, 10)
    found = [partition(data, 20, BalancedDirichlet(0.5), seed).counts(data)[:, 0] for seed in range(20)]
    spread = [float((column / column.sum()).square().sum()) for column in found]
    assert sum(spread) / 20 == pytest.approx(1.5 / 11, rel=0.25)  # (alpha + 1) / (20 alpha + 1)


def test_a_balanced_deal_that_cannot_be_is_refused() -> None:
    sentence = "some client always held fewer than 10 samples; .* type dirichlet:0.1"
    with pytest.raises(FedAlloyError, match=sentence):
        partition(dataset(100, 0, 3), 20, BalancedDirichlet(0.1), 0)


def test_quantity_skews_sizes_and_not_classes() -> None:
    data = dataset(20_000, 0, 4)
    counts = partition(data, 10, Quantity(0.5), 1).counts(data)
    sizes = counts.sum(1)
    assert sizes.max() > 4 * sizes.min()
    large = counts[sizes > 1000]
    assert (large / large.sum(1, keepdim=True) - 0.25).abs().max() < 0.05


def test_seeds_differ() -> None:
    data = dataset(300, 60, 4)
    for skew in (IID(), Dirichlet(0.5), BalancedDirichlet(0.5), Pathological(2), Quantity(1)):
        assert not same(partition(data, 5, skew, 0), partition(data, 5, skew, 1))


@pytest.mark.parametrize(
    "text", ["iid", "dirichlet:0.01", "dirichlet:0.001", "pathological:2", "quantity:0.5"]
)
def test_ten_thousand_clients(text: str) -> None:
    data = dataset(60_000, 10_000, 10)
    split = partition(data, 10_000, parse_skew(text), 0)
    assert split.train_index.sort().values.tolist() == list(range(60_000))
    assert (split.owner_of_test >= 0).all()


def test_views() -> None:
    split = partition(dataset(100, 20, 3), 4, IID(), 0)
    assert split.train(2).untyped_storage().data_ptr() == split.train_index.untyped_storage().data_ptr()
    assert split.test(3).untyped_storage().data_ptr() == split.test_index.untyped_storage().data_ptr()


# --- text


@given(skews)
def test_text_and_back(skew: Skew) -> None:
    number = getattr(skew, "alpha", 1.0)
    assume(1e-6 <= number <= 1e6)  # what can be typed
    assert parse_skew(str(skew)) == skew


@pytest.mark.parametrize(
    "text",
    [
        "iid",
        "domain",
        "dirichlet:0.1",
        "dirichlet:1",
        "balanced-dirichlet:0.1",
        "pathological:2",
        "quantity:0.5",
    ],
)
def test_text_is_kept(text: str) -> None:
    assert str(parse_skew(text)) == text
    assert parse_skew(f" {text.upper()} ") == parse_skew(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dirichlt:0.1", "did you mean 'dirichlet'?"),
        ("zzz", "there are: balanced-dirichlet, dirichlet, domain, iid, pathological, quantity"),
        ("dirichlet", "such as dirichlet:0.1"),
        ("balanced-dirichlet", "such as balanced-dirichlet:0.1"),
        ("balanced-dirichlet:0", "above 0"),
        ("dirichlet:x", "such as dirichlet:0.1"),
        ("dirichlet:-1", "above 0"),
        ("dirichlet:nan", "above 0"),
        ("dirichlet:1e999", "from 1e-06 to 1000000"),
        ("pathological:0", "at least one class"),
        ("pathological:1.5", "whole number"),
        ("quantity:0", "above 0"),
        ("iid:3", "takes no number"),
        ("domain:", "takes no number"),
    ],
)
def test_bad_text(text: str, sentence: str) -> None:
    with pytest.raises(FedAlloyError) as caught:
        parse_skew(text)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("clients", "skew", "share", "sentence"),
    [
        (0, IID(), 0.0, "at least 1"),
        (101, IID(), 0.0, "101 clients but only 100 samples"),
        (4, IID(), 1.0, "out of range"),
        (4, IID(), -0.1, "out of range"),
        (4, IID(), float("nan"), "out of range"),
        (4, Pathological(4), 0.0, "has 3 classes"),
        (60, Pathological(2), 0.0, "too few samples"),
        (4, Domain(), 0.0, "has no domains"),
    ],
)
def test_bad_arguments(clients: int, skew: Skew, share: float, sentence: str) -> None:
    with pytest.raises(FedAlloyError, match=sentence):
        partition(dataset(100, 20, 3), clients, skew, 0, share)


def test_fewer_clients_than_domains() -> None:
    with pytest.raises(FedAlloyError, match="2 clients for 3 domains"):
        partition(dataset(100, 20, 3, domains=3), 2, Domain(), 0)
