"""Fine-tuning before an evaluation: on a copy, with the rate of the round, and without a trace."""

from pathlib import Path

import pytest
import torch
from laboratory import BATCHNORM, Lab, digits, far, run

from fedalloy.core.registry import make
from fedalloy.core.state import Phase

PARTICIPANTS = ([0, 1, 5], [0, 1])


@pytest.mark.parametrize("part", ["", "-1:", ":-1"])
@pytest.mark.parametrize("lr", [None, 0.03])
def test_it_is_plain_training_of_the_part(part: str, lr: float | None) -> None:
    """A fresh optimiser, the rate of the latest round unless another is given, batches of its own."""
    text = f"fedavg+finetune(epochs=2, lr={lr}, part='{part}')"
    lab = Lab(make(text), digits(), BATCHNORM, lr=0.1, lr_decay=0.5, momentum=0.9, weight_decay=0.01)
    plain = Lab(make("fedavg"), digits(), BATCHNORM, lr=0.1, lr_decay=0.5, momentum=0.9, weight_decay=0.01)
    for each in (lab, plain):
        each.rounds(*PARTICIPANTS)
    assert torch.equal(lab.weights, plain.weights)
    by_hand = plain.tested(3)
    by_hand.fit("finetune", Phase(2, part, lr=0.05 if lr is None else lr))
    expected = by_hand.weights.flat.clone(), by_hand.weights.buffers.clone()
    tuned = lab.tested(3)
    assert torch.equal(tuned.weights.flat, expected[0])
    assert torch.equal(tuned.weights.buffers, expected[1])
    span = tuned.weights.span(part)
    moved = tuned.weights.flat != lab.weights
    assert bool(moved[span].any())
    assert not moved[: span.start].any()
    assert not moved[span.stop :].any()


def test_epochs_are_epochs_whatever_local_work_is_counted_in() -> None:
    ends = []
    for steps in (None, 1):
        lab = Lab(make("fedavg+finetune(epochs=3)"), digits(), lr=0.1, steps=steps)
        lab.server.round = 1
        ends.append(lab.tested(0).weights.flat.clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("text", ["fedavg+finetune+astrained", "fedavg+astrained+finetune"])
def test_it_comes_last(text: str) -> None:
    lab = Lab(make(text), digits(), lr=0.1).rounds([0, 1], [1])
    kept = lab.keeps[0]["astrained.weights"].clone()
    client = lab.tested(0)
    assert far(client.weights.flat, kept) > 1e-3  # tuned, not put back
    again = Lab(make("fedavg+astrained"), digits(), lr=0.1).rounds([0, 1], [1]).tested(0)
    again.fit("finetune", Phase(5))
    expected = again.weights.flat.clone()
    assert torch.equal(lab.tested(0).weights.flat, expected)


def test_nothing_flows_back(tmp_path: Path) -> None:
    """The server's weights and private state are those of a run without it; personal accuracies are added."""
    plain, tuned = (
        run(tmp_path / text, digits(), text, rounds=3, lr=0.1) for text in ("scaffold", "scaffold+finetune")
    )
    for key in ("weights_sha256", "private_sha256"):
        assert plain.summary[key] == tuned.summary[key]
    for before, after in zip(plain.history, tuned.history, strict=True):
        assert after["metrics"]["global_acc"] == before["metrics"]["global_acc"]
        assert "personal_local_acc" in after["metrics"]
        assert "personal_local_acc" not in before["metrics"]
