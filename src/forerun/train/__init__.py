"""Training of draft models, and of heads that draft from a target's hidden states, mostly on texts of the target."""
