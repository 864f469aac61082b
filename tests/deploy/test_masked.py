"""Secure aggregation: the server ends with what it would have had, and has seen nobody's update."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from loopback import SMALL, Loopback

from fedalloy.core import registry
from fedalloy.deploy.masked import check_maskable
from fedalloy.deploy.server import serve
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Result

SETTINGS: dict[str, Any] = {
    **SMALL,
    "method": "fedavg",
    "rounds": 2,
    "skew": "dirichlet:0.5",
    "join_limit": 1.0,
    "round_limit": 5.0,
}


def played(room: Path, **changes: Any) -> tuple[Result, Loopback]:
    settings = {**SETTINGS, "run_folder": str(room / "run"), **changes}
    grid = Loopback(settings, room / "state", [{}] * 3)
    return serve(grid, settings), grid


def state(result: Result) -> dict[str, torch.Tensor]:
    return RunFolder(result.folder).checkpoint()[1]


@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox(mu=0.1)", "fedavg(agg_weights=uniform)", "fedetf", "moon", "scaffold"]
)
def test_the_same_model_to_the_step_of_quantisation(tmp_path: Path, method: str) -> None:
    plain, _ = played(tmp_path / "plain", method=method)
    hidden, _ = played(tmp_path / "masked", method=method, masked=True)
    assert all(not line["refused"] for line in hidden.history)
    for key, value in state(plain).items():
        torch.testing.assert_close(state(hidden)[key], value, rtol=0, atol=2e-3)
    assert plain.summary["weights_sha256"] != hidden.summary["weights_sha256"]  # it did go another way


def test_no_update_is_readable(tmp_path: Path) -> None:
    """What a site sends has nothing to do with its update: neither its values nor their order of size."""
    settings = {**SETTINGS, "masked": True, "rounds": 1, "run_folder": str(tmp_path / "run")}
    grid = Loopback(settings, tmp_path / "state", [{}] * 3)
    sent: list[list[bytes]] = []

    def watch(question: Message, answer: Message) -> Message:
        for record in answer.content.array_records.values():
            assert len(record) == 0
        for config in answer.content.config_records.values():
            if "masked_params" in config:
                sent.append(config["masked_params"])  # type: ignore[arg-type]
        return answer

    grid.tamper = watch
    result = serve(grid, settings)
    assert len(sent) == 3
    weights = state(result)["server.weights"].numpy()
    for masked in sent:
        noise = np.load(io.BytesIO(masked[2]), allow_pickle=False).ravel()
        assert noise.size == weights.size
        assert noise.astype(float).std() > 2**28  # spread over all of the modulus, 2^32


def test_a_site_may_drop_out(tmp_path: Path) -> None:
    settings = {**SETTINGS, "masked": True, "run_folder": str(tmp_path / "run")}
    grid = Loopback(settings, tmp_path / "state", [{}] * 3)
    stages: list[str] = []

    def deaf(question: Message) -> bool:
        record = question.content.config_records.get("secaggplus_configs")
        gone = bool(
            record
            and record.get("stage") == "collect_masked_vectors"
            and question.metadata.group_id == "2"
            and question.metadata.dst_node_id == 102
        )
        stages.append(str(record and record.get("stage")))
        return gone

    grid.deaf = deaf
    result = serve(grid, settings)
    why = "did not stay until the end of a masked round"
    assert [line["refused"] for line in result.history] == [[], [{"client": 2, "why": why}]]


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("feddw", "sends .*counts|not summed up"),
        ("fedproto", "not summed up|whole numbers"),
        ("fedpac", "cannot be masked"),
        ("fedsce", "weighs every reply by itself"),
        ("ccvr", "asks clients about the new model"),
    ],
)
def test_methods_that_need_more_than_a_sum_are_refused_by_name(method: str, why: str) -> None:
    with pytest.raises(FedAlloyError, match=why) as error:
        check_maskable(registry.make(method))
    assert registry.make(method).title in str(error.value)
    assert "masked" in str(error.value)


def test_a_masking_site_sends_nothing_in_the_open(tmp_path: Path) -> None:
    settings = {**SETTINGS, "run_folder": str(tmp_path / "run")}
    grid = Loopback(settings, tmp_path / "state", [{"only-masked": True}, {}, {}])
    result = serve(grid, settings)
    (lost,) = result.history[0]["refused"]
    assert lost["client"] == 0
    assert "only by secure aggregation" in lost["why"]
