"""Training of draft models and of heads, on texts that their target wrote."""
