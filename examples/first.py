"""The first look from Python: ten clients with skewed labels, one method, one number and a report."""

import fedalloy as fa

fed = fa.federate("digits", clients=10, skew=fa.Dirichlet(0.1), seed=0)
result = fa.train(fed, model="mlp", method=fa.methods.scaffold(), rounds=10, epochs=2, lr=0.1)

print(f"accuracy on the global test set: {result.accuracy:.1%}")
print(f"bytes sent by the clients: {result.summary['bytes_up']:,}")
print(f"report: {result.report('report.html')}")
