"""A model of your own: any nn.Module whose last linear layer makes the logits.

From the root of the repository it also runs as

    fedalloy run --model examples.own_model:small_net --rounds 5
"""

from torch import Tensor, nn

import fedalloy as fa
from fedalloy.models import Inputs


class SmallNet(nn.Module):
    """Two small convolutions and a linear layer; FedAlloy takes the last linear layer as the head."""

    def __init__(self, channels: int, side: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.classify = nn.Linear(16 * (side // 2) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.features(x).flatten(1))
        return logits


def small_net(inputs: Inputs) -> nn.Module:
    """Sized by the data: a factory gets the shape of a sample and the number of classes."""
    channels, side, _ = inputs.shape
    return SmallNet(channels, side, inputs.classes)


if __name__ == "__main__":
    fed = fa.federate("digits", clients=5, skew="dirichlet:0.5", seed=0)
    result = fa.train(fed, model="own_model:small_net", method="fedavg", rounds=5, lr=0.1, engine="inline")
    print(f"{result.summary['parameters']:,} parameters, accuracy {result.accuracy:.1%}")
