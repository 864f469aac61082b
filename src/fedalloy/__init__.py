"""FedAlloy: heterogeneous federated learning, every method an alloy of small mechanisms."""

__version__ = "0.1.0"
