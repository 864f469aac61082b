"""FedAlloy in a Flower federation: Flower moves messages between organisations, FedAlloy brings the method.

`records` is the form of mail and replies on Flower's wire, `site` answers mail where the data are, `worker` keeps a
site's process alive between messages, `post` is the engine that carries mail over Flower's grid, `server` runs a whole
training, `deploy` and `cli` start and stop the processes of a federation.
"""
