"""The gains of speculative decoding, in closed form and by simulation. The room needs numpy alone."""
