"""What a federated method is made of; it knows no method."""
