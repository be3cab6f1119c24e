"""Runs the server, or a batch of requests, on a Ray cluster: in several processes, each with one engine."""
