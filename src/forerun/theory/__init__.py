"""What speculative decoding can gain, in closed form and by simulation. The room needs numpy alone."""
