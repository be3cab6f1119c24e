"""The memory plan: what an engine will need, computed before anything is loaded, and what this machine has."""
