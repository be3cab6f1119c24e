"""Beyond one process: the server and the batch on a Ray cluster, an engine on each of its nodes."""
