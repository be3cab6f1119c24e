"""Scripts that `benchmarks.peers` runs inside the environments of other engines; they import nothing of forerun."""
