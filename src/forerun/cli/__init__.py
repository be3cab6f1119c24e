"""The command `forerun`: flags, inputs, and what a terminal shows. Only commands that compute import torch."""
