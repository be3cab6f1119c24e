"""The server and the batch on a Ray cluster: several processes, with an engine on each node."""
