"""The gains of speculative decoding, in closed form and by simulation. This package needs no library but numpy."""
