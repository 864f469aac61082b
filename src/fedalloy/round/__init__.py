"""One round of federated learning: at a client, at the server, between them."""
