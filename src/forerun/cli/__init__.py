"""The command `forerun`: flags, inputs, and what a terminal shows. Only what computes is slow to import."""
