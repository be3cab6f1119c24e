"""What an engine needs in memory before anything is loaded, and what this machine has."""
