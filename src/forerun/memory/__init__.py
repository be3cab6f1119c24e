"""The memory that an engine will need, computed before anything is loaded, and the memory that this machine has."""
