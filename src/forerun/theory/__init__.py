"""What speculative decoding can give, in closed form and by simulation. Needs numpy alone."""
