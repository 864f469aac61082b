"""The head of a net: a version of it without bias, and where the classifier's weights are."""

from dataclasses import dataclass

from torch import nn

from fedalloy.core.alloy import Mechanism
from fedalloy.core.views import ReplicaView
from fedalloy.core.weights import Weights
from fedalloy.errors import FedAlloyError


@dataclass(frozen=True)
class HeadWithoutBias(Mechanism):
    """Class scores are inner products with the class weights, and nothing else."""

    claims = frozenset({"the head's bias"})
    gives = frozenset({"class weights"})

    def build(self, replica: ReplicaView) -> None:
        head = replica.net.head
        if not isinstance(head, nn.Linear):
            raise FedAlloyError(f"{self} needs a linear head; {replica.model} has {type(head).__name__}")
        bare = nn.Linear(head.in_features, head.out_features, bias=False)
        bare.weight = head.weight
        replica.net.head = bare


def classifier(weights: Weights) -> slice:
    """The span of all that follows the features: the neck, if there is one, and the head."""
    neck, head = weights.span("neck"), weights.span("head")
    return slice(neck.start if neck.stop else head.start, head.stop)
