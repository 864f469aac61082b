"""A validation split: training samples in the place of test samples that nobody may look at."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fedalloy as fa
from fedalloy.data.federation import Federation
from fuzzing import examples
from terminal import QUICK, fedalloy, history, save_npz, strict_json

SKEWS = ("iid", "dirichlet:0.1", "pathological:2", "quantity:0.5", "domain")


def dataset(train: int = 400, test: int = 100) -> fa.Dataset:
    """Every sample is its own number, so that it is known again wherever it goes."""
    numbers = torch.arange(train + test)
    x = torch.stack([numbers, numbers], 1).float()
    return fa.Dataset(
        "toy", x, numbers % 4, train, "vector", 4, domain=numbers % 3, domain_names=("a", "b", "c")
    )


def numbers(federation: Federation, index: torch.Tensor) -> set[int]:
    return set(federation.dataset.x[index, 0].int().tolist())


def trained_on(federation: Federation) -> set[int]:
    return numbers(federation, federation.split.train_index)


def scored_on(federation: Federation) -> set[int]:
    """Everything that any model is tried on."""
    return numbers(federation, torch.cat([federation.scored, federation.split.test_index]))


class TestHoldingOut:
    @pytest.mark.parametrize("skew", SKEWS)
    @pytest.mark.parametrize("limit", [None, 200])
    def test_a_share_of_the_training_samples_and_none_of_the_test_set(
        self, skew: str, limit: int | None
    ) -> None:
        federation = fa.federate(dataset(), clients=6, skew=skew, limit=limit, validation=0.25)
        train, held = trained_on(federation), scored_on(federation)
        assert len(held) == (limit or 400) // 4
        assert len(train) + len(held) == (limit or 400)
        assert not train & held
        assert max(train | held) < 400  # the test set is not even there any more
        assert held == numbers(federation, federation.split.global_test)
        if limit:
            whole = fa.federate(dataset(), clients=6, skew=skew, limit=limit)
            assert train | held == trained_on(whole)

    @examples(40)
    @given(st.sampled_from(SKEWS), st.floats(0.05, 0.9), st.floats(0.05, 0.9), st.integers(0, 99))
    @example("iid", 0.875, 0.0625, 0)  # nobody has enough to hold a sample out
    def test_what_clients_keep_for_testing_is_not_looked_at_either(
        self, skew: str, test_share: float, share: float, seed: int
    ) -> None:
        def dealt(validation: float) -> Federation:
            return fa.federate(
                dataset(), clients=6, skew=skew, seed=seed, test_share=test_share, validation=validation
            )

        real = dealt(0)
        wanted = (real.sizes * share).round().minimum(real.sizes - 1)
        if not bool((wanted > 0).any()):
            with pytest.raises(fa.FedAlloyError, match="less than a sample of each client"):
                dealt(share)
            return
        ours = dealt(share)
        for client in range(6):
            train, held = (
                numbers(ours, part) for part in (ours.split.train(client), ours.split.test(client))
            )
            assert not train & held
            assert train | held == numbers(real, real.split.train(client))
            assert len(held) == pytest.approx(share * len(train | held), abs=1)
        assert not scored_on(ours) & scored_on(real)
        assert max(scored_on(ours) | trained_on(ours)) < 400 or skew == "domain"

    def test_seeds_hold_out_other_samples_and_the_same_seed_the_same(self) -> None:
        held = [
            scored_on(fa.federate(dataset(), clients=4, skew="iid", seed=seed, validation=0.2))
            for seed in (0, 0, 1)
        ]
        assert held[0] == held[1] != held[2]

    def test_the_skew_of_the_clients_does_not_matter_to_what_is_held_out(self) -> None:
        held = [scored_on(fa.federate(dataset(), clients=4, skew=skew, validation=0.2)) for skew in SKEWS]
        assert all(samples == held[0] for samples in held)

    @pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
    def test_a_share_out_of_range(self, share: float) -> None:
        with pytest.raises(fa.FedAlloyError, match="is out of range; expected 0 up to, but below, 1"):
            fa.federate(dataset(), validation=share)

    @pytest.mark.parametrize("share", [0.001, 0.999])
    def test_a_share_that_leaves_nothing(self, share: float) -> None:
        with pytest.raises(fa.FedAlloyError, match="leaves some on both sides"):
            fa.federate(dataset(), validation=share)

    def test_a_share_of_each_client_that_is_nothing(self) -> None:
        with pytest.raises(fa.FedAlloyError, match="less than a sample of each client"):
            fa.federate(dataset(), skew="iid", test_share=0.5, validation=0.001)


class TestRuns:
    def test_the_same_for_every_method_and_number_of_workers(self, tmp_path: Path) -> None:
        flags = ("--clients", "4", "--rounds", "1", "--validation", "0.25", "--eval-every", "1")
        ways = {
            "inline": ("--engine", "inline"),
            "two": ("--workers", "2"),
            "local": ("--engine", "inline", "--method", "local"),
        }
        for name, way in ways.items():
            assert fedalloy("run", *flags, *way, "--out", str(tmp_path / name)).code == 0
        dealt = {(tmp_path / name / "partition.json").read_text() for name in ways}
        assert len(dealt) == 1
        counts = strict_json(dealt.pop())["counts"]
        assert sum(map(sum, counts)) == 1438 - round(1438 * 0.25)
        inline, two = (history(tmp_path / name)[0]["metrics"] for name in ("inline", "two"))
        assert inline == two
        assert "validation = 0.25" in (tmp_path / "two/config.toml").read_text()

    @pytest.mark.parametrize("method", ["fedavg", "local"])
    def test_another_test_set_makes_no_difference(self, tmp_path: Path, method: str) -> None:
        dice = np.random.default_rng(0)
        pixels = dice.integers(0, 256, (120, 8, 8), np.uint8)
        arrays: dict[str, Any] = {"x_train": pixels, "y_train": np.arange(120) % 4}
        found = []
        for number, tests in enumerate((8, 40)):
            x_test = dice.integers(0, 256, (tests, 8, 8), np.uint8)
            data = {**arrays, "x_test": x_test, "y_test": np.arange(tests) % 4}
            root = save_npz(tmp_path / f"{number}/mine.npz", data).parent
            flags = ("--data", "mine", "--data-root", str(root), "--method", method, "--skew", "iid")
            out = root / "run"
            assert fedalloy("run", *QUICK, *flags, "--validation", "0.2", "--out", str(out)).code == 0
            found.append([line["metrics"] for line in history(out)])
        assert found[0] == found[1]

    def test_a_resume_with_another_share_is_refused(self, tmp_path: Path) -> None:
        place = str(tmp_path / "run")
        assert fedalloy("run", *QUICK, "--validation", "0.25", "--out", place).code == 0
        said = fedalloy("run", "--resume", place, "--validation", "0.5")
        assert (said.code, "--validation 0.25 instead of 0.5" in said.err) == (2, True)

    def test_training_cannot_change_the_share_of_a_federation(self) -> None:
        federation = fa.federate("digits", clients=4, validation=0.25)
        assert federation.origin["validation"] == 0.25
        with pytest.raises(fa.FedAlloyError, match="validation belong to the federation"):
            fa.train(federation, validation=0.5)

    def test_a_share_of_everything_is_refused_by_its_flag(self) -> None:
        said = fedalloy("run", "--validation", "1")
        assert "--validation must be a number of at least 0 and below 1, not 1" in said.err
