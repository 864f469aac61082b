"""The minimum of a quadratic form over the simplex, against every face and against random points."""

import itertools

import pytest
import torch
from torch import Tensor

from fedalloy.mechanisms.simplex import simplex_minimum


def drawn(n: int, rank: int, seed: int, own: float = 1.0) -> Tensor:
    """A Gram matrix of some rank plus a diagonal."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, rank, generator=draw, dtype=torch.float64)
    return rows @ rows.T + own * torch.rand(n, generator=draw, dtype=torch.float64).diag()


def value(P: Tensor, a: Tensor) -> float:
    return float(a @ P @ a)


def by_faces(P: Tensor) -> float:
    """The least value over all faces of the simplex, each solved without regard to signs."""
    best, n = float("inf"), len(P)
    for size in range(1, n + 1):
        for face in map(list, itertools.combinations(range(n), size)):
            x = torch.linalg.solve(P[face][:, face], torch.ones(size, dtype=torch.float64))
            b = x / x.sum()
            if bool((b >= 0).all()):
                best = min(best, value(P[face][:, face], b))
    return best


def on_the_simplex(a: Tensor) -> None:
    assert a.dtype == torch.float64
    assert bool((a >= 0).all())
    assert float(a.sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_no_face_has_less(seed: int) -> None:
    P = drawn(7, 3, seed)
    a = simplex_minimum(P)
    on_the_simplex(a)
    assert value(P, a) == pytest.approx(by_faces(P), rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 40, 150])
@pytest.mark.parametrize("own", [1e-6, 1.0, 1e3])
def test_no_coordinate_promises_less(n: int, own: float) -> None:
    """The optimality condition: no slope lies below the value."""
    P = drawn(n, 5, n, own)
    a = simplex_minimum(P)
    on_the_simplex(a)
    assert float((P @ a).min()) >= value(P, a) - 1e-10 * float(P.diagonal().max())
    assert value(P, a) <= min(float(P.diagonal().min()), float(P.mean())) + 1e-12


def test_scale_does_not_matter() -> None:
    P = drawn(6, 2, 0)
    for scale in (1e-20, 1e20):
        assert torch.allclose(simplex_minimum(scale * P), simplex_minimum(P), atol=1e-9)


def test_what_cannot_be_told_apart_weighs_the_same() -> None:
    even = torch.full((5,), 0.2, dtype=torch.float64)
    for P in (torch.zeros(5, 5), torch.ones(5, 5), torch.eye(5)):
        assert torch.allclose(simplex_minimum(P.double()), even, atol=1e-9)


def test_a_semi_definite_form() -> None:
    """Two points that are the same, and a mean of others that is zero: no error, and the least value."""
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    a = simplex_minimum(rows @ rows.T)
    on_the_simplex(a)
    assert value(rows @ rows.T, a) < 1e-10


def test_rounding_below_zero_is_borne() -> None:
    P = drawn(30, 3, 1, own=0.0) - 1e-13 * torch.eye(30, dtype=torch.float64)
    a = simplex_minimum(P)
    on_the_simplex(a)
    assert value(P, a) < 1e-8


@pytest.mark.parametrize("seed", range(10))
def test_noise_gives_a_combination_all_the_same(seed: int) -> None:
    noise = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    on_the_simplex(simplex_minimum(1e-30 * (noise + noise.T + 2 * torch.eye(6))))
