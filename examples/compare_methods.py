"""Compare methods from Python: one federation, so every method gets the same clients, weights and batches."""

import fedalloy as fa

METHODS = ["fedavg", "fedprox(mu=0.1)", "scaffold", "scaffold+prox(mu=0.1)"]

fed = fa.federate("digits", clients=10, skew="dirichlet:0.1", seed=0)
print(f"{'method':26} {'accuracy':>8} {'worst client':>12} {'sent up':>10}")
for method in METHODS:
    result = fa.train(fed, model="mlp", method=method, rounds=6, epochs=2, lr=0.1, engine="inline")
    clients = [share for share in result.history[-1]["metrics"]["per_client"] if share is not None]
    sent = result.summary["bytes_up"] / 2**20
    print(f"{method:26} {result.accuracy:8.1%} {min(clients):12.1%} {sent:6.2f} MiB")
