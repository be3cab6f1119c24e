"""What a model is computed with: one backend per file."""
