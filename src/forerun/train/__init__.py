"""Trains draft models, and heads that draft from a target's hidden states, mostly on texts that the target wrote."""
