"""FedPer: base layers are averaged, the last layers stay with each client; both are trained jointly.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers". 2019, arXiv 1912.00818.
"""

from typing import Literal

from fedalloy.core.alloy import Alloy, alloy
from fedalloy.core.parameters import Count
from fedalloy.core.registry import recipe
from fedalloy.mechanisms.as_trained import AsTrained
from fedalloy.mechanisms.share import Share


@recipe("FedPer", family="personal", paper="Arivazhagan et al., 2019, arXiv 1912.00818")
def fedper(num_personal_layers: Count = 1, eval_body: Literal["averaged", "own"] = "averaged") -> Alloy:
    # Algorithm 1: (theta, phi_k) <- SGD on (theta, phi_k), nothing frozen; theta <- sum_k p_k theta_k.
    # What is not shared, phi_k with its running statistics, stays where it is by itself.
    base = f":-{num_personal_layers}" if num_personal_layers else ""
    return alloy("FedPer", Share(part=base), *([AsTrained()] if eval_body == "own" else []))
