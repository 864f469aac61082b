"""A data set in memory: training samples first, then test samples, in one tensor."""

from dataclasses import dataclass, field

from torch import Tensor

from fedalloy.nets.base import Inputs, Kind


@dataclass(frozen=True)
class Dataset:
    """Samples `x`, labels `y`; `x[:train]` is for training, the rest is the global test set."""

    name: str
    x: Tensor  # image: uint8 N C H W; vector: float32 N F; tokens: integer N L
    y: Tensor  # int64 N
    train: int
    kind: Kind
    classes: int
    class_names: tuple[str, ...] = ()
    domain: Tensor | None = None  # int64 N: which domain a sample comes from
    domain_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = field(
        default=()
    )  # per channel, of pixels scaled to [0, 1]; or per vector entry
    std: tuple[float, ...] = field(default=())
    vocab: int = 0

    @property
    def inputs(self) -> Inputs:
        """What a net is sized by."""
        return Inputs(self.kind, tuple(self.x.shape[1:]), self.classes, self.vocab)
