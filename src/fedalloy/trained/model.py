"""A trained net with its preprocessing: samples as you have them go in, class probabilities come out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedalloy.core.net import Net
from fedalloy.core.views import EVAL_BATCH
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.round.runtime import tiny_is_zero
from fedalloy.trained.card import Card
from fedalloy.trained.program import Program
from fedalloy.trained.samples import stored
from fedalloy.trained.write import write


@dataclass(frozen=True)
class Prediction:
    """What a model says of one sample."""

    label: int
    name: str  # of the class
    probability: float
    probabilities: tuple[float, ...]  # of all classes


class Model(nn.Module):
    """A trained model, ready to use; a plain `nn.Module` in eval mode.

    Samples may be one or many: images as H W C, C H W or with N in front (uint8, or float in [0, 1]), vectors, rows of
    word numbers, texts.

    >>> import fedalloy as fa
    >>> fed = fa.federate("digits", clients=2, skew="iid")
    >>> model = fa.train(fed, rounds=1, engine="inline").model
    >>> model(fed.dataset.x[:5]).shape
    torch.Size([5, 10])
    >>> len(model.predict(fed.dataset.x[0])[0].probabilities)
    10
    """

    def __init__(self, net: Net, card: Card) -> None:
        super().__init__()
        self.program = Program(net, card.preprocessing)
        self.card = card
        self.eval()

    @property
    def net(self) -> Net:
        """The net alone, which reads prepared samples."""
        return self.program.net

    @property
    def preprocessing(self) -> Preprocessing:
        return self.card.preprocessing

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes, by number where they have no names."""
        return self.card.class_names

    def forward(self, samples: Any) -> Tensor:
        """Probabilities, a row for each sample."""
        return self._over(samples).softmax(1)

    def predict(self, samples: Any) -> list[Prediction]:
        """Of each sample the most probable class, its probability, and those of all classes."""
        logits, names = self._over(samples), self.class_names
        labels, rows = logits.argmax(1).tolist(), logits.softmax(1).tolist()
        return [
            Prediction(label, names[label], row[label], tuple(row))
            for label, row in zip(labels, rows, strict=True)
        ]

    def save(self, path: str | Path) -> Path:
        """Write `.safetensors`, `.pt2` or `.onnx`."""
        return write(self.program, self.card, Path(path))

    def _over(self, samples: Any) -> Tensor:
        """Logits, in the batches of an evaluation: the same bits."""
        x = stored(samples, self.preprocessing)
        with torch.inference_mode(), tiny_is_zero():
            found: Sequence[Tensor] = [self.program.logits(batch) for batch in torch.split(x, EVAL_BATCH)]
            return torch.cat(list(found)) if len(x) else torch.empty(0, self.preprocessing.classes)
