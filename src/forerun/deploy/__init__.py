"""More than one process: the server and the batch on a Ray cluster, with an engine on each of its nodes."""
