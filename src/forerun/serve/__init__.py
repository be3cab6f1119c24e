"""The HTTP server with its APIs, and `forerun batch`, which answers a file of requests."""
